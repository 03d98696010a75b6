"""What each layer of a model let out, and which experts its tokens reached, while a block runs.

Shapes: B rows, T tokens, E hidden, P experts per token, N = B*T.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from m1serve.kernels.moe import route
from m1serve.kernels.residual import Sum
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.moe import SparseMoE


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    """layer -> [B, T, E] of each forward, one behind the other"""
    chosen: dict[int, list[Tensor]] = field(default_factory=dict)
    """layer -> [B, T, P] experts, sorted"""

    def after(self, layer: int) -> Tensor:
        """[B, T, E] of all forwards' tokens."""
        return torch.cat(self.outputs[layer], 1)

    def experts(self, layer: int) -> Tensor:
        """[B, T, P] of all forwards' tokens; equal where the sets are."""
        return torch.cat(self.chosen[layer], 1)


@contextmanager
def traced(model: M1ForCausalLM) -> Iterator[Trace]:
    """Records every forward of the model inside the block, at the price of routing twice."""
    trace = Trace()

    def keep_output(layer: int, output: Tensor | Sum) -> None:
        made_BTE = output.total() if isinstance(output, Sum) else output
        trace.outputs.setdefault(layer, []).append(made_BTE.detach())

    def keep_experts(layer: int, moe: nn.Module, g_BTE: Tensor) -> None:
        assert isinstance(moe, SparseMoE)
        routes = route(g_BTE.flatten(0, 1), moe.gate.weight, moe.num_chosen)
        chosen_NP = routes.chosen_NP.sort(-1).values
        trace.chosen.setdefault(layer, []).append(chosen_NP.view(*g_BTE.shape[:2], -1))

    with ExitStack() as hooks:
        for i, block in enumerate(model.blocks):
            hooks.enter_context(
                _removed(block.register_forward_hook(lambda _m, _a, o, i=i: keep_output(i, o)))
            )
            moe = block.block_sparse_moe
            hooks.enter_context(
                _removed(moe.register_forward_pre_hook(lambda m, a, i=i: keep_experts(i, m, a[0])))
            )
        yield trace


@contextmanager
def _removed(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
