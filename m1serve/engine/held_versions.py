"""HeldVersions: the weights versions in memory. The last one takes what starts; others run out.

Each is a model and a pool, so LocalEngine loads no further one while engine.max_held_versions are
here; going back to one that is held still costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from m1serve.engine.batch import VersionBatch
from m1serve.engine.generation import Generation


class HeldVersions:
    """Changed by the step thread; names may be read from any."""

    def __init__(self, first: VersionBatch) -> None:
        self._batches = [first]

    def __iter__(self) -> Iterator[VersionBatch]:
        return iter(self._batches)

    @property
    def current(self) -> VersionBatch:
        return self._batches[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """Newest last."""
        return tuple(batch.weights_version for batch in self._batches)

    @property
    def num_rows(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    def get(self, weights_version: str) -> VersionBatch | None:
        return next((b for b in self._batches if b.weights_version == weights_version), None)

    def batch_of(self, generation: Generation) -> VersionBatch:
        """Where it runs or is to run."""
        wanted = generation.weights_version or generation.request.weights_pin
        batch = self.current if wanted is None else self.get(wanted)
        assert batch is not None, f"{wanted} was dropped while {generation.request.id} wanted it"
        return batch

    def make_current(self, batch: VersionBatch) -> None:
        self._batches = [*(held for held in self._batches if held is not batch), batch]

    def drop_drained(self, generations: Iterable[Generation]) -> list[str]:
        """Lets go of old versions that none of the open generations runs on or waits for."""
        if len(self._batches) == 1:
            return []
        wanted = {g.weights_version or g.request.weights_pin for g in generations}
        drained = [name for name in self.names[:-1] if name not in wanted]
        self._batches = [b for b in self._batches if b.weights_version not in drained]
        return drained
