"""Activations of gated products, by value. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate), of gate up to `limit` and up within ±`limit`.

    It is that of gpt-oss (arXiv:2508.10925)."""

    limit: float = 7.0
    alpha: float = 1.702


Gate = str | ClampedSwiGLU
"""A kind of `reference.ACTIVATIONS`, of act(gate) * up, or a function of both."""
