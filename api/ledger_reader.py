"""The ledger as the public API reads it: opened at the first question, asked from threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict

import anyio
import anyio.to_thread

from m1serve.errors import StoreError
from m1serve.store import Store

READ_S = 5.0
"""A database that hangs is away, for whoever asks."""
NUM_READERS = 2


class LedgerReader:
    """Answers are served without a database; only what asks for the ledger needs one."""

    def __init__(self, open_store: Callable[[], Store] | None = None) -> None:
        self._open = open_store
        self._lock = threading.Lock()
        self._store: Store | None = None
        # places of its own: a database that hangs takes none of those that requests are parsed in
        self._places = anyio.CapacityLimiter(NUM_READERS)

    async def session(self, tenant_id: str, session_id: str) -> bytes | None:
        """As JSON, None when there is none. StoreError while the database is away."""
        try:
            with anyio.fail_after(READ_S):
                return await anyio.to_thread.run_sync(
                    self._session,
                    tenant_id,
                    session_id,
                    limiter=self._places,
                    abandon_on_cancel=True,
                )
        except TimeoutError:
            raise StoreError(f"the ledger did not answer within {READ_S:g} s") from None

    def _session(self, tenant_id: str, session_id: str) -> bytes | None:
        report = self._opened().ledger.session_report(tenant_id, session_id)
        if report is None:
            return None
        return json.dumps({"id": session_id, "object": "session", **asdict(report)}).encode()

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _opened(self) -> Store:
        with self._lock:
            if self._open is None:
                raise StoreError("this server was started without a ledger to read from")
            if self._store is None:
                self._store = self._open()
            return self._store
