"""nano_oasis: a compact LLM inference engine built around OasisKV (arXiv 2608.08097).

    from nano_oasis import LLM, SamplingParams

Heavy parts (torch) are imported on first use, so that `--help` and errors come at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nano_oasis.async_engine import AsyncEngine
    from nano_oasis.config import ConfigError, EngineConfig
    from nano_oasis.llm import LLM
    from nano_oasis.outputs import CompletionOutput, GenerationError, Logprob, RequestOutput
    from nano_oasis.request import EngineDead, RequestError, SamplingParams

_WHERE = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "EngineConfig": "config",
    "ConfigError": "config",
    "EngineDead": "request",
    "SamplingParams": "request",
    "RequestError": "request",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "GenerationError": "outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDead",
    "GenerationError",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'nano_oasis' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nano_oasis.{_WHERE[name]}"), name)
