"""The shipped model does what its card says, on few tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.envs import task_ids
from m1serve.model.checkpoint import load_model
from m1serve.online_rl.sft_rollout import play
from m1serve.online_rl.sft_success import wilson_interval

NANO = Path(__file__).resolve().parents[2] / "m1serve" / "model" / "nano"


def test_the_shipped_model_solves_some_held_out_tasks_and_not_all() -> None:
    torch.set_num_threads(1)
    model, tok = load_model(NANO), ChatTokenizer.load(NANO)
    ids = [t for f in ("lookup", "calc", "sums", "aiw") for t in task_ids("report", f, 6)]
    played = play(model, tok, ids, torch.Generator().manual_seed(0), capacity=1024)
    solved = sum(r.reward for r in played)
    assert 4 <= solved <= 20
    assert sum(t.is_well_formed for r in played for t in r.turns) >= 0.9 * sum(
        len(r.turns) for r in played
    )


@pytest.mark.parametrize(
    ("solved", "num", "low", "high"),
    [(0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0), (5, 10, 0.237, 0.763)],
)
def test_wilson_intervals_are_those_of_the_tables(
    solved: int, num: int, low: float, high: float
) -> None:
    assert wilson_interval(solved, num) == pytest.approx((low, high), abs=1e-3)
