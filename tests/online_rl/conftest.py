"""A tiny random M1 on disk, turns sampled from it, and builders for trajectories of any shape."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.model.checkpoint import load_model
from m1serve.model.golden import sequence_logprobs
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.tiny import tiny_model_dir
from m1serve.store.records import TurnRecord
from m1serve.store.views import TrajectoryView
from m1serve.types import (
    HistoryRule,
    Mode,
    RewardStatus,
    Sampling,
    StopCause,
    TokenFlag,
    VersionSpan,
)

MakeTurn = Callable[..., TurnRecord]
MakeView = Callable[..., TrajectoryView]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tok(tiny_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_dir)


@pytest.fixture
def model(tiny_dir: Path) -> M1ForCausalLM:
    return load_model(tiny_dir).eval()


def turn_record(
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    flags: Sequence[int] | None = None,
    version: str = "nano@0",
    **changes: object,
) -> TurnRecord:
    """A finished turn; logprobs are −1, −2, … unless given."""
    num = len(completion)
    record = TurnRecord(
        turn_id=uuid.uuid4().hex,
        request_id=uuid.uuid4().hex,
        session_id="s",
        group_key=None,
        task_id=None,
        tenant_id="t",
        key_id="k",
        model_id="nano",
        mode=Mode.TRAIN,
        consent=True,
        created_at=1.0,
        choice=0,
        num_choices=1,
        history_rule=HistoryRule.EXACT,
        request_hash=uuid.uuid4().hex,
        retry_count=0,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=tuple(logprobs or [-1.0 - i for i in range(num)]),
        sampled_logprobs=None,
        token_flags=tuple(flags or [int(TokenFlag.SAMPLED)] * num),
        version_spans=(VersionSpan(start=0, end=num, weights_version=version),),
        sampling=Sampling(),
        stop=StopCause.EOS,
        stop_detail=None,
        finish_reason="stop",
        was_delivered=True,
        cached_tokens=0,
        tokenizer_digest="",
        template_digest="",
        numerics_digest="",
        ttft_ms=1.0,
        total_ms=2.0,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def trajectory_view(
    turns: Sequence[TurnRecord],
    *,
    reward: float | None = 1.0,
    group: str | None = "g",
    **changes: object,
) -> TrajectoryView:
    view = TrajectoryView(
        trajectory_id=uuid.uuid4().hex,
        session_id="s",
        tenant_id="t",
        group_key=group,
        task_id=None,
        mode=Mode.TRAIN,
        model_id="nano",
        history_rule=HistoryRule.EXACT,
        turns=tuple(turns),
        context=(),
        state="claimed",
        state_reason="",
        reward=reward,
        reward_status=RewardStatus.OK,
        created_at=1.0,
    )
    return replace(view, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def make_turn() -> MakeTurn:
    return turn_record


@pytest.fixture(scope="session")
def make_view() -> MakeView:
    return trajectory_view


def sampled_completion(
    model: M1ForCausalLM, prompt: Sequence[int], num_tokens: int, seed: int
) -> tuple[list[int], list[float]]:
    """Ids and logprobs as the model itself gives them."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    with torch.no_grad():
        hidden, state = model.hidden(torch.tensor([ids]))
        for _ in range(num_tokens):
            p_1V = torch.softmax(model.logits(hidden[:, -1]), -1)
            ids.append(int(torch.multinomial(p_1V, 1, generator=generator)))
            hidden, state = model.hidden(torch.tensor([ids[-1:]]), state)
    logprobs = sequence_logprobs(model, ids)[len(prompt) - 1 :]
    return ids[len(prompt) :], logprobs.tolist()


@pytest.fixture(scope="session")
def sample() -> Callable[..., tuple[list[int], list[float]]]:
    return sampled_completion
