"""Group-relative advantages: (R − mean) / std over the attempts at one task.

A reward that could not be computed is left out of the statistics and of the gradient. A group in
which every attempt got the same reward says nothing and is dropped (DAPO's dynamic sampling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SILENT_STD = 1e-6


def group_advantages(rewards: Sequence[float | None]) -> tuple[float | None, ...] | None:
    """One advantage a reward, None where the reward is None; None for a group without a signal.

    std is the population's, as in the paper's recipe: no small-sample correction.
    """
    known = [r for r in rewards if r is not None]
    if len(known) < 2:
        return None
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / len(known))
    if std < SILENT_STD:
        return None
    return tuple(None if r is None else (r - mean) / std for r in rewards)
