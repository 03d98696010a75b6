"""Ray Serve around an engine: a replica follows the store, and its death is told to its callers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from m1serve.config import EngineSettings, ModelSettings, Settings
from m1serve.errors import EngineAwayError, EngineError
from m1serve.store import Store
from m1serve.types import Delta, Slot, Started, StopCause, VersionRef, VersionState

StartRig = Callable[..., Awaitable[Any]]

# Ray warns about itself when it is imported and when its processes end
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


async def test_a_lost_replica_ends_streams_with_an_error(over_ray: StartRig) -> None:
    import ray
    from ray.util import list_named_actors

    rig = await over_ray(max_model_len=2048, num_slots=2)
    items = rig.open(rig.request(max_tokens=2000, n=2))
    assert isinstance(await anext(items), Started)
    waiting = asyncio.create_task(anext(rig.open(rig.request())))
    await asyncio.sleep(0.2)
    for actor in await asyncio.to_thread(list_named_actors, all_namespaces=True):
        if actor["name"].startswith("SERVE_REPLICA"):
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
    deltas = [item async for item in items if isinstance(item, Delta)]
    assert {d.choice for d in deltas if d.stop is StopCause.ERROR} == {0, 1}
    with pytest.raises(EngineAwayError):
        await waiting
    # Ray Serve starts another one
    async with asyncio.timeout(60):
        while True:
            try:
                said = await rig.say(max_tokens=3)
                break
            except EngineError:
                await asyncio.sleep(0.5)
    assert len(said.ids()) == 3


async def test_a_replica_follows_its_target_and_reports(
    ray_apps: dict[str, Any],
    versions: tuple[VersionRef, VersionRef],
    tmp_path: Path,
) -> None:
    from ray import serve

    from m1serve.engine.remote import RemoteEngine
    from m1serve.engine.replica import engine_app

    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"text": "hello"}))
    settings = Settings(
        home=tmp_path,
        model=ModelSettings(model_id="tiny"),
        engine=EngineSettings(kind="scripted", script=script, max_model_len=192),
    )
    store = Store.open(settings.database)
    for version in versions:
        store.weights.register(
            version.weights_version, "tiny", version.path, state=VersionState.CANDIDATE
        )
    store.weights.set_target("tiny", Slot.STABLE, "tiny@0")
    app = engine_app(settings)
    handle = await asyncio.to_thread(serve.run, app, name="following", route_prefix=None)
    engine = await RemoteEngine.connect(handle)
    try:
        assert engine.weights_version == "tiny@0"
        store.weights.set_target("tiny", Slot.STABLE, "tiny@1")
        async with asyncio.timeout(20):
            while engine.weights_version != "tiny@1":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            while not (found := store.weights.deployments("tiny")) or (  # noqa: ASYNC110
                found[0].weights_version != "tiny@1"
            ):
                await asyncio.sleep(0.05)
        assert found[0].is_accepted
        assert found[0].replica.startswith("engine-stable-")
    finally:
        await engine.close()
        await asyncio.to_thread(serve.delete, "following", _blocking=False)
        store.close()
