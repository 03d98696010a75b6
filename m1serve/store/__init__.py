"""Everything that is kept: the capture journal, the ledger, jobs, rewards, runs and weight
versions.
"""

from m1serve.store.store import Store, load_tenant_key

__all__ = ["Store", "load_tenant_key"]
