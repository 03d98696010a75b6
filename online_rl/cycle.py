"""One training cycle, as the algorithm box of the paper plus what makes its result safe to serve.

Every arrow is a row change. A run that crashed starts again where its rows say it was: before the
commit with the same data from the same parent, after it with the version that was committed.
"""

from __future__ import annotations

from m1serve.online_rl.packing import split_minibatches
from m1serve.online_rl.run_metrics import claim_metrics, mismatch_metrics, step_metrics
from m1serve.online_rl.samples import build_groups
from m1serve.online_rl.workshop import Workshop
from m1serve.store.runs import Outcome
from m1serve.types import VersionState


def run_cycle(shop: Workshop) -> Outcome:
    """Trains a candidate unless the run has one already, then lets verification and gate decide."""
    if shop.candidate() is None:
        outcome = _train_candidate(shop)
        if outcome is not None:
            return outcome
    return _judge_candidate(shop)


def _train_candidate(shop: Workshop) -> Outcome | None:
    """None once a candidate is committed; else how the run ended without one."""
    shop.enter("claim")
    parent = shop.parent()
    views = shop.claim_groups(parent)
    groups = build_groups(views)
    metrics = claim_metrics(views, groups)
    if len(groups) < shop.train.min_groups:
        return shop.skip(metrics)

    shop.enter("train")
    learner = shop.start_learner(parent)
    minibatches = split_minibatches(learner.shuffled(groups), shop.train.minibatches)
    mismatch = shop.measure_mismatch(learner, minibatches[0], parent)
    metrics |= mismatch_metrics(mismatch)
    if not mismatch.mean <= shop.train.parity_mean_max:
        return shop.refuse(mismatch, metrics)
    steps = [learner.train_minibatch(rows) for rows in shop.while_leased(minibatches)]
    metrics |= step_metrics(steps, weight_max=shop.train.weight_max)

    shop.enter("write")
    candidate = shop.write_version(learner, parent)
    shop.enter("commit")
    shop.commit(candidate, parent, metrics)
    return None


def _judge_candidate(shop: Workshop) -> Outcome:
    """Each step moves the version by one arrow, or to rejected."""
    arrows = {
        VersionState.CANDIDATE: ("verify", shop.verify),
        VersionState.VERIFIED: ("gate", shop.gate),
        VersionState.GATED: ("promote", shop.promote),
    }
    while (state := shop.candidate_state()) in arrows:
        phase, move = arrows[state]
        shop.enter(phase)
        move()
    shop.enter("finish")
    return shop.finish(state)
