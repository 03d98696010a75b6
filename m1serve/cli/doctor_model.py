"""What `m1serve doctor` says of a model directory and this machine's memory, without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from m1serve.chat.published import template_difference
from m1serve.chat.tokenizer import EOS, ChatTokenizer
from m1serve.cli.finding import Finding, Unfit
from m1serve.errors import M1ServeError
from m1serve.model.checkpoint import FETCH_BOTH, wanted_shapes
from m1serve.model.config import M1Config
from m1serve.model.devices import Device
from m1serve.model.directory import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_json_object
from m1serve.model.fitting import CONTEXTS, RESERVED, Fit, fit, num_devices_needed
from m1serve.model.footprint import Footprint, footprint
from m1serve.model.inventory import (
    Inventory,
    abridged,
    narrow_routers,
    take_inventory,
    tensor_problems,
)
from m1serve.model.token_ids import TOKENIZER_FILE, resolve_token_ids

M1_VOCAB_SIZE, M1_HIDDEN_SIZE, M1_EOS_ID = 200_064, 6_144, 200_020
_SHOWN = 5
_UNREADABLE = f"not checked: {CONFIG_FILE} cannot be read"


def examine_model(path: Path, devices: Sequence[Device]) -> Iterator[Finding]:
    """One finding a subject; files are read as far as their headers."""
    if not path.is_dir():
        yield _wrong("model", f"{path} is no directory; --model wants one with {CONFIG_FILE}")
        return
    config: M1Config | None = None
    try:
        raw = read_json_object(path / CONFIG_FILE)
        config = M1Config.from_dict(raw)
        yield _good("model", _described(path, raw, config), asdict(config))
    except M1ServeError as error:
        yield _wrong("model", str(error))
    inventory: Inventory | None = None
    try:
        inventory = take_inventory(path)
        yield _files(path, inventory)
    except M1ServeError as error:
        yield _wrong("model files", str(error))
    yield _tensors(config, inventory)
    yield _tokenizer(path, config)
    yield _template(path)
    yield _memory(config, inventory, devices)


def _described(path: Path, raw: Mapping[str, object], config: M1Config) -> str:
    counted = footprint(config, weight_itemsize=2, kv_itemsize=2)
    return (
        f"{path}, {raw['model_type']}, {config.num_hidden_layers} layers of width "
        f"{config.hidden_size} ({len(config.lightning_layers)} lightning, "
        f"{len(config.softmax_layers)} softmax), {_count(counted.num_params)} parameters, "
        f"{config.rotary_dim} of {config.head_dim} channels rotate"
    )


def _files(path: Path, inventory: Inventory) -> Finding:
    problems = inventory.file_problems()
    others = {file.name for file in path.glob("*.safetensors")}
    others -= {file.name for file in (*inventory.files, *inventory.missing_files)}
    details = {
        "num_files": len(inventory.files),
        "num_bytes": inventory.num_bytes,
        "missing": [file.name for file in inventory.missing_files],
        "problems": problems,
    }
    if inventory.weight_map is None and inventory.missing_files and others:
        problems = [f"neither {SINGLE_FILE} nor {INDEX_FILE} beside {len(others)} other files"]
    if problems:
        return _wrong("model files", abridged(problems, _SHOWN), details)
    ignored = f"; {len(others)} that the index does not name" if others else ""
    text = f"{_plural(len(inventory.files), 'file')}, {_size(inventory.num_bytes)}, none truncated"
    return _good("model files", text + ignored, details)


def _tensors(config: M1Config | None, inventory: Inventory | None) -> Finding:
    if config is None or inventory is None:
        return _wrong("model tensors", _UNREADABLE if config is None else "not checked: no files")
    problems = tensor_problems(inventory, wanted_shapes(config))
    seen, listed = inventory.tensors, inventory.names
    narrow = narrow_routers(inventory)
    details = {
        "num_tensors": len(listed),
        "num_read_headers": len(seen),
        "dtypes": inventory.dtypes,
        "num_narrow_routers": len(narrow),
        "problems": problems,
    }
    if problems:
        return _wrong("model tensors", f"{abridged(problems, _SHOWN)}; {FETCH_BOTH}", details)
    dtypes = ", ".join(f"{num:,} {dtype}" for dtype, num in sorted(inventory.dtypes.items()))
    text = f"{len(listed):,}, named as {CONFIG_FILE} wants them"
    text += f"; {dtypes}, shapes as wanted" if seen else ""
    if len(seen) < len(listed):
        text += f"; shapes and dtypes of {len(listed) - len(seen):,} unknown, their files are away"
    if narrow:
        text += f"; {len(narrow)} routers are not fp32 as MiniMax's: this is a cast copy"
    return _good("model tensors", text, details)


def _tokenizer(path: Path, config: M1Config | None) -> Finding:
    file = path / TOKENIZER_FILE
    if config is None:
        return _wrong("model tokenizer", _UNREADABLE)
    try:
        config = resolve_token_ids(config, file)
        num_tokens = ChatTokenizer.load(file).vocab_size
        _require_m1s_end(config)
    except M1ServeError as error:
        return _wrong("model tokenizer", str(error))
    bos, eos = config.bos_token_id, config.eos_token_id
    return _good(
        "model tokenizer",
        f"{num_tokens:,} of {config.vocab_size:,} ids, a sentence begins with {bos} and ends with "
        f"{eos}",
        {"num_tokens": num_tokens, "bos_token_id": bos, "eos_token_id": eos},
    )


def _require_m1s_end(config: M1Config) -> None:
    is_m1 = (config.vocab_size, config.hidden_size) == (M1_VOCAB_SIZE, M1_HIDDEN_SIZE)
    if is_m1 and config.eos_token_id != M1_EOS_ID:
        raise Unfit(
            f"{EOS} is {config.eos_token_id}, in MiniMax-M1 it is {M1_EOS_ID}; "
            "fetch the tokenizer.json that belongs to the checkpoint"
        )


def _template(path: Path) -> Finding:
    try:
        source = _template_source(path)
    except M1ServeError as error:
        return _wrong("model template", str(error))
    if source is None:
        return _good("model template", "none here; MiniMax-M1's is built in")
    if (difference := template_difference(source)) is not None:
        return _wrong(
            "model template",
            f"not MiniMax-M1's, the only one m1serve renders: {difference}; "
            "use the template that the model was trained with, or another server",
        )
    return _good("model template", "renders what m1serve renders")


def _template_source(path: Path) -> str | None:
    """A chat_template.jinja goes before the tokenizer_config.json, as in transformers."""
    jinja, config = path / "chat_template.jinja", path / "tokenizer_config.json"
    if jinja.exists():
        return _text_of(jinja)
    source = read_json_object(config).get("chat_template") if config.exists() else None
    match source:
        case None | str():
            return source
        case [*named]:
            for entry in named:
                match entry:
                    case {"name": "default", "template": str(text)}:
                        return text
    raise Unfit(
        f"chat_template in {config} is {json.dumps(source)[:80]}, wanted a text, or a list with "
        "one that is named default; fetch the file again"
    )


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise Unfit(f"cannot read {file} ({error.strerror}); fetch it again") from error
    except UnicodeDecodeError as error:
        raise Unfit(f"{file} is not UTF-8 ({error}); fetch it again") from error


def _memory(
    config: M1Config | None, inventory: Inventory | None, devices: Sequence[Device]
) -> Finding:
    if config is None:
        return _wrong("memory", _UNREADABLE)
    best = max(devices, key=lambda device: device.free_bytes)
    itemsize = _itemsize_on(best, inventory)
    counted = footprint(config, weight_itemsize=itemsize, kv_itemsize=itemsize)
    most = config.max_position_embeddings
    alone = fit(counted, free_bytes=best.free_bytes, max_context_tokens=most)
    free_bytes = sum(device.free_bytes for device in devices)
    together = fit(counted, free_bytes=free_bytes, max_context_tokens=most)
    details = {
        "devices": [asdict(device) for device in devices],
        "device": best.name,
        "footprint": asdict(counted),
        "fit": {"is_enough": alone.is_enough, **asdict(alone)},
        "fit_of_all_devices": {"is_enough": together.is_enough, **asdict(together)},
    }
    precision = "in bf16" if itemsize == 2 else "in fp32"
    text = (
        f"{best.name} ({best.model}) has {_size(best.free_bytes)} free; weights {precision} take "
        f"{_size(counted.weight_bytes)}, a sequence {_size(counted.state_bytes)} and "
        f"{counted.kv_token_bytes:,} bytes a token; {_room(alone)}"
    )
    if alone.is_enough:
        return _good("memory", text, details)
    advice = _if_shared(together, len(devices)) if together.is_enough else _wanted(counted, best)
    return _wrong("memory", f"{text}; {advice}", details)


def _itemsize_on(device: Device, inventory: Inventory | None) -> int:
    """As engine.dtype 'auto' loads: bf16 on a GPU if any is stored so, or none is known."""
    dtypes = inventory.dtypes if inventory else {}
    return 2 if device.is_cuda and (not dtypes or "BF16" in dtypes) else 4


def _room(fits: Fit) -> str:
    if not fits.is_enough:
        return "does not fit"
    table = ", ".join(f"{c.num_sequences:,} x {c.context_tokens:,}" for c in fits.concurrency)
    longest = f"fits a context of {fits.longest_context_tokens:,} tokens"
    return f"{longest}, or sequences x tokens: {table}" if table else longest


def _if_shared(together: Fit, num_devices: int) -> str:
    return (
        f"all {num_devices} devices, if they shared weights and sequences (tensor parallel): "
        f"{_room(together)}; but the local engine uses one"
    )


def _wanted(counted: Footprint, best: Device) -> str:
    context = CONTEXTS[1]
    wanted = counted.weight_bytes + counted.sequence_bytes(context)
    if not best.is_cuda:
        return f"{_size(wanted / (1 - RESERVED))} free would do for one context of {context:,}"
    num = num_devices_needed(counted, free_bytes=best.total_bytes, context_tokens=context)
    text = (
        f"{_plural(num, 'such device')}, otherwise empty, would do for one context of {context:,}"
    )
    if num == 1:
        return text
    return f"{text}, if they shared it (tensor parallel); but the local engine uses one"


def _good(subject: str, text: str, details: Mapping[str, object] | None = None) -> Finding:
    return Finding(subject=subject, is_good=True, text=text, details=details or {})


def _wrong(subject: str, text: str, details: Mapping[str, object] | None = None) -> Finding:
    return Finding(subject=subject, is_good=False, text=text, details=details or {})


def _plural(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


def _count(num: int) -> str:
    return f"{num / 1e9:.2f} billion" if num >= 1e9 else f"{num / 1e6:.1f} million"
