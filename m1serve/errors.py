"""Every error m1serve raises on purpose.

M1ServeError
├── ConfigError (ValueError)        settings, flags, files given by the operator
├── RequestError (ValueError)       what a client sent; becomes a 4xx
│   └── OverloadedError             a 503 with Retry-After, never a 400
├── EngineError (RuntimeError)      the engine could not do it
│   └── EngineAwayError             nothing was sampled: a 503 with Retry-After
├── WeightsError (ValueError)       corrupt, truncated or of another architecture
├── StoreError (RuntimeError)       database or journal; a 503
│   └── FencedError                 the lease is somebody else's by now: stop, write nothing
└── RewardError (RuntimeError)      a reward that could not be computed

Messages say what, got, wanted and what to do. Instances pickle: they cross Ray and Celery.
"""

from __future__ import annotations


class M1ServeError(Exception):
    """Root of the tree."""


class ConfigError(M1ServeError, ValueError):
    """The operator's settings cannot work."""


class RequestError(M1ServeError, ValueError):
    """The client's request cannot be served as it is."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_request_error, (type(self), self.message, self.__dict__.copy())


class OverloadedError(RequestError):
    """No room now; the same request may work later."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = "overloaded",
        status: int = 503,
        retry_after_s: int = 1,
    ) -> None:
        super().__init__(message, param=param, code=code, status=status)
        self.retry_after_s = retry_after_s


def _rebuild_request_error(
    kind: type[RequestError], message: str, state: dict[str, object]
) -> RequestError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class EngineError(M1ServeError, RuntimeError):
    """The engine failed or refuses by its capabilities."""


class EngineAwayError(EngineError):
    """No engine took the request, or the one that had it was lost before it began."""


class WeightsError(M1ServeError, ValueError):
    """A version directory that must not serve."""


class StoreError(M1ServeError, RuntimeError):
    """Database or journal trouble."""


class FencedError(StoreError):
    """A lease was lost; whoever holds it now owns the row."""


class RewardError(M1ServeError, RuntimeError):
    """A scorer could not compute a reward."""
