"""CacheMemory: what a device has for states, keys and snapshots, shared by all held versions."""

from __future__ import annotations

import logging
from functools import partial

from m1serve.config import EngineSettings
from m1serve.engine.memory_plan import MemoryPlan, plan_memory
from m1serve.engine.pages import PageAllocator
from m1serve.engine.prefix_cache import PrefixCache
from m1serve.engine.slots import SlotPool
from m1serve.errors import ConfigError
from m1serve.model.config import M1Config
from m1serve.model.devices import device_of
from m1serve.model.hybrid import M1ForCausalLM
from m1serve.model.paged import KeyPages

logger = logging.getLogger(__name__)

CPU_PAGE_TOKENS, GPU_PAGE_TOKENS = 32, 256
"""Small pages waste little of short sequences; on a GPU a page is what one program streams."""
_USABLE = 0.85
"""Of the free memory, when no figure is set: activations, graphs and fragments take the rest."""


class CacheMemory:
    def __init__(self, model: M1ForCausalLM, settings: EngineSettings) -> None:
        """Takes the memory at once. ConfigError when no sequence would fit."""
        weight = model.embed_tokens.weight
        self._config, self._device, self._dtype = model.config, weight.device, weight.dtype
        self._max_tokens = settings.max_model_len
        page_tokens = GPU_PAGE_TOKENS if weight.is_cuda else CPU_PAGE_TOKENS
        self.plan = _planned(model, settings, page_tokens)
        self.snapshots = PrefixCache(settings.snapshot_bytes, page_bytes=self.plan.page_bytes)
        self.allocator = PageAllocator(
            self.plan.num_pages, page_tokens=page_tokens, spare=self.snapshots
        )
        self._pages = KeyPages.allocate(
            model.config, self.plan.num_pages, page_tokens, device=self._device, dtype=self._dtype
        )

    def fits(self, config: M1Config) -> bool:
        """Whether a version of this architecture can share the memory."""
        return config == self._config

    def new_pool(self) -> SlotPool:
        """Rows for one more version."""
        return SlotPool(
            self._config,
            num_rows=self.plan.num_slots,
            max_tokens=self._max_tokens,
            pages=self._pages,
            allocator=self.allocator,
            device=self._device,
        )


def _planned(model: M1ForCausalLM, settings: EngineSettings, page_tokens: int) -> MemoryPlan:
    """With room for the weights of further versions, if there is any."""
    weight = model.embed_tokens.weight
    plan = partial(
        plan_memory,
        model.config,
        settings,
        page_tokens=page_tokens,
        kv_itemsize=weight.dtype.itemsize,
    )
    device = device_of(weight.device)
    assert device is not None, f"{weight.device} has no memory"
    usable = int(_USABLE * device.free_bytes)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    others = (settings.max_held_versions - 1) * weight_bytes
    try:
        return plan(free=usable - others)
    except ConfigError:
        alone = plan(free=usable)
        logger.warning(
            "%.1f GiB are not left for the weights of another version: swaps will be refused",
            others / 2**30,
        )
        return alone
