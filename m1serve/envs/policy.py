"""The order desk's policy and tools: what may be cancelled or refunded, and at what fee.

Two desks may differ in any of it, so an agent has to read the system prompt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STATUSES = ("pending", "shipped", "delivered", "cancelled")
FEES = (5, 10, 15, 20)
TIERS = ("basic", "gold")

_OPENINGS = (
    "You are a shop agent. Policy:",
    "You work at the order desk of a shop. Follow this policy:",
    "You are the agent of an online shop. Rules:",
)
_LOOK_UP = (
    "Look up an order before you state facts about it or change it.",
    "Always look up an order first, before you answer or act.",
    "Never state facts about an order or change it without looking it up.",
)
_CANCEL = (
    "Cancel only orders with status {statuses}.",
    "An order may be cancelled only if its status is {statuses}.",
    "Cancellations: only if {statuses}.",
)
_REFUND = (
    "Refund only orders with status {statuses}. The refund is price * quantity, minus a fee of "
    "{fee} if the tier is {tier}.",
    "An order may be refunded only if its status is {statuses}. Pay back price * quantity; "
    "tier {tier} pays a fee of {fee}.",
    "Refunds: only if {statuses}. Amount: price * quantity, less {fee} for tier {tier}.",
)
_NO_CANCEL = (
    "This desk cancels no orders.",
    "Cancellations: never.",
    "Orders may not be cancelled.",
)
_NO_REFUND = ("This desk refunds no orders.", "Refunds: never.", "Orders may not be refunded.")
_CALCULATE = (
    "Use the calculator for arithmetic.",
    "Do all arithmetic with the calculator.",
    "For any arithmetic use the calculator.",
)
_REFUSE = (
    "If the policy forbids a request, change nothing and say: not allowed.",
    "If a request is against the policy, change nothing and say: not allowed.",
    "When the rules forbid a request, say: not allowed, and change nothing.",
)
_MISSING = (
    "If an order does not exist, say: not found.",
    "For an order that does not exist say: not found.",
    "An unknown order: say not found.",
)

_DESCRIPTIONS = {
    "get_order": ("Look up an order", "Get the record of an order", "Read one order"),
    "cancel_order": ("Cancel an order", "Set an order to cancelled", "Cancel one order"),
    "refund_order": ("Refund an order", "Pay back an order", "Refund one order"),
    "calculator": ("Evaluate an expression", "Do arithmetic", "Compute an expression"),
    "add_note": ("Add a note to an order", "Write a note", "Keep a note"),
    "track_parcel": ("Track a parcel", "Where a parcel is", "Follow a parcel"),
}
_ARGUMENTS = {
    "get_order": {"order_id": "string"},
    "cancel_order": {"order_id": "string"},
    "refund_order": {"order_id": "string", "amount": "integer"},
    "calculator": {"expression": "string"},
    "add_note": {"order_id": "string", "text": "string"},
    "track_parcel": {"order_id": "string"},
}
EXTRA_TOOLS = ("add_note", "track_parcel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    cancel: tuple[str, ...]
    """Statuses that may be cancelled; empty when the desk has no tool for it."""
    refund: tuple[str, ...]
    fee: int
    fee_tier: str

    def refund_due(self, price: int, quantity: int, tier: str) -> int:
        return price * quantity - (self.fee if tier == self.fee_tier else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    policy: Policy
    system: str
    tools: tuple[dict[str, object], ...]


def make_desk(rng: random.Random) -> Desk:
    policy = _make_policy(rng)
    return Desk(policy=policy, system=_system(policy, rng), tools=_tools(policy, rng))


def _make_policy(rng: random.Random) -> Policy:
    closed = rng.choices(("", "cancel", "refund"), (0.9, 0.05, 0.05))[0]
    cancel = rng.choice((("pending",), ("pending",), ("pending", "shipped")))
    refund = rng.choice((("delivered",), ("delivered",), ("delivered", "shipped")))
    return Policy(
        cancel=() if closed == "cancel" else cancel,
        refund=() if closed == "refund" else refund,
        fee=rng.choice(FEES),
        fee_tier=rng.choice(TIERS),
    )


def _system(policy: Policy, rng: random.Random) -> str:
    cancel = rng.choice(_CANCEL).format(statuses=" or ".join(policy.cancel))
    refund = rng.choice(_REFUND).format(
        statuses=" or ".join(policy.refund), fee=policy.fee, tier=policy.fee_tier
    )
    acts = [
        cancel if policy.cancel else rng.choice(_NO_CANCEL),
        refund if policy.refund else rng.choice(_NO_REFUND),
    ]
    rng.shuffle(acts)
    rules = [rng.choice(_LOOK_UP), *acts, *(rng.choice(r) for r in (_CALCULATE, _REFUSE, _MISSING))]
    has_numbers = rng.random() < 0.6
    lines = [f"{i}. {r}" if has_numbers else f"- {r}" for i, r in enumerate(rules, 1)]
    return "\n".join([rng.choice(_OPENINGS), *lines])


def _tools(policy: Policy, rng: random.Random) -> tuple[dict[str, object], ...]:
    names = ["get_order", "calculator"]
    names += ["cancel_order"] if policy.cancel else []
    names += ["refund_order"] if policy.refund else []
    if len(names) < 4 or rng.random() < 0.25:
        names.append(rng.choice(EXTRA_TOOLS))
    rng.shuffle(names)
    return tuple(_tool(name, rng.choice(_DESCRIPTIONS[name])) for name in names)


def _tool(name: str, description: str) -> dict[str, object]:
    arguments = _ARGUMENTS[name]
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in arguments.items()},
            "required": list(arguments),
        },
    }
