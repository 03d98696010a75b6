"""What the demo reads from the store: verdicts on its episodes, and what the replicas serve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    versions: tuple[int | None, int | None]
    """Numbers of the oldest and the newest weights that sampled it."""

    @property
    def is_success(self) -> bool | None:
        """None when no scorer could tell."""
        return None if self.reward is None else self.reward > SUCCESS


def success_rate(results: Iterable[Outcome]) -> float:
    """Of those with a verdict; 0 when there is none."""
    known = [r.is_success for r in results if r.is_success is not None]
    return sum(known) / len(known) if known else 0.0


def outcomes(store: Store, session_ids: Sequence[str]) -> dict[str, Outcome]:
    """Of those sessions that have been judged; a forked session counts by its newest trajectory."""
    wanted = set(session_ids)
    found: dict[str, Outcome] = {}
    for row in store.ledger.list_trajectories(limit=2 * len(wanted)):
        if row.session_id in wanted and row.reward_status is not None:
            outcome = Outcome(
                reward=row.reward,
                status=row.reward_status,
                versions=(row.min_version, row.max_version),
            )
            found.setdefault(row.session_id, outcome)
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
