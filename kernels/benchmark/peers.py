"""Other people's kernels behind one interface, loaded from the directory that was fetched.

Copies, casts and index tensors a peer needs are made before the call that is timed.
Shapes: T tokens, N sequences, B rows, H heads, D head dim, S slots.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from m1serve.kernels.benchmark.inputs import Answer, Sequences, layer_slopes, random_sequences
from m1serve.kernels.benchmark.peers_fetch import SITE
from m1serve.kernels.benchmark.peers_load import import_from, load_file, vllm_surroundings

VLLM_FILE = "vllm/model_executor/layers/lightning_attn.py"
SGLANG_FILE = "sglang/kernels/ops/attention/linear/seg_la.py"
# past it their 32-bit offsets overflow, or a call lasts longer than it tells
LONG = 65536


class Peer:
    """One implementation: the operators it has, with the most tokens worth giving it."""

    name: ClassVar[str]
    longest: ClassVar[dict[str, int]]

    def takes(self, op: str, num_tokens: int) -> bool:
        return num_tokens <= self.longest.get(op, 0)

    def prefill(self, sequences: Sequences) -> Callable[[], Answer]:
        raise NotImplementedError(f"{self.name} has no prefill")

    def training(self, sequences: Sequences, do_THD: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """One forward and one backward; what is returned are dq, dk and dv."""
        raise NotImplementedError(f"{self.name} has no backward")

    def decode(
        self, qkv_BHX: Tensor, slope_H: Tensor, pool_SHDD: Tensor, slot_B: Tensor
    ) -> Callable[[], Tensor]:
        """`qkv_BHX` holds a token's q, k and v beside each other, X = 3 D."""
        raise NotImplementedError(f"{self.name} has no decode")


class Fla(Peer):
    """flash-linear-attention: `simple_gla` with the log decay of MiniMax's slopes."""

    name = "fla"
    longest: ClassVar[dict[str, int]] = {"prefill": 1 << 20, "training": LONG, "decode": LONG}

    def __init__(self, directory: Path) -> None:
        import_from(directory / SITE)
        ops = importlib.import_module("fla.ops.simple_gla")
        self._chunk: Callable[..., tuple[Tensor, Tensor]] = ops.chunk_simple_gla
        self._recurrent: Callable[..., tuple[Tensor, Tensor]] = ops.fused_recurrent_simple_gla

    def prefill(self, sequences: Sequences) -> Callable[[], Answer]:
        q, k, v = (t.contiguous()[None] for t in _qkv(sequences))
        options = self._options(sequences) | {"initial_state": sequences.state_NHDD}

        def call() -> Answer:
            o, state = self._chunk(q, k, v, output_final_state=True, **options)
            return Answer(o[0], state)

        return call

    def training(self, sequences: Sequences, do_THD: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        inputs = [t.contiguous()[None].requires_grad_() for t in _qkv(sequences)]
        options = self._options(sequences)

        def call() -> tuple[Tensor, ...]:
            o, _ = self._chunk(*inputs, **options)
            return torch.autograd.grad(o, inputs, do_THD[None])

        return call

    def decode(
        self, qkv_BHX: Tensor, slope_H: Tensor, pool_SHDD: Tensor, slot_B: Tensor
    ) -> Callable[[], Tensor]:
        """Not in place: the state is gathered beforehand, and the next one is another tensor."""
        q, k, v = (t.contiguous()[:, None] for t in qkv_BHX.chunk(3, dim=-1))
        state = _rows(pool_SHDD, slot_B)
        decay = -slope_H

        def call() -> Tensor:
            o, _ = self._recurrent(
                q, k, v, g_gamma=decay, scale=1.0, initial_state=state, output_final_state=True
            )
            return o[:, 0]

        return call

    def _options(self, sequences: Sequences) -> dict[str, Any]:
        options: dict[str, Any] = {"g_gamma": -sequences.slope_H, "scale": 1.0}
        if sequences.num_sequences > 1:
            cpu = torch.tensor(sequences.cu_seqlens, dtype=torch.long)
            options |= {"cu_seqlens": cpu.to(sequences.q_THD.device), "cu_seqlens_cpu": cpu}
        return options


class Vllm(Peer):
    """vLLM's kernel alone, on the fp32 [1, H, T, D] tensors it wants."""

    name = "vllm"
    longest: ClassVar[dict[str, int]] = {"prefill": LONG, "decode": LONG}

    def __init__(self, directory: Path) -> None:
        import_from(directory / SITE)
        self._module = load_file("m1serve_bench_vllm", directory / VLLM_FILE, vllm_surroundings())

    def prefill(self, sequences: Sequences) -> Callable[[], Answer]:
        per_sequence = [
            [t[span].float().transpose(0, 1).contiguous()[None] for t in _qkv(sequences)]
            for span in sequences.spans
        ]

        def call() -> Answer:
            outputs, states = [], []
            for n, (q, k, v) in enumerate(per_sequence):
                o, state = self._attend(q, k, v, sequences, n)
                outputs.append(o[0].transpose(0, 1))
                states.append(state)
            return Answer(
                outputs[0] if len(outputs) == 1 else torch.cat(outputs), torch.cat(states)
            )

        return call

    def decode(
        self, qkv_BHX: Tensor, slope_H: Tensor, pool_SHDD: Tensor, slot_B: Tensor
    ) -> Callable[[], Tensor]:
        q, k, v = (t.float().contiguous()[:, :, None] for t in qkv_BHX.chunk(3, dim=-1))
        shape_BHD = q.squeeze(2).shape

        def call() -> Tensor:
            o: Tensor = self._module.linear_decode_forward_triton(
                q, k, v, pool_SHDD, slope_H, slot_B
            )
            return o.view(shape_BHD)

        return call

    def _attend(
        self, q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, sequences: Sequences, n: int
    ) -> tuple[Tensor, Tensor]:
        given = sequences.state_NHDD
        history = None if given is None else given[n : n + 1]
        o, states = self._module.lightning_attention(
            q_1HTD, k_1HTD, v_1HTD, sequences.slope_H, kv_history=history
        )
        return o, states[:, :, -1]


class VllmLayer(Vllm):
    """The same, with the casts and transposes that vLLM's layer makes around it."""

    name = "vllm, as its layer calls it"
    longest: ClassVar[dict[str, int]] = {"prefill": LONG}

    def prefill(self, sequences: Sequences) -> Callable[[], Answer]:
        def call() -> Answer:
            wide = [t.float() for t in _qkv(sequences)]
            outputs, states = [], []
            for n, span in enumerate(sequences.spans):
                q, k, v = (t[span].transpose(0, 1).contiguous()[None] for t in wide)
                o, state = self._attend(q, k, v, sequences, n)
                outputs.append(o[0].transpose(0, 1).contiguous())
                states.append(state.clone())
            return Answer(torch.cat(outputs), torch.cat(states))

        return call


class Sglang(Peer):
    """SGLang's `seg_la`."""

    name = "sglang"
    longest: ClassVar[dict[str, int]] = {"prefill": LONG, "decode": LONG}

    def __init__(self, directory: Path) -> None:
        self._module = load_file("m1serve_bench_sglang", directory / SGLANG_FILE, {})

    def prefill(self, sequences: Sequences) -> Callable[[], Answer]:
        q, k, v = (t.contiguous() for t in _qkv(sequences))
        given, (_, num_heads, head_dim) = sequences.state_NHDD, q.shape
        shape_NHDD = (sequences.num_sequences, num_heads, head_dim, head_dim)
        state_NHDD = torch.empty(shape_NHDD, device=q.device)
        lengths = [span.stop - span.start for span in sequences.spans]
        meta = self._meta(
            lengths, torch.arange(len(lengths), device=q.device), is_continued=given is not None
        )

        def call() -> Answer:
            if given is not None:
                state_NHDD.copy_(given)
            o = self._module.seg_la_fwd(
                q, k, v, state_NHDD, sequences.slope_H, meta, softmax_scale=1.0
            )
            return Answer(o, state_NHDD)

        return call

    def decode(
        self, qkv_BHX: Tensor, slope_H: Tensor, pool_SHDD: Tensor, slot_B: Tensor
    ) -> Callable[[], Tensor]:
        q, k, v = (t.contiguous() for t in qkv_BHX.chunk(3, dim=-1))
        meta = self._meta([1] * len(q), slot_B, is_continued=True)

        def call() -> Tensor:
            o: Tensor = self._module.seg_la_fwd(
                q, k, v, pool_SHDD, slope_H, meta, softmax_scale=1.0
            )
            return o

        return call

    def _meta(self, lengths: list[int], slot_N: Tensor, *, is_continued: bool) -> object:
        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=slot_N.device)

        return self._module.SegLaMeta(
            batch_size=len(lengths),
            max_q_length=max(lengths),
            q_offsets=integers([sum(lengths[:n]) for n in range(len(lengths) + 1)]),
            s_offsets=slot_N.int(),
            q_lengths=integers(lengths),
            s_scales=integers([int(is_continued)] * len(lengths)),
        )


PEERS: tuple[Callable[[Path], Peer], ...] = (Fla, Vllm, VllmLayer, Sglang)


def compile_in_parallel(directory: Path, num_processes: int, *, timeout_s: float) -> None:
    """Fills Triton's cache with every configuration FLA's autotuner will try, on several cores."""
    command = [sys.executable, "-m", "m1serve.kernels.benchmark.peers", str(directory)]
    children = [
        subprocess.Popen([*command, str(i), str(num_processes)], stderr=subprocess.DEVNULL)
        for i in range(num_processes)
    ]
    for child in children:
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()


def _compile_share(directory: Path, index: int, num_processes: int) -> None:
    """Runs FLA forwards and backwards with only every n-th configuration of each autotuner."""
    fla = Fla(directory)
    for autotuner in _autotuners():
        # the first, which always fits the device, lets the others fail
        share = autotuner.configs[index::num_processes]
        autotuner.configs = [c for c in autotuner.configs[:1] if c not in share] + share
    sequences = random_sequences([4096], layer_slopes(39, "cuda"))
    fla.prefill(sequences)()
    fla.training(sequences, torch.randn_like(sequences.q_THD.contiguous()))()
    torch.cuda.synchronize()


def _autotuners() -> list[Any]:
    """FLA's kernels that choose among configurations, under whatever wraps them."""
    found = []
    for module in [m for name, m in sys.modules.items() if name.startswith("fla.ops.common")]:
        for kernel in vars(module).values():
            while kernel is not None and not isinstance(getattr(kernel, "configs", None), list):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None and kernel not in found:
                found.append(kernel)
    return found


def _qkv(sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    return sequences.q_THD, sequences.k_THD, sequences.v_THD


def _rows(pool_SHDD: Tensor, slot_B: Tensor) -> Tensor:
    """The slots as one tensor: a view where they follow each other, as the benchmark's do."""
    first = int(slot_B[0])
    following = torch.arange(first, first + len(slot_B), device=slot_B.device)
    is_run = torch.equal(slot_B.long(), following)
    return pool_SHDD[first : first + len(slot_B)] if is_run else pool_SHDD[slot_B.long()]


if __name__ == "__main__":
    _compile_share(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
