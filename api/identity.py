"""Who asks, and how the turn is labelled: sessions, groups, tasks and modes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from m1serve.errors import RequestError
from m1serve.types import Mode

_LABEL = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    tenant_id: str
    key_id: str

    @property
    def cache_salt(self) -> str:
        """Keeps one tenant from timing whether another sent a prefix."""
        return hashlib.blake2b(self.tenant_id.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    session_id: str | None
    """None when the client named none."""
    group_key: str | None
    task_id: str | None
    mode: Mode


def labels(headers: Mapping[str, str], metadata: Mapping[str, str], *, is_stored: bool) -> Labels:
    """Headers win over metadata; `store: false` always means off."""
    mode = _mode(headers.get("x-m1-mode"))
    return Labels(
        session_id=_label(headers, metadata, "x-m1-session-id", "m1_session"),
        group_key=_label(headers, metadata, "x-m1-group-id", "group_id"),
        task_id=_label(headers, metadata, "x-m1-task-id", "task_id"),
        mode=mode if is_stored else Mode.OFF,
    )


def check_label(value: str, name: str) -> str:
    if _LABEL.fullmatch(value) is None:
        raise RequestError(
            f"{name} is {value[:40]!r}; wanted 1 to 128 visible ASCII characters", param=name
        )
    return value


def _label(
    headers: Mapping[str, str], metadata: Mapping[str, str], header: str, key: str
) -> str | None:
    if header in headers:
        return check_label(headers[header], header)
    return check_label(metadata[key], f"metadata.{key}") if key in metadata else None


def _mode(text: str | None) -> Mode:
    if text is None:
        return Mode.TRAIN
    try:
        return Mode(text.lower())
    except ValueError:
        raise RequestError(
            f"x-m1-mode is {text[:40]!r}; wanted train, eval or off", param="x-m1-mode"
        ) from None
