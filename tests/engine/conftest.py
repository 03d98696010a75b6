"""Engines to test: local on a tiny random model, scripted, and (slow) local behind Ray Serve."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings, ModelSettings, Settings
from m1serve.engine.base import Engine
from m1serve.engine.local import LocalEngine
from m1serve.engine.script import ScriptedReply
from m1serve.engine.scripted import ScriptedEngine
from m1serve.model.checkpoint import load_model
from m1serve.model.tiny import tiny_model_dir
from m1serve.model.weights import version_path, write_version
from m1serve.types import (
    Delta,
    EngineStats,
    GenerateRequest,
    Limits,
    Sampling,
    Started,
    StopCause,
    VersionRef,
)

SETTINGS = EngineSettings(num_slots=8, max_model_len=192, prefill_chunk_tokens=64)
UNDER_GRAMMAR = '<think>\nWhich one?\n</think>\n{"order": 4217}'
SCRIPT = "The order 4217 is pending, so I cancel it. What is the status of it, please? " * 16


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def weights_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny@0 and tiny@1: two random models of one architecture."""
    root = tmp_path_factory.mktemp("weights")
    for number in (0, 1):
        model_dir = tiny_model_dir(root / f"model{number}", seed=number)
        write_version(
            root,
            weights_version=f"tiny@{number}",
            model=load_model(model_dir),
            tokenizer_file=model_dir / "tokenizer.json",
            parent=None,
            run_id=None,
            golden_prompts=[list(range(10, 30))],
        )
    return root


@pytest.fixture(scope="session")
def versions(weights_root: Path) -> tuple[VersionRef, VersionRef]:
    old, new = (
        VersionRef(weights_version=name, path=str(version_path(weights_root, name)))
        for name in ("tiny@0", "tiny@1")
    )
    return old, new


@pytest.fixture(scope="session")
def tok(weights_root: Path) -> ChatTokenizer:
    return ChatTokenizer.load(version_path(weights_root, "tiny@0") / "serving")


@pytest.fixture
def settings() -> EngineSettings:
    return SETTINGS


@dataclass
class Said:
    """What a stream brought, folded by choice."""

    started: Started
    deltas: dict[int, list[Delta]] = field(default_factory=dict)

    def ids(self, choice: int = 0) -> tuple[int, ...]:
        return tuple(i for delta in self.deltas[choice] for i in delta.token_ids)

    def logprobs(self, choice: int = 0) -> tuple[float, ...]:
        return tuple(p for delta in self.deltas[choice] for p in delta.logprobs)

    def flags(self, choice: int = 0) -> tuple[int, ...]:
        return tuple(f for delta in self.deltas[choice] for f in delta.token_flags)

    def stop(self, choice: int = 0) -> StopCause | None:
        return self.deltas[choice][-1].stop

    def detail(self, choice: int = 0) -> str | None:
        return self.deltas[choice][-1].stop_detail

    def versions(self, choice: int = 0) -> tuple[str, ...]:
        return tuple(d.weights_version for d in self.deltas[choice] for _ in d.token_ids)


class Rig:
    """An engine with a tokenizer and shorthands for requests."""

    def __init__(self, engine: Engine, tok: ChatTokenizer) -> None:
        self.engine, self.tok = engine, tok
        self._ids = itertools.count()

    def prompt(self, text: str = "What is the status of order 4217?") -> tuple[int, ...]:
        return tuple(self.tok.encode_text(text))

    @property
    def long_winded(self) -> Sampling:
        """Never ends by itself, the same every time."""
        return Sampling(seed=7, logit_bias=((self.tok.eos_id, -100.0),))

    async def stats(self) -> EngineStats:
        """As of now: what is remote is asked again."""
        refresh = getattr(self.engine, "refresh", None)
        if refresh is not None:
            await refresh()
        return self.engine.stats()

    def request(self, *, max_tokens: int = 12, **fields: Any) -> GenerateRequest:
        fields.setdefault("prompt_ids", self.prompt())
        fields.setdefault("sampling", self.long_winded)
        fields.setdefault("limits", Limits(max_tokens=max_tokens))
        fields.setdefault("id", f"r{next(self._ids)}-{id(self)}")
        return GenerateRequest(**fields)

    def open(self, request: GenerateRequest) -> AsyncGenerator[Started | Delta, None]:
        items = self.engine.generate(request)
        assert isinstance(items, AsyncGenerator)
        return items

    async def say(self, **fields: Any) -> Said:
        fields.setdefault("min_delta_interval_s", math.inf)
        return await gather_said(self.open(self.request(**fields)))

    async def begin(self, **fields: Any) -> asyncio.Task[Said]:
        """`say` of a request that has begun: it runs on what is served now."""
        items = self.open(self.request(**fields))
        started = await anext(items)
        assert isinstance(started, Started)
        return asyncio.create_task(gather_said(items, Said(started)))


async def gather_said(items: AsyncIterator[Started | Delta], said: Said | None = None) -> Said:
    async for item in items:
        if isinstance(item, Started):
            assert said is None, "Started came twice or late"
            said = Said(item)
        else:
            assert said is not None, "a delta came before Started"
            said.deltas.setdefault(item.choice, []).append(item)
    assert said is not None
    return said


StartRig = Callable[..., Awaitable[Rig]]


@pytest_asyncio.fixture
async def local(
    versions: tuple[VersionRef, VersionRef], tok: ChatTokenizer
) -> AsyncIterator[StartRig]:
    """Starts local engines, closes them afterwards."""
    engines: list[Engine] = []

    async def start(**changes: Any) -> Rig:
        settings = SETTINGS.model_copy(update=changes)
        engine = LocalEngine.start(versions[0], settings=settings, tokenizer=tok)
        engines.append(engine)
        return Rig(engine, tok)

    yield start
    for engine in engines:
        await engine.close()


@pytest_asyncio.fixture
async def make_rig(
    versions: tuple[VersionRef, VersionRef], tok: ChatTokenizer
) -> AsyncIterator[Callable[..., Rig]]:
    """For engines built by the test itself."""
    engines: list[Engine] = []

    def make(build: Callable[..., Engine], **how: Any) -> Rig:
        engines.append(build(versions, tok, SETTINGS, **how))
        return Rig(engines[-1], tok)

    yield make
    for engine in engines:
        await engine.close()


@pytest_asyncio.fixture
async def scripted(
    versions: tuple[VersionRef, VersionRef], tok: ChatTokenizer
) -> AsyncIterator[StartRig]:
    async def start(**changes: Any) -> Rig:
        engine = ScriptedEngine(
            lambda request: ScriptedReply(
                text=UNDER_GRAMMAR if request.grammar else SCRIPT, step_s=0.001
            ),
            tokenizer=tok,
            settings=SETTINGS.model_copy(update=changes),
            weights_version=versions[0].weights_version,
        )
        return Rig(engine, tok)

    yield start


@pytest.fixture(scope="session")
def ray_apps() -> Iterator[dict[str, Any]]:
    """Handles of the applications that were started, by the settings they run with."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray
    from ray import serve

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address="127.0.0.1",
    )
    yield {}
    serve.shutdown()
    ray.shutdown()


@pytest_asyncio.fixture
async def over_ray(
    versions: tuple[VersionRef, VersionRef], tok: ChatTokenizer, request: pytest.FixtureRequest
) -> AsyncIterator[StartRig]:
    """Tests with the same settings share an application; each begins on the first version."""
    apps: dict[str, Any] = request.getfixturevalue("ray_apps")
    from ray import serve

    from m1serve.engine.remote import RemoteEngine
    from m1serve.engine.replica import engine_app

    engines: list[RemoteEngine] = []

    async def start(**changes: Any) -> Rig:
        settings = Settings(
            engine=SETTINGS.model_copy(update=changes), model=ModelSettings(model_id="tiny")
        )
        key = settings.engine.model_dump_json()
        if key not in apps:
            app = engine_app(settings, version=versions[0])
            name = f"engine{len(apps)}"
            apps[key] = await asyncio.to_thread(serve.run, app, name=name, route_prefix=None)
        engine = await RemoteEngine.connect(apps[key])
        await engine.load(versions[0])
        engines.append(engine)
        return Rig(engine, tok)

    yield start
    for engine in engines:
        await engine.close()


KINDS = [
    "local",
    "scripted",
    pytest.param(
        "over_ray",
        # Ray warns about itself when it is imported and when its processes end
        marks=[
            pytest.mark.slow,
            pytest.mark.timeout(300),
            pytest.mark.filterwarnings("ignore"),
        ],
    ),
]


@pytest.fixture(params=KINDS)
def start(request: pytest.FixtureRequest) -> StartRig:
    """Starts an engine of every kind that keeps the contract."""
    rig: StartRig = request.getfixturevalue(request.param)
    return rig
