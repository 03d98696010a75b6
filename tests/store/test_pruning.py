from __future__ import annotations

from typing import Any

from m1serve.store import Store
from m1serve.types import Slot, SwapReport, VersionState


def register(store: Store, number: int, state: VersionState) -> str:
    name = f"nano@{number}"
    parent = f"nano@{number - 1}" if number else None
    store.weights.register(name, "nano", f"/v/{number}", parent=parent, state=state)
    return name


def prunable(store: Store, keep: int) -> list[str]:
    return [v.weights_version for v in store.weights.prunable("nano", keep)]


def test_retired_versions_but_the_newest_and_rejected_ones_are_prunable(store: Store) -> None:
    for number in range(6):
        register(store, number, VersionState.RETIRED)
    register(store, 6, VersionState.REJECTED)
    register(store, 7, VersionState.ROLLED_BACK)
    register(store, 8, VersionState.CANDIDATE)
    register(store, 9, VersionState.ACTIVE)
    assert prunable(store, 2) == ["nano@6", "nano@3", "nano@2", "nano@1"]
    assert prunable(store, 9) == ["nano@6"]


def test_what_somebody_uses_is_not_prunable(workshop: Any) -> None:
    store = workshop.store
    for number in range(8):
        register(store, number, VersionState.RETIRED)
    store.weights.set_target("nano", Slot.CANARY, "nano@1")
    refused = SwapReport(weights_version="nano@2", is_accepted=False, reason="no", phases_ms={})
    store.weights.report_deployment("replica", Slot.STABLE, "nano@3", refused)
    lease = workshop.lease()
    store.runs.claim_groups(
        lease.run_id,
        lease.token,
        model_id="nano",
        parent_version="nano@4",
        max_groups=1,
        max_age_versions=4,
    )
    assert prunable(store, 1) == ["nano@6", "nano@5"]
    store.runs.finish(lease.run_id, lease.token, "skipped", "no data")
    assert prunable(store, 1) == ["nano@6", "nano@5", "nano@4"]
