"""The server of tests/api, and what a client puts together of an answer in either mode."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from m1serve.api import create_app
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings, Settings
from m1serve.engine.local import LocalEngine
from m1serve.model.checkpoint import load_model
from m1serve.model.tiny import tiny_model_dir
from m1serve.model.weights import version_path, write_version
from m1serve.types import VersionRef


def _api_fixtures() -> Any:
    name = "m1serve_tests_api_fixtures"
    if name not in sys.modules:
        file = Path(__file__).parents[1] / "api" / "conftest.py"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


tok, serve, eventually = (getattr(_api_fixtures(), name) for name in ("tok", "serve", "eventually"))

ServeLocal = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(scope="session")
def tiny_versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[VersionRef, VersionRef]:
    """Two random models of one architecture: fake@0 and fake@1."""
    root = tmp_path_factory.mktemp("weights")
    for number in (0, 1):
        model_dir = tiny_model_dir(root / f"model{number}", seed=number)
        write_version(
            root,
            weights_version=f"fake@{number}",
            model=load_model(model_dir),
            tokenizer_file=model_dir / "tokenizer.json",
            parent=None,
            run_id=None,
            golden_prompts=[list(range(10, 30))],
        )
    old, new = (
        VersionRef(weights_version=name, path=str(version_path(root, name)))
        for name in ("fake@0", "fake@1")
    )
    return old, new


@pytest.fixture
def serve_local(tiny_versions: tuple[VersionRef, VersionRef]) -> ServeLocal:
    """A tiny random model behind the whole API, as "fake"."""
    api = _api_fixtures()

    @asynccontextmanager
    async def serve_local(**sections: Any) -> AsyncIterator[Any]:
        version = tiny_versions[0]
        tok = ChatTokenizer.load(Path(version.path) / "serving")
        engine = LocalEngine.start(
            version,
            settings=EngineSettings(num_slots=8, max_model_len=512, prefill_chunk_tokens=64),
            tokenizer=tok,
        )
        settings = Settings(**{"model": {"model_id": "fake"}, **sections})
        journal = api.Kept()
        try:
            async with (
                api.running(create_app(engine, journal, settings, tok)) as url,
                httpx.AsyncClient(verify=False) as http,
            ):
                client = AsyncOpenAI(
                    base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=http
                )
                world = api.World(engine, journal, url, client, settings)
                world.engine.tok = tok
                yield world
        finally:
            await engine.close()

    return serve_local


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}


@dataclass
class Told:
    """One choice as the client has it."""

    content: str | None = None
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    """`id`, `name`, `arguments`."""
    finish: str | None = None
    deltas: list[Any] = field(default_factory=list)
    """Of a stream, in order."""
    usage: Any = None

    @property
    def message(self) -> tuple[str, str, list[tuple[str, str]], str | None]:
        """What must not depend on the mode."""
        calls = [(call["name"], call["arguments"]) for call in self.calls]
        return (self.content or "", self.reasoning, calls, self.finish)


Ask = Callable[..., Awaitable[Told]]


@pytest.fixture
def tools() -> list[dict[str, Any]]:
    return [TOOL]


@pytest.fixture
def ask() -> Ask:
    """Asks through the OpenAI client; `stream` says in which mode."""
    return _ask


async def _ask(world: Any, *, stream: bool = False, **more: Any) -> Told:
    more.setdefault("messages", [{"role": "user", "content": "Hi"}])
    create = world.client.chat.completions.create
    if not stream:
        return _whole(await create(model="fake", **more))
    more.setdefault("stream_options", {"include_usage": True})
    told = Told()
    async for chunk in await create(model="fake", stream=True, **more):
        told.usage = chunk.usage or told.usage
        for choice in chunk.choices:
            _add(told, choice)
    return told


def _whole(answer: Any) -> Told:
    [choice] = answer.choices
    message = choice.message
    return Told(
        content=message.content,
        reasoning=getattr(message, "reasoning_content", None) or "",
        calls=[
            {"id": c.id, "name": c.function.name, "arguments": c.function.arguments}
            for c in message.tool_calls or []
        ],
        finish=choice.finish_reason,
        usage=answer.usage,
    )


def _add(told: Told, choice: Any) -> None:
    """As an ordinary client does: by index, the first delta of a call names it."""
    delta = choice.delta
    told.deltas.append(delta)
    if delta.content is not None:
        told.content = (told.content or "") + delta.content
    told.reasoning += getattr(delta, "reasoning_content", None) or ""
    for call in delta.tool_calls or []:
        if call.index == len(told.calls):
            told.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
        assert call.index < len(told.calls)
        assert call.id in (None, told.calls[call.index]["id"])
        told.calls[call.index]["arguments"] += call.function.arguments or ""
    told.finish = choice.finish_reason or told.finish


@pytest.fixture
def call_text() -> Callable[..., str]:
    """A block of calls as the model writes it: `call_text(("look", {...}), ...)`."""

    def write(*calls: tuple[str, object]) -> str:
        lines = (json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls)
        return "<tool_calls>\n" + "".join(f"{line}\n" for line in lines) + "</tool_calls>"

    return write
