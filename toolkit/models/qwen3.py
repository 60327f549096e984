"""Qwen3 (Yang et al., 2025): Llama's decoder with a norm on each head's query and key."""

from typing import Any

from toolkit.models.llama import Llama, Variant, sliding_windows


class Qwen3(Llama):
    @staticmethod
    def variant(config: Any) -> Variant:
        bias = bool(getattr(config, "attention_bias", False))
        return Variant(
            qkv_bias=bias, out_bias=bias, qk_norm=True, sliding_windows=sliding_windows(config)
        )
