"""The ledger as the public API reads it: opened at the first question, asked from threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from m1serve.errors import StoreError
from m1serve.store import Store
from m1serve.store.session_report import SessionReport


class LedgerReader:
    """Answers are served without a database; only what asks for the ledger needs one."""

    def __init__(self, open_store: Callable[[], Store] | None = None) -> None:
        self._open = open_store
        self._lock = threading.Lock()
        self._store: Store | None = None

    def session(self, tenant_id: str, session_id: str) -> SessionReport | None:
        """Blocks. StoreError while there is no database."""
        return self._opened().ledger.session_report(tenant_id, session_id)

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
