"""Figures of memory that workers and the estimate before them share."""

from __future__ import annotations

CPU_CACHE_SHARE = 0.4
"""Share of a CPU machine's free memory, with the weights loaded, that the KV cache gets."""
SAMPLING_BYTES = 10
"""Bytes per logit that sampling takes at most: an fp32 copy, token counts, a 16-bit copy."""
