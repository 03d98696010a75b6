"""What one request costs on a machine: what fits beside the weights, seconds, dollars.

Prefill has the machine for itself; decode shares each step among the sequences of a batch, all at
the same length. Not counted: communication between GPUs, launches, sampling, the host, idle time.
"""

from __future__ import annotations

from dataclasses import dataclass

from m1serve.cost.machine import Machine
from m1serve.cost.shape import Shape
from m1serve.errors import ConfigError

NUM_SPANS = 256
"""An answer is timed in so many spans of one length each, by the context in their middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    """Sequences that decode together, if so many fit."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or self.concurrency < 1:
            raise ConfigError(
                f"a prompt of {self.prompt_tokens} and an answer of {self.output_tokens} tokens, "
                f"{self.concurrency} at once; wanted at least 1 of each"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of one request among `batch`."""

    batch: int
    prefill_s: float
    decode_s: float
    """From the first token to the last."""
    step_ms: float
    """Mean."""
    is_bound_by_bytes: bool
    """In the middle of the answer."""
    gpu_hours: float
    """Prefill, and the request's share of its decode steps."""
    dollars: float
    dollars_per_million_prompt_tokens: float
    dollars_per_million_output_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    model: str
    weight_bytes: int
    state_bytes: int
    kv_token_bytes: int
    sequence_bytes: int
    """At the end of the answer."""
    room_bytes: float
    """Left beside the weights; negative when they do not fit."""
    max_sequences: int
    prefill_flops: int
    generation_flops: int
    decode_step_bytes: float
    """Of one step of the batch in the middle of the answer; of one sequence where none fits."""
    timing: Timing | None
    """At the wanted concurrency, or what fits of it. None when not even one sequence fits."""
    full_timing: Timing | None
    """With as many sequences as fit."""


def serving_cost(shape: Shape, machine: Machine, load: Workload) -> ServingCost:
    sequence_bytes = shape.sequence_bytes(load.prompt_tokens + load.output_tokens)
    room_bytes = machine.room_bytes - shape.weight_bytes
    max_sequences = max(0, int(room_bytes // sequence_bytes))
    batch = min(load.concurrency, max_sequences)
    middle = load.prompt_tokens + load.output_tokens // 2
    return ServingCost(
        model=shape.name,
        weight_bytes=shape.weight_bytes,
        state_bytes=shape.state_bytes,
        kv_token_bytes=shape.kv_token_bytes,
        sequence_bytes=sequence_bytes,
        room_bytes=room_bytes,
        max_sequences=max_sequences,
        prefill_flops=shape.prefill_flops(load.prompt_tokens),
        generation_flops=shape.generation_flops(
            load.output_tokens, prompt_tokens=load.prompt_tokens
        ),
        decode_step_bytes=shape.decode_bytes(middle, batch=max(1, batch)),
        timing=_timing(shape, machine, load, batch) if batch else None,
        full_timing=_timing(shape, machine, load, max_sequences) if batch else None,
    )


def _timing(shape: Shape, machine: Machine, load: Workload, batch: int) -> Timing:
    prefill_s = prefill_seconds(shape, machine, load.prompt_tokens)
    decode_s = decode_seconds(shape, machine, load, batch=batch)
    middle = load.prompt_tokens + load.output_tokens // 2
    return Timing(
        batch=batch,
        prefill_s=prefill_s,
        decode_s=decode_s,
        step_ms=1e3 * decode_s / load.output_tokens,
        is_bound_by_bytes=machine.is_bound_by_bytes(
            flops=batch * shape.decode_flops(middle),
            moved_bytes=shape.decode_bytes(middle, batch=batch),
        ),
        gpu_hours=machine.gpu_hours(prefill_s + decode_s / batch),
        dollars=machine.dollars(prefill_s + decode_s / batch),
        dollars_per_million_prompt_tokens=1e6 * machine.dollars(prefill_s) / load.prompt_tokens,
        dollars_per_million_output_tokens=(
            1e6 * machine.dollars(decode_s / batch) / load.output_tokens
        ),
    )


def prefill_seconds(shape: Shape, machine: Machine, num_tokens: int) -> float:
    """One pass over the weights and the FLOPs of the prompt, whichever takes longer."""
    return machine.seconds(
        flops=shape.prefill_flops(num_tokens),
        moved_bytes=shape.step_weight_bytes(num_tokens) + shape.sequence_bytes(num_tokens),
    )


def decode_seconds(shape: Shape, machine: Machine, load: Workload, *, batch: int) -> float:
    """All steps of an answer while `batch` sequences of its length decode together."""
    span = load.output_tokens / NUM_SPANS
    contexts = (load.prompt_tokens + round((i + 0.5) * span) for i in range(NUM_SPANS))
    return sum(
        span
        * machine.seconds(
            flops=batch * shape.decode_flops(context),
            moved_bytes=shape.decode_bytes(context, batch=batch),
        )
        for context in contexts
    )
