"""The key/value caches of `transformers` behind the interface of ours.

Shape suffixes: B sequences, L new positions, S all positions, G key/value heads, K head width.
"""

import inspect
from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationMixin

CACHE_NAME = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
"""What `transformers` calls the cache that it hands from step to step: the name changed within version 5."""


class GenerationCache:
    """A `transformers` cache (DynamicCache, StaticCache, …) as `KeyValueCache` is used: read `length`, extend each layer, advance."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.length = int(cache.get_seq_length())

    def extend(self, layer: int, k_BGLK: Tensor, v_BGLK: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, old and new."""
        return self._cache.update(k_BGLK, v_BGLK, layer)

    def advance(self, positions: int) -> None:
        """The cache counts by itself."""


def new_generation_cache() -> Any:
    """An empty cache that grows."""
    return DynamicCache()
