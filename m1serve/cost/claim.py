"""The report's claim on MiniMax-M1 against DeepSeek-R1, beside what its figure and we compute."""

from __future__ import annotations

from dataclasses import dataclass

from m1serve.cost.paper import figure_curves
from m1serve.cost.shape import Shape

LENGTHS = (16_384, 32_768, 65_536, 100_000, 131_072, 1_000_000)
FIGURE_END = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """M1's FLOPs over R1's at one length, as shares of 1."""

    num_tokens: int
    token_expanded: float
    """Of the one token at this context."""
    token_absorbed: float
    generation_expanded: float
    """Of all tokens up to this length."""
    generation_absorbed: float
    figure: float | None
    """Of all tokens, by the report's own curves; None beyond where they end."""
    figure_token: float | None
    """Of the one token, by the slopes of those curves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualCost:
    """From where on M1 costs less than R1; below, it costs more."""

    token_expanded: float
    token_absorbed: float
    generation_expanded: float
    generation_absorbed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    shares: tuple[Share, ...]
    equal_cost: EqualCost


def examine_claim(m1: Shape, *, expanded: Shape, absorbed: Shape) -> Claim:
    return Claim(
        shares=tuple(_share(n, m1, expanded, absorbed) for n in LENGTHS),
        equal_cost=EqualCost(
            token_expanded=m1.equal_context(expanded),
            token_absorbed=m1.equal_context(absorbed),
            generation_expanded=m1.equal_generation(expanded),
            generation_absorbed=m1.equal_generation(absorbed),
        ),
    )


def _share(num_tokens: int, m1: Shape, expanded: Shape, absorbed: Shape) -> Share:
    token, generation = m1.decode_flops(num_tokens), m1.generation_flops(num_tokens)
    curves = figure_curves()
    m1_curve, r1_curve = curves["MiniMax-M1"], curves["DeepSeek-R1"]
    is_drawn = num_tokens <= FIGURE_END
    return Share(
        num_tokens=num_tokens,
        token_expanded=token / expanded.decode_flops(num_tokens),
        token_absorbed=token / absorbed.decode_flops(num_tokens),
        generation_expanded=generation / expanded.generation_flops(num_tokens),
        generation_absorbed=generation / absorbed.generation_flops(num_tokens),
        figure=m1_curve.at(num_tokens) / r1_curve.at(num_tokens) if is_drawn else None,
        figure_token=m1_curve.slope(num_tokens) / r1_curve.slope(num_tokens) if is_drawn else None,
    )
