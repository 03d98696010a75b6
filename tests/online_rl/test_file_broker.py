"""The embedded broker between threads: every message arrives whole, once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from queue import Empty

from kombu import Connection
from kombu.simple import SimpleQueue

from m1serve.online_rl.tasks import FILE_TRANSPORT

NUM_MESSAGES = 400
QUEUE = "broker-test"
"""Its own: kombu keeps one list of bindings a process, whatever the folder."""


def connect(folder: Path) -> Connection:
    options = {
        "data_folder_in": str(folder / "queue"),
        "data_folder_out": str(folder / "queue"),
        "control_folder": str(folder / "control"),
        "polling_interval": 0.001,
    }
    return Connection("filesystem://", transport=FILE_TRANSPORT, transport_options=options)


def test_a_reader_never_meets_half_a_message(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()

    def write() -> None:
        with connect(tmp_path) as connection:
            queue = SimpleQueue(connection.channel(), QUEUE)
            for number in range(NUM_MESSAGES):
                queue.put({"number": number, "padding": "x" * 2000})
            queue.close()

    writer = threading.Thread(target=write)
    read: list[int] = []
    with connect(tmp_path) as connection:
        # bound before anything is sent: kombu's threads share what they believe to be bound
        queue = SimpleQueue(connection.channel(), QUEUE)
        writer.start()
        while writer.is_alive() or len(read) < NUM_MESSAGES:
            try:
                message = queue.get_nowait()
            except Empty:
                time.sleep(0.001)
                continue
            read.append(message.payload["number"])
            message.ack()
        queue.close()
    writer.join()
    assert sorted(read) == list(range(NUM_MESSAGES))
    assert list((tmp_path / "queue").iterdir()) == []


def test_a_binding_is_whole_while_others_create_it(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    with connect(tmp_path) as first, connect(tmp_path) as second:
        channels = first.channel(), second.channel()
        for number in range(100):
            exchange, start = f"exchange{number}", threading.Barrier(2)

            def bind(exchange: str = exchange, start: threading.Barrier = start) -> None:
                start.wait()
                channels[0]._queue_bind(exchange, "key", "", "m1serve")

            binder = threading.Thread(target=bind)
            binder.start()
            start.wait()
            seen = [channels[1].get_table(exchange) for _ in range(20)]
            channels[1]._queue_bind(exchange, "key", "", "m1serve")
            binder.join()
            assert all(len(table) in (0, 1) for table in seen)
            assert [b.queue for b in channels[1].get_table(exchange)] == ["m1serve"]
