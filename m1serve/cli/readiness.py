"""When a server answers: polled over HTTP with the standard library, so that `up` stays light."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from pathlib import Path

from m1serve.errors import M1ServeError


class NotReadyError(M1ServeError):
    """The server did not answer in time."""


def answers(host: str, port: int, path: str = "/health", *, timeout_s: float = 2.0) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_until_ready(
    host: str, port: int, *, timeout_s: float, is_hopeless: Callable[[], bool] = lambda: False
) -> float:
    """Seconds it took. Raises NotReadyError after `timeout_s`, or as soon as it is hopeless."""
    started = time.monotonic()
    while not answers(host, port):
        waited_s = time.monotonic() - started
        if waited_s > timeout_s or is_hopeless():
            raise NotReadyError(
                f"no answer from http://{host}:{port}/health after {waited_s:.0f} s; "
                "see logs/server.log in the home directory"
            )
        time.sleep(0.1)
    return time.monotonic() - started


def write_ready_file(path: Path, facts: dict[str, object]) -> None:
    """Appears whole, so that a script may wait for its existence."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(facts) + "\n")
    aside.replace(path)
