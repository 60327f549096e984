"""Mistral (Jiang et al., 2023): Llama's decoder with a sliding window."""

from __future__ import annotations

from typing import Any

from toolkit.models.llama import Llama, Shape, sliding_windows


class Mistral(Llama):
    @staticmethod
    def shape(config: Any) -> Shape:
        return Shape(sliding_windows=sliding_windows(config))
