"""kombu's filesystem transport, but a message appears whole: a reader never meets half a file.

kombu (5.7) opens the file under its final name and writes afterwards, while `_get` takes no lock.
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
        folder = Path(self.data_folder_out)
        # only names that end in .<queue>.msg are read
        aside, final = folder / f"{name}.tmp", folder / f"{name}.{queue}.msg"
        try:
            aside.write_text(dumps(message))  # type: ignore[no-untyped-call]
            os.replace(aside, final)
        except OSError as error:
            raise ChannelError(f"cannot put a message into {folder}: {error}") from error


class Transport(filesystem.Transport):
    Channel = Channel
