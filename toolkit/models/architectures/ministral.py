"""Ministral 8B (Mistral AI, 2024): Mistral with windows in some layers."""

from toolkit.models.architectures import mistral
from toolkit.models.architectures.mistral import describe

__all__ = ["ARCHITECTURES", "Config", "describe"]

ARCHITECTURES = ("MinistralForCausalLM", "MinistralModel")


class Config(mistral.Config, kw_only=True):
    """Its default for `layer_types` is windows in all layers."""
