"""The order desk's world: a private table of orders and the tools that read and change it.

The tools do what they are told; keeping to the policy is the agent's job, the verifier checks it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from m1serve.envs.arithmetic import evaluate
from m1serve.envs.policy import EXTRA_TOOLS, STATUSES, TIERS
from m1serve.envs.task import ToolUse, split_of

ITEMS = (
    "lamp", "chair", "desk", "phone", "camera", "kettle",
    "jacket", "guitar", "tent", "bike", "clock", "mirror",
)  # fmt: skip
MAX_PRICE = 400
OrderRecord = dict[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    order_id: str
    item: str
    price: int
    quantity: int
    status: str
    tier: str

    def record(self) -> OrderRecord:
        return {
            "order_id": self.order_id,
            "item": self.item,
            "price": self.price,
            "quantity": self.quantity,
            "status": self.status,
            "tier": self.tier,
        }


def make_order_id(rng: random.Random, split: str) -> str:
    """Four digits; every id belongs to one split."""
    while True:
        order_id = str(rng.randrange(1000, 10000))
        if split_of(order_id) == split:
            return order_id


def make_order(rng: random.Random, order_id: str, statuses: tuple[str, ...] = STATUSES) -> Order:
    return Order(
        order_id=order_id,
        item=rng.choice(ITEMS),
        price=rng.randrange(11, MAX_PRICE),
        quantity=rng.randrange(1, 10),
        status=rng.choice(statuses),
        tier=rng.choice(TIERS),
    )


class OrderDesk:
    """One episode over a copy of `orders`."""

    def __init__(self, orders: tuple[Order, ...], tools: tuple[str, ...]) -> None:
        self._orders = {o.order_id: o.record() for o in orders}
        self._tools = tools
        self._transcript: list[ToolUse] = []

    @property
    def orders(self) -> dict[str, OrderRecord]:
        return self._orders

    @property
    def transcript(self) -> tuple[ToolUse, ...]:
        return tuple(self._transcript)

    @property
    def looked_up(self) -> frozenset[str]:
        """Ids that were read, found or not."""
        uses = (u for u in self._transcript if u.name == "get_order")
        return frozenset(str(u.arguments.get("order_id")) for u in uses)

    def call(self, name: str, arguments: dict[str, object]) -> str:
        result = self._run(name, arguments)
        self._transcript.append(ToolUse(name=name, arguments=dict(arguments), result=result))
        return result

    def _run(self, name: str, arguments: dict[str, object]) -> str:
        if name not in self._tools:
            return f"error: no tool {name[:40]!r} here"
        if name == "calculator":
            value = evaluate(str(arguments.get("expression", "")))
            return "error: only integers, + - * and parentheses" if value is None else str(value)
        order_id = str(arguments.get("order_id"))
        order = self._orders.get(order_id)
        if order is None:
            return f"error: no order {order_id[:20]}"
        if name == "get_order":
            return json.dumps(order)
        if name in EXTRA_TOOLS:
            return "ok"
        return self._change(name, order, arguments)

    def _change(self, name: str, order: OrderRecord, arguments: dict[str, object]) -> str:
        if name == "cancel_order":
            order["status"] = "cancelled"
            return "ok"
        amount = arguments.get("amount")
        if type(amount) is not int:
            return "error: amount must be an integer"
        order["status"], order["refund"] = "refunded", amount
        return "ok"
