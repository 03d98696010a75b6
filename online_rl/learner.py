"""The policy being trained: fp32 masters, AdamW moments, shuffling; one minibatch step.

A run starts from its parent's `trainer/` files; what `tensors()` and `meta()` return is what the
next run reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from m1serve.config import TrainSettings
from m1serve.errors import WeightsError
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.online_rl.cispo import cispo_loss
from m1serve.online_rl.forward import TokenStreams, token_streams, trained_logprobs
from m1serve.online_rl.packing import Row, pack_microbatches

BETAS = (0.9, 0.95)
EPS = 1e-15
MOMENTS = ("exp_avg", "exp_avg_sq")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one optimizer step saw, for the run's metrics."""

    logp_N: Tensor
    """Before the step."""
    streams: TokenStreams
    grad_norm: float
    """Before clipping, as the next two."""
    grad_min: float
    """Smallest |g| that is not 0."""
    grad_max: float
    num_tokens: int
    """That went through the model, shared prefixes once."""


class Learner:
    def __init__(self, model: M1ForCausalLM, settings: TrainSettings) -> None:
        self.model = model.float().eval()
        self.settings = settings
        self.num_steps = 0
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.lr, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
        )

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], meta: Mapping[str, object]) -> None:
        """Puts back what `tensors()` and `meta()` of the parent's run gave."""
        named = dict(self.model.named_parameters())
        wanted = {f"master.{n}" for n in named} | {f"{m}.{n}" for n in named for m in MOMENTS}
        if wanted - tensors.keys():
            missing = sorted(wanted - tensors.keys())[:3]
            raise WeightsError(f"trainer files lack {missing}; the parent was trained otherwise")
        self.num_steps = int(str(meta["num_steps"]))
        for name, parameter in named.items():
            parameter.copy_(tensors[f"master.{name}"])
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.num_steps), device=parameter.device),
                **{m: tensors[f"{m}.{name}"].to(parameter.device) for m in MOMENTS},
            }
        self.generator.set_state(tensors["generator"])

    def tensors(self) -> dict[str, Tensor]:
        out = {"generator": self.generator.get_state()}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            out[f"master.{name}"] = parameter.detach()
            out |= {f"{m}.{name}": state[m] for m in MOMENTS}
        return out

    def meta(self) -> dict[str, object]:
        return {
            "num_steps": self.num_steps,
            "optimizer": "adamw",
            "betas": list(BETAS),
            "eps": EPS,
            "settings": self.settings.model_dump(mode="json"),
        }

    def shuffled(self, items: Sequence[T]) -> list[T]:
        order = torch.randperm(len(items), generator=self.generator).tolist()
        return [items[i] for i in order]

    def train_minibatch(self, rows: Sequence[Row]) -> StepRecord:
        """Accumulates the gradient over microbatches, clips it and takes one AdamW step."""
        settings = self.settings
        self.optimizer.zero_grad(set_to_none=True)
        logps: list[Tensor] = []
        streams: list[TokenStreams] = []
        micros = pack_microbatches(rows, settings.microbatch_rows)
        for micro in micros:
            logp_N = trained_logprobs(self.model, micro)
            seen = token_streams(micro, logp_N.device)
            sign = -1.0 if settings.negate_advantages else 1.0
            loss = cispo_loss(
                logp_N,
                seen.sampler_logp_N,
                sign * seen.advantage_N,
                seen.norm_N,
                weight_max=settings.weight_max,
            )
            torch.autograd.backward(loss)
            logps.append(logp_N.detach())
            streams.append(seen)
        low, high = gradient_range(self.model)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip)
        self.optimizer.step()
        self.num_steps += 1
        return StepRecord(
            logp_N=torch.cat(logps),
            streams=concatenate(streams),
            grad_norm=norm.item(),
            grad_min=low,
            grad_max=high,
            num_tokens=sum(m.num_tokens for m in micros),
        )


def concatenate(streams: Sequence[TokenStreams]) -> TokenStreams:
    return TokenStreams(
        sampler_logp_N=torch.cat([s.sampler_logp_N for s in streams]),
        advantage_N=torch.cat([s.advantage_N for s in streams]),
        norm_N=torch.cat([s.norm_N for s in streams]),
    )


def gradient_range(model: torch.nn.Module) -> tuple[float, float]:
    """Smallest and largest |g| that is not 0; M1 saw 1e-18 to 1e-5, below AdamW's usual epsilon."""
    low, high = float("inf"), 0.0
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        size = parameter.grad.abs()
        high = max(high, size.max().item())
        low = min(low, size.masked_fill(size == 0, torch.inf).min().item())
    return low, high
