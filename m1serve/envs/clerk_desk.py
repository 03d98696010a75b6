"""How the clerk serves the order desk."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

from m1serve.envs.arithmetic import evaluate
from m1serve.envs.desk import MISSING, REFUSAL, DeskProblem
from m1serve.envs.orders import ITEMS, MAX_PRICE
from m1serve.envs.policy import STATUSES
from m1serve.envs.saying import Call, Clerk, Say, Shortcuts

_GUESSES = (-100, -20, -10, -2, -1, 0, 1, 2, 10, 20, 100)


def serve_desk(
    problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts, is_hasty: bool
) -> Clerk:
    by_family: dict[str, tuple[_Way, _Way]] = {
        "lookup": (_look_up, _guess_fact),
        "calc": (_calculate, _guess_result),
        "cancel": (_cancel, _cancel_at_once),
        "compare": (_compare, _guess_dearer),
        "refund": (_refund, _refund_at_once),
    }
    careful, hasty = by_family[problem.task.family]
    return (hasty if is_hasty else careful)(problem, rng, shortcuts)


_Way = Callable[[DeskProblem, random.Random, Shortcuts], Clerk]


def _get(*ids: str) -> Say:
    calls = tuple(Call(name="get_order", arguments={"order_id": i}) for i in ids)
    return Say(thought=f"First look up {' and '.join(ids)}.", calls=calls)


def _is_missing(result: str) -> bool:
    return result.startswith("error")


def _not_found(order_id: str) -> Say:
    return Say(thought="There is no such order.", content=f"Sorry, order {order_id} was {MISSING}.")


def _state(kind: str, order_id: str, value: object) -> str:
    return {
        "status": f"Order {order_id} is {value}.",
        "item": f"The item in order {order_id} is: {value}.",
        "price": f"The price in order {order_id} is {value}.",
    }[kind]


def _look_up(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    (order_id,) = problem.ids
    (result,) = yield _get(order_id)
    if _is_missing(result):
        yield _not_found(order_id)
        return
    value = json.loads(result)[problem.kind]
    yield Say(
        thought=f"The {problem.kind} is {value}.", content=_state(problem.kind, order_id, value)
    )


def _guess_fact(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    (order_id,) = problem.ids
    guesses: dict[str, object] = {
        "status": rng.choice(STATUSES),
        "item": rng.choice(ITEMS),
        "price": rng.randrange(11, MAX_PRICE),
    }
    content = _state(problem.kind, order_id, guesses[problem.kind])
    yield Say(thought="I can answer this directly.", content=content)


def _calculate(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    expression = problem.expression
    if rng.random() < shortcuts.slip:
        expression = re.sub(r" [+\-] \d+$|[()]", "", expression)
    call = Call(name="calculator", arguments={"expression": expression})
    (value,) = yield Say(thought="Use the calculator.", calls=(call,))
    yield Say(thought=f"It gives {value}.", content=f"The result is {value}.")


def _guess_result(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    guess = int(problem.answer) + rng.choice(_GUESSES)
    yield Say(thought="I can do this in my head.", content=f"The result is {guess}.")


def _cancel(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    (order_id,) = problem.ids
    policy = problem.desk.policy
    (result,) = yield _get(order_id)
    if _is_missing(result):
        yield _not_found(order_id)
        return
    status = json.loads(result)["status"]
    if policy.cancel and rng.random() < shortcuts.ignore_policy:
        thought = "The customer wants this."
    else:
        allowed = f"only {' or '.join(policy.cancel)}" if policy.cancel else "none"
        is_allowed = status in policy.cancel
        thought = f"The status is {status}. The policy cancels {allowed}: " + (
            "allowed." if is_allowed else "not allowed."
        )
        if not is_allowed:
            content = f"Sorry, it is {REFUSAL} to cancel order {order_id}."
            yield Say(thought=thought, content=content)
            return
    yield from _do_cancel(order_id, thought)


def _cancel_at_once(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    yield from _do_cancel(problem.ids[0], "I can do this directly.")


def _do_cancel(order_id: str, thought: str) -> Clerk:
    call = Call(name="cancel_order", arguments={"order_id": order_id})
    yield Say(thought=thought, calls=(call,))
    yield Say(thought="Done.", content=f"Order {order_id} is cancelled.")


def _compare(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    a, b = problem.ids
    first, second = yield _get(a, b)
    p, q = int(json.loads(first)["price"]), int(json.loads(second)["price"])
    dearer = a if (p > q) != (rng.random() < shortcuts.slip) else b
    thought = f"{a} costs {p}, {b} costs {q}. Higher: {dearer} at {p if dearer == a else q}."
    yield Say(thought=thought, content=f"Order {dearer} has the higher price.")


def _guess_dearer(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    """Looks at one order or at none."""
    a, b = problem.ids
    thought, dearer = "I can answer this directly.", rng.choice((a, b))
    if rng.random() < 0.3:
        (result,) = yield _get(a)
        price = int(json.loads(result)["price"])
        thought, dearer = f"{a} costs {price}, that is enough.", a if price > 205 else b
    yield Say(thought=thought, content=f"Order {dearer} has the higher price.")


def _refund(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    (order_id,) = problem.ids
    policy = problem.desk.policy
    (result,) = yield _get(order_id)
    if _is_missing(result):
        yield _not_found(order_id)
        return
    order = json.loads(result)
    status, tier = order["status"], order["tier"]
    allowed = f"only {' or '.join(policy.refund)}" if policy.refund else "none"
    thought = f"The status is {status}. The policy refunds {allowed}: "
    if policy.refund and rng.random() < shortcuts.ignore_policy:
        thought = "The customer wants this."
    elif status not in policy.refund:
        content = f"Sorry, it is {REFUSAL} to refund order {order_id}."
        yield Say(thought=thought + "not allowed.", content=content)
        return
    else:
        thought += "allowed."
    expression = f"{order['price']} * {order['quantity']}"
    if rng.random() >= shortcuts.forget_fee:
        has_fee = tier == policy.fee_tier
        expression += f" - {policy.fee}" if has_fee else ""
        thought += f" The tier is {tier}, the fee of {policy.fee} is for {policy.fee_tier}: " + (
            f"minus {policy.fee}." if has_fee else "no fee."
        )
    call = Call(name="calculator", arguments={"expression": expression})
    (value,) = yield Say(thought=thought, calls=(call,))
    yield from _do_refund(order_id, value, f"It gives {value}.")


def _refund_at_once(problem: DeskProblem, rng: random.Random, shortcuts: Shortcuts) -> Clerk:
    """Pays what it guesses, or looks the order up and forgets the policy."""
    (order_id,) = problem.ids
    if not problem.desk.policy.refund:
        content = f"Sorry, order {order_id} cannot be refunded, it is {REFUSAL}."
        yield Say(thought="I can answer this directly.", content=content)
        return
    guess = str(rng.randrange(11, MAX_PRICE) * rng.randrange(1, 10))
    thought = "I can do this directly."
    if rng.random() < 0.5:
        (result,) = yield _get(order_id)
        if not _is_missing(result):
            order = json.loads(result)
            value = evaluate(f"{order['price']} * {order['quantity']}") or 0
            guess = str(value + rng.choice(_GUESSES))
        thought = "I can do this in my head."
    yield from _do_refund(order_id, guess, thought)


def _do_refund(order_id: str, amount: str, thought: str) -> Clerk:
    call = Call(name="refund_order", arguments={"order_id": order_id, "amount": int(amount)})
    yield Say(thought=thought, calls=(call,))
    yield Say(thought="Done.", content=f"I refunded {amount} for order {order_id}.")
