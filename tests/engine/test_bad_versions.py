"""A version that must not serve is refused by name, before a token; what serves goes on serving."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.engine.local import LocalEngine
from m1serve.errors import WeightsError
from m1serve.model.manifest import FileRecord, Golden, file_sha256, read_manifest
from m1serve.model.tensor_file import tensor_digests
from m1serve.types import VersionRef

StartRig = Callable[..., Awaitable[Any]]
Damage = Callable[[Path], None]
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def lose_a_file(serving: Path) -> None:
    (serving / WEIGHTS).unlink()


def truncate(serving: Path) -> None:
    content = (serving / WEIGHTS).read_bytes()
    (serving / WEIGHTS).write_bytes(content[:-100])


def rewrite(serving: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Consistently, as a broken exporter would: digests and sizes are those of the bad file."""
    tensors = {name: t.clone() for name, t in load_file(serving / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, serving / WEIGHTS)
    reseal(serving)


def edit_json(serving: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((serving / name).read_text())
    change(raw)
    (serving / name).write_text(json.dumps(raw))
    reseal(serving)


def reseal(serving: Path) -> None:
    manifest = read_manifest(serving.parent)
    files = {
        f"serving/{name}": FileRecord(
            num_bytes=(serving / name).stat().st_size,
            sha256="" if name == WEIGHTS else file_sha256(serving / name),
        )
        for name in (WEIGHTS, CONFIG, TOKENIZER)
    }
    tensors = tensor_digests(serving / WEIGHTS)
    replace(manifest, files=files, tensors=tensors).sealed().write(serving.parent)


def misshape(serving: Path) -> None:
    rewrite(serving, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(64, 64)}))


def lose_a_tensor(serving: Path) -> None:
    rewrite(serving, lambda tensors: tensors.pop("model.norm.weight"))


def spoil_one_weight(serving: Path) -> None:
    """Of an expert that no golden sequence may reach."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.3.block_sparse_moe.experts.1.w3.weight"][9, 9] = torch.nan

    rewrite(serving, change)


def name_an_unknown_layer(serving: Path) -> None:
    kinds = ["linear_attention"] * 7 + ["sliding_attention"]
    edit_json(serving, CONFIG, lambda raw: raw.update(layer_types=kinds))


def number_an_unknown_layer(serving: Path) -> None:
    edit_json(serving, CONFIG, lambda raw: raw.update(attn_type_list=[0] * 7 + [2]))


def contradict(serving: Path) -> None:
    edit_json(serving, CONFIG, lambda raw: raw.update(mlp_alpha_factor=1))


def outgrow_the_vocabulary(serving: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["added_tokens"].append({**raw["added_tokens"][-1], "id": 512, "content": "<more>"})

    edit_json(serving, TOKENIZER, change)


def forget_a_control_token(serving: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["added_tokens"] = [
            t for t in raw["added_tokens"] if t["content"] != "<end_of_document>"
        ]
        del raw["model"]["vocab"]["<end_of_document>"]

    edit_json(serving, TOKENIZER, change)


def remember(serving: Path, token_ids: tuple[Any, ...], logprobs: tuple[Any, ...]) -> None:
    golden = Golden(token_ids=token_ids, logprobs=logprobs)
    manifest = read_manifest(serving.parent)
    replace(manifest, golden=(*manifest.golden, golden)).sealed().write(serving.parent)


def remember_a_foreign_token(serving: Path) -> None:
    remember(serving, (5, 512), (-1.0,))


def remember_a_word(serving: Path) -> None:
    remember(serving, (5, "six"), (-1.0,))


def remember_one_logprob_too_many(serving: Path) -> None:
    """Which would be spread over all tokens."""
    remember(serving, (5, 6), (-1.0, -1.0))


def remember_no_logprob(serving: Path) -> None:
    remember(serving, (5, 6), (None,))


FAULTS: list[tuple[Damage, str]] = [
    (lose_a_file, "files are missing: ['model.safetensors']"),
    (truncate, "model.safetensors is truncated"),
    (misshape, "tensor lm_head.weight is [64, 64], the architecture of config.json wants"),
    (lose_a_tensor, "tensor model.norm.weight is missing"),
    (spoil_one_weight, "1 of 4096 values of model.layers.3.block_sparse_moe.experts.1.w3.weight"),
    (name_an_unknown_layer, "layer_types holds 'sliding_attention', known are"),
    (number_an_unknown_layer, "attn_type_list holds other values than 0 and 1: [0, 2]"),
    (contradict, "layernorm_mlp_alpha is 2.0 and mlp_alpha_factor is 1: one of them is wrong"),
    (outgrow_the_vocabulary, "is the wrong tokenizer: it has 513 tokens, the model 512"),
    (remember_a_foreign_token, "golden sequence 1 of tiny@1 is not one of this model"),
    (remember_a_word, "golden sequence 1 of tiny@1 is not one of this model"),
    (remember_one_logprob_too_many, "golden sequence 1 of tiny@1 is not one of this model"),
    (remember_no_logprob, "golden sequence 1 of tiny@1 is not one of this model"),
    (forget_a_control_token, "has no tokens ['<end_of_document>']"),
]


def damaged(version: VersionRef, tmp_path: Path, damage: Damage) -> VersionRef:
    target = shutil.copytree(version.path, tmp_path / "bad")
    damage(target / "serving")
    return VersionRef(weights_version=version.weights_version, path=str(target))


@pytest.mark.parametrize(
    ("damage", "said"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
async def test_a_swap_to_it_is_refused_and_the_running_version_goes_on(
    local: StartRig,
    versions: tuple[VersionRef, VersionRef],
    tmp_path: Path,
    damage: Damage,
    said: str,
) -> None:
    rig = await local()
    before = (await rig.say(max_tokens=8)).ids()
    running = rig.open(rig.request(max_tokens=40))
    for _ in range(2):
        await anext(running)
    report = await rig.engine.load(damaged(versions[1], tmp_path, damage))
    assert not report.is_accepted
    assert said in report.reason
    assert {d.weights_version async for d in running} == {"tiny@0"}
    assert rig.engine.stats().versions == ("tiny@0",)
    assert (await rig.say(max_tokens=8)).ids() == before
    assert (await rig.engine.load(versions[1])).is_accepted


@pytest.mark.parametrize(
    ("damage", "said"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_an_engine_does_not_start_on_it(
    versions: tuple[VersionRef, VersionRef],
    tok: ChatTokenizer,
    settings: Any,
    tmp_path: Path,
    damage: Damage,
    said: str,
) -> None:
    with pytest.raises(WeightsError) as refusal:
        LocalEngine.start(damaged(versions[1], tmp_path, damage), settings=settings, tokenizer=tok)
    assert said in str(refusal.value)
