"""How exact lightning attention is: every comparison is with float64 and of the worst head.

The same cases run under pytest on a GPU, in the benchmark, and at small sizes on the CPU.
Shapes: T tokens, N sequences, B rows, H heads, D head dim, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from m1serve.kernels.benchmark.inputs import (
    HEAD_DIM,
    SHORT,
    Answer,
    Sequences,
    answer_error,
    exact_answer,
    layer_slopes,
    random_sequences,
    span_errors,
    worst,
    worst_error,
)
from m1serve.kernels.benchmark.ours import M1serve
from m1serve.kernels.benchmark.peers import Peer
from m1serve.kernels.benchmark.report import OURS
from m1serve.kernels.lightning import lightning_attention

BARS = {torch.bfloat16: 3e-3, torch.float16: 3e-3, torch.float32: 1e-5}
LENGTHS = (1, 63, 64, 65, 127, 300, 500, 4097)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how large the comparisons are."""

    device: str = "cuda"
    heads: slice = field(default_factory=lambda: slice(None))
    "which of M1's 64 heads"
    lengths: tuple[int, ...] = LENGTHS
    layers: tuple[int, ...] = (0, 78)
    num_steps: int = 20_000
    "of the long decode"
    is_large: bool = True
    "adds what needs a large GPU: long sequences of few heads, a million tokens, M1's vocabulary"

    def slopes(self, layer: int) -> Tensor:
        return layer_slopes(layer, self.device, self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCase:
    """One comparison, made when `run` is called; it passes at or below the bar."""

    op: str
    case: str
    dtype: torch.dtype
    bar: float
    run: Callable[[], float]
    impl: str = OURS

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def forward_checks(setting: Setting) -> Iterator[CheckCase]:
    for name, dtype, sequences in _settings(setting):
        yield _forward(name, dtype, BARS[dtype], sequences)


def backward_checks(setting: Setting) -> Iterator[CheckCase]:
    for name, dtype, sequences in _settings(setting):
        yield _backward(name, dtype, BARS[dtype], sequences)


def _settings(
    setting: Setting,
) -> Iterator[tuple[str, torch.dtype, Callable[[], Sequences]]]:
    """Every dtype and layer at every length, from zeros and from a state, and a ragged batch."""
    for dtype in BARS:
        for layer in setting.layers:
            for length in setting.lengths:
                for is_continued in (False, True):
                    name = f"T={length} layer {layer}" + " from a state" * is_continued
                    yield name, dtype, later(setting, [length], layer, dtype, is_continued)
            ragged = later(setting, [1, 65, 300, 63], layer, dtype, True)
            yield f"ragged layer {layer} from states", dtype, ragged


def head_dim_checks(setting: Setting) -> Iterator[CheckCase]:
    """The other head sizes, forwards and backwards."""
    for head_dim in (32, 64):
        for dtype, bar in BARS.items():
            sequences = later(setting, [65, 300], 0, dtype, True, head_dim)
            yield _forward(f"D={head_dim} ragged layer 0 from states", dtype, bar, sequences)
            yield _backward(f"D={head_dim} ragged layer 0 from states", dtype, bar, sequences)


def share_checks(setting: Setting) -> Iterator[CheckCase]:
    """Eight heads and a long sequence: what a tensor-parallel rank has, cut into segments."""
    if not setting.is_large:
        return
    for layer, heads in ((0, slice(0, 8)), (78, slice(56, 64))):
        few = replace(setting, heads=heads)
        for length in (20_000, 65_553):
            for dtype in (torch.bfloat16, torch.float32):
                sequences = later(few, [length], layer, dtype, True)
                name = f"H=8 T={length} layer {layer} from a state"
                yield _forward(name, dtype, BARS[dtype], sequences)
                yield _backward(name, dtype, BARS[dtype], sequences)


def far_checks(setting: Setting) -> Iterator[CheckCase]:
    """Tokens whose values lie beyond what 32 bits address, at M1's 64 heads."""
    if setting.is_large:
        yield CheckCase(
            op="prefill",
            case="the ends of 264144 and of 1048576 tokens, layer 0",
            dtype=torch.bfloat16,
            bar=BARS[torch.bfloat16],
            run=_far_error,
        )


def peer_checks(impl: Peer, setting: Setting) -> Iterator[CheckCase]:
    """The same questions to a peer: findings, not our failures."""
    dtype, bar = torch.bfloat16, BARS[torch.bfloat16]
    for layer in setting.layers:
        for length in (300, 4097):
            for is_continued in (False, True):
                sequences = later(setting, [length], layer, dtype, is_continued)
                name = f"T={length} layer {layer}" + " from a state" * is_continued
                if impl.takes("prefill", length):
                    yield _forward(name, dtype, bar, sequences, impl)
            if impl.takes("training", length):
                yield _peer_backward(impl, f"T={length} layer {layer}", bar, sequences)


def later(
    setting: Setting,
    lengths: Sequence[int],
    layer: int,
    dtype: torch.dtype,
    is_continued: bool,
    head_dim: int = HEAD_DIM,
) -> Callable[[], Sequences]:
    """Drawn only when the check runs; the seed follows from the sizes."""
    if len(lengths) == 1 and dtype == torch.float32:
        # one short sequence is a few: see `span_errors`
        lengths = [*lengths] * max(1, SHORT // lengths[0])
    return lambda: random_sequences(
        lengths,
        setting.slopes(layer),
        head_dim=head_dim,
        dtype=dtype,
        is_continued=is_continued,
        seed=sum(lengths) + layer,
    )


def _forward(
    name: str,
    dtype: torch.dtype,
    bar: float,
    sequences: Callable[[], Sequences],
    impl: Peer | None = None,
) -> CheckCase:
    asked = impl or M1serve()

    def run() -> float:
        given = sequences()
        return answer_error(asked.prefill(given)(), exact_answer(given), given.cu_seqlens)

    return CheckCase(op="prefill", case=name, dtype=dtype, bar=bar, run=run, impl=asked.name)


def _backward(
    name: str, dtype: torch.dtype, bar: float, sequences: Callable[[], Sequences]
) -> CheckCase:
    def run() -> float:
        given = sequences()
        return gradient_error(given, gradients(given), gradients(given, is_exact=True))

    return CheckCase(op="backward", case=name, dtype=dtype, bar=bar, run=run)


def _peer_backward(
    impl: Peer, name: str, bar: float, sequences: Callable[[], Sequences]
) -> CheckCase:
    """From the outputs alone, to q, k and v alone: what every peer with a backward has."""

    def run() -> float:
        given = replace(sequences(), state_NHDD=None)
        generator = torch.Generator(given.q_THD.device).manual_seed(1)
        shape, device = given.q_THD.shape, given.q_THD.device
        do_THD = torch.randn(shape, generator=generator, device=device).to(given.q_THD.dtype)
        leaves = [t.double().requires_grad_() for t in (given.q_THD, given.k_THD, given.v_THD)]
        o_THD = exact_answer(with_leaves(given, leaves)).o_THD
        wanted = torch.autograd.grad(o_THD, leaves, do_THD.double())
        got = [gradient.view(shape) for gradient in impl.training(given, do_THD)()]
        return gradient_error(given, got, wanted)

    return CheckCase(
        op="backward", case=name, dtype=torch.bfloat16, bar=bar, run=run, impl=impl.name
    )


def gradients(given: Sequences, *, is_exact: bool = False, is_drawn: bool = True) -> list[Tensor]:
    """dq, dk, dv and, where there is an initial state, its gradient; ours, or in float64.

    What comes in are drawn gradients of outputs and final states, or ones.
    """
    leaves = [given.q_THD, given.k_THD, given.v_THD]
    leaves += [] if given.state_NHDD is None else [given.state_NHDD]
    leaves = [(t.double() if is_exact else t).detach().requires_grad_() for t in leaves]
    if is_exact:
        answer = exact_answer(with_leaves(given, leaves))
    else:
        answer = Answer(
            *lightning_attention(
                leaves[0],
                leaves[1],
                leaves[2],
                given.slope_H,
                cu_seqlens=given.cu_seqlens,
                initial_state_NHDD=leaves[3] if len(leaves) == 4 else None,
            )
        )
    device = given.q_THD.device
    generator = torch.Generator(device).manual_seed(len(given.q_THD))
    incoming = []
    for t, dtype in ((answer.o_THD, given.q_THD.dtype), (answer.state_NHDD, torch.float32)):
        drawn = torch.randn(t.shape, generator=generator, device=device).to(dtype)
        incoming.append((drawn if is_drawn else torch.ones_like(drawn)).to(t.dtype))
    outputs = [answer.o_THD, answer.state_NHDD]
    return list(torch.autograd.grad(outputs, leaves, incoming))


def with_leaves(given: Sequences, leaves: Sequence[Tensor]) -> Sequences:
    q_THD, k_THD, v_THD, *state = leaves
    return replace(
        given, q_THD=q_THD, k_THD=k_THD, v_THD=v_THD, state_NHDD=state[0] if state else None
    )


def gradient_error(given: Sequences, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The worst head of any sequence in any of the gradients."""
    errors = [
        error
        for mine, exact in zip(got[:3], wanted[:3], strict=True)
        for error in span_errors(mine, exact, given.cu_seqlens)
    ]
    if len(wanted) == 4:
        pairs = zip(got[3], wanted[3], strict=True)
        errors += [worst_error(mine, exact, head_dim=0) for mine, exact in pairs]
    return worst(errors)


def _far_error() -> float:
    """Layer 0 forgets 8192 tokens to 1e-14, so a window before each end is the whole truth."""
    given = random_sequences([1 << 20], layer_slopes(0, "cuda"))
    answer = M1serve().prefill(given)()
    errors = []
    for end in (264_144, 1 << 20):
        window = slice(end - 10_240, end)
        late = replace(
            given,
            q_THD=given.q_THD[window],
            k_THD=given.k_THD[window],
            v_THD=given.v_THD[window],
            cu_seqlens=[0, 10_240],
        )
        wanted = exact_answer(late)
        got_THD = answer.o_THD[end - 2048 : end]
        errors.append(worst_error(got_THD, wanted.o_THD[-2048:], head_dim=1))
        if end == 1 << 20:
            errors.append(worst_error(answer.state_NHDD[0], wanted.state_NHDD[0], head_dim=0))
    return worst(errors)
