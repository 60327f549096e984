"""Memory constants shared by the worker and by the estimate of `tk serve --dry-run`."""

CPU_CACHE_SHARE = 0.4
"""Share of a CPU machine's free memory, with the weights loaded, that the KV cache gets."""
SAMPLING_BYTES = 10
"""Bytes per logit that sampling takes at most: an fp32 copy, token counts, a 16-bit copy."""
