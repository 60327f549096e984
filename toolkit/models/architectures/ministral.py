"""Ministral 8B (Mistral AI, 2024): Mistral with windows in some layers."""

from toolkit.models.architectures.mistral import Config, describe

__all__ = ["ARCHITECTURES", "Config", "describe"]

ARCHITECTURES = ("MinistralForCausalLM", "MinistralModel")
