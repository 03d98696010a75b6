"""Whether a port is free, asked before anything is started.

The test binds without SO_REUSEPORT: two Ray Serve proxies on one port would silently share it, and
clients would meet the old and the new application in turn.
"""

from __future__ import annotations

import socket

from m1serve.errors import ConfigError


def is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # a listener that sets SO_REUSEADDR only collides when both listen
            probe.listen(1)
        except OSError:
            return False
    return True


def require_free(host: str, ports: dict[str, int]) -> None:
    """Raises ConfigError naming the first setting whose port is taken, or given twice."""
    if len(set(ports.values())) < len(ports):
        raise ConfigError(f"{' and '.join(ports)} are the same port {min(ports.values())}")
    for setting, port in ports.items():
        if not is_free(host, port):
            raise ConfigError(
                f"port {port} on {host} is taken; stop what listens there or choose another with "
                f"--set {setting}=PORT"
            )


def pick_free(host: str = "127.0.0.1") -> int:
    """A port that nobody had a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
