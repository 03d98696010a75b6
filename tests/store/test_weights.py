from __future__ import annotations

from typing import Any

import pytest

from m1serve.errors import StoreError
from m1serve.store import Store
from m1serve.types import Slot, SwapReport, VersionRef, VersionState


def candidate(store: Store, number: int, parent: str | None, *, until: str = "gated") -> str:
    name = f"nano@{number}"
    store.weights.register(name, "nano", f"/v/{number}", parent=parent)
    for before, after in (("candidate", "verified"), ("verified", "gated"), ("gated", "canary")):
        if before == until:
            break
        assert store.weights.advance(name, VersionState(before), VersionState(after), "fine")
    return name


def states(store: Store) -> dict[str, str]:
    return {v.weights_version: v.state.value for v in store.weights.list("nano")}


def test_a_version_is_registered_once_under_its_model(store: Store) -> None:
    assert store.weights.next_number("nano") == 0
    assert store.weights.register("nano@0", "nano", "/v/0")
    assert not store.weights.register("nano@0", "nano", "/elsewhere")
    version = store.weights.get("nano@0")
    assert version is not None
    assert (version.path, version.number, version.state) == ("/v/0", 0, VersionState.CANDIDATE)
    assert version.ref == VersionRef(weights_version="nano@0", path="/v/0")
    assert store.weights.next_number("nano") == 1


@pytest.mark.parametrize("name", ["nano", "nano@", "nano@x", "@1", "other@1"])
def test_a_malformed_version_is_refused(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="version"):
        store.weights.register(name, "nano", "/v")


def test_an_arrow_is_taken_once_with_a_reason_on_record(store: Store) -> None:
    name = candidate(store, 1, None, until="candidate")
    arrow = (VersionState.CANDIDATE, VersionState.VERIFIED)
    assert store.weights.advance(name, *arrow, "golden gap 1e-6")
    assert not store.weights.advance(name, *arrow, "again")
    (entry,) = store.audit.list(subject=name)
    assert (entry.before, entry.after, entry.reason) == ("candidate", "verified", "golden gap 1e-6")


def test_an_arrow_that_does_not_exist_is_refused(store: Store) -> None:
    name = candidate(store, 1, None, until="candidate")
    with pytest.raises(StoreError, match=r"no arrow from candidate to active.*'rejected'"):
        store.weights.advance(name, VersionState.CANDIDATE, VersionState.ACTIVE, "hurry")


def test_a_target_is_compared_before_it_is_set(workshop: Any) -> None:
    weights = workshop.store.weights
    assert weights.target("nano") is None
    workshop.first_version()
    candidate(workshop.store, 1, "nano@0")
    assert not weights.set_target("nano", Slot.STABLE, "nano@1", expect=None)
    assert weights.set_target("nano", Slot.STABLE, "nano@1", expect="nano@0")
    assert weights.target("nano", Slot.STABLE).weights_version == "nano@1"
    assert weights.set_target("nano", Slot.CANARY, "nano@0")
    assert weights.set_target("nano", Slot.CANARY, None)
    assert weights.target("nano", Slot.CANARY) is None
    with pytest.raises(StoreError, match="no weights version 'nano@9'"):
        weights.set_target("nano", Slot.CANARY, "nano@9")


@pytest.mark.parametrize("until", ["gated", "canary"])
def test_promotion_retires_the_parent_and_moves_the_target(workshop: Any, until: str) -> None:
    store = workshop.store
    workshop.first_version()
    name = candidate(store, 1, "nano@0", until=until)
    store.weights.set_target("nano", Slot.CANARY, name)
    store.weights.promote(name)
    store.weights.promote(name)
    assert states(store) == {"nano@1": "active", "nano@0": "retired"}
    assert store.weights.target("nano").path == "/v/1"
    assert store.weights.target("nano", Slot.CANARY) is None


def test_what_did_not_pass_the_gates_is_not_promoted(workshop: Any) -> None:
    workshop.first_version()
    name = candidate(workshop.store, 1, "nano@0", until="verified")
    with pytest.raises(StoreError, match="no arrow from verified to active"):
        workshop.store.weights.promote(name)
    assert states(workshop.store)["nano@0"] == "active"


def test_a_candidate_of_a_replaced_parent_is_not_promoted(workshop: Any) -> None:
    store = workshop.store
    workshop.first_version()
    one, two = candidate(store, 1, "nano@0"), candidate(store, 2, "nano@0")
    store.weights.promote(one)
    with pytest.raises(StoreError, match="trained from nano@0 but nano@1 is stable"):
        store.weights.promote(two)
    assert states(store) == {"nano@2": "gated", "nano@1": "active", "nano@0": "retired"}


def test_rollback_goes_to_the_nearest_retired_ancestor(workshop: Any) -> None:
    store = workshop.store
    workshop.first_version()
    for number in (1, 2):
        store.weights.promote(candidate(store, number, f"nano@{number - 1}"))
    assert store.weights.rollback("nano", reason="users complain") == "nano@1"
    assert store.weights.target("nano").weights_version == "nano@1"
    assert states(store) == {"nano@2": "rolled_back", "nano@1": "active", "nano@0": "retired"}
    # what is trained from nano@1 after that has a rolled-back sibling, and rolls back past it
    store.weights.promote(candidate(store, 3, "nano@1"))
    assert store.weights.rollback("nano") == "nano@1"
    assert store.weights.rollback("nano") == "nano@0"
    with pytest.raises(StoreError, match="no retired ancestor"):
        store.weights.rollback("nano")


def test_a_model_without_a_target_cannot_roll_back(store: Store) -> None:
    with pytest.raises(StoreError, match="no stable target"):
        store.weights.rollback("nano")


def test_a_deployment_says_what_serves_and_what_was_refused(store: Store) -> None:
    def report(serves: str, reason: str = "") -> SwapReport:
        return SwapReport(
            weights_version=serves,
            is_accepted=not reason,
            reason=reason,
            phases_ms={"stage": 3.0},
            parity_mean=1e-6,
        )

    store.weights.report_deployment("r1", Slot.STABLE, "nano@1", report("nano@1"))
    store.weights.report_deployment("r1", Slot.STABLE, "nano@2", report("nano@1", "sha256 differs"))
    (row,) = store.weights.deployments("nano")
    assert (row.weights_version, row.wanted_version) == ("nano@1", "nano@2")
    assert (row.is_accepted, row.reason) == (False, "sha256 differs")
    assert row.report["phases_ms"] == {"stage": 3.0}
    assert [e.action for e in store.audit.list()] == ["deploy.refused", "deploy.accepted"]
    assert store.weights.deployments("other") == []


def test_evals_are_kept_by_version_and_family(store: Store) -> None:
    store.evals.record("nano@1", "gate", "sums", 24, 20, {"kl": 0.01})
    store.evals.record("nano@2", "gate", "sums", 24, 21)
    (row,) = store.evals.list("nano@1")
    assert (row.suite, row.family, row.num, row.successes) == ("gate", "sums", 24, 20)
    assert row.details == {"kl": 0.01}
    assert len(store.evals.list()) == 2
