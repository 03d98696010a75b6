"""Words a request: a template of the task's split, then politeness, case, typing slips."""

from __future__ import annotations

import random
import re
import tomllib
from functools import cache
from importlib import resources

_OPEN, _CLOSE = 0.2, 0.15
_LOWER, _UPPER, _BARE, _TYPO = 0.3, 0.03, 0.4, 0.12


@cache
def _tables() -> dict[str, dict[str, list[str]]]:
    text = resources.files("m1serve.envs").joinpath("wordings.toml").read_text("utf-8")
    tables: dict[str, dict[str, list[str]]] = tomllib.loads(text)
    return tables


def templates(kind: str, split: str) -> tuple[str, ...]:
    return tuple(_tables()[kind][split])


def kinds() -> tuple[str, ...]:
    return tuple(k for k in _tables() if k != "style")


def mention(order_id: str, rng: random.Random) -> str:
    """How an order is named: "order 4217", "#4217", "4217"."""
    return rng.choice(_tables()["style"]["orders"]).format(id=order_id)


def ask(kind: str, split: str, rng: random.Random, **slots: str) -> str:
    """One request as a person might type it."""
    text = rng.choice(templates(kind, split)).format(**slots)
    text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
    text = _politely(text, rng)
    if rng.random() < _BARE:
        text = text.rstrip("?.!")
    roll = rng.random()
    if roll < _LOWER:
        text = text.lower()
    elif roll < _LOWER + _UPPER:
        text = text.upper()
    return mistype(text, rng) if rng.random() < _TYPO else text


def _politely(text: str, rng: random.Random) -> str:
    style = _tables()["style"]
    if rng.random() < _OPEN:
        opening = rng.choice(style["openings"])
        text = opening + (text if re.match(r"I\b|[A-Z]{2}", text) else text[0].lower() + text[1:])
    if rng.random() < _CLOSE and "please" not in text.lower():
        end = text[-1] if text[-1] in "?.!" else ""
        closing = rng.choice(style["closings"])
        text = text.rstrip("?.!") + closing + ("" if closing.endswith("!") else end)
    return text


def mistype(text: str, rng: random.Random) -> str:
    """One slip in one longer word; digits are never touched."""
    words = list(re.finditer(r"[A-Za-z]{4,}", text))
    if not words:
        return text
    word = rng.choice(words)
    letters = list(word.group())
    i = rng.randrange(1, len(letters) - 1)
    kind = rng.randrange(3)
    if kind == 0:
        letters[i], letters[i + 1] = letters[i + 1], letters[i]
    elif kind == 1:
        del letters[i]
    else:
        letters.insert(i, letters[i])
    return text[: word.start()] + "".join(letters) + text[word.end() :]
