"""Whether a server that other machines can reach lets anybody in, and keys that are no digests."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from m1serve.errors import ConfigError

if TYPE_CHECKING:
    from m1serve.config import ServeSettings


def require_keys(serve: ServeSettings) -> None:
    """Raises ConfigError, which never repeats what should have been a digest."""
    admin_keys = [key for key in [serve.admin_key] if key is not None]
    users = [*serve.api_keys, *(key.sha256 for key in serve.keys)]
    if not all(re.fullmatch("[0-9a-fA-F]{64}", digest) for digest in (*users, *admin_keys)):
        raise ConfigError(
            "serve.api_keys, serve.admin_key and the sha256 of serve.keys hold sha256 hex digests, "
            "not keys; make a key with its digest: m1serve keys new"
        )
    if len({digest.lower() for digest in users}) < len(users):
        raise ConfigError("serve.api_keys and serve.keys hold a key twice; leave one of them out")
    admin_keys += [key.sha256 for key in serve.keys if "admin" in key.scopes]
    keys = {"serve.api_keys": users, "serve.admin_key": admin_keys}
    missing = [name for name, given in keys.items() if not given]
    if missing and not _is_loopback(serve.host):
        raise ConfigError(
            f"serve.host {serve.host!r} is reachable from other machines and "
            f"{' and '.join(missing)} let anybody in; set them or bind to 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
