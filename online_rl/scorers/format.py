"""Scores form alone: every turn one think block and a reply, finished by the model itself."""

from __future__ import annotations

from collections.abc import Sequence

from m1serve.types import Reward, StopCause, Turn


class FormatScorer:
    name = "format"
    version = "1"

    def score(self, turns: Sequence[Turn], task_id: str) -> Reward:
        faults = format_faults(turns)
        value = float(not faults)
        return Reward(
            value=value, components={"format": value}, evidence=f"format: {faults or 'ok'}"
        )


def format_faults(turns: Sequence[Turn]) -> list[str]:
    if not turns:
        return ["no turn"]
    faults = []
    for number, turn in enumerate(turns, 1):
        if not turn.is_well_formed or turn.reasoning is None:
            faults.append(f"turn {number} is not a think block and a reply")
        if turn.stop is not StopCause.EOS:
            faults.append(f"turn {number} stopped by {turn.stop}")
    if turns[-1].tool_calls:
        faults.append("the last turn still calls tools")
    return faults
