"""What a run of reinforcement learning costs: rollouts sampled, then trained on once each.

As many rollouts of a step decode together as fit on one machine; more machines take less time.
A training pass is three forwards (one forward, two for the gradients), or four where activations
are computed again. Not counted: the optimiser, weights sent to the samplers, scoring and sandboxes,
a reference model, log-probabilities computed again, waiting for the longest rollout, failed runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from m1serve.cost.machine import Machine
from m1serve.cost.serving import Workload, serving_cost
from m1serve.cost.shape import Shape
from m1serve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRun:
    prompt_tokens: int
    rollout_tokens: int
    """Sampled in one rollout: the mean, taken as every rollout's length."""
    group_size: int
    prompts_per_step: int
    num_steps: int
    recomputes: bool
    """Whether training computes activations a second time instead of keeping them."""

    def __post_init__(self) -> None:
        for name in ("group_size", "prompts_per_step", "num_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; wanted at least 1")

    @property
    def num_rollouts(self) -> int:
        return self.group_size * self.prompts_per_step * self.num_steps

    @property
    def num_forwards(self) -> int:
        """What one training pass over a token costs, in forwards."""
        return 4 if self.recomputes else 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RlCost:
    model: str
    num_rollouts: int
    sampled_tokens: int
    sampling_flops: int
    """Each rollout reads its prompt itself."""
    training_flops: int
    training_flops_if_kept: int
    """Three forwards: no activation computed again."""
    sampling_gpu_hours: float | None
    """None when not even one rollout fits on the machine."""
    training_gpu_hours: float
    gpu_hours: float | None
    dollars: float | None


def rl_cost(shape: Shape, machine: Machine, run: RlRun) -> RlCost:
    load = Workload(
        prompt_tokens=run.prompt_tokens,
        output_tokens=run.rollout_tokens,
        concurrency=run.group_size * run.prompts_per_step,
    )
    rollout = serving_cost(shape, machine, load)
    forward = shape.prefill_flops(
        run.prompt_tokens + run.rollout_tokens, num_logits=run.rollout_tokens
    )
    training_flops = run.num_rollouts * run.num_forwards * forward
    training_gpu_hours = machine.gpu_hours(machine.seconds(flops=training_flops, moved_bytes=0))
    timing = rollout.timing
    sampling_gpu_hours = None if timing is None else run.num_rollouts * timing.gpu_hours
    gpu_hours = None if sampling_gpu_hours is None else sampling_gpu_hours + training_gpu_hours
    return RlCost(
        model=shape.name,
        num_rollouts=run.num_rollouts,
        sampled_tokens=run.num_rollouts * run.rollout_tokens,
        sampling_flops=run.num_rollouts * (rollout.prefill_flops + rollout.generation_flops),
        training_flops=training_flops,
        training_flops_if_kept=run.num_rollouts * 3 * forward,
        sampling_gpu_hours=sampling_gpu_hours,
        training_gpu_hours=training_gpu_hours,
        gpu_hours=gpu_hours,
        dollars=None if gpu_hours is None else gpu_hours * machine.price_per_gpu_hour,
    )
