"""Text completions go on with each other by their tokens."""

from typing import Any

import httpx
import pytest

from m1serve.store.records import SessionSource


async def completed(world: Any, prompt: Any, **headers: str) -> str:
    async with httpx.AsyncClient(verify=False) as http:
        answer = await http.post(
            f"{world.url}/v1/completions",
            json={"model": "fake", "prompt": prompt},
            headers=headers,
        )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("is_ids", [False, True])
async def test_a_prompt_that_begins_with_an_answer_joins_its_session(
    serve: Any, is_ids: bool
) -> None:
    def given(text: str) -> Any:
        return list(world.tok.encode_text(text)) if is_ids else text

    async with serve("one", "two", "three", "four") as world:
        first = "Question: " + await completed(world, given("Question: "))
        second = first + " More: " + await completed(world, given(first + " More: "))
        await completed(world, given(second))
        await completed(world, given("Question: "))
        a, b, c, d = world.turns
    assert first == "Question: one"
    assert {a.session_id, b.session_id, c.session_id} == {a.session_id}
    assert d.session_id != a.session_id
    sources = [turn.session_source for turn in world.turns]
    assert sources == [
        SessionSource.NEW,
        SessionSource.INFERRED,
        SessionSource.INFERRED,
        SessionSource.NEW,
    ]


async def test_equal_texts_are_ambiguous_until_something_tells_them_apart(serve: Any) -> None:
    async with serve("one") as world:
        for task in ("a", "b"):
            await completed(world, "Question: ", **{"x-m1-task-id": task})
        await completed(world, "Question: one more")
        await completed(world, "Question: one more", **{"x-m1-task-id": "b"})
        first, second, lost, found = world.turns
    assert lost.session_source is SessionSource.AMBIGUOUS
    assert found.session_id == second.session_id != first.session_id


async def test_every_prompt_of_a_batch_finds_its_own(serve: Any) -> None:
    async with serve("x") as world:
        await completed(world, ["A: ", "B: "])
        await completed(world, ["B: x!", "A: x!"])
        sessions = {world.tok.decode(t.prompt_ids): t.session_id for t in world.turns}
    assert sessions["A: x!"] == sessions["A: "] != sessions["B: "] == sessions["B: x!"]
