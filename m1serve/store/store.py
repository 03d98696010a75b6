"""The store: one database with the ledger, jobs, rewards, runs, weights, evals and audit."""

from __future__ import annotations

import os
from pathlib import Path

from m1serve.errors import StoreError
from m1serve.store.audit import Audit
from m1serve.store.database import Database
from m1serve.store.evals import Evals
from m1serve.store.jobs import Jobs
from m1serve.store.ledger import Ledger
from m1serve.store.rewards import Rewards
from m1serve.store.runs import Runs
from m1serve.store.schema import ensure_schema
from m1serve.store.weights import Weights

INSECURE_TENANT_KEY = b"m1serve tests and tools that only read"
"""Names prompt blocks when no key is given; whoever ingests for real passes `load_tenant_key`."""


class Store:
    """Synchronous and thread-safe; asyncio callers go through a thread."""

    def __init__(self, db: Database, *, tenant_key: bytes, job_max_attempts: int) -> None:
        self._db = db
        self.jobs = Jobs(db, max_attempts=job_max_attempts)
        self.ledger = Ledger(db, tenant_key=tenant_key, job_max_attempts=job_max_attempts)
        self.rewards = Rewards(db)
        self.runs = Runs(db)
        self.weights = Weights(db)
        self.evals = Evals(db)
        self.audit = Audit(db)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        migrate: bool = True,
        tenant_key: bytes = INSECURE_TENANT_KEY,
        job_max_attempts: int = 3,
    ) -> Store:
        """Connects and brings the schema up to date; StoreError when either is impossible.

        `tenant_key` matters to whoever ingests; reading needs none.
        """
        db = Database(url)
        try:
            ensure_schema(db, migrate=migrate)
        except StoreError:
            db.close()
            raise
        return cls(db, tenant_key=tenant_key, job_max_attempts=job_max_attempts)

    def make_durable(self) -> bool:
        """What was committed before survives even a power failure after this; False: not yet."""
        return self._db.make_durable()

    def close(self) -> None:
        self._db.close()


def load_tenant_key(home: Path) -> bytes:
    """The key file under `home`, made at the first call and readable by its owner only."""
    path = home / "tenant.key"
    home.mkdir(parents=True, exist_ok=True)
    aside = home / f".tenant.key.{os.getpid()}"
    if not path.exists():
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            # a link fails when another process was first; its key is the key then
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    key = path.read_bytes()
    if len(key) != 32:
        raise StoreError(f"{path} holds {len(key)} bytes, wanted 32; restore it from a backup")
    return key
