"""kombu's filesystem transport, but messages and bindings appear whole: none is met half-written.

kombu (5.7) opens both kinds of file under their final names and writes afterwards. Its reader of
messages takes no lock, and a binding that is read while another process creates it is empty: the
message is dropped, or the reader dies of the JSON.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.exceptions import ChannelError
from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    def _put(self, queue: str, message: dict[str, Any], /, **_: object) -> None:  # type: ignore[override]
        name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}"
        # only names that end in .<queue>.msg are read
        _write_whole(Path(self.data_folder_out) / f"{name}.{queue}.msg", message)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        file: Path = self._exchange_file(exchange)  # type: ignore[no-untyped-call]
        binding = filesystem.exchange_queue_t(routing_key or "", pattern or "", queue or "")
        bindings = self.get_table(exchange)  # type: ignore[no-untyped-call]
        if binding not in bindings:
            file.parent.mkdir(exist_ok=True)
            _write_whole(file, [binding, *bindings])


class Transport(filesystem.Transport):
    Channel = Channel


def _write_whole(file: Path, value: object) -> None:
    aside = file.with_name(f"{uuid.uuid4()}.tmp")
    try:
        aside.write_text(dumps(value))  # type: ignore[no-untyped-call]
        os.replace(aside, file)
    except OSError as error:
        raise ChannelError(f"cannot write {file}: {error}") from error
