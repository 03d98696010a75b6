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
from m1serve.model.footprint import footprint
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
        self.snapshots = PrefixCache(settings.snapshot_bytes)
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
            dtype=self._dtype,
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
    asked = settings.memory_bytes
    if asked is not None and asked > device.free_bytes:
        raise ConfigError(
            f"engine.memory_bytes is {asked / 2**30:.2f} GiB, and on {device.name} "
            f"{device.free_bytes / 2**30:.2f} GiB are free beside the weights; lower it or leave "
            "it out"
        )
    usable = int(_USABLE * device.free_bytes)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    others = (settings.max_held_versions - 1) * weight_bytes
    _warn_of_small_snapshots(model.config, settings)
    try:
        return plan(free=usable - others)
    except ConfigError:
        alone = plan(free=usable)
        logger.warning(
            "%.1f GiB are not left for the weights of another version: swaps will be refused",
            others / 2**30,
        )
        return alone


def _warn_of_small_snapshots(config: M1Config, settings: EngineSettings) -> None:
    state_bytes = footprint(config, weight_itemsize=4, kv_itemsize=4).state_bytes
    if 0 < settings.snapshot_bytes < state_bytes:
        logger.warning(
            "engine.snapshot_bytes is %d MiB and the states of one snapshot are %d MiB: no prefix "
            "will be kept",
            settings.snapshot_bytes >> 20,
            state_bytes >> 20,
        )
