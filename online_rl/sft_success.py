"""Success of a model by family at temperature 1, with Wilson's 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.envs import FAMILIES, task_ids
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.online_rl.sft_rollout import Rollout, play

_Z = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Success:
    num: int
    solved: int
    mean_said: float
    """Sampled tokens an episode."""

    @property
    def rate(self) -> float:
        return self.solved / self.num

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.solved, self.num)

    def to_dict(self) -> dict[str, float | list[float]]:
        low, high = self.interval
        return {
            "num": self.num,
            "solved": self.solved,
            "rate": round(self.rate, 4),
            "interval95": [round(low, 4), round(high, 4)],
            "mean_said_tokens": round(self.mean_said, 1),
        }


def wilson_interval(solved: int, num: int) -> tuple[float, float]:
    rate, z2 = solved / num, _Z * _Z
    middle = (rate + z2 / (2 * num)) / (1 + z2 / num)
    half = _Z / (1 + z2 / num) * math.sqrt(rate * (1 - rate) / num + z2 / (4 * num * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def measure_success(
    model: M1ForCausalLM,
    tok: ChatTokenizer,
    split: str,
    per_family: int,
    *,
    seed: int = 0,
    families: Sequence[str] = FAMILIES,
) -> dict[str, Success]:
    """By family, and over "all"."""
    device = model.lm_head.weight.device
    ids = [t for f in families for t in task_ids(split, f, per_family, seed)]
    played = play(model, tok, ids, torch.Generator(device).manual_seed(seed))
    by_family = {f: _count([r for r in played if r.task_id.startswith(f"{f}/")]) for f in families}
    return {"all": _count(played), **by_family}


def _count(played: Sequence[Rollout]) -> Success:
    return Success(
        num=len(played),
        solved=sum(r.reward >= 1.0 for r in played),
        mean_said=sum(r.num_said for r in played) / len(played),
    )
