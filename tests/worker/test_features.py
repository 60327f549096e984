"""Inputs of a step's tokens that stand for features."""

from __future__ import annotations

import numpy as np
import torch

from tests.attention.test_cpu_backend import make_batch
from toolkit import SamplingParams
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.sequence import Feature, SequenceSpec
from toolkit.worker.features import FeatureRequests

CPU = torch.device("cpu")
FEATURES = (
    Feature(b"a", ((2, 5), (9, 3)), both_ways=True),
    Feature(b"b", ((14, 4),)),
    Feature(b"c", ((20, 2),), both_ways=True),
)


def new_row(row: int, features: tuple[Feature, ...], num_tokens: int) -> NewRow:
    spec = SequenceSpec(
        prompt_token_ids=[0] * num_tokens,
        params=SamplingParams(),
        max_tokens=1,
        eos_token_ids=[],
        features=features,
    )
    return NewRow(row, spec, 0, [], 0, [])


def step(computed: list[int], counts: list[int], new: list[NewRow]) -> SchedulerOutput:
    """Return a step of rows 0 and 1."""
    arrays = (np.array(values, np.int32) for values in ([0, 1], counts, computed))
    return SchedulerOutput(0, *arrays, np.zeros(2, np.bool_), new_rows=new)


def test_last_keys_are_those_of_runs():
    features = FeatureRequests(2, 64, CPU, has_axes=False, both_ways=True, table=None)

    def last_keys(one: SchedulerOutput) -> list[list[int]]:
        features.apply(one)
        features.send(one)
        lens = [(n, int(at) + n) for n, at in zip(one.num_tokens, one.num_computed, strict=True)]
        batch = make_batch(lens)
        batch.positions = batch.positions.int()
        features.place(batch)
        assert batch.last_key is not None
        assert batch.last_key.dtype == torch.int32
        return [part.tolist() for part in batch.last_key.split(one.num_tokens.tolist())]

    new = [new_row(0, (), 60), new_row(1, FEATURES, 30)]
    first = last_keys(step([0, 0], [3, 13], new))
    assert first == [[0, 1, 2], [0, 1, 6, 6, 6, 6, 6, 7, 8, 11, 11, 11, 12]]
    second = last_keys(step([3, 13], [1, 12], []))
    assert second == [[3], [*range(13, 20), 21, 21, 22, 23, 24]]
    third = last_keys(step([4, 25], [2, 3], []))  # after all features
    assert third == [[4, 5], [25, 26, 27]]


def test_models_without_runs_have_no_last_keys():
    features = FeatureRequests(2, 64, CPU, has_axes=False, both_ways=False, table=None)
    one = step([0, 0], [3, 13], [new_row(0, (), 60), new_row(1, FEATURES, 30)])
    features.apply(one)
    assert features.send(one)
    batch = make_batch([(3, 3), (13, 13)])
    features.place(batch)
    assert batch.last_key is None
