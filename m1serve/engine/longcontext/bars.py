"""What the slice is held to on an H200, and what it would mean for all 80 layers on eight GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from m1serve.engine.longcontext.measure import Decode, Prefill, SnapshotCost
from m1serve.kernels.benchmark.bars import Bar
from m1serve.kernels.benchmark.timing import Ceilings
from m1serve.model.config import M1Config
from m1serve.model.flops import key_flops
from m1serve.model.parity import Agreement

K = 1024
_M1_LAYERS, _GPUS = 80, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    config: M1Config
    ceilings: Ceilings
    sustained_gemm_tflop_s: float
    """What the chip keeps up for seconds, as a prefill lasts"""
    prefill: tuple[Prefill, ...]
    decode: tuple[Decode, ...]
    snapshot: SnapshotCost

    def read(self, tokens: int) -> Prefill | None:
        return next((row for row in self.prefill if row.tokens == tokens), None)

    def step(self, context: int, batch: int) -> Decode | None:
        fits = (r for r in self.decode if (r.context, r.batch) == (context, batch))
        return next((r for r in fits if r.vocab_size == self.config.vocab_size), None)

    def share_ms(self, tokens: int, kind: str) -> float | None:
        row = self.read(tokens)
        found = [share.ms for share in row.shares if share.kind == kind] if row else []
        return found[0] if found else None


def bars(m: Measured) -> list[Bar]:
    return [*_prefill_bars(m), *_kernel_bars(m), *_decode_bars(m)]


def _prefill_bars(m: Measured) -> list[Bar]:
    short, long, softmax_ms = m.read(64 * K), m.read(K * K), m.share_ms(64 * K, "softmax_attention")
    growth = None
    if short is not None and long is not None and softmax_ms is not None:
        # all but softmax attention grows with the tokens, that with their square
        softmax_s = softmax_ms / 1e3
        explained = 16 * (short.seconds - softmax_s) + 256 * softmax_s
        growth = long.seconds / explained
    return [
        Bar(name="seconds, 64K", value=short.seconds if short else None, sense="<=", wanted=1.15),
        Bar(name="seconds, 1M", value=long.seconds if long else None, sense="<=", wanted=46.0),
        Bar(name="1M over what 64K explains", value=growth, sense="<=", wanted=1.15),
        Bar(name="restore over reading, 256K", value=m.snapshot.speedup, sense=">=", wanted=100.0),
    ]


def _kernel_bars(m: Measured) -> list[Bar]:
    found = []
    for name, kind, flops, wanted in (
        ("experts", "experts", _expert_flops(m.config), 0.82),
        ("dense products", "gemm", _dense_flops(m.config), 0.95),
    ):
        ms = m.share_ms(64 * K, kind)
        for of, peak in (
            ("GEMM ceiling", m.ceilings.gemm_tflop_s),
            ("sustained GEMM rate", m.sustained_gemm_tflop_s),
        ):
            share = None if ms is None else flops * 64 * K / ms / 1e9 / peak
            label = f"{name}, share of the {of}, 64K"
            found.append(Bar(name=label, value=share, sense=">=", wanted=wanted))
    elementwise = m.share_ms(64 * K, "elementwise")
    found.append(Bar(name="elementwise ms, 64K", value=elementwise, sense="<=", wanted=60.0))
    for tokens in (64 * K, K * K):
        ms = m.share_ms(tokens, "softmax_attention")
        # every token attends to half of them on average
        pairs = tokens * (tokens + 1) // 2
        rate = None if ms is None else key_flops(m.config) * pairs / ms / 1e9
        found.append(
            Bar(name=f"softmax attention TFLOP/s, {tokens}", value=rate, sense=">=", wanted=640.0)
        )
    return found


def _decode_bars(m: Measured) -> list[Bar]:
    def ratio(context: int, to: int) -> float | None:
        one, other = m.step(context, 1), m.step(to, 1)
        return one.ms / other.ms if one and other else None

    def share(batch: int) -> float | None:
        row = m.step(K, batch)
        return row.min_bytes / (m.ceilings.copy_tb_s * 1e9) / row.ms if row else None

    first = m.step(K, 1)
    return [
        Bar(name="decode ms, batch 1", value=first.ms if first else None, sense="<=", wanted=2.7),
        Bar(name="decode at 256K over 1K", value=ratio(256 * K, K), sense="<=", wanted=1.15),
        Bar(name="decode at token 80,000 over 1,000", value=ratio(80_000, 1000), sense="<=",
            wanted=1.15),
        Bar(name="decode, share of the bytes, batch 32", value=share(32), sense=">=", wanted=0.9),
        Bar(name="decode, share of the bytes, batch 128", value=share(128), sense=">=", wanted=0.9),
    ]  # fmt: skip


def parity_bars(fp32_head: Agreement) -> list[Bar]:
    """Of training against serving in bf16, as the weights were drawn."""
    r, mean = fp32_head.r, fp32_head.mean_abs_dlogp
    return [
        Bar(name="parity, r of probabilities", value=r, sense=">=", wanted=0.9995),
        Bar(name="parity, mean |dlogp|", value=mean, sense="<=", wanted=0.015),
    ]


def _expert_flops(config: M1Config) -> int:
    """Of one token in all layers."""
    expert = 2 * 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * config.num_experts_per_tok * expert


def _dense_flops(config: M1Config) -> int:
    """Of one token: the projections of all layers. The router is fp32 and left out."""
    E, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    lightning = 2 * E * (3 * inner + inner + inner)
    softmax = 2 * E * (inner + 2 * kv + inner)
    return len(config.lightning_layers) * lightning + len(config.softmax_layers) * softmax


def projection(m: Measured) -> dict[str, object]:
    """Computed, not measured: the slice's times for 80 layers, divided among eight GPUs.

    As if tensor parallelism cost nothing: no communication, every kernel as good on an eighth of
    its heads and columns. What a real node reaches will be slower.
    """
    scale = _M1_LAYERS / m.config.num_hidden_layers / _GPUS
    return {
        "is_projection": True,
        "assumes": "80 layers, 8 GPUs, no communication, kernels as efficient on their shares",
        "prefill_seconds": {str(row.tokens): row.seconds * scale for row in m.prefill},
        "decode_ms": {
            f"{row.context}x{row.batch}": row.ms_hidden * scale
            for row in m.decode
            if row.vocab_size == m.config.vocab_size
        },
    }
