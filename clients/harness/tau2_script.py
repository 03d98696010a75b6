"""tau2-bench's ground truth, read from the user's clone, as a script for the scripted engine."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from m1serve.clients.harness.play import (
    STOP,
    Call,
    Line,
    Part,
    agent_texts,
    call_text,
    script,
)
from m1serve.errors import ConfigError

TAB = "\t"
_PARTS = {
    "Reason for call": "reason_for_call",
    "Known info": "known_info",
    "Unknown info": "unknown_info",
    "Task instructions": "task_instructions",
}
GREETING_TURNS = 1
"""The harness greets the user in the agent's name before the agent is asked."""
_USER_CALLS = {
    "update_task_with_user_tools": (
        (Call(name="check_notifications", arguments={}),),
        (Call(name="dismiss_notification", arguments={"notification_id": "notif_1"}),),
    )
}
"""What a user of the mock domain does with tools of its own: before it asks, and at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tau2Task:
    id: str
    instructions: str
    """As they stand in the user simulator's prompt."""
    heard: str | None
    """What the agent said last in a conversation that was begun already."""
    calls: tuple[Call, ...]
    last_words: tuple[str, ...]
    assertions: tuple[str, ...]
    num_agent_turns: int
    """Before the first of ours."""
    num_user_turns: int


def tau2_script(clone: Path, domain: str) -> list[Line]:
    """Judge, user and agent of every task; tasks that share their instructions are one play."""
    tasks = read_tasks(clone, domain)
    judges = [_judge_line(task) for task in tasks if task.assertions]
    users, agents = [], []
    plays: dict[tuple[str, int], str] = {}
    for task in tasks:
        key = (task.instructions, task.num_user_turns)
        if key in plays:
            continue
        plays[key] = name = f"TASK tau2-{domain} {task.id} :"
        before, after = _USER_CALLS.get(task.id, ((), ()))
        texts = [call_text([call]) for call in before]
        texts += [f"{name} please see to it.", *(call_text([call]) for call in after), STOP]
        cue = task.heard or task.instructions
        users.append(Part(cue=cue, texts=tuple(texts), first_turn=task.num_user_turns))
        same = [t for t in tasks if (t.instructions, t.num_user_turns) == key]
        words = list(dict.fromkeys(word for t in same for word in t.last_words))
        longest = max(same, key=lambda t: len(t.calls))
        texts_of_agent = agent_texts(longest.calls, words)
        cue = f"user\n{name}"
        agents.append(Part(cue=cue, texts=texts_of_agent, first_turn=task.num_agent_turns))
    # instructions may be part of longer ones, and of those of a conversation that was begun
    users.sort(key=lambda part: (-part.first_turn, -len(part.cue)))
    return [*judges, *script([*users, *agents])]


def read_tasks(clone: Path, domain: str) -> list[Tau2Task]:
    file = clone / "data" / "tau2" / "domains" / domain / "tasks.json"
    if not file.is_file():
        raise ConfigError(f"no tasks at {file}; --dir must be a whole clone of tau2-bench")
    return [_task(raw) for raw in json.loads(file.read_text(encoding="utf-8"))]


def _task(raw: dict[str, dict[str, object]]) -> Tau2Task:
    criteria = raw.get("evaluation_criteria") or {}
    state = raw.get("initial_state") or {}
    history = state.get("message_history") or []
    assert isinstance(history, list)
    roles = [message["role"] for message in history]
    actions = criteria.get("actions") or []
    assert isinstance(actions, list)
    calls = [
        Call(name=a["name"], arguments=a["arguments"])
        for a in actions
        if a.get("requestor", "assistant") == "assistant"
    ]
    for check in criteria.get("env_assertions") or ():  # type: ignore[attr-defined]
        if not calls and check["func_name"] == "assert_task_status":
            task_id, status = (check["arguments"][k] for k in ("task_id", "expected_status"))
            arguments = {"task_id": task_id, "status": status}
            calls.append(Call(name="update_task_status", arguments=arguments))
    return Tau2Task(
        id=str(raw["id"]),
        instructions=_instructions(raw["user_scenario"]["instructions"]),
        heard=f"user\n{history[-1]['content']}" if history else None,
        calls=tuple(calls),
        last_words=_words(criteria.get("communicate_info")),
        assertions=_words(criteria.get("nl_assertions")),
        num_agent_turns=roles.count("assistant") if roles else GREETING_TURNS,
        num_user_turns=roles.count("user"),
    )


def _instructions(raw: object) -> str:
    """Laid out as the harness does it: labelled parts, each indented, and all of it once more."""
    text = str(raw)
    if isinstance(raw, dict):
        parts = [f"Domain: {raw['domain']}"]
        for label, key in _PARTS.items():
            if raw.get(key) is not None:
                parts.append(f"{label}:\n{textwrap.indent(raw[key], TAB)}")
        text = "\n".join(parts)
    return textwrap.indent(text, TAB)


def _words(raw: object) -> tuple[str, ...]:
    return tuple(map(str, raw)) if isinstance(raw, list) else ()


def _judge_line(task: Tau2Task) -> Line:
    results = [
        {"expectedOutcome": text, "reasoning": "the answers are given", "metExpectation": True}
        for text in task.assertions
    ]
    cue = f"expectedOutcomes:\n        {list(task.assertions)}"
    return {"when": cue, "text": json.dumps({"results": results}, ensure_ascii=False)}
