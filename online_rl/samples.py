"""Trajectories become training samples: exact ids, the sampler's logprobs, what may be trained.

Nothing is tokenised or rendered here. A sample is a maximal exact token extension: while a turn's
prompt begins with everything seen so far the sample grows, otherwise the turn starts a sample of
its own. A turn that was cut (length, repetition) is trained like any other, with the reward it got;
only the run for which a repetition stop cut it is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from m1serve.errors import StoreError
from m1serve.online_rl.advantages import group_advantages
from m1serve.store.records import BROKEN, TurnRecord
from m1serve.store.views import TrajectoryView


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row of training data; all streams are as long as `token_ids`."""

    trajectory_id: str
    group: str
    advantage: float
    token_ids: tuple[int, ...]
    is_trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    """The sampler's; nan where it sampled nothing, so that a wrong mask poisons the loss instead of
    passing.
    """
    versions: tuple[str, ...]
    """weights_version that sampled the token; '' where nothing was sampled."""

    @property
    def num_trained(self) -> int:
        return sum(self.is_trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one task that carry a signal."""

    key: str
    samples: tuple[Sample, ...]

    @property
    def num_trained(self) -> int:
        return sum(s.num_trained for s in self.samples)


def group_of(view: TrajectoryView) -> str:
    """What it is compared with: its tenant's group, else the other choices of its first request."""
    if view.group_key is not None:
        return f"{view.tenant_id}/{view.group_key}"
    return f"{view.tenant_id}/request:{view.turns[0].request_id}"


def is_countable(view: TrajectoryView) -> bool:
    """It has a reward, and neither infrastructure nor client cut a turn: that is no failure."""
    return view.reward is not None and not any(t.stop in BROKEN for t in view.turns)


def build_groups(views: Iterable[TrajectoryView]) -> list[Group]:
    """Groups with a signal, in a fixed order; silent groups are dropped."""
    by_key: dict[str, list[TrajectoryView]] = {}
    for view in sorted(views, key=lambda v: v.trajectory_id):
        by_key.setdefault(group_of(view), []).append(view)
    groups: list[Group] = []
    for key, members in sorted(by_key.items()):
        advantages = group_advantages([v.reward if is_countable(v) else None for v in members])
        if advantages is None:
            continue
        samples = [
            sample
            for view, advantage in zip(members, advantages, strict=True)
            if advantage is not None
            for sample in trajectory_samples(view, key, advantage)
        ]
        if samples:
            groups.append(Group(key=key, samples=tuple(samples)))
    return groups


def trajectory_samples(view: TrajectoryView, group: str, advantage: float) -> list[Sample]:
    """The trajectory's samples that have at least one token to train."""
    streams: list[_Streams] = []
    for turn in view.turns:
        if not streams or not streams[-1].is_extended_by(turn.prompt_ids):
            streams.append(_Streams())
        streams[-1].append(turn)
    return [
        Sample(
            trajectory_id=view.trajectory_id,
            group=group,
            advantage=advantage,
            token_ids=tuple(s.token_ids),
            is_trained=tuple(s.is_trained),
            logprobs=tuple(s.logprobs),
            versions=tuple(s.versions),
        )
        for s in streams
        if any(s.is_trained)
    ]


class _Streams:
    """A sample under construction."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_trained: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []

    def is_extended_by(self, prompt_ids: Sequence[int]) -> bool:
        return list(prompt_ids[: len(self.token_ids)]) == self.token_ids

    def append(self, turn: TurnRecord) -> None:
        spans = turn.version_spans
        lengths = {turn_length(turn), len(turn.logprobs), len(turn.token_flags)}
        if len(lengths) > 1 or sum(s.end - s.start for s in spans) != turn_length(turn):
            raise StoreError(
                f"turn {turn.turn_id} has {turn_length(turn)} tokens, {len(turn.logprobs)} "
                f"logprobs, {len(turn.token_flags)} flags and version spans {spans}; "
                "all must cover the same tokens"
            )
        heard = turn.prompt_ids[len(self.token_ids) :]
        self.token_ids += heard
        self.is_trained += [False] * len(heard)
        self.logprobs += [math.nan] * len(heard)
        self.versions += [""] * len(heard)
        self.token_ids += turn.completion_ids
        self.is_trained += turn.trainable_tokens()
        self.logprobs += turn.logprobs
        for span in spans:
            self.versions += [span.weights_version] * (span.end - span.start)


def turn_length(turn: TurnRecord) -> int:
    return len(turn.completion_ids)
