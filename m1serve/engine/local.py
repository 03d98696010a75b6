"""LocalEngine: the model in this process, on one device, with continuous batching.

Steps run on a thread of their own; everything here is the asyncio side of it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial

import torch

from m1serve.chat.tokenizer import ChatTokenizer
from m1serve.config import EngineSettings
from m1serve.engine.admission import check_prompt, check_request, deferral
from m1serve.engine.constraint import Constraint
from m1serve.engine.core import EngineCore
from m1serve.engine.generation import Generation
from m1serve.engine.generation import Sequence as Choice
from m1serve.engine.grammar_compiler import GrammarCompiler, NewConstraint, no_constraint
from m1serve.engine.outbox import Outlet
from m1serve.engine.sampler import seeded_rng
from m1serve.engine.staging import Staged, stage, swap_refused
from m1serve.engine.step_thread import StepThread, step_thread_died
from m1serve.engine.stopping import StopRules, ThinkBudget
from m1serve.engine.token_ids import TokenIds
from m1serve.errors import EngineError, OverloadedError, RequestError, WeightsError
from m1serve.types import (
    Capabilities,
    Delta,
    EngineStats,
    GenerateRequest,
    InFlight,
    Limits,
    Scored,
    Started,
    SwapReport,
    VersionRef,
)

MAX_TOP_LOGPROBS = 20
LONG_PROMPT_TOKENS = 16_384


class LocalEngine:
    """Build it with `LocalEngine.start`."""

    def __init__(
        self, staged: Staged, *, settings: EngineSettings, tokenizer: ChatTokenizer
    ) -> None:
        weight = staged.model.embed_tokens.weight
        self._settings, self._tokenizer = settings, tokenizer
        self._device, self._dtype = str(weight.device), weight.dtype
        vocab_size = min(tokenizer.vocab_size, staged.model.config.vocab_size)
        self._core = EngineCore(
            staged.model,
            weights_version=staged.weights_version,
            settings=settings,
            vocab_size=vocab_size,
        )
        self._thread = StepThread(self._core)
        self._compiler = GrammarCompiler(tokenizer)
        self._compiler.warm()
        self._loading = asyncio.Lock()
        self._orders = itertools.count()
        self._active: set[str] = set()
        self._num_waiting = 0
        self._capabilities = Capabilities(
            max_model_len=settings.max_model_len,
            vocab_size=vocab_size,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            in_flight=frozenset({InFlight.FINISH, InFlight.RECOMPUTE}),
            has_prompt_logprobs=True,
            has_grammar=True,
            has_penalties=True,
            has_reasoning_budget=True,
        )

    @classmethod
    def start(
        cls,
        version: VersionRef,
        *,
        settings: EngineSettings,
        tokenizer: ChatTokenizer,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> LocalEngine:
        """Loads and verifies the version; raises WeightsError when it must not serve."""
        staged = stage(version, tokenizer=tokenizer, device=device, dtype=dtype)
        return cls(staged, settings=settings, tokenizer=tokenizer)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def weights_version(self) -> str:
        return self._core.weights_version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Started | Delta]:
        prompt = await self._prompt(request.prompt_ids)
        check_request(request, self._capabilities, prompt=prompt)
        new_constraint = await self._compiler.constraints(request)
        generation = self._open(request, prompt, new_constraint=new_constraint)
        num_open = request.n
        try:
            yield await self._first(generation)
            while num_open > 0:
                item = await generation.outlet.queue.get()
                if isinstance(item, Exception):
                    raise item
                num_open -= isinstance(item, Delta) and item.stop is not None
                yield item
        finally:
            self._active.discard(request.id)
            if num_open > 0:
                self._thread.post(partial(self._core.abort, request.id))

    async def abort(self, request_id: str) -> None:
        self._thread.post(partial(self._core.abort, request_id))

    async def score(
        self, token_ids: Sequence[int], *, weights_version: str | None = None
    ) -> Scored:
        """Queued with everything else; reads the ids in chunks between decode steps."""
        ids = tuple(token_ids)
        prompt = await self._prompt(ids)
        request = GenerateRequest(
            id=f"score-{uuid.uuid4().hex}",
            prompt_ids=ids,
            limits=Limits(max_tokens=0),
            prompt_logprobs=True,
            weights_pin=weights_version,
            min_delta_interval_s=math.inf,
        )
        generation = self._open(request, prompt, is_cacheable=False)
        try:
            started = await self._first(generation)
        finally:
            self._active.discard(request.id)
            self._thread.post(partial(self._core.abort, request.id))
        if started.prompt_logprobs is None or len(started.prompt_logprobs) != len(ids) - 1:
            raise EngineError(f"scoring {len(ids)} tokens failed; the engine's log has the reason")
        return Scored(weights_version=started.weights_version, logprobs=started.prompt_logprobs)

    async def load(self, version: VersionRef) -> SwapReport:
        async with self._loading:
            if version.weights_version == self.weights_version:
                return _held_already(version, {})
            try:
                begin = time.perf_counter()
                if await self._switch_back(version):
                    return _held_already(version, {"switch": (time.perf_counter() - begin) * 1e3})
                held, most = self._core.stats.versions, self._settings.max_held_versions
                if (deferred := deferral(version, held, most)) is not None:
                    return deferred
                staged = await asyncio.to_thread(
                    stage,
                    version,
                    tokenizer=self._tokenizer,
                    device=self._device,
                    dtype=self._dtype,
                )
                if not self._core.can_hold(staged.model):
                    raise WeightsError(_another_architecture(version, self.weights_version))
                begin = time.perf_counter()
                switch = partial(self._core.switch, staged.model, staged.weights_version)
                await asyncio.wrap_future(self._thread.call(switch))
            except EngineError:
                raise
            except (WeightsError, OSError, RuntimeError) as error:
                return swap_refused(error, serving=self.weights_version)
            return staged.accepted(switch_ms=(time.perf_counter() - begin) * 1e3)

    async def _switch_back(self, version: VersionRef) -> bool:
        """To weights that running requests still hold: staging them again would hold them twice."""
        name = version.weights_version
        if name not in self._core.stats.versions:
            return False
        return await asyncio.wrap_future(self._thread.call(partial(self._core.switch_back, name)))

    def stats(self) -> EngineStats:
        """Raises EngineError when the step thread died: nothing will ever run here again."""
        if self._thread.has_died:
            raise step_thread_died()
        return self._core.stats

    async def close(self) -> None:
        self._compiler.close()
        await asyncio.to_thread(self._thread.close)

    def _open(
        self,
        request: GenerateRequest,
        prompt: TokenIds,
        *,
        is_cacheable: bool = True,
        new_constraint: NewConstraint = no_constraint,
    ) -> Generation:
        """Queues the request, unless the engine is full, closed or busy with the same id."""
        if request.id in self._active:
            raise RequestError(f"request id {request.id!r} is running already; use a fresh one")
        if self._num_waiting >= self._settings.max_waiting:
            raise OverloadedError(
                f"{self._num_waiting} requests are waiting, the limit is "
                f"{self._settings.max_waiting}; try again later"
            )
        limit_s = request.limits.deadline_s
        outlet = Outlet(self._core.outbox, asyncio.get_running_loop())
        generation = Generation(
            request=request,
            prompt=prompt,
            outlet=outlet,
            order=next(self._orders),
            deadline_s=math.inf if limit_s is None else time.monotonic() + limit_s,
            is_cacheable=is_cacheable,
        )
        generation.sequences = [
            self._choice(generation, i, constraint=new_constraint()) for i in range(request.n)
        ]
        generation.unplaced.extend(generation.sequences)
        if not self._thread.post(partial(self._core.submit, generation)):
            raise (
                step_thread_died() if self._thread.has_died else EngineError("the engine is closed")
            )
        self._active.add(request.id)
        return generation

    def _choice(
        self, generation: Generation, index: int, *, constraint: Constraint | None
    ) -> Choice:
        request, budget = generation.request, generation.request.limits.reasoning_budget
        seed, tokenizer = request.sampling.seed, self._tokenizer
        return Choice(
            generation=generation,
            choice=index,
            rules=StopRules(
                request, tokenizer=tokenizer, max_model_len=self._settings.max_model_len
            ),
            budget=(
                None
                if budget is None
                else ThinkBudget(budget, tokenizer=tokenizer, prompt_ids=request.prompt_ids)
            ),
            constraint=constraint,
            rng=None if seed is None else seeded_rng(seed, index),
            unread=generation.prompt,
            emit_at_s=math.inf if math.isinf(request.min_delta_interval_s) else 0.0,
        )

    async def _prompt(self, ids: tuple[int, ...]) -> TokenIds:
        """A million ids take 60 ms: not on the event loop. Checked."""
        try:
            if len(ids) < LONG_PROMPT_TOKENS:
                prompt = TokenIds.of(ids)
            else:
                prompt = await asyncio.to_thread(TokenIds.of, ids)
        except OverflowError:
            check_prompt(ids, self._capabilities)
            raise
        check_prompt(prompt, self._capabilities)
        return prompt

    async def _first(self, generation: Generation) -> Started:
        """Waits for the request's turn; raises what refused it."""
        self._num_waiting += 1
        try:
            item = await generation.outlet.queue.get()
        finally:
            self._num_waiting -= 1
        if isinstance(item, Exception):
            raise item
        assert isinstance(item, Started), f"the first item was {type(item).__name__}"
        return item


def _another_architecture(version: VersionRef, serving: str) -> str:
    return (
        f"{version.weights_version} has another architecture than {serving}, which is served: its "
        "states and keys cannot share this engine's memory. Start a server of its own for it"
    )


def _held_already(version: VersionRef, phases_ms: dict[str, float]) -> SwapReport:
    return SwapReport(
        weights_version=version.weights_version, is_accepted=True, reason="", phases_ms=phases_ms
    )
