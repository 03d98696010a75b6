"""Every Prometheus metric of m1serve. With PROMETHEUS_MULTIPROC_DIR set, processes share them.

Labels never carry ids of requests, sessions or keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """Build one a process and pass it on."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._shown: dict[Gauge, set[str]] = {}
        self._declare_api()
        self._declare_engine()
        self._declare_capture()
        self._declare_work()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes, summed over processes where they share a directory."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        shared = CollectorRegistry()
        multiprocess.MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
        return generate_latest(shared)

    def show(self, gauge: Gauge, counts: Mapping[str, int]) -> None:
        """One value a label; what was shown before and is not in `counts` any more is 0."""
        labels = self._shown.setdefault(gauge, set())
        labels.update(counts)
        for label in labels:
            gauge.labels(label).set(counts.get(label, 0))

    def _declare_api(self) -> None:
        self.requests = self._counter("http_requests", "HTTP responses", "route", "status")
        self.turns = self._counter("turns", "Finished choices", "mode", "stop")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens whose state came from a snapshot"
        )
        self.completion_tokens = self._counter("completion_tokens", "Sampled tokens")
        self.ttft_seconds = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token of streams"
        )
        self.generation_seconds = self._histogram(
            "generation_seconds", "Start of generation to last byte of the answer"
        )
        self.open_responses = self._gauge(
            "open_responses", "Answers being generated or sent", across="livesum"
        )

    def _declare_engine(self) -> None:
        self.running = self._gauge(
            "engine_running_sequences", "Slots in use: sequences that read or decode"
        )
        self.waiting = self._gauge("engine_waiting_requests", "Requests without slots")
        self.slots = self._gauge("engine_slots", "State slots; 0 when the engine is dead")
        self.engine_tokens = self._gauge("engine_tokens", "Tokens since the engine started", "kind")
        self.engine_swaps = self._gauge("engine_swaps", "Weight swaps since the engine started")
        self.preemptions = self._gauge(
            "engine_preemptions", "Sequences that gave their memory back and read everything again"
        )
        self.prefix_lookups = self._gauge(
            "engine_prefix_lookups", "Prompts that looked for a snapshot, by outcome", "outcome"
        )
        self.snapshots = self._gauge("engine_snapshots", "Prefix snapshots that are kept")
        self.snapshot_bytes = self._gauge("engine_snapshot_bytes", "Memory of the snapshots")
        self.key_pages = self._gauge("engine_key_pages", "Pages of keys and values", "state")

    def _declare_capture(self) -> None:
        self.capture_dropped = self._gauge(
            "capture_dropped_records", "Records the journal could not take", across="livesum"
        )
        self.capture_queued = self._gauge(
            "capture_queued_records", "Records not yet on disk", across="livesum"
        )

    def _declare_work(self) -> None:
        """What the store knows; set when the admin page is scraped."""
        self.ledger_turns = self._gauge("ledger_turns", "Turns in the ledger")
        self.trajectories = self._gauge("trajectories", "Trajectories in the ledger", "state")
        self.jobs = self._gauge("jobs", "Job rows", "state")
        self.runs = self._gauge("training_runs", "The newest 1000 training runs", "state")
        self.swap_seconds = self._gauge(
            "weight_swap_seconds", "Phases of the last swap", "replica", "phase"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"m1serve_{name}", text, labels, registry=self.registry)

    def _gauge(
        self, name: str, text: str, *labels: str, across: Literal["livesum", "livemax"] = "livemax"
    ) -> Gauge:
        """`across` processes: most look at one thing, so that the largest says it."""
        return Gauge(
            f"m1serve_{name}", text, labels, registry=self.registry, multiprocess_mode=across
        )

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"m1serve_{name}", text, labels, registry=self.registry, buckets=_SECONDS)
