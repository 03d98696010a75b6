"""What a model that knows the bug of our toy repository answers to Agentless's questions."""

from __future__ import annotations

from m1serve.clients.harness.play import FALLBACK, Line, say

FILE = "shapes/area.py"
_QUESTIONS = {
    "provide a list of files that one would need to edit": f"```\n{FILE}\n```",
    "Identify all locations that need inspection": f"```\n{FILE}\nfunction: rectangle_area\n```",
    "provide a set of locations that need to be edited": (
        f"```\n{FILE}\nfunction: rectangle_area\nline: 13\n```"
    ),
}


def agentless_script() -> list[Line]:
    """One sampled patch of three is wrong, so that the ranking has something to decide."""
    lines: list[Line] = [
        {"when": question, "text": say(answer, thought="Only one function is wrong.")}
        for question, answer in _QUESTIONS.items()
    ]
    right, wrong = _edit("width * height"), _edit("width - height")
    repair = {"when": "generate *SEARCH/REPLACE* edits", "text": right}
    return [*lines, {**repair, "more_texts": [wrong, right]}, FALLBACK]


def _edit(expression: str) -> str:
    return say(
        f"The sum is returned.\n\n```python\n### {FILE}\n<<<<<<< SEARCH\n"
        f"    return width + height\n=======\n    return {expression}\n>>>>>>> REPLACE\n```",
        thought="An area is a product.",
    )
