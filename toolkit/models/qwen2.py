"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama's decoder with biases on query, key and value."""

from typing import Any

from toolkit.models.llama import Llama, Variant, sliding_windows


class Qwen2(Llama):
    @staticmethod
    def variant(config: Any) -> Variant:
        return Variant(qkv_bias=True, sliding_windows=sliding_windows(config))
