"""Which tokens may be trained: one rule, token by token, from the record to the trainer's mask."""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m1serve.online_rl.forward import token_streams
from m1serve.online_rl.packing import Microbatch, Row
from m1serve.online_rl.samples import trajectory_samples
from m1serve.store import Store
from m1serve.store.captured import capture
from m1serve.store.records import JournalEntry, SessionEnded, TurnRecord
from m1serve.types import Sampling, StopCause, TokenFlag

MakeTurn = Callable[..., TurnRecord]
S, F, M = int(TokenFlag.SAMPLED), int(TokenFlag.FORCED), int(TokenFlag.MASKED)

ALONE: dict[str, list[tuple[Any, bool]]] = {
    "temperature": [(1.0, True), (0.0, False), (0.7, False), (1.01, False)],
    "top_p": [(1.0, True), (0.95, True), (0.9, True), (0.89, False)],
    "top_k": [(0, True), (40, False)],
    "min_p": [(0.0, True), (0.05, False)],
    "presence_penalty": [(0.0, True), (0.1, False), (-0.1, False)],
    "frequency_penalty": [(0.0, True), (0.1, False), (-0.1, False)],
    "repetition_penalty": [(1.0, True), (1.1, False), (0.9, False)],
    "seed": [(None, True), (7, True)],
    "logit_bias": [((), True), (((5, 1.0),), False)],
    "stop_token_ids": [((), True), ((9,), True)],
}


def test_each_sampling_parameter_has_a_verdict() -> None:
    fields = {field.name for field in dataclasses.fields(Sampling)}
    assert fields <= set(ALONE), "say in ALONE whether a token sampled with it may be trained"


@pytest.mark.parametrize(
    ("name", "value", "is_trainable"),
    [(name, value, verdict) for name, rows in ALONE.items() for value, verdict in rows],
)
def test_one_parameter_alone_decides(
    make_turn: MakeTurn, name: str, value: object, is_trainable: bool
) -> None:
    turn = make_turn([1], [2, 3], sampling=Sampling(**{name: value}))
    assert turn.trainable_tokens() == [is_trainable] * 2


@pytest.mark.parametrize("stop", list(StopCause))
def test_only_a_completion_that_was_not_broken_off_is_trained(
    make_turn: MakeTurn, stop: StopCause
) -> None:
    # a repetition stop that does not say how long its run was: any token may be of it
    is_whole = stop not in (StopCause.ABORT, StopCause.ERROR, StopCause.REPETITION)
    assert make_turn([1], [2, 3], stop=stop).trainable_tokens() == [is_whole] * 2


def test_flags_and_logprobs_decide_token_by_token(make_turn: MakeTurn) -> None:
    table = [
        (S, -0.5, True),
        (F, 0.0, False),
        (S | F, -0.5, False),
        (S | M, -0.5, False),
        (M, -0.5, False),
        (0, -0.5, False),
        (S, -math.inf, False),
        (S, math.nan, False),
        (S, 0.0, True),
    ]
    turn = make_turn(
        [1], range(2, 2 + len(table)), flags=[r[0] for r in table], logprobs=[r[1] for r in table]
    )
    assert turn.trainable_tokens() == [r[2] for r in table]


@pytest.mark.parametrize(
    ("num_run", "wanted"),
    [
        ("1", "t.t.tt.."),
        ("2", "t.t.t..."),
        ("3", "t.t....."),
        ("4", "t.t....."),
        ("5", "t......."),
        ("6", "........"),
        ("9", "........"),
        ("0", "........"),
        ("for ever", "........"),
        (None, "........"),
    ],
)
def test_the_run_of_a_repetition_stop_is_not_trained(
    make_turn: MakeTurn, num_run: str | None, wanted: str
) -> None:
    """A masked token is of the run, a forced one only stands in it; what led there is trained."""
    flags = [S, F, S, S | M, S, S, F, S]
    turn = make_turn([1], range(2, 10), flags=flags, stop=StopCause.REPETITION, stop_detail=num_run)
    assert "".join("t" if on else "." for on in turn.trainable_tokens()) == wanted


sampling = st.builds(
    Sampling,
    temperature=st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
)
token = st.tuples(
    st.integers(0, 99),
    st.sampled_from([S, S, S, F, M, S | F, S | M]),
    st.floats(-9.0, 0.0, width=32) | st.just(-math.inf),
)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(turns=st.lists(st.tuples(sampling, st.lists(token, min_size=1, max_size=8)), max_size=5))
def test_the_trainer_trains_what_the_ledger_counts(
    make_turn: MakeTurn, ledger_store: Store, turns: list[Any]
) -> None:
    """Through journal values, rows, views, samples and the flat streams of the loss."""
    session_id = uuid.uuid4().hex
    history = [1, 2, 3]
    records: list[TurnRecord] = []
    for number, (how, tokens) in enumerate(turns):
        record = make_turn(
            history,
            [t[0] for t in tokens],
            flags=[t[1] for t in tokens],
            logprobs=[t[2] for t in tokens],
            sampling=how,
            session_id=session_id,
            created_at=float(number),
        )
        records.append(record)
        history = [*record.prompt_ids, *record.completion_ids, 7]
    end = SessionEnded(session_id=session_id, tenant_id="t", at=99.0, reason="end")
    entries = [
        JournalEntry(writer="w", seq=ledger_store.ledger.count_turns() + i, record=record)
        for i, record in enumerate([*records, end])
    ]
    ledger_store.ledger.ingest(entries)
    wanted = [
        (token_id, logprob)
        for record in records
        for token_id, logprob, is_on in zip(
            record.completion_ids, record.logprobs, record.trainable_tokens(), strict=True
        )
        if is_on
    ]
    rows = ledger_store.ledger.list_trajectories(session_id=session_id)
    assert sum(row.num_trainable for row in rows) == len(wanted)
    views = ledger_store.ledger.trajectories([row.trajectory_id for row in rows])
    samples = [sample for view in views for sample in trajectory_samples(view, "g", 1.0)]
    packed = [
        (token_id, logprob)
        for s in samples
        for token_id, logprob, on in zip(s.token_ids, s.logprobs, s.is_trained, strict=True)
        if on
    ]
    assert packed == wanted
    micro = Microbatch(rows=tuple(Row(sample=s, norm=1.0) for s in samples), prefix_length=0)
    assert token_streams(micro, "cpu").sampler_logp_N.tolist() == [p for _, p in wanted]


def test_the_ledger_counts_no_token_of_a_broken_turn(make_turn: MakeTurn) -> None:
    turn = make_turn([1], [2, 3], stop=StopCause.ABORT)
    assert capture("w", 0, turn, b"secret").facts.num_trainable == 0


@pytest.fixture(scope="module")
def ledger_store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("trainable") / "store.db"
    store = Store.open(f"sqlite:///{path}")
    yield store
    store.close()
