"""The operator's routes over a real store."""

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from m1serve.api import create_admin_app
from m1serve.config import ServeSettings, Settings
from m1serve.store import Store
from m1serve.types import Slot, VersionState

SETTINGS = Settings(serve=ServeSettings(admin_key=hashlib.sha256(b"root").hexdigest()))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(f"sqlite:///{tmp_path / 'admin.db'}")
    for number, state in [(0, VersionState.ACTIVE), (1, VersionState.GATED)]:
        store.weights.register(
            f"nano@{number}",
            "nano",
            str(tmp_path / str(number)),
            parent=None if number == 0 else "nano@0",
            state=state,
        )
    store.weights.set_target("nano", Slot.STABLE, "nano@0")
    yield store
    store.close()


@pytest.fixture
async def admin(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_admin_app(store, SETTINGS))
    async with httpx.AsyncClient(
        transport=transport,
        base_url="http://admin/admin",
        headers={"authorization": "Bearer root"},
    ) as client:
        yield client


async def test_the_status_shows_what_serves_and_what_waits(admin: httpx.AsyncClient) -> None:
    status = (await admin.get("/status")).json()
    assert status["target"] == "nano@0"
    assert status["deployments"] == []
    assert status["last_run"] is None
    assert isinstance(status["jobs"], dict)
    assert isinstance(status["trajectories"], dict)


async def test_a_requested_run_is_listed(admin: httpx.AsyncClient) -> None:
    run_id = (await admin.post("/retrain", json={"overrides": {"lr": 1e-5}})).json()["run_id"]
    [run] = (await admin.get("/runs")).json()["data"]
    assert (run["run_id"], run["overrides"], run["state"]) == (run_id, {"lr": 1e-5}, "requested")
    assert (await admin.get(f"/runs/{run_id}")).json()["model_id"] == "nano"
    assert (await admin.get("/runs/none")).status_code == 404


async def test_weights_are_promoted_and_rolled_back(admin: httpx.AsyncClient) -> None:
    listed = (await admin.get("/weights")).json()["data"]
    assert [version["weights_version"] for version in listed] == ["nano@1", "nano@0"]
    promoted = await admin.post("/weights/promote", json={"weights_version": "nano@1"})
    assert promoted.json() == {"weights_version": "nano@1"}
    assert (await admin.get("/status")).json()["target"] == "nano@1"
    back = await admin.post("/weights/rollback", json={})
    assert back.json() == {"weights_version": "nano@0"}


async def test_what_the_store_refuses_is_a_conflict(admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/weights/rollback", json={})
    assert answer.status_code == 409
    assert "cannot roll back" in answer.json()["error"]["message"]


async def test_trajectories_are_listed_by_state(admin: httpx.AsyncClient) -> None:
    answer = await admin.get("/trajectories", params={"state": "eligible", "limit": 5})
    assert answer.json() == {"object": "list", "data": []}
    refused = await admin.get("/trajectories", params={"limit": 0})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "query.limit"


async def test_the_metrics_page_shows_what_the_store_knows(admin: httpx.AsyncClient) -> None:
    await admin.post("/retrain", json={})
    text = (await admin.get("http://admin/metrics")).text
    assert 'm1serve_training_runs{state="requested"} 1.0' in text
    assert "m1serve_ledger_turns 0.0" in text


@pytest.mark.parametrize("body", [{"lr": 1}, {"overrides": []}, {"trigger": 3}])
async def test_bad_bodies_are_refused(admin: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await admin.post("/retrain", json=body)).status_code == 400


async def test_an_unknown_route_names_the_admins_own(admin: httpx.AsyncClient) -> None:
    error = (await admin.get("/nothing")).json()["error"]
    assert error["code"] == "not_found"
    assert "/admin/status" in error["message"]
    assert "/v1/" not in error["message"]


async def test_the_admin_key_is_needed(admin: httpx.AsyncClient) -> None:
    for route in ("/status", "/runs", "/weights", "/trajectories"):
        answer = await admin.get(route, headers={"authorization": "Bearer guest"})
        assert answer.status_code == 401
