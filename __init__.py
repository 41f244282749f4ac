"""Octavo: an LLM inference engine in JAX.

The names below are loaded on first use (PEP 562), so that importing a host-side
module such as ``octavo.engine.scheduler`` never imports jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": ".engine.llm",
    "AsyncLLM": ".engine.async_llm",
    "EngineArgs": ".engine.args",
    "SamplingParams": ".engine.sampling_params",
    "RequestOutput": ".engine.outputs",
    "CompletionOutput": ".engine.outputs",
    "Logprob": ".engine.outputs",
    "RequestError": ".engine.errors",
    "EngineDeadError": ".engine.errors",
}

__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from .engine.args import EngineArgs as EngineArgs
    from .engine.async_llm import AsyncLLM as AsyncLLM
    from .engine.errors import EngineDeadError as EngineDeadError
    from .engine.errors import RequestError as RequestError
    from .engine.llm import LLM as LLM
    from .engine.outputs import CompletionOutput as CompletionOutput
    from .engine.outputs import Logprob as Logprob
    from .engine.outputs import RequestOutput as RequestOutput
    from .engine.sampling_params import SamplingParams as SamplingParams


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
