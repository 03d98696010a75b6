"""Trajectories as Parquet: a row a turn, for dataframes and training sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from m1serve.errors import ConfigError
from m1serve.store.records import TurnRecord
from m1serve.store.views import TrajectoryView

_ROWS_A_GROUP = 256


def write_parquet(views: Iterable[TrajectoryView], path: Path) -> int:
    """Returns how many trajectories. ConfigError without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed: pip install 'm1serve[parquet]', "
            "or export JSON lines"
        ) from None
    schema = pa.schema([(name, _type(pa, kind)) for name, kind in COLUMNS.items()])
    num = 0
    rows: list[dict[str, object]] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for view in views:
            num += 1
            rows += _rows(view)
            if len(rows) >= _ROWS_A_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return num


COLUMNS = {
    "trajectory_id": "string",
    "position": "int32",
    "is_context": "bool",
    "session_id": "string",
    "tenant_id": "string",
    "group_key": "string",
    "task_id": "string",
    "mode": "string",
    "model_id": "string",
    "history_rule": "string",
    "state": "string",
    "state_reason": "string",
    "reward": "float64",
    "reward_status": "string",
    "turn_id": "string",
    "request_id": "string",
    "created_at": "float64",
    "choice": "int32",
    "num_choices": "int32",
    "session_source": "string",
    "temperature": "float64",
    "top_p": "float64",
    "stop": "string",
    "stop_detail": "string",
    "finish_reason": "string",
    "was_delivered": "bool",
    "prompt_ids": "ids",
    "completion_ids": "ids",
    "logprobs": "floats",
    "sampled_logprobs": "floats",
    "token_flags": "flags",
    "is_trainable": "bools",
    "weights_versions": "strings",
    "tokenizer_digest": "string",
    "template_digest": "string",
    "numerics_digest": "string",
    "ttft_ms": "float64",
    "total_ms": "float64",
}
"""In order, with their kinds; `weights_versions` names the one that sampled each token."""


def _type(pa: Any, kind: str) -> Any:  # noqa: ANN401 - an optional library's values
    lists = {
        "ids": pa.int32(),
        "floats": pa.float32(),
        "flags": pa.int8(),
        "bools": pa.bool_(),
        "strings": pa.dictionary(pa.int32(), pa.string()),
    }
    return pa.list_(lists[kind]) if kind in lists else pa.type_for_alias(kind)


def _rows(view: TrajectoryView) -> Iterator[dict[str, object]]:
    num_context = len(view.context)
    for position, turn in enumerate(view.conversation):
        yield _row(view, turn, position=position, is_context=position < num_context)


def _row(
    view: TrajectoryView, turn: TurnRecord, *, position: int, is_context: bool
) -> dict[str, object]:
    plain = {
        name: getattr(source, name)
        for source in (turn, view)
        for name in COLUMNS
        if hasattr(source, name)
    }
    versions = [s.weights_version for s in turn.version_spans for _ in range(s.start, s.end)]
    return {
        **plain,
        "position": position,
        "is_context": is_context,
        "created_at": turn.created_at,
        "temperature": turn.sampling.temperature,
        "top_p": turn.sampling.top_p,
        "is_trainable": [on and not is_context for on in turn.trainable_tokens()],
        "weights_versions": versions,
    }
