"""What the demo reads from the store: verdicts on its episodes, and what the replicas serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m1serve.errors import StoreError
from m1serve.store import Store
from m1serve.types import RewardStatus

SUCCESS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    reward: float | None
    """None when no scorer could tell."""
    status: RewardStatus

    @property
    def is_success(self) -> bool:
        return self.reward is not None and self.reward > SUCCESS


def outcomes(store: Store, session_ids: Sequence[str]) -> dict[str, Outcome]:
    """Of those sessions that have been judged; a forked session counts by its newest trajectory."""
    wanted = set(session_ids)
    found: dict[str, Outcome] = {}
    for row in store.ledger.list_trajectories(limit=2 * len(wanted)):
        if row.session_id in wanted and row.reward_status is not None:
            found.setdefault(row.session_id, Outcome(reward=row.reward, status=row.reward_status))
    return found


def deployed_swap_ms(store: Store, model_id: str, weights_version: str) -> float | None:
    """Of the slowest replica, once all of them serve it. Raises StoreError when one refused it."""
    deployments = store.weights.deployments(model_id)
    for deployment in deployments:
        if deployment.wanted_version == weights_version and not deployment.is_accepted:
            raise StoreError(f"{deployment.replica} refused {weights_version}: {deployment.reason}")
    if not deployments or any(d.weights_version != weights_version for d in deployments):
        return None
    return max(_total_ms(d.report.get("phases_ms")) for d in deployments)


def _total_ms(phases_ms: object) -> float:
    assert isinstance(phases_ms, Mapping)
    return float(sum(phases_ms.values()))
