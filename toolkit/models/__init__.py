"""One file per architecture, the registry, and the weight loader."""

from toolkit.models.registry import SUPPORTED, CausalLM, resolve_architecture

__all__ = ["SUPPORTED", "CausalLM", "resolve_architecture"]
