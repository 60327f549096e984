"""What a decode step's layers cost, on a CPU."""

from __future__ import annotations

from toolkit.bench import layers
from toolkit.demo import MODEL_DIR


def test_times_are_those_of_a_layer_for_each_number_of_requests():
    times = layers.measure(MODEL_DIR, [1, 3], context=20, layers=2, dtype="auto")
    assert list(times) == [1, 3]
    assert all(0 < seconds < 1 for seconds in times.values())
