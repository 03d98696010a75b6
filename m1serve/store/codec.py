"""Journal records as bytes: zstd over msgpack, token streams packed, one schema number for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgpack
import zstandard

from m1serve.errors import StoreError
from m1serve.store.blobs import bytes_to_floats, bytes_to_ids, floats_to_bytes, ids_to_bytes
from m1serve.store.database import clean_text
from m1serve.store.records import (
    FeedbackGiven,
    JournalRecord,
    SessionEnded,
    SessionSource,
    TurnRecord,
    TurnsDelivered,
)
from m1serve.store.versions import version_number
from m1serve.types import HistoryRule, Mode, Sampling, StopCause, VersionSpan

_SCHEMA = 2
_READ = (1, 2)
"""1 lacks fields that have defaults."""
_LEVEL = 1
_KINDS: dict[str, type[JournalRecord]] = {
    "turn": TurnRecord,
    "delivered": TurnsDelivered,
    "end": SessionEnded,
    "feedback": FeedbackGiven,
}


def encode_record(record: JournalRecord) -> bytes:
    """Raises StoreError when the streams of a turn differ in length: such a record must never be
    trained on.
    """
    if isinstance(record, TurnRecord):
        check_turn(record)
    elif isinstance(record, FeedbackGiven) and not math.isfinite(record.value):
        raise StoreError(
            f"feedback {record.feedback_id} has value {record.value}, wanted a finite one"
        )
    kind = next(name for name, type_ in _KINDS.items() if isinstance(record, type_))
    fields = {
        field.name: _pack_field(field.name, getattr(record, field.name))
        for field in dataclasses.fields(record)
    }
    return zstandard.compress(msgpack.packb([_SCHEMA, kind, fields]), _LEVEL)


def decode_record(payload: bytes) -> JournalRecord:
    schema, kind, fields = msgpack.unpackb(zstandard.decompress(payload), use_list=False)
    if schema not in _READ or kind not in _KINDS:
        raise StoreError(
            f"journal record of schema {schema}, kind {kind!r}; this code reads schemas {_READ}, "
            f"kinds {sorted(_KINDS)}: ingest it with the m1serve that wrote it"
        )
    type_ = _KINDS[kind]
    return type_(**{name: _unpack_field(name, value) for name, value in fields.items()})


def clean_record(record: JournalRecord) -> JournalRecord:
    """The same record with text that every database takes."""
    cleaned: dict[str, Any] = {
        field.name: clean_text(value)
        for field in dataclasses.fields(record)
        if type(value := getattr(record, field.name)) is str and "\0" in value
    }
    return dataclasses.replace(record, **cleaned) if cleaned else record


def check_turn(turn: TurnRecord) -> None:
    num = len(turn.completion_ids)
    streams = {"logprobs": len(turn.logprobs), "token_flags": len(turn.token_flags)}
    if turn.sampled_logprobs is not None:
        streams["sampled_logprobs"] = len(turn.sampled_logprobs)
    wrong = {name: length for name, length in streams.items() if length != num}
    if wrong:
        raise StoreError(
            f"turn {turn.turn_id}: {num} completion ids but {wrong}; nothing is padded"
        )
    ends = [span.end for span in turn.version_spans]
    starts = [span.start for span in turn.version_spans]
    if starts != [0, *ends[:-1]][: len(starts)] or (ends[-1] if ends else 0) != num:
        raise StoreError(
            f"turn {turn.turn_id}: version spans {turn.version_spans} do not cover {num} ids"
        )
    for span in turn.version_spans:
        version_number(span.weights_version)


def sampling_to_dict(sampling: Sampling) -> dict[str, object]:
    return dataclasses.asdict(sampling)


def sampling_from_dict(values: dict[str, Any]) -> Sampling:
    bias = tuple((int(token), float(value)) for token, value in values["logit_bias"])
    stops = tuple(values["stop_token_ids"])
    return Sampling(**{**values, "logit_bias": bias, "stop_token_ids": stops})


def _pack_field(name: str, value: Any) -> object:  # noqa: ANN401
    pack = _PACK.get(name)
    return value if pack is None or value is None else pack(value)


def _unpack_field(name: str, value: Any) -> Any:  # noqa: ANN401
    unpack = _UNPACK.get(name)
    return value if unpack is None or value is None else unpack(value)


_PACK: dict[str, Callable[[Any], object]] = {
    "prompt_ids": ids_to_bytes,
    "completion_ids": ids_to_bytes,
    "logprobs": floats_to_bytes,
    "sampled_logprobs": floats_to_bytes,
    "token_flags": bytes,
    "mode": str,
    "history_rule": str,
    "stop": str,
    "session_source": str,
    "sampling": sampling_to_dict,
    "version_spans": lambda spans: [(s.start, s.end, s.weights_version) for s in spans],
}
_UNPACK: dict[str, Callable[[Any], object]] = {
    "prompt_ids": bytes_to_ids,
    "completion_ids": bytes_to_ids,
    "logprobs": bytes_to_floats,
    "sampled_logprobs": bytes_to_floats,
    "token_flags": tuple,
    "mode": Mode,
    "history_rule": HistoryRule,
    "stop": StopCause,
    "session_source": SessionSource,
    "sampling": sampling_from_dict,
    "version_spans": lambda spans: tuple(
        VersionSpan(start=start, end=end, weights_version=version) for start, end, version in spans
    ),
}
