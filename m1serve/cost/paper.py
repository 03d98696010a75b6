"""What the MiniMax-M1 report says of cost: its Figure 1 (right), point by point, and its RL budget.

The points are read off the vector graphic of the PDF (markers against the drawn ticks), not printed
numbers, and good to about 0.1 TFLOP. The curves are sums that reproduce every point to that: our
reading, as the report states no convention, and a sum that fits is not proof that it was meant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from m1serve.cost import rivals
from m1serve.cost.machine import H800, Machine
from m1serve.cost.minimax import M1

FIGURE_TOKENS = (*range(1024, 131_072, 8192), 131_072)
"""The generation lengths that the figure has markers at."""

FIGURE_TFLOP = {
    "DeepSeek-R1": (
        80.88, 992.10, 2372.81, 4223.02, 6542.73, 9331.94, 12590.62, 16318.79, 20516.45,
        25183.62, 30320.28, 35926.41, 42002.04, 48547.17, 55561.79, 63045.91, 69979.65,
    ),
    "Qwen3-235B-A22B": (
        46.48, 592.82, 1449.23, 2615.69, 4092.21, 5878.82, 7975.49, 10382.22, 13099.00,
        16125.85, 19462.76, 23109.72, 27066.75, 31333.83, 35910.97, 40798.21, 45328.87,
    ),
    "MiniMax-M1": (
        107.24, 980.05, 1879.25, 2804.84, 3756.82, 4735.19, 5739.95, 6771.10, 7828.64,
        8912.58, 10022.90, 11159.58, 12322.64, 13512.10, 14727.95, 15970.19, 17078.80,
    ),
}  # fmt: skip
"""Cumulative, in 1e12 FLOPs; the axis is in units of 1e16."""

CLAIMED_SHARE, CLAIMED_TOKENS = 0.25, 100_000
"""'Approximately 25 % of the FLOPs [of DeepSeek R1] at a length of 100K tokens.'"""

RL_NUM_GPUS, RL_HOURS, RL_DOLLARS = 512, 3 * 7 * 24, 534_700
"""'512 H800 GPUs [...] only three weeks, with a rental cost of just $534,700.'"""
RL_GPU_HOURS = RL_NUM_GPUS * RL_HOURS


def rl_machine(like: Machine) -> Machine:
    """Eight H800 hold one copy of the model; the report's price, shares of the peaks as given."""
    return replace(like, gpu=H800, num_gpus=8, price_per_gpu_hour=RL_DOLLARS / RL_GPU_HOURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Cumulative FLOPs of generating n tokens: `fixed` n + `pair` n^2."""

    fixed: int
    pair: int

    def at(self, num_tokens: int) -> int:
        return self.fixed * num_tokens + self.pair * num_tokens**2

    def slope(self, num_tokens: int) -> int:
        """Of the one token at this context."""
        return self.fixed + 2 * self.pair * num_tokens


def figure_curves() -> dict[str, Curve]:
    """The sums that draw Figure 1 (right). Where they depart from the models, a comment says so."""
    return {
        "DeepSeek-R1": _r1_curve(),
        "Qwen3-235B-A22B": _qwen3_curve(),
        "MiniMax-M1": _m1_curve(),
    }


def _r1_curve() -> Curve:
    dense = 3 * rivals.R1_HIDDEN * rivals.R1_DENSE
    experts = (rivals.R1_TOP + rivals.R1_SHARED) * 3 * rivals.R1_HIDDEN * rivals.R1_EXPERT
    # 61 layers with experts and three dense ones beside them; R1 has 58 and three. No router
    weights = rivals.R1_LAYERS * (rivals.r1_attention_params() + experts)
    weights += rivals.R1_DENSE_LAYERS * dense + rivals.R1_VOCAB * rivals.R1_HIDDEN
    pair = rivals.R1_LAYERS * rivals.R1_HEADS * _head_pair(rivals.R1_QK, rivals.R1_V)
    return Curve(fixed=2 * weights, pair=pair)


def _qwen3_curve() -> Curve:
    experts = rivals.QWEN_TOP * 3 * rivals.QWEN_HIDDEN * rivals.QWEN_EXPERT
    weights = rivals.QWEN_LAYERS * (rivals.qwen_attention_params() + experts)
    weights += rivals.QWEN_VOCAB * rivals.QWEN_HIDDEN
    pair = rivals.QWEN_LAYERS * rivals.QWEN_HEADS * _head_pair(rivals.QWEN_D, rivals.QWEN_D)
    return Curve(fixed=2 * weights, pair=pair)


def _m1_curve() -> Curve:
    E, inner = M1.hidden_size, M1.num_attention_heads * M1.head_dim
    kv = M1.num_key_value_heads * M1.head_dim
    # 72 lightning layers and 8 softmax layers; M1 has 70 and 10. No router
    num_lightning, num_softmax = 72, 8
    weights = num_lightning * 5 * E * inner + num_softmax * (2 * E * inner + 2 * E * kv)
    weights += 80 * M1.num_experts_per_tok * 3 * E * M1.intermediate_size + M1.vocab_size * E
    # the recurrence as if 8192 channels were one head; 64 heads of 128 cost 26 times less
    weights += num_lightning * inner**2
    pair = num_softmax * M1.num_attention_heads * _head_pair(M1.head_dim, M1.head_dim)
    return Curve(fixed=2 * weights, pair=pair)


def _head_pair(qk_dim: int, v_dim: int) -> int:
    # scores over the causal half, weighted sums over the whole square
    return qk_dim + 2 * v_dim
