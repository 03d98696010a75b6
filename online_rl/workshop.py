"""The steps of a training cycle, with their effects on rows and files; `cycle.py` orders them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from m1serve.config import Settings, TrainSettings
from m1serve.errors import ConfigError, EngineError, StoreError, WeightsError
from m1serve.model.manifest import SERVING, TRAINER, read_manifest
from m1serve.model.token_ids import TOKENIZER_FILE
from m1serve.model.weights import (
    discard_version,
    load_trainer,
    load_version,
    version_path,
    write_version,
)
from m1serve.online_rl.examiner import Examiner
from m1serve.online_rl.held_run import HeldRun
from m1serve.online_rl.learner import Learner
from m1serve.online_rl.packing import Row
from m1serve.online_rl.parity import Mismatch, main_version, measure_mismatch
from m1serve.online_rl.run_metrics import finite
from m1serve.store.runs import Outcome
from m1serve.store.versions import WeightsVersion
from m1serve.store.views import TrajectoryView
from m1serve.types import VersionRef, VersionState

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPEN_STATES = frozenset({VersionState.CANDIDATE, VersionState.VERIFIED, VersionState.GATED})


def with_overrides(settings: TrainSettings, overrides: Mapping[str, object]) -> TrainSettings:
    """The run's own settings; ConfigError names what is unknown or out of range."""
    try:
        return TrainSettings.model_validate({**settings.model_dump(), **overrides})
    except ValidationError as error:
        faults = "; ".join(
            f"{e['loc'][0]}: {e['msg']} (got {e['input']!r})" for e in error.errors()
        )
        raise ConfigError(f"overrides refused: {faults}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """A version directory that no row knows yet."""

    weights_version: str
    path: Path
    manifest_digest: str


@dataclass(kw_only=True)
class Workshop(HeldRun):
    """Each method is one step of the cycle, or one way for it to end."""

    settings: Settings
    examiner: Examiner
    train: TrainSettings = field(init=False)

    def __post_init__(self) -> None:
        self.train = with_overrides(self.settings.train, self.lease.overrides)

    # ---- data and learner ----------------------------------------------------------------------

    def parent(self) -> VersionRef:
        """The stable version, or what the run was claimed for before it crashed."""
        frozen = self.run().parent_version
        if frozen is not None:
            return self._known(frozen).ref
        target = self.store.weights.target(self.lease.model_id)
        if target is None:
            raise StoreError(f"{self.lease.model_id} has no stable version to train from")
        return target

    def claim_groups(self, parent: VersionRef) -> list[TrajectoryView]:
        return self.store.runs.claim_groups(
            self.lease.run_id,
            self.lease.token,
            model_id=self.lease.model_id,
            parent_version=parent.weights_version,
            max_groups=self.train.max_groups,
            max_age_versions=self.train.max_age_versions,
        )

    def start_learner(self, parent: VersionRef) -> Learner:
        """From the parent's trainer files; a version without them lends its serving weights."""
        path = Path(parent.path)
        model, manifest = load_version(path, weights_version=parent.weights_version)
        learner = Learner(model, self.train)
        if manifest.files_in(TRAINER):
            learner.restore(*load_trainer(path))
        return learner

    def measure_mismatch(
        self, learner: Learner, rows: Sequence[Row], parent: VersionRef
    ) -> Mismatch:
        """On the parent's own tokens; if it sampled none of them, with whoever sampled most."""
        sampler = main_version(rows, preferred=parent.weights_version)
        model = learner.model
        if sampler != parent.weights_version:
            model = load_version(Path(self._known(sampler).path))[0].eval()
        return measure_mismatch(
            model, rows, weights_version=sampler, max_rows=self.train.microbatch_rows
        )

    # ---- the candidate -------------------------------------------------------------------------

    def write_version(self, learner: Learner, parent: VersionRef) -> WeightsFile:
        """Into the next free number; what a crashed attempt left there belongs to nobody."""
        number = self.store.weights.next_number(self.lease.model_id)
        name = f"{self.lease.model_id}@{number}"
        root = self.settings.weights_dir
        if version_path(root, name).exists():
            discard_version(version_path(root, name))
        manifest = read_manifest(Path(parent.path))
        path = write_version(
            root,
            weights_version=name,
            model=learner.model,
            tokenizer_file=Path(parent.path) / SERVING / TOKENIZER_FILE,
            parent=parent.weights_version,
            run_id=self.lease.run_id,
            # the ancestors' sequences, so that no user's tokens get into a manifest
            golden_prompts=[golden.token_ids for golden in manifest.golden],
            trainer_tensors=learner.tensors(),
            trainer_meta=learner.meta(),
            dtype=DTYPES[self.train.serving_dtype],
        )
        digest = read_manifest(path).digest
        return WeightsFile(weights_version=name, path=path, manifest_digest=digest)

    def commit(
        self, candidate: WeightsFile, parent: VersionRef, metrics: Mapping[str, float]
    ) -> None:
        self.store.runs.commit(
            self.lease.run_id,
            self.lease.token,
            weights_version=candidate.weights_version,
            parent=parent.weights_version,
            path=str(candidate.path),
            manifest_digest=candidate.manifest_digest,
            metrics=finite(metrics),
        )

    # ---- the verdict ---------------------------------------------------------------------------

    def verify(self) -> None:
        version = self.committed()
        try:
            _check_committed(version)
            gap = self.wait_for(self.examiner.verify(version.ref))
        except (WeightsError, EngineError) as error:
            self._advance(version, VersionState.REJECTED, f"verification: {error}")
        else:
            self._advance(version, VersionState.VERIFIED, f"golden gap {gap:.1e}")

    def gate(self) -> None:
        version = self.committed()
        exam = self.wait_for(self.examiner.examine(self._parent_of(version), version.ref))
        overall = exam.decision.table[0]
        if exam.decision.is_passed:
            reason = (
                f"success {overall.parent:.3f} -> {overall.candidate:.3f}, "
                f"KL {exam.candidate.kl:.4f}"
            )
            self._advance(version, VersionState.GATED, reason)
        else:
            reasons = "; ".join(exam.decision.reasons)
            self._advance(version, VersionState.REJECTED, f"gate: {reasons}")

    def promote(self) -> None:
        version = self.committed()
        stable = self.store.weights.target(self.lease.model_id)
        if stable is not None and stable.weights_version not in (
            version.parent,
            version.weights_version,
        ):
            reason = f"{stable.weights_version} became stable meanwhile, not {version.parent}"
            self._advance(version, VersionState.REJECTED, reason)
            return
        self.store.weights.promote(version.weights_version, reason=version.reason)

    # ---- endings -------------------------------------------------------------------------------

    def skip(self, metrics: Mapping[str, float]) -> Outcome:
        """Too little to learn from; the data waits for more, unless it fills every batch alone."""
        num, claimed = int(metrics["num_groups"]), int(metrics["num_groups_claimed"])
        if claimed >= self.train.max_groups:
            self.store.runs.release(self.lease.run_id, self.lease.token, "burn")
        reason = f"{num} of {claimed} groups carry a signal, {self.train.min_groups} are needed"
        return self.end("skipped", reason, metrics)

    def refuse(self, mismatch: Mismatch, metrics: Mapping[str, float]) -> Outcome:
        """Sampler and trainer compute different models; nothing is trained, the data waits."""
        reason = (
            f"parity: mean |trainer - sampler| logprob is {mismatch.mean:.2e} on "
            f"{mismatch.num_tokens} tokens of {mismatch.weights_version}, allowed is "
            f"{self.train.parity_mean_max:.0e}; check that both run the same weights and numerics"
        )
        return self.end("failed", reason, metrics)

    def finish(self, state: VersionState) -> Outcome:
        """After the last arrow: a rejected version's files go, its data is released or burned."""
        version = self.committed()
        metrics = self.examiner.summary(self._parent_of(version), version.ref)
        if state is not VersionState.REJECTED:
            return self.end("promoted", version.reason, metrics)
        self.store.runs.release(self.lease.run_id, self.lease.token, self.train.after_rejection)
        _discard(version)
        return self.end("rejected", version.reason, metrics)

    def fail(self, reason: str) -> None:
        """For the supervisor, after an error of ours; the data is given back, the first time."""
        version = self.candidate()
        if version is not None and version.state in OPEN_STATES:
            self._advance(version, VersionState.REJECTED, f"run failed: {reason}")
            self.store.runs.release(self.lease.run_id, self.lease.token, "release")
            _discard(version)
        self.end("failed", reason, {})

    def _advance(self, version: WeightsVersion, to_state: VersionState, reason: str) -> None:
        """A compare-and-set that finds another state leaves it; the cycle reads the row again."""
        # version rows know no lease, so ask before the write
        self.store.runs.heartbeat(self.lease.run_id, self.lease.token)
        self.store.weights.advance(version.weights_version, version.state, to_state, reason)

    def _parent_of(self, version: WeightsVersion) -> VersionRef:
        if version.parent is None:
            raise StoreError(f"{version.weights_version} has no parent to be compared with")
        return self._known(version.parent).ref

    def _known(self, weights_version: str) -> WeightsVersion:
        version = self.store.weights.get(weights_version)
        if version is None:
            raise StoreError(f"{weights_version} is not in the ledger; import or restore it")
        return version


def _discard(version: WeightsVersion) -> None:
    """What cannot be removed now does not change the verdict; `m1serve weights prune` does it."""
    path = Path(version.path)
    try:
        # a trainer that was killed here may have removed it already
        if path.exists():
            discard_version(path)
    except OSError as error:
        logger.warning("%s stays: %s", path, error)


def _check_committed(version: WeightsVersion) -> None:
    """A trainer that lost its run unawares may have written to the same number."""
    digest = read_manifest(Path(version.path)).digest
    if digest != version.manifest_digest:
        raise WeightsError(
            f"{version.path} holds {digest[:12]}, not what was committed as "
            f"{version.weights_version} ({version.manifest_digest[:12]}); train again"
        )
