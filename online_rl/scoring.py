"""One score job: claim the row, read the ledger's tokens, ask the sandbox, record the reward.

Delivered twice, the second delivery finds the row taken or done and does nothing.
"""

from __future__ import annotations

import logging

from m1serve.chat.reply import turn_from_ids
from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import ScoreSettings
from m1serve.online_rl.scorers.sandbox import Sandbox, Verdict
from m1serve.store import Store
from m1serve.store.jobs import SCORE, ClaimedJob
from m1serve.store.views import TrajectoryView
from m1serve.types import RewardStatus, Turn

RETRYABLE = frozenset({RewardStatus.CRASHED, RewardStatus.TIMEOUT})
LEASE_MARGIN_S = 10.0
"""Beyond the scorer's own time; when it runs out too early the token refuses one of two results."""
RETRY_S = 1.0
"""Before the second attempt; each further one waits four times as long."""
UNKNOWN_SCORER = "none"
"""Named in the reward row when no scorer got far enough to say who it is."""
logger = logging.getLogger(__name__)


def score_job(
    store: Store, tok: ChatTokenizer, sandbox: Sandbox, job_id: str, settings: ScoreSettings
) -> bool:
    """True when this delivery recorded a reward, be it one without a value."""
    job = store.jobs.claim(job_id, lease_s=settings.timeout_s + LEASE_MARGIN_S)
    if job is None:
        return False
    if job.kind != SCORE:
        store.jobs.fail(job_id, job.token, f"no worker does jobs of kind {job.kind!r}", None)
        return False
    trajectory_id = str(job.payload["trajectory_id"])
    try:
        view = store.ledger.trajectory(trajectory_id)
        verdict = sandbox.score(decode_turns(tok, view), view.task_id or "")
    except Exception as error:
        logger.exception("job_id=%s trajectory_id=%s could not be scored", job_id, trajectory_id)
        store.jobs.fail(job_id, job.token, f"{type(error).__name__}: {error}", retry_in_s(job))
        return False
    return _record(store, job, trajectory_id, verdict)


def _record(store: Store, job: ClaimedJob, trajectory_id: str, verdict: Verdict) -> bool:
    reward = verdict.reward
    if reward.status in RETRYABLE and job.attempt < job.max_attempts:
        error = f"{reward.status.value}: {reward.evidence}"
        store.jobs.fail(job.job_id, job.token, error, retry_in_s(job))
        return False
    return store.rewards.record(
        trajectory_id,
        scorer=verdict.scorer or UNKNOWN_SCORER,
        scorer_version=verdict.version,
        reward=reward,
        job=(job.job_id, job.token),
    )


def decode_turns(tok: ChatTokenizer, view: TrajectoryView) -> list[Turn]:
    return [
        turn_from_ids(tok, turn_id=t.turn_id, completion_ids=t.completion_ids, stop=t.stop)
        for t in view.conversation
    ]


def retry_in_s(job: ClaimedJob) -> float:
    return float(RETRY_S * 4 ** (job.attempt - 1))
