"""Bands of a heatmap: time ranges of equal height on a logarithmic scale."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

PER_DECADE = 12
FASTEST = 1e-4  # seconds
DECADES = 7
NUM_BANDS = PER_DECADE * DECADES


def band_of(seconds: float) -> int:
    """Return the band of a time. The first and the last band include all times beyond them."""
    if seconds <= FASTEST:
        return 0
    return min(NUM_BANDS - 1, int(PER_DECADE * math.log10(seconds / FASTEST)))


def lower_bound(band: int) -> float:
    """Return the shortest time of a band, in seconds."""
    return FASTEST * math.pow(10.0, band / PER_DECADE)


def count_by_band(buckets: Sequence[tuple[float, float, float]]) -> array[float]:
    """Distribute a histogram's observations, spread evenly in their buckets, over the bands."""
    counts = array("f", bytes(4 * NUM_BANDS))
    for above, up_to, count in buckets:
        low, high = band_of(above), band_of(up_to)
        if low == high:
            counts[low] += count
            continue
        for band in range(low, high + 1):
            begin = above if band == low else lower_bound(band)
            end = up_to if band == high else lower_bound(band + 1)
            counts[band] += count * (end - begin) / (up_to - above)
    return counts
