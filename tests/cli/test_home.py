"""Ports, the lock of a home, and what an earlier supervisor left running."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from m1serve.cli.home_lock import end_leftovers, lock_home
from m1serve.cli.ports import is_free, pick_free, require_free
from m1serve.errors import ConfigError


def test_a_listening_port_is_taken_even_with_reuseport() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(ConfigError, match=rf"port {port} .* is taken.*serve\.port=PORT"):
            require_free("127.0.0.1", {"serve.port": port})


def test_a_port_is_free_again_after_its_listener_closed() -> None:
    port = pick_free()
    address = ("127.0.0.1", port)
    with socket.create_server(address) as listener, socket.create_connection(address):
        listener.accept()[0].close()
    assert is_free("127.0.0.1", port)


def test_one_port_for_two_purposes_is_refused() -> None:
    port = pick_free()
    with pytest.raises(ConfigError, match="the same port"):
        require_free("127.0.0.1", {"serve.port": port, "serve.admin_port": port})


def test_a_home_has_one_holder(tmp_path: Path) -> None:
    in_use = pytest.raises(ConfigError, match=rf"in use by another .*pid {os.getpid()}")
    with lock_home(tmp_path), in_use, lock_home(tmp_path):
        pass
    with lock_home(tmp_path):
        pass


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = pytest.raises(ConfigError, match="choose another directory")
    with refused, lock_home(tmp_path / "file"):
        pass


def sleeper(home: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "M1SERVE_HOME": str(home)}
    process = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    # Popen returns while the kernel is still exchanging the old environment for the new one
    while f"M1SERVE_HOME={home}" not in Path(f"/proc/{process.pid}/environ").read_text():
        time.sleep(0.01)
    return process


def test_leftovers_of_this_home_are_ended(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "server.pid").write_text(f"{process.pid}\n")
    assert end_leftovers(tmp_path, grace_s=5.0) == ["server"]
    assert process.wait(5) == -15
    assert list((tmp_path / "run").iterdir()) == []


def test_a_reused_pid_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    process = sleeper(tmp_path / "another")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "server.pid").write_text(f"{process.pid}\n")
    assert end_leftovers(tmp_path, grace_s=0.1) == []
    assert process.poll() is None
    process.kill()
    process.wait()
