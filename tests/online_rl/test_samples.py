"""From the ledger's turns to training samples: which tokens are trained, and that nothing is
altered.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m1serve.errors import StoreError
from m1serve.online_rl.samples import build_groups, group_of, trajectory_samples
from m1serve.store.records import TurnRecord
from m1serve.store.views import TrajectoryView
from m1serve.types import Sampling, StopCause, TokenFlag, VersionSpan

MakeTurn = Callable[..., TurnRecord]
MakeView = Callable[..., TrajectoryView]
SAMPLED, FORCED, MASKED = TokenFlag.SAMPLED, TokenFlag.FORCED, TokenFlag.MASKED


def test_exact_extensions_become_one_sample(make_turn: MakeTurn, make_view: MakeView) -> None:
    first = make_turn([1, 2, 3], [4, 5], version="nano@1")
    second = make_turn([1, 2, 3, 4, 5, 6], [7], version="nano@2")
    (sample,) = trajectory_samples(make_view([first, second]), "g", 0.5)
    assert sample.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert sample.is_trained == (False, False, False, True, True, False, True)
    assert sample.logprobs[3:5] == first.logprobs
    assert sample.logprobs[6:] == second.logprobs
    assert all(math.isnan(sample.logprobs[i]) for i in (0, 1, 2, 5))
    assert sample.versions == ("", "", "", "nano@1", "nano@1", "", "nano@2")
    assert sample.advantage == 0.5


def test_a_rewritten_history_starts_a_sample_of_its_own(
    make_turn: MakeTurn, make_view: MakeView
) -> None:
    first = make_turn([1, 2, 3], [4, 5])
    second = make_turn([1, 2, 3, 5, 6], [7])
    samples = trajectory_samples(make_view([first, second]), "g", 1.0)
    assert [s.token_ids for s in samples] == [(1, 2, 3, 4, 5), (1, 2, 3, 5, 6, 7)]
    assert [s.num_trained for s in samples] == [2, 1]


def test_only_tokens_the_model_chose_alone_are_trained(
    make_turn: MakeTurn, make_view: MakeView
) -> None:
    flags = [SAMPLED, FORCED, SAMPLED | MASKED, SAMPLED]
    turn = make_turn([1], [2, 3, 4, 5], flags=[int(f) for f in flags])
    (sample,) = trajectory_samples(make_view([turn]), "g", 1.0)
    assert sample.is_trained == (False, True, False, False, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": Sampling(temperature=0.7)},
        {"sampling": Sampling(presence_penalty=0.1)},
        {"stop": StopCause.ABORT},
        {"stop": StopCause.ERROR},
    ],
)
def test_a_bent_or_broken_turn_is_context_only(
    make_turn: MakeTurn, make_view: MakeView, changes: dict[str, object]
) -> None:
    first = make_turn([1], [2, 3], **changes)
    second = make_turn([1, 2, 3, 4], [5])
    (sample,) = trajectory_samples(make_view([first, second]), "g", 1.0)
    assert sample.is_trained == (False, False, False, False, True)
    assert trajectory_samples(make_view([first]), "g", 1.0) == []


def test_streams_of_different_length_are_refused(make_turn: MakeTurn, make_view: MakeView) -> None:
    short = make_turn([1], [2, 3], logprobs=[-1.0])
    with pytest.raises(StoreError, match="2 tokens, 1 logprobs"):
        trajectory_samples(make_view([short]), "g", 1.0)
    spans = (VersionSpan(start=0, end=1, weights_version="nano@0"),)
    with pytest.raises(StoreError, match="version spans"):
        trajectory_samples(make_view([make_turn([1], [2, 3], version_spans=spans)]), "g", 1.0)


def test_groups_are_those_of_a_tenant_and_silent_ones_are_dropped(
    make_turn: MakeTurn, make_view: MakeView
) -> None:
    views = [
        make_view([make_turn([1], [2])], reward=r, group=g, tenant_id=t)
        for t, g, r in [
            ("a", "x", 1.0),
            ("a", "x", 0.0),
            ("b", "x", 1.0),
            ("b", "x", 1.0),
            ("a", "y", 0.0),
            ("a", "y", None),
        ]
    ]
    (group,) = build_groups(views)
    assert group.key == "a/x"
    assert sorted(s.advantage for s in group.samples) == [-1.0, 1.0]


def test_an_aborted_attempt_is_no_failure(make_turn: MakeTurn, make_view: MakeView) -> None:
    cut = make_view([make_turn([1], [2], stop=StopCause.ABORT)], reward=0.0)
    done = [make_view([make_turn([1], [2])], reward=1.0) for _ in range(2)]
    assert build_groups([cut, *done]) == []


def test_choices_of_one_request_are_a_group(make_turn: MakeTurn, make_view: MakeView) -> None:
    turns = [make_turn([1], [i], request_id="r", num_choices=2) for i in (2, 3)]
    views = [make_view([t], group=None, reward=float(i)) for i, t in enumerate(turns)]
    assert group_of(views[0]) == group_of(views[1])
    assert len(build_groups(views)[0].samples) == 2


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, object]]:
    """Turns that extend, rewrite or restart the history."""
    ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)
    seen: list[int] = []
    turns = []
    for _ in range(draw(st.integers(1, 6))):
        how = draw(st.sampled_from(["extend", "extend", "rewrite", "restart"]))
        if how == "rewrite" and seen:
            cut = draw(st.integers(0, len(seen) - 1))
            seen = [*seen[:cut], *draw(ids)]
        elif how == "restart":
            seen = []
        prompt = [*seen, *draw(ids)]
        completion = draw(ids)
        flags = draw(
            st.lists(
                st.sampled_from([1, 1, 2, 3, 5]), min_size=len(completion), max_size=len(completion)
            )
        )
        turns.append({"prompt": prompt, "completion": completion, "flags": flags})
        seen = [*prompt, *completion]
    return turns


@given(turns=conversations())
@settings(max_examples=60, deadline=None)
def test_each_sampled_token_is_trained_exactly_once(
    make_turn: MakeTurn, make_view: MakeView, turns: list[dict[str, object]]
) -> None:
    records = [make_turn(**t) for t in turns]
    samples = trajectory_samples(make_view(records), "g", 1.0)
    trained = [
        (token, logprob)
        for s in samples
        for token, logprob, on in zip(s.token_ids, s.logprobs, s.is_trained, strict=True)
        if on
    ]
    wanted = [
        (token, logprob)
        for r in records
        for token, logprob, flag in zip(r.completion_ids, r.logprobs, r.token_flags, strict=True)
        if flag == SAMPLED
    ]
    assert trained == wanted
