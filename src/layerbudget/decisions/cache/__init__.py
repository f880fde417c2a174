"""The format of the keys and values of every layer. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry import lazy_names

if TYPE_CHECKING:
    from .cache import caching as caching
    from .cache import planned_cache as planned_cache
    from .cache import rounding as rounding
    from .export import llama_cache as llama_cache
    from .export import vllm_options as vllm_options
    from .forecast import measuring as measuring
    from .formats import CACHES as CACHES
    from .formats import check_cached as check_cached
    from .formats import find_cache as find_cache
    from .plan import cache_space as cache_space
    from .plan import plan_cache as plan_cache
    from .sensitivity import cache_damage as cache_damage
    from .space import CacheSpace as CacheSpace

__getattr__ = lazy_names(
    __name__,
    {
        "cache": "caching planned_cache rounding",
        "export": "llama_cache vllm_options",
        "forecast": "measuring",
        "formats": "CACHES check_cached find_cache",
        "plan": "cache_space plan_cache",
        "sensitivity": "cache_damage",
        "space": "CacheSpace",
    },
)
