"""API keys: who holds one, and what it may do. Only digests are known here."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from m1serve.api.identity import Caller
from m1serve.config import ServeSettings
from m1serve.errors import RequestError


class Scope(StrEnum):
    """What a key may be used for. Models are shown to every key."""

    INFER = "infer"
    FEEDBACK = "feedback"
    READ = "read"
    ADMIN = "admin"


USER_SCOPES = frozenset({Scope.INFER, Scope.FEEDBACK, Scope.READ})


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    digest: str
    """sha256 hex, lower case."""
    scopes: frozenset[Scope]
    tenant: str | None = None


class KeyRing:
    """The keys of one port. `is_open` takes any key and none, for all callers as one tenant."""

    def __init__(self, keys: Iterable[Key], *, is_open: bool) -> None:
        self._keys = tuple(keys)
        self._is_open = is_open

    @classmethod
    def of_users(cls, serve: ServeSettings) -> KeyRing:
        keys = _user_keys(serve)
        return cls(keys, is_open=not keys)

    @classmethod
    def of_admins(cls, serve: ServeSettings) -> KeyRing:
        """Users' keys too: they are known, and refused for what they may not do."""
        keys = _user_keys(serve)
        if serve.admin_key is not None:
            admin = Key(digest=serve.admin_key.lower(), scopes=frozenset({Scope.ADMIN}))
            keys = [admin, *keys]
        return cls(keys, is_open=not any(Scope.ADMIN in key.scopes for key in keys))

    def caller(self, authorization: str | None, scope: Scope | None = None) -> Caller:
        """Raises RequestError: 401 for an unknown key, 403 for one without the scope."""
        scheme, _, text = (authorization or "").partition(" ")
        text = text.strip() if scheme.lower() == "bearer" else ""
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if self._is_open:
            return Caller(tenant_id="default", key_id=digest[:12] if text else "none")
        # every digest is compared, so that the time does not tell which one came close
        found = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        if not text or not found:
            got = "no key" if not text else "a key that is not among the accepted ones"
            raise RequestError(
                f"got {got}; send a valid one as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                status=401,
            )
        scopes = frozenset[Scope]().union(*(key.scopes for key in found))
        if scope is not None and scope not in scopes:
            raise RequestError(
                f"this key may {', '.join(sorted(scopes)) or 'do nothing'}, wanted {scope}; "
                "use a key with that scope",
                code="insufficient_scope",
                status=403,
            )
        tenant = next((key.tenant for key in found if key.tenant is not None), digest[:12])
        return Caller(tenant_id=tenant, key_id=digest[:12])


def _user_keys(serve: ServeSettings) -> list[Key]:
    plain = [Key(digest=digest.lower(), scopes=USER_SCOPES) for digest in serve.api_keys]
    scoped = [
        Key(
            digest=key.sha256.lower(),
            scopes=frozenset(Scope(name) for name in key.scopes),
            tenant=key.tenant,
        )
        for key in serve.keys
    ]
    return plain + scoped
