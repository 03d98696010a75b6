"""Whole episodes sampled in one batch on one device, without a service: to measure a model.

Continuous batching: a row speaks, waits until enough rows have something to read, or is done.
Shapes: B rows, T tokens, E hidden, P prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from m1serve.chat.messages import ChatMessage
from m1serve.chat.reply import turn_from_ids
from m1serve.chat.template import encode_extension, encode_prompt
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.envs import score_episode
from m1serve.envs.base import Episode, build_problem
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.state import SequenceState
from m1serve.types import StopCause, Turn

MAX_TURN_TOKENS = 160
_ROWS = 512
_READ_SHARE, _DONE_SHARE = 0.3, 0.3
"""Reading and dropping finished rows wait for this share of the batch."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One episode; the streams begin after the shared prompt and have one entry a token."""

    task_id: str
    prompt_ids: tuple[int, ...]
    world: Episode
    max_turns: int
    ids: list[int] = field(default_factory=list)
    is_said: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    speaking: list[int] = field(default_factory=list)
    is_done: bool = False

    @property
    def reward(self) -> float:
        return score_episode(self.task_id, self.turns).value or 0.0

    @property
    def num_said(self) -> int:
        return sum(self.is_said)


def open_rollout(tok: ChatTokenizer, task_id: str) -> Rollout:
    problem = build_problem(task_id)
    task = problem.task
    messages = [
        ChatMessage(role="system", content=task.system),
        ChatMessage(role="user", content=task.user),
    ]
    rendered = encode_prompt(tok, messages, task.tools)
    return Rollout(
        task_id=task_id,
        prompt_ids=rendered.ids[: rendered.system_end],
        world=problem.open(),
        max_turns=problem.max_turns,
        unread=list(rendered.ids[rendered.system_end :]),
    )


@torch.no_grad()
def play(
    model: M1ForCausalLM,
    tok: ChatTokenizer,
    task_ids: Sequence[str],
    generator: torch.Generator,
    *,
    capacity: int = 1280,
) -> list[Rollout]:
    """Plays every task to its end at temperature 1. A row never outgrows `capacity` tokens."""
    rollouts = [open_rollout(tok, t) for t in task_ids]
    for i in range(0, len(rollouts), _ROWS):
        _Batch(model, tok, rollouts[i : i + _ROWS], capacity).run(generator)
    return rollouts


def prompt_states(
    model: M1ForCausalLM, prompts: Sequence[tuple[int, ...]]
) -> tuple[SequenceState, Tensor]:
    """The states after the distinct prompts, and which of them each row continues."""
    distinct = list(dict.fromkeys(prompts))
    device = model.lm_head.weight.device
    ids_PT, length_P = _padded(distinct, device)
    state = model.hidden(ids_PT, None, length_P)[1]
    rows = torch.tensor([distinct.index(p) for p in prompts], device=device)
    return state, rows


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids_BT[i, : len(row)] = torch.tensor(row)
    return ids_BT.to(device), torch.tensor([len(row) for row in rows], device=device)


class _Batch:
    def __init__(
        self, model: M1ForCausalLM, tok: ChatTokenizer, rows: list[Rollout], capacity: int
    ) -> None:
        self.model, self.tok, self.rows, self.capacity = model, tok, rows, capacity
        self.device = model.lm_head.weight.device
        state, pick_B = prompt_states(model, [r.prompt_ids for r in rows])
        self.state = state.select(pick_B).with_capacity(capacity)
        self.last_BE = torch.zeros(len(rows), model.config.hidden_size, device=self.device)

    def run(self, generator: torch.Generator) -> None:
        while self.rows:
            waiting = [i for i, r in enumerate(self.rows) if r.unread and not r.is_done]
            num_done = sum(r.is_done for r in self.rows)
            num_busy = len(self.rows) - num_done - len(waiting)
            if waiting and (not num_busy or len(waiting) >= _READ_SHARE * len(self.rows)):
                self._read(waiting)
            elif num_done == len(self.rows) or num_done > _DONE_SHARE * len(self.rows):
                self._drop_finished()
            else:
                self._speak(generator, {*waiting})

    def _read(self, waiting: list[int]) -> None:
        pick = torch.tensor(waiting, device=self.device)
        ids_BT, count_B = _padded([self.rows[i].unread for i in waiting], self.device)
        hidden_BTE, part = self.model.hidden(ids_BT, self.state.select(pick), count_B)
        self.state.write(pick, part)
        self.last_BE[pick] = hidden_BTE[torch.arange(len(pick), device=self.device), count_B - 1]
        for i in waiting:
            row = self.rows[i]
            row.ids += row.unread
            row.is_said += [False] * len(row.unread)
            row.logprobs += [0.0] * len(row.unread)
            row.unread = []

    def _speak(self, generator: torch.Generator, waiting: set[int]) -> None:
        """One token for every row that is neither waiting nor done."""
        logp_BV = torch.log_softmax(self.model.logits(self.last_BE), -1)
        token_B1 = torch.multinomial(logp_BV.exp(), 1, generator=generator)
        logprobs = logp_BV.gather(1, token_B1).squeeze(1).tolist()
        tokens = token_B1.squeeze(1).tolist()
        is_on = [i not in waiting and not r.is_done for i, r in enumerate(self.rows)]
        count_B = None if all(is_on) else torch.tensor(is_on, device=self.device).long()
        # consumed at once, so that the end of a sentence is in the state when the row reads on
        hidden_B1E, self.state = self.model.hidden(token_B1, self.state, count_B)
        self.last_BE = hidden_B1E[:, 0].clone()
        for i, row in enumerate(self.rows):
            if is_on[i]:
                self._say(row, tokens[i], logprobs[i])

    def _say(self, row: Rollout, token: int, logprob: float) -> None:
        row.ids.append(token)
        row.is_said.append(True)
        row.logprobs.append(logprob)
        row.speaking.append(token)
        if token == self.tok.eos_id:
            self._end_turn(row, StopCause.EOS)
        elif len(row.speaking) == MAX_TURN_TOKENS:
            self._end_turn(row, StopCause.LENGTH)

    def _end_turn(self, row: Rollout, stop: StopCause) -> None:
        turn = turn_from_ids(self.tok, turn_id=row.task_id, completion_ids=row.speaking, stop=stop)
        row.turns.append(turn)
        row.speaking = []
        # a malformed turn earns nothing, whatever would follow
        is_going_on = stop is StopCause.EOS and turn.is_well_formed and bool(turn.tool_calls)
        row.is_done = not is_going_on or len(row.turns) == row.max_turns
        if not row.is_done:
            row.unread = list(encode_extension(self.tok, True, _use_tools(row.world, turn)))
            used = len(row.prompt_ids) + len(row.ids) + len(row.unread)
            row.is_done = used + MAX_TURN_TOKENS > self.capacity

    def _drop_finished(self) -> None:
        keep = [i for i, r in enumerate(self.rows) if not r.is_done]
        pick = torch.tensor(keep, dtype=torch.long, device=self.device)
        self.rows = [self.rows[i] for i in keep]
        if keep:
            self.state, self.last_BE = self.state.select(pick), self.last_BE[pick]


def _use_tools(world: Episode, turn: Turn) -> list[ChatMessage]:
    return [
        ChatMessage(role="tool", name=c.name, content=world.call(c.name, json.loads(c.arguments)))
        for c in turn.tool_calls
    ]
