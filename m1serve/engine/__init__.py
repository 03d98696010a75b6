"""Engines turn prompt ids into sampled ids with their logprobs. Import the one you need."""

from m1serve.engine.base import Engine

__all__ = ["Engine"]
