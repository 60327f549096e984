"""Mistral (Jiang et al., 2023): Llama's decoder with a sliding window."""

from typing import Any

from toolkit.models.llama import Llama, Variant, sliding_windows


class Mistral(Llama):
    @staticmethod
    def variant(config: Any) -> Variant:
        return Variant(sliding_windows=sliding_windows(config))
