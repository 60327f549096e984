"""The rank to blame when several end, progress of ranks, and their messages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from toolkit.errors import CheckpointError, WorkersLostError
from toolkit.executor import rank_progress as progress
from toolkit.executor.rank_failures import as_error, blamed, cause_of
from toolkit.executor.rank_messages import (
    Broken,
    Cause,
    Heartbeat,
    Result,
    decode_from_rank,
    encode,
)
from toolkit.executor.rank_progress import Progress
from toolkit.scheduler import ModelOutput, PromptLogprobs

KILLED = Broken(2, "", "ended unexpectedly (killed by signal 9)", cause=Cause.KILLED)
KNOWS = Broken(1, "CheckpointError", "model.safetensors is cut short")
FAILED = Broken(3, "", "ZeroDivisionError: division by zero")
LOST = Broken(0, "", "RuntimeError: Connection closed by peer", cause=Cause.LOST_PEER)


@pytest.mark.parametrize("order", list(itertools.permutations([LOST, FAILED, KILLED])))
def test_a_killed_rank_is_blamed_in_any_order(order):
    assert blamed(order) is KILLED


@pytest.mark.parametrize("reason", [KNOWS, FAILED])
def test_a_rank_with_an_error_is_blamed_before_one_that_lost_it(reason):
    assert blamed([LOST, reason]) is reason


def test_a_network_error_is_a_lost_peer():
    lost = RuntimeError("Connection closed by peer [10.0.0.2]:1234")
    assert cause_of(lost) is Cause.LOST_PEER
    assert cause_of(ZeroDivisionError("division by zero")) is Cause.FAILED


def test_an_error_of_a_rank_keeps_its_type():
    assert isinstance(as_error(KNOWS, "rank 1"), CheckpointError)
    assert str(as_error(KILLED, "rank 2 on 10.0.0.3")).startswith(
        "rank 2 on 10.0.0.3 ended unexpectedly"
    )
    assert str(as_error(FAILED, "rank 3")) == "rank 3: ZeroDivisionError: division by zero"
    assert isinstance(
        as_error(Broken(1, "SystemExit", "not a ToolkitError"), "rank 1"), WorkersLostError
    )


def test_ranks_behind_are_the_silent_ones_or_the_slowest(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    ranks = Progress([1, 2, 3])
    for rank, steps in ((1, 8), (2, 7), (3, 8)):
        ranks.note(Heartbeat(rank, steps))
    assert ranks.behind(9) == [2]
    assert ranks.behind(8) == [2]
    assert ranks.behind(7) == []
    now += progress.SILENCE + 0.1
    ranks.note(Heartbeat(1, 8))
    ranks.note(Heartbeat(2, 7))
    assert ranks.behind(9) == [3]


def test_a_result_survives_encoding():
    def logprobs(*shape: int) -> np.ndarray:
        return np.random.default_rng(shape[0]).integers(0, 99, shape).astype(np.int32)

    sent = ModelOutput(
        7,
        np.array([3, -1], np.int32),
        logprobs(2, 3),
        {4: PromptLogprobs(1, logprobs(5, 1))},
        {1: np.array([0.5, -2.0], np.float32)},
    )
    received = decode_from_rank(bytearray(encode(Result(1, sent))))
    assert isinstance(received, Result)
    got = received.output
    assert (received.rank, got.step, got.token_ids.tolist()) == (1, 7, [3, -1])
    assert got.token_ids.dtype == np.int32
    pairs = [
        (got.logprobs, sent.logprobs),
        (got.prompt_logprobs[4].records, sent.prompt_logprobs[4].records),
    ]
    for actual, expected in pairs:
        np.testing.assert_array_equal(actual, expected)
    assert got.prompt_logprobs[4].start == 1
    np.testing.assert_array_equal(got.pooled[1], sent.pooled[1])
