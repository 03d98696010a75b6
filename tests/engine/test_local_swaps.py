"""The local engine between two versions: what it refuses, and what goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.engine.local import LocalEngine
from m1serve.errors import WeightsError
from m1serve.types import Sampling, VersionRef

StartRig = Callable[..., Awaitable[Any]]
Versions = tuple[VersionRef, VersionRef]


async def plain(rig: Any, seed: int, **fields: Any) -> Any:
    """Drawn from the model's own distribution."""
    return await rig.say(sampling=Sampling(seed=seed), **fields)


def copy_of(version: VersionRef, tmp_path: Path) -> VersionRef:
    target = tmp_path / "copy"
    shutil.copytree(version.path, target)
    return VersionRef(weights_version=version.weights_version, path=str(target))


async def test_flipped_bits_are_refused(
    local: StartRig, versions: Versions, tmp_path: Path
) -> None:
    rig = await local()
    bad = copy_of(versions[1], tmp_path)
    weights = next((tmp_path / "copy" / "serving").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(bytes(content))
    report = await rig.engine.load(bad)
    assert not report.is_accepted
    assert "tiny@1" in report.reason
    assert rig.engine.stats().versions == ("tiny@0",)


async def test_weights_that_miss_their_golden_logprobs_are_refused(
    local: StartRig, versions: Versions, tmp_path: Path
) -> None:
    rig = await local()
    bad = copy_of(versions[1], tmp_path)
    file = tmp_path / "copy" / "serving" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["golden"][0]["logprobs"][3] -= 0.2
    file.write_text(json.dumps(_resealed(manifest)))
    report = await rig.engine.load(bad)
    assert not report.is_accepted
    assert "golden" in report.reason


def _resealed(manifest: dict[str, Any]) -> dict[str, Any]:
    import hashlib

    content = {name: value for name, value in manifest.items() if name != "digest"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {**content, "digest": digest}


async def test_an_engine_does_not_start_on_bad_weights(
    versions: Versions, tok: ChatTokenizer, settings: Any
) -> None:
    wrong = VersionRef(weights_version="tiny@1", path=versions[0].path)
    with pytest.raises(WeightsError, match="tiny@0"):
        LocalEngine.start(wrong, settings=settings, tokenizer=tok)


async def test_serving_goes_on_while_a_version_is_staged(
    local: StartRig, versions: Versions
) -> None:
    rig = await local(max_model_len=2048)
    items = rig.open(rig.request(max_tokens=1900))
    for _ in range(2):
        await anext(items)
    loading = asyncio.create_task(rig.engine.load(versions[1]))
    num_deltas = 0
    async for _ in items:
        if loading.done():
            break
        num_deltas += 1
    await items.aclose()
    assert num_deltas > 1
    report = await loading
    assert report.parity_mean is not None
    assert report.parity_mean < 1e-5


async def test_going_back_to_a_version_that_is_held_reads_nothing(
    local: StartRig, versions: Versions, tmp_path: Path
) -> None:
    rig = await local(max_model_len=512)
    running = await rig.begin(max_tokens=200)
    await rig.engine.load(versions[1])
    moved = VersionRef(weights_version="tiny@0", path=str(tmp_path / "absent"))
    report = await rig.engine.load(moved)
    assert (report.is_accepted, set(report.phases_ms)) == (True, {"switch"})
    assert rig.engine.weights_version == "tiny@0"
    await running


async def test_rolling_back_and_forth_keeps_every_request_on_its_version(
    local: StartRig, versions: Versions
) -> None:
    rig = await local(max_model_len=512)
    streams = []
    for target in (versions[1], versions[0], versions[1]):
        streams.append(await rig.begin(max_tokens=60))
        assert (await rig.engine.load(target)).is_accepted
    said = await asyncio.gather(*streams)
    assert [set(one.versions()) for one in said] == [{"tiny@0"}, {"tiny@1"}, {"tiny@0"}]
    assert said[0].ids() == said[2].ids() != said[1].ids()
