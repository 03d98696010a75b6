"""The whole of `m1serve cost` as one value: what was asked, every figure, what is assumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from m1serve.cost import paper
from m1serve.cost.claim import LENGTHS, Claim, examine_claim
from m1serve.cost.machine import H800, Machine
from m1serve.cost.minimax import M1, shape_of
from m1serve.cost.rivals import qwen3, r1_absorbed, r1_expanded
from m1serve.cost.rl import RlCost, RlRun, rl_cost
from m1serve.cost.serving import ServingCost, Workload, prefill_seconds, serving_cost
from m1serve.cost.shape import Shape, Storage
from m1serve.model.config import M1Config
from m1serve.model.flops import relative_prefill_cost

CONVENTIONS = (
    "1 MAC = 2 FLOPs. Counted: matrix products (attention projections, experts that a token meets, "
    "router, head), scores and weighted sums of attention, the lightning recurrence. Not counted: "
    "norms, activations, rotary positions, softmax, the embedding's look-up.",
    "A token at context n attends to n keys. Generation is cumulative: the sum over contexts 1 to "
    "n, the head at every token. Prefill attends causally (n(n+1)/2 pairs, half the square), "
    "lightning in chunks of 256, and computes one token's logits.",
    "MLA expanded: keys and values of 128 heads, 2 x (192 + 128) FLOPs a head and key, cached as "
    "they are. Absorbed: queries against the latent, 2 x (576 + 512) FLOPs, 576 numbers cached. "
    "Prefill is expanded in both.",
    "Seconds are a roofline: the longer of FLOPs / (peak x MFU) and bytes / (bandwidth x share). "
    "Bytes of a decode step: weights of the body and of the experts that the batch is expected to "
    "meet under uniform routing, caches read, states read and written.",
    "Not counted in serving: communication, launches, sampling, host, idle time. In RL: optimiser, "
    "weight transfer, scoring, recomputed log-probabilities, the wait for the longest rollout.",
    "Peaks by the makers' figures (H200: 141 GB, 4.8 TB/s, 989 TFLOP/s bf16), 8-bit weights "
    "multiplied in bf16. Shapes of R1 and Qwen3 by their published configurations; all is "
    "computed, nothing on this page was measured.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    name: str
    config: M1Config
    storage: Storage
    machine: Machine
    load: Workload
    run: RlRun


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """FLOPs by model at one length; cumulative ones of an answer behind no prompt."""

    num_tokens: int
    token_flops: dict[str, int]
    generation_flops: dict[str, int]
    prefill_flops: dict[str, int]
    """Of reading so many tokens; one token's logits."""
    prefill_s: dict[str, float]
    """On the question's machine, whether or not it all fits."""
    prefill_token_ratio: float
    """Of the model asked: FLOPs of a prompt token at this context over one at an empty one."""
    figure_flops: dict[str, int]
    """By the curves of the report's figure; empty beyond where they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRl:
    """The question's RL run, for M1 on the report's machines, beside the report's budget."""

    stated_gpu_hours: int
    stated_dollars: int
    computed: RlCost
    share_of_stated: float | None
    stated_peak_flops: float
    """What 512 H800 could multiply in three weeks at their peak."""
    computed_flops: int
    rollouts_per_step_affordable: float | None
    """That the stated GPU-hours pay for, all else as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    conventions: tuple[str, ...]
    question: Question
    shapes: tuple[Shape, ...]
    """The model asked about, then R1 twice and Qwen3."""
    lengths: tuple[LengthRow, ...]
    claim: Claim
    serving: tuple[ServingCost, ...]
    rl: tuple[RlCost, ...]
    paper_rl: PaperRl

    def to_json(self) -> dict[str, object]:
        figure = {
            "tokens": paper.FIGURE_TOKENS,
            "tflop": paper.FIGURE_TFLOP,
            "curves": {name: asdict(curve) for name, curve in paper.figure_curves().items()},
        }
        return {**asdict(self), "figure": figure}


def make_report(question: Question) -> Report:
    storage = question.storage
    expanded, absorbed = r1_expanded(storage), r1_absorbed(storage)
    m1 = shape_of(M1, name="MiniMax-M1", storage=storage)
    rivals = (expanded, absorbed, qwen3(storage))
    is_taken = question.name in {rival.name for rival in rivals}
    name = f"{question.name} (asked)" if is_taken else question.name
    shapes = (shape_of(question.config, name=name, storage=storage), *rivals)
    return Report(
        conventions=CONVENTIONS,
        question=question,
        shapes=shapes,
        lengths=tuple(_length_row(n, shapes, question) for n in LENGTHS),
        claim=examine_claim(m1, expanded=expanded, absorbed=absorbed),
        serving=tuple(serving_cost(shape, question.machine, question.load) for shape in shapes),
        rl=tuple(rl_cost(shape, question.machine, question.run) for shape in shapes),
        paper_rl=_paper_rl(m1, question),
    )


def _length_row(num_tokens: int, shapes: tuple[Shape, ...], question: Question) -> LengthRow:
    is_drawn = num_tokens <= paper.FIGURE_TOKENS[-1]
    return LengthRow(
        num_tokens=num_tokens,
        token_flops={shape.name: shape.decode_flops(num_tokens) for shape in shapes},
        generation_flops={shape.name: shape.generation_flops(num_tokens) for shape in shapes},
        prefill_flops={shape.name: shape.prefill_flops(num_tokens) for shape in shapes},
        prefill_s={
            shape.name: prefill_seconds(shape, question.machine, num_tokens) for shape in shapes
        },
        prefill_token_ratio=relative_prefill_cost(question.config, num_tokens),
        figure_flops={
            name: curve.at(num_tokens) for name, curve in paper.figure_curves().items() if is_drawn
        },
    )


def _paper_rl(m1: Shape, question: Question) -> PaperRl:
    run = question.run
    cost = rl_cost(m1, paper.rl_machine(question.machine), run)
    stated = paper.RL_GPU_HOURS
    rollouts_per_step = run.group_size * run.prompts_per_step
    hours = cost.gpu_hours
    return PaperRl(
        stated_gpu_hours=stated,
        stated_dollars=paper.RL_DOLLARS,
        computed=cost,
        share_of_stated=None if hours is None else hours / stated,
        stated_peak_flops=stated * 3600 * H800.flops_per_s,
        computed_flops=cost.sampling_flops + cost.training_flops,
        rollouts_per_step_affordable=(
            None if hours is None else rollouts_per_step * stated / hours
        ),
    )
