"""The cold start's loss on one part, and its replay as a CUDA graph: small kernels, many launches.

Shapes: B rows, W tokens of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.model.hybrid import M1ForCausalLM
from m1serve.online_rl.sft_batches import READ, SAID, Part
from m1serve.online_rl.sft_recipe import Schedule

_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTensors:
    """A part on the device, as int64."""

    prompts_PS: Tensor
    prompt_length_P: Tensor
    prompt_of_B: Tensor
    ids_BW: Tensor
    kind_BW: Tensor

    @classmethod
    def of(cls, part: Part, device: torch.device) -> PartTensors:
        names = [f.name for f in fields(cls)]
        tensors = (torch.from_numpy(a).to(device).long() for a in part.arrays())
        return cls(**dict(zip(names, tensors, strict=True)))

    def fill(self, part: Part) -> None:
        mine = (getattr(self, f.name) for f in fields(self))
        for tensor, array in zip(mine, part.arrays(), strict=True):
            tensor.copy_(torch.from_numpy(array))


def said_loss(model: M1ForCausalLM, part: PartTensors, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross entropies, and the plain sum over what the clerk says."""
    _, state = model.hidden(part.prompts_PS, None, part.prompt_length_P)
    hidden_BWE, _ = model.hidden(part.ids_BW, state.select(part.prompt_of_B))
    logits_BWV = model.logits(hidden_BWE[:, :-1])
    entropy = F.cross_entropy(
        logits_BWV.flatten(0, 1), part.ids_BW[:, 1:].flatten(), reduction="none"
    )
    kind = part.kind_BW[:, 1:].flatten()
    is_said = (kind == SAID).float()
    weight = is_said + schedule.context_weight * (kind == READ).float()
    return (entropy * weight).sum(), (entropy * is_said).sum().detach()


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    part: PartTensors
    scale: Tensor
    said: Tensor


class GradientPass:
    """Adds the gradient of one part, times a scale, to the parameters' gradients."""

    def __init__(self, model: M1ForCausalLM, schedule: Schedule) -> None:
        self.model, self.schedule = model, schedule
        self._captured: dict[tuple[tuple[int, ...], ...], _Captured] = {}
        self._device = model.lm_head.weight.device
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def add(self, part: Part, scale: float) -> Tensor:
        """Returns the summed loss over what the clerk says."""
        if self._device.type != "cuda":
            return self._run(PartTensors.of(part, self._device), torch.tensor(scale))
        if part.shape not in self._captured:
            self._captured[part.shape] = self._capture(PartTensors.of(part, self._device))
        held = self._captured[part.shape]
        held.part.fill(part)
        held.scale.fill_(scale)
        held.graph.replay()
        return held.said.clone()

    def _run(self, part: PartTensors, scale: Tensor) -> Tensor:
        is_half = self.schedule.precision == "bf16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=is_half):
            loss, said = said_loss(self.model, part, self.schedule)
            balance = self.schedule.balance_weight * self.model.balance_loss()
        # each part's balance counts by its share of what is said in the step
        num_said = (part.kind_BW == SAID).sum()
        torch.autograd.backward((loss + balance * num_said) * scale)
        for block in self.model.blocks:
            # it would keep this pass's autograd graph, whose streams a capture must not meet
            block.block_sparse_moe.balance = None
        return said

    def _capture(self, part: PartTensors) -> _Captured:
        """Gradients of the trial runs are put back."""
        kept = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        scale = torch.zeros((), device=self._device)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._run(part, scale)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            said = self._run(part, scale)
        for parameter, grad in zip(self.model.parameters(), kept, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(grad)
        return _Captured(graph=graph, part=part, scale=scale, said=said)
