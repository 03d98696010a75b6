"""Intervals for success rates and for the gain between two of them. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    value: float
    low: float
    high: float


def wilson(successes: float, num: int, *, z: float = Z_95) -> Interval:
    """Wilson score interval of a proportion; (0, 0, 1) when nothing was counted."""
    if num == 0:
        return Interval(value=0.0, low=0.0, high=1.0)
    rate = successes / num
    scale = 1 + z * z / num
    centre = (rate + z * z / (2 * num)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / num + z * z / (4 * num * num))
    # rounding may put the rate itself a hair outside
    low, high = min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half))
    return Interval(value=rate, low=low, high=high)


def paired_gain(
    before: Sequence[float],
    after: Sequence[float],
    *,
    num_resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Mean of after - before over the same tasks, with a bootstrap interval over the tasks."""
    if len(before) != len(after):
        raise ValueError(f"pairs wanted, got {len(before)} before and {len(after)} after")
    if not before:
        return Interval(value=0.0, low=-1.0, high=1.0)
    gains_N = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    picks_RN = np.random.default_rng(seed).integers(0, len(gains_N), (num_resamples, len(gains_N)))
    means_R = gains_N[picks_RN].mean(axis=1)
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(means_R, [tail, 100 - tail])
    return Interval(value=float(gains_N.mean()), low=float(low), high=float(high))


def is_worse_beyond_noise(gain: Interval) -> bool:
    """The whole interval of the gain lies below zero."""
    return gain.high < 0
