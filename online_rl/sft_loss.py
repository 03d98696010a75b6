"""The cold start's loss on one part, and its replay as a CUDA graph: small kernels, many launches.

Shapes: B rows, W tokens of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from m1serve.model.hybrid import M1ForCausalLM
from m1serve.online_rl.sft_batches import Part
from m1serve.online_rl.sft_recipe import Schedule

_WARM_UP = 3


def said_loss(model: M1ForCausalLM, part: Part, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross entropies, and the plain sum over what the clerk says."""
    _, state = model.hidden(part.prompts_PS, None, part.prompt_length_P)
    hidden_BWE, _ = model.hidden(part.ids_BW, state.select(part.prompt_of_B))
    logits_BWV = model.logits(hidden_BWE[:, :-1])
    entropy = F.cross_entropy(
        logits_BWV.flatten(0, 1), part.ids_BW[:, 1:].flatten(), reduction="none"
    )
    kind = part.weight_BW[:, 1:].flatten()
    is_said = (kind == 2).float()
    weight = is_said + schedule.context_weight * (kind == 1).float()
    return (entropy * weight).sum(), (entropy * is_said).sum().detach()


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    part: Part
    scale: Tensor
    said: Tensor


class GradientPass:
    """Adds the gradient of one part, times a scale, to the parameters' gradients."""

    def __init__(self, model: M1ForCausalLM, schedule: Schedule) -> None:
        self.model, self.schedule = model, schedule
        self._captured: dict[tuple[torch.Size, ...], _Captured] = {}
        self._device = model.lm_head.weight.device
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def add(self, part: Part, scale: float) -> Tensor:
        """Returns the summed loss over what the clerk says."""
        if self._device.type != "cuda":
            return self._run(part, torch.tensor(scale))
        key = tuple(t.shape for t in part.tensors())
        if key not in self._captured:
            self._captured[key] = self._capture(part.to(self._device))
        held = self._captured[key]
        for mine, theirs in zip(held.part.tensors(), part.tensors(), strict=True):
            mine.copy_(theirs, non_blocking=True)
        held.scale.fill_(scale)
        held.graph.replay()
        return held.said.clone()

    def _run(self, part: Part, scale: Tensor) -> Tensor:
        loss, said = said_loss(self.model, part, self.schedule)
        balance = self.schedule.balance_weight * self.model.balance_loss()
        # each part's balance counts by its share of what is said in the step
        num_said = (part.weight_BW == 2).sum()
        torch.autograd.backward((loss + balance * num_said) * scale)
        return said

    def _capture(self, part: Part) -> _Captured:
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
