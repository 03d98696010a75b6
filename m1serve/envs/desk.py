"""The five families of the order desk: lookup, calc, cancel, compare, refund.

A reply is right when the final table equals the expected one, the required answer is stated with no
rival beside it, and every order that was spoken of or changed was looked up first.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from m1serve.envs.arithmetic import evaluate
from m1serve.envs.orders import (
    ITEMS,
    MAX_PRICE,
    Order,
    OrderDesk,
    OrderRecord,
    make_order,
    make_order_id,
)
from m1serve.envs.policy import STATUSES, Desk, Policy, make_desk
from m1serve.envs.task import Episode, Task, TaskId, Verdict, split_of
from m1serve.envs.wording import ask, mention

DESK_FAMILIES = ("lookup", "calc", "cancel", "compare", "refund")
REFUSAL, MISSING = "not allowed", "not found"
_FIELDS = ("status", "status", "item", "price")
_MISSING_RATE = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskProblem:
    task: Task
    kind: str
    """What is asked: status, item, price, calc, cancel, compare or refund."""
    ids: tuple[str, ...]
    """Orders the request names."""
    desk: Desk
    orders: tuple[Order, ...]
    expected: Mapping[str, OrderRecord]
    answer: str
    """A word, a number, an order id, or one of the two set phrases."""
    expression: str = ""
    max_turns: int = 6

    def open(self) -> OrderDesk:
        return OrderDesk(self.orders, tuple(str(t["name"]) for t in self.desk.tools))

    def judge(self, content: str, episode: Episode) -> Verdict:
        assert isinstance(episode, OrderDesk)
        unread = [i for i in self.ids if i not in episode.looked_up]
        is_same = episode.orders == self.expected
        calls = "; ".join(f"{u.name}{dict(u.arguments)} -> {u.result}" for u in episode.transcript)
        evidence = (
            f"wanted the answer {self.answer!r}, got {content!r}; table "
            f"{'as expected' if is_same else f'{episode.orders}, wanted {dict(self.expected)}'}; "
            f"not looked up: {', '.join(unread) or 'none'}; calls: {calls or 'none'}"
        )
        components = {
            "state": float(is_same),
            "answer": float(states(content, self.answer, self.ids, self.task.family)),
            "looked_up": float(not unread),
        }
        return Verdict(components=components, evidence=evidence, notes={})


def states(content: str, answer: str, ids: tuple[str, ...], family: str) -> bool:
    """Whether `content` gives `answer` and no rival of it."""
    text = content.lower()
    numbers = set(re.findall(r"-?\d+", text))
    if family == "compare" and answer not in (REFUSAL, MISSING):
        return numbers == {answer}
    numbers -= set(ids) - {answer}
    if answer.lstrip("-").isdigit():
        return numbers == {answer} and REFUSAL not in text and MISSING not in text
    words = set(re.findall(r"[a-z]+", text))
    if answer in (REFUSAL, MISSING):
        other = REFUSAL if answer == MISSING else MISSING
        return answer in text and other not in text and not numbers
    rivals = ({*STATUSES, *ITEMS} - {answer}) & words
    is_refused = REFUSAL in text or MISSING in text
    return answer in words and not rivals and not is_refused and not numbers


def desk_of(task_id: TaskId) -> Desk:
    """Tasks with neighbouring numbers share a desk, so that a batch has few system prompts."""
    return make_desk(random.Random(f"desk/{task_id.split}/{task_id.number // 4}"))


def build_desk_problem(task_id: TaskId, desk: Desk | None = None) -> DeskProblem:
    """At its own desk, or at a given one (then the id alone does not name it)."""
    desk = desk or desk_of(task_id)
    rng = random.Random(str(task_id))
    family = task_id.family
    if family == "calc":
        expression = make_expression(rng, task_id.split)
        text = ask("calc", task_id.split, rng, e=spell_out(expression, rng))
        answer = str(evaluate(expression))
        return _problem(task_id, desk, text, kind="calc", answer=answer, expression=expression)
    kind = rng.choice(_FIELDS) if family == "lookup" else family
    ids = _distinct_ids(rng, task_id.split, 2 if family == "compare" else 1)
    orders = _orders(rng, ids, family, desk.policy)
    if family != "compare" and rng.random() < _MISSING_RATE:
        orders = ()
    named = {slot: mention(i, rng) for slot, i in zip("ab", ids, strict=False)}
    answer, expected = settle(kind, orders, desk.policy)
    text = ask(kind, task_id.split, rng, **named)
    return _problem(
        task_id, desk, text, kind=kind, answer=answer, ids=ids, orders=orders, expected=expected
    )


def _problem(
    task_id: TaskId,
    desk: Desk,
    user: str,
    *,
    kind: str,
    answer: str,
    ids: tuple[str, ...] = (),
    orders: tuple[Order, ...] = (),
    expected: Mapping[str, OrderRecord] | None = None,
    expression: str = "",
) -> DeskProblem:
    task = Task(
        task_id=str(task_id),
        family=task_id.family,
        split=task_id.split,
        system=desk.system,
        tools=desk.tools,
        user=user,
    )
    return DeskProblem(
        task=task,
        kind=kind,
        ids=ids,
        desk=desk,
        orders=orders,
        expected=expected or {},
        answer=answer,
        expression=expression,
    )


def settle(
    kind: str, orders: tuple[Order, ...], policy: Policy
) -> tuple[str, dict[str, OrderRecord]]:
    """What a careful agent answers, and the table it leaves."""
    expected = {o.order_id: o.record() for o in orders}
    if not orders:
        return MISSING, expected
    order = orders[0]
    if kind == "compare":
        return max(orders, key=lambda o: o.price).order_id, expected
    if kind == "cancel" and order.status in policy.cancel:
        expected[order.order_id]["status"] = "cancelled"
        return "cancelled", expected
    if kind == "refund" and order.status in policy.refund:
        due = policy.refund_due(order.price, order.quantity, order.tier)
        expected[order.order_id] |= {"status": "refunded", "refund": due}
        return str(due), expected
    if kind in ("cancel", "refund"):
        return REFUSAL, expected
    return str(order.record()[kind]), expected


def _distinct_ids(rng: random.Random, split: str, count: int) -> tuple[str, ...]:
    ids: list[str] = []
    while len(ids) < count:
        order_id = make_order_id(rng, split)
        if order_id not in ids:
            ids.append(order_id)
    return tuple(ids)


def _orders(
    rng: random.Random, ids: tuple[str, ...], family: str, policy: Policy
) -> tuple[Order, ...]:
    """Orders with different prices; requests to change one are allowed about half of the time."""
    allowed = {"cancel": policy.cancel, "refund": policy.refund}.get(family, ())
    statuses = allowed if allowed and rng.random() < 0.35 else STATUSES
    while True:
        orders = tuple(make_order(rng, i, statuses) for i in ids)
        if len({o.price for o in orders}) == len(orders):
            return orders


def make_expression(rng: random.Random, split: str) -> str:
    """Operands belong to one split, in whatever order they stand."""
    while True:
        a, b, c = (rng.randrange(11, 100) for _ in range(3))
        forms = (f"{a} * {b}", f"{a} * {b} + {c}", f"{a} * {b} - {c}", f"({a} + {b}) * {c}")
        expression = rng.choice(forms)
        if split_of(operands(expression)) == split:
            return expression


def operands(expression: str) -> str:
    """The key by which an expression belongs to a split."""
    return " ".join(sorted(re.findall(r"\d+", expression), key=int))


def spell_out(expression: str, rng: random.Random) -> str:
    """The ways people write an expression."""
    roll = rng.random()
    if roll < 0.25:
        return expression.replace(" ", "")
    if roll < 0.35:
        return expression.replace("*", "x")
    if roll < 0.5 and "(" not in expression:
        words = {"*": "times", "+": "plus", "-": "minus"}
        return " ".join(words.get(part, part) for part in expression.split())
    return expression


assert MAX_PRICE < 1000, "a price must never look like an order id"
