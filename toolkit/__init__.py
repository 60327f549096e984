"""tk: a server for language models with its own inference engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolkit.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "EngineConfig",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "ToolkitError",
    "__version__",
]

_MODULES = {
    "LLM": "toolkit.engine.llm",
    "AsyncLLM": "toolkit.engine.async_llm",
    "BeamSearchParams": "toolkit.sampling.params",
    "EngineConfig": "toolkit.config",
    "LoRARequest": "toolkit.sequence",
    "RequestOutput": "toolkit.engine.outputs",
    "SamplingParams": "toolkit.sampling.params",
    "StructuredOutputsParams": "toolkit.sampling.structured_outputs",
    "ToolkitError": "toolkit.errors",
}

if TYPE_CHECKING:
    from toolkit.config import EngineConfig
    from toolkit.engine.async_llm import AsyncLLM
    from toolkit.engine.llm import LLM
    from toolkit.engine.outputs import RequestOutput
    from toolkit.errors import ToolkitError
    from toolkit.sampling.params import BeamSearchParams, SamplingParams
    from toolkit.sampling.structured_outputs import StructuredOutputsParams
    from toolkit.sequence import LoRARequest


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import toolkit` stays fast."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
