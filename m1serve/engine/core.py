"""EngineCore: the state of a running engine and one step of it. No thread, no asyncio."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from m1serve.config import EngineSettings
from m1serve.engine.admission import unknown_pin
from m1serve.engine.batch import Progress, VersionBatch, failed_by
from m1serve.engine.cache_memory import CacheMemory
from m1serve.engine.generation import ABORTED, Generation, Sequence
from m1serve.engine.held_versions import HeldVersions
from m1serve.engine.outbox import Outbox
from m1serve.engine.placement import Placement
from m1serve.engine.sampler import Sampler
from m1serve.engine.scheduler import WaitingQueue
from m1serve.engine.stopping import Stop
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.types import EngineStats, StopCause

logger = logging.getLogger(__name__)

CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 1024, 16_384
"""A GPU reads all experts for any chunk of a few hundred tokens: a small one costs as much."""
OVERDUE = Stop(cause=StopCause.ABORT, detail="deadline")


class EngineCore:
    def __init__(
        self,
        model: M1ForCausalLM,
        *,
        weights_version: str,
        settings: EngineSettings,
        vocab_size: int,
    ) -> None:
        """Only the first `vocab_size` ids are sampled: embeddings may be padded beyond them."""
        self.outbox = Outbox()
        self._settings = settings
        self._memory = CacheMemory(model, settings)
        self._chunk_tokens = settings.prefill_chunk_tokens or (
            GPU_CHUNK_TOKENS if model.embed_tokens.weight.is_cuda else CPU_CHUNK_TOKENS
        )
        self._sampler = Sampler(vocab_size=vocab_size, device=str(model.embed_tokens.weight.device))
        self._waiting = WaitingQueue()
        self._open: dict[str, Generation] = {}
        self._sampled_tokens = self._prefilled_tokens = self._num_swaps = 0
        self._versions = HeldVersions(self._new_batch(model, weights_version))
        self._placement = Placement(
            self._versions, self._waiting, self._memory.allocator, num_slots=settings.num_slots
        )

    @property
    def weights_version(self) -> str:
        return self._versions.current.weights_version

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def stats(self) -> EngineStats:
        placement, memory = self._placement, self._memory
        return EngineStats(
            num_running=self._versions.num_rows,
            num_waiting=self._waiting.num_not_started,
            num_slots=self._settings.num_slots,
            versions=self._versions.names,
            sampled_tokens=self._sampled_tokens,
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=placement.cached_tokens,
            num_swaps=self._num_swaps,
            num_preemptions=placement.num_preemptions,
            prefix_lookups=placement.num_lookups,
            prefix_hits=placement.num_hits,
            num_snapshots=len(memory.snapshots),
            snapshot_bytes=memory.snapshots.num_bytes,
            num_pages=memory.allocator.num_pages,
            num_free_pages=memory.allocator.num_free,
        )

    def can_hold(self, model: M1ForCausalLM) -> bool:
        """Whether another version may share the memory that was divided for the first."""
        return self._memory.fits(model.config)

    # ---- commands ------------------------------------------------------------------------------

    def submit(self, generation: Generation) -> None:
        pin = generation.request.weights_pin
        if pin is not None and pin not in self._versions.names:
            generation.outlet.put(unknown_pin(pin, self._versions.names))
            self.outbox.flush()
            return
        self._open[generation.request.id] = generation
        self._waiting.push(generation)

    def abort(self, request_id: str) -> None:
        generation = self._open.get(request_id)
        if generation is not None:
            self._end(generation, ABORTED)
            # nothing may be left to step for
            self._drop_drained()
            self.outbox.flush()

    def switch(self, model: M1ForCausalLM, weights_version: str) -> None:
        """What starts later gets this version; running requests do as their `in_flight` says."""
        held = self._versions.get(weights_version)
        self._make_current(held or self._new_batch(model, weights_version))

    def switch_back(self, weights_version: str) -> bool:
        """To a version that is still held; False when it has drained."""
        held = self._versions.get(weights_version)
        if held is not None:
            self._make_current(held)
        return held is not None

    def _make_current(self, fresh: VersionBatch) -> None:
        for batch in (batch for batch in self._versions if batch is not fresh):
            for sequence in (*batch.rows.decoding, *batch.rows.reading):
                if sequence.generation.follows_weights:
                    self._move_off(batch, sequence)
        for generation in self._open.values():
            # who runs on these already goes on as it is
            is_old = generation.weights_version != fresh.weights_version
            if generation.follows_weights and is_old:
                self._hand_out_old(generation)
                generation.rebind()
        self._versions.make_current(fresh)
        self._num_swaps += 1
        self._drop_drained()

    def close(self, error: Exception | None) -> None:
        """Aborts what is open, or tells it the error that ended the engine."""
        for generation in list(self._open.values()):
            if error is None:
                self._end(generation, ABORTED)
            else:
                generation.outlet.put(error)
        self._open.clear()
        self.outbox.flush()

    # ---- a step --------------------------------------------------------------------------------

    def step(self) -> None:
        now_s = time.monotonic()
        self._end_overdue(now_s)
        self._read_prompts()
        for batch in self._versions:
            self._placement.make_room(batch)
            self._sampled_tokens += len(batch.rows.decoding)
            self._finish(batch.decode(), batch.weights_version)
        self._hand_out(now_s)
        self._drop_drained()
        self.outbox.flush()

    def _end_overdue(self, now_s: float) -> None:
        for generation in [g for g in self._open.values() if g.deadline_s <= now_s]:
            self._end(generation, OVERDUE)

    def _read_prompts(self) -> None:
        """Places what waits and reads prompts until the step's budget is used."""
        budget = float(self._chunk_tokens)
        at_least = 1
        while True:
            for generation, error in self._placement.place(budget):
                self._end(generation, failed_by(error))
            num_read = 0
            for batch in self._versions:
                progress = batch.read(budget, at_least=at_least)
                budget -= progress.cost
                num_read += progress.num_tokens
                self._settle(batch, progress)
            if num_read == 0:
                return
            self._prefilled_tokens += num_read
            at_least = 0

    def _settle(self, batch: VersionBatch, progress: Progress) -> None:
        """Prompts that have been read: choices may fork, scoring is done, failures end."""
        version = batch.weights_version
        for sequence in progress.failed:
            if sequence.generation.leader is sequence and sequence.stop is not None:
                self._end(sequence.generation, sequence.stop)
        self._finish(progress.failed, version)
        for sequence in progress.read:
            generation = sequence.generation
            generation.start(cached_tokens=sequence.num_cached, weights_version=version)
            if generation.leader is sequence:
                generation.leader = None
                self._waiting.push(generation)
            stop = sequence.rules.before_any()
            if stop is not None:
                self._end(generation, stop)

    def _hand_out(self, now_s: float) -> None:
        for batch in self._versions:
            for sequence in batch.rows.decoding:
                if sequence.emit_at_s <= now_s:
                    sequence.emit_at_s = now_s + sequence.request.min_delta_interval_s
                    delta = sequence.next_delta(batch.weights_version)
                    sequence.generation.outlet.put(delta)

    # ---- endings -------------------------------------------------------------------------------

    def _finish(self, sequences: Iterable[Sequence], weights_version: str) -> None:
        """The last delta of sequences whose rows are freed already."""
        for sequence in sequences:
            generation = sequence.generation
            if generation.request.id not in self._open or sequence.is_over:
                continue
            generation.finish(sequence, weights_version=weights_version)
            if not generation.is_open:
                del self._open[generation.request.id]

    def _end(self, generation: Generation, stop: Stop) -> None:
        """Stops every choice that has not stopped by itself."""
        version = generation.weights_version or self.weights_version
        generation.start(cached_tokens=0, weights_version=version)
        generation.unplaced.clear()
        generation.drop_prompt_end()
        running = [s for s in generation.sequences if not s.is_over]
        for sequence in running:
            for batch in self._versions:
                if sequence in batch.rows:
                    batch.rows.release(sequence)
            sequence.stop = stop
        self._finish(running, version)

    def _move_off(self, batch: VersionBatch, sequence: Sequence) -> None:
        """Queues it for the new weights; what the old ones sampled is handed out after that."""
        batch.rows.release(sequence)
        self._placement.requeue(sequence)

    def _hand_out_old(self, generation: Generation) -> None:
        """What was sampled so far, wherever its choices wait: a delta is of one version."""
        version = generation.weights_version
        for sequence in generation.sequences:
            if version is not None and len(sequence.token_ids) > sequence.num_sent:
                generation.outlet.put(sequence.next_delta(version))

    def _drop_drained(self) -> None:
        for weights_version in self._versions.drop_drained(self._open.values()):
            self._memory.snapshots.drop_version(weights_version)

    def _new_batch(self, model: M1ForCausalLM, weights_version: str) -> VersionBatch:
        return VersionBatch(
            model,
            weights_version=weights_version,
            memory=self._memory,
            sampler=self._sampler,
        )
