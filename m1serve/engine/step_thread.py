"""StepThread: runs an EngineCore on a thread of its own; commands come in between steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from m1serve.engine.batch import STEP_ERRORS
from m1serve.engine.core import EngineCore
from m1serve.errors import EngineError

Command = Callable[[], None]
T = TypeVar("T")


class StepThread:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._is_closing = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="m1serve-engine", daemon=True)
        self._thread.start()

    @property
    def has_died(self) -> bool:
        """It ended without being asked to."""
        return self._is_closed and not self._is_closing

    def post(self, command: Command) -> bool:
        """Runs it between two steps; from any thread. False: nothing runs here any more."""
        with self._wake:
            if self._is_closed:
                return False
            self._commands.append(command)
            self._wake.notify()
        return True

    def call(self, command: Callable[[], T]) -> Future[T]:
        """As `post`; the future has what it returned or raised."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = command()
            except STEP_ERRORS as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        if not self.post(run):
            future.set_exception(EngineError("the engine is closed"))
        return future

    def close(self) -> None:
        """Aborts what is open and waits for the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        error: EngineError | None = step_thread_died()
        try:
            while not self._is_closing:
                self._obey()
                if self._core.has_work:
                    self._core.step()
            error = None
        finally:
            with self._wake:
                self._is_closed = True
            self._obey()
            self._core.close(error)

    def _obey(self) -> None:
        with self._wake:
            while not (self._commands or self._core.has_work or self._is_stopping):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    @property
    def _is_stopping(self) -> bool:
        return self._is_closing or self._is_closed


def step_thread_died() -> EngineError:
    return EngineError("the engine's step thread died; the log has the reason, restart the replica")
