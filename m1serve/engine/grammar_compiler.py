"""GrammarCompiler: grammars to matchers, on a thread of its own, within limits, remembered.

llguidance compiles in Rust, recursing over the schema: its thread has a stack for the deepest that
m1serve.chat.json_schema lets through.
"""

from __future__ import annotations

import asyncio
import json
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from m1serve.chat.tokenizer import TAGS, ChatTokenizer
from m1serve.engine.constraint import Constraint
from m1serve.engine.tag_tokens import TagTokens
from m1serve.errors import EngineError, OverloadedError, RequestError
from m1serve.types import GenerateRequest, Grammar

COMPILE_S = 5.0
MAX_TEXT_BYTES = 512 * 1024
MAX_KEPT, MAX_KEPT_BYTES = 64, 8 * 2**20
MAX_STUCK = 3
STACK_BYTES = 128 * 2**20
LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=500_000,
    # a step of one row is cut off after some milliseconds
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
T = TypeVar("T")
NewConstraint = Callable[[], Constraint | None]
Compiled = LLMatcher | RequestError
_PLACE = re.compile(r"^at (\d+)\(\d+\): ")
_TAG = re.compile("(" + "|".join(map(re.escape, TAGS)) + ")")
_EXCERPT = re.compile(r"^\s*\d+ \| ")


class GrammarCompiler:
    """One an engine; `compile` may be called from any event loop."""

    def __init__(self, tokenizer: ChatTokenizer, *, compile_s: float = COMPILE_S) -> None:
        self._tokenizer, self._compile_s = tokenizer, compile_s
        self._vocabulary: LLTokenizer | None = None
        self._tags: TagTokens | None = None
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._num_stuck = 0
        self._is_closed = False

    async def constraints(self, request: GenerateRequest) -> NewConstraint:
        """Makes the constraints of a request's choices; raises as `compile`."""
        if request.grammar is None:
            return no_constraint
        matcher, tokenizer, tags = await self.compile(request.grammar), self._tokenizer, self._tags
        assert tags is not None, "the first to be compiled built them"
        return lambda: Constraint(matcher.deep_copy(), request, tokenizer=tokenizer, tags=tags)

    async def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at its beginning, to be copied. Raises RequestError for what does not compile
        or takes too long, OverloadedError when others keep the compiler busy."""
        found = self._find(grammar)
        if found is None:
            found = await self._compile_beside(grammar)
        if isinstance(found, RequestError):
            # it is kept and raised again: without the way it took before
            raise found.with_traceback(None)
        return found

    def warm(self) -> None:
        """Learns the vocabulary beside whatever else is done."""
        self._ready_worker().submit(self._learn)

    def close(self) -> None:
        self._is_closed = True
        if self._worker is not None:
            self._worker.stop()

    async def _compile_beside(self, grammar: Grammar) -> Compiled:
        if self._is_closed:
            raise EngineError("the engine is closed")
        if self._num_stuck >= MAX_STUCK:
            raise OverloadedError(
                "the grammar compiler is busy with schemas that take too long; try again"
            )
        worker = self._ready_worker()
        if self._vocabulary is None:
            # a large one takes seconds, once; that is no fault of the grammar's
            await asyncio.shield(asyncio.wrap_future(worker.submit(self._learn)))
        job = worker.submit(lambda: self._compile(grammar))
        try:
            async with asyncio.timeout(self._compile_s):
                return await asyncio.wrap_future(job)
        except TimeoutError:
            if not worker.is_at(job):
                raise OverloadedError("other grammars are being compiled; try again") from None
        if self._worker is worker:
            # a thread cannot be killed: it is left behind and counted until it comes back
            self._worker = None
            self._count_stuck(1)
            job.add_done_callback(lambda _: self._count_stuck(-1))
            worker.stop()
        error = _refusal(grammar, f"it does not compile within {self._compile_s:g} s; simplify it")
        self._keep(grammar, error)
        raise error

    def _count_stuck(self, change: int) -> None:
        with self._lock:
            self._num_stuck += change

    def _ready_worker(self) -> _Worker:
        if self._worker is None:
            self._worker = _Worker()
        return self._worker

    def _learn(self) -> None:
        if self._vocabulary is None:
            vocabulary = LLTokenizer(TokenizerWrapper(_Pieces(self._tokenizer)))
            anything = LLMatcher(vocabulary, LLMatcher.grammar_from_regex("a"), log_level=0)
            self._tags = TagTokens(self._tokenizer, num_bytes=len(anything.compute_bitmask()))
            self._vocabulary = vocabulary

    def _find(self, grammar: Grammar) -> Compiled | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def _keep(self, grammar: Grammar, found: Compiled) -> None:
        with self._lock:
            self._kept[grammar] = found
            num_bytes = sum(len(kept.text) for kept in self._kept)
            while len(self._kept) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES:
                num_bytes -= len(self._kept.popitem(last=False)[0].text)

    def _compile(self, grammar: Grammar) -> Compiled:
        """On the worker's thread."""
        found = self._find(grammar)
        if found is not None:
            return found
        assert self._vocabulary is not None, "it is learned first"
        found = _matcher(self._vocabulary, grammar)
        if isinstance(found, RequestError) and grammar.fallback is not None:
            found = _matcher(self._vocabulary, replace(grammar, text=grammar.fallback))
        self._keep(grammar, found)
        return found


def _matcher(vocabulary: LLTokenizer, grammar: Grammar) -> Compiled:
    if len(grammar.text) > MAX_TEXT_BYTES:
        return _refusal(grammar, f"it has {len(grammar.text)} characters; at most {MAX_TEXT_BYTES}")
    text = LLMatcher.grammar_from_lark(grammar.text)
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        # some contradictions show only when the first token is asked for
        matcher.compute_bitmask()
    return _refused(grammar, matcher.get_error()) if matcher.is_error() else matcher


def no_constraint() -> None:
    """Of the choices of a request without a grammar."""
    return None


class _Worker:
    """A daemon thread with a deep stack that runs one job after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._current: object = None
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._run, name="m1serve-grammars", daemon=True).start()
        finally:
            threading.stack_size(before)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            self._current = future
            try:
                future.set_result(job())
            except (RuntimeError, ValueError, TypeError, LookupError) as error:
                future.set_exception(EngineError(f"the grammar compiler failed: {error}"))
            self._current = None

        self._jobs.put(run)
        return future

    def is_at(self, future: object) -> bool:
        return self._current is future

    def stop(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class _Pieces:
    """What llguidance reads of a tokenizer. Tags are text to a grammar; other added tokens can
    never be part of what it allows."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        added = json.loads(tokenizer.to_json())["added_tokens"]
        self.special_token_ids = [t["id"] for t in added if t["content"] not in TAGS]

    def __call__(self, text: str | bytes) -> list[int]:
        """How the model itself would spell what a grammar leaves no choice about: with its tags."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        ids: list[int] = []
        for part in _TAG.split(text):
            tag = self._tokenizer.control_ids.get(part) if part in TAGS else None
            ids += self._tokenizer.encode_text(part) if tag is None else [tag]
        return ids


def _refused(grammar: Grammar, message: str) -> RequestError:
    """The compiler's words without its excerpts; the line it names tells which tool is meant."""
    place, param = _PLACE.match(message), grammar.param
    if place is not None:
        line = grammar.text.splitlines()[int(place[1]) - 1]
        tool = re.match(r"arguments_(\d+):", line)
        param += f"[{tool[1]}].function.parameters" if tool and param == "tools" else ""
        message = message[place.end() :].removeprefix("failed to compile JSON schema: ")
    lines: list[str] = []
    for line in message.splitlines():
        if _EXCERPT.match(line):
            break
        lines.append(line.strip())
    return _refusal(grammar, " ".join(filter(None, lines))[:400], param=param)


def _refusal(grammar: Grammar, why: str, *, param: str | None = None) -> RequestError:
    param = param or grammar.param
    return RequestError(f"{param} cannot be enforced: {why}", param=param, code="invalid_schema")
