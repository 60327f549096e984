"""Byte sizes and large numbers as text."""

from __future__ import annotations

import pytest

from toolkit.units import count, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (3277, "3.2 KiB"),
        (12 * 2**20, "12.0 MiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (140 * 2**30, "140.00 GiB"),
    ],
)
def test_size_has_the_largest_unit_that_fits(num_bytes, text):
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (3812, "3.81K"), (124_439_808, "124M"), (7.6e9, "7.6B")]
)
def test_count_has_three_digits(number, text):
    assert count(number) == text
