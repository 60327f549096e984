"""Checks of SamplingParams, and the name of the parameter in each error."""

from __future__ import annotations

import math

import msgspec
import pytest

from toolkit import SamplingParams
from toolkit.errors import InvalidRequestError

WRONG = [
    ("n", [0, -1, 129, 1.5, "2", True, None]),
    ("temperature", [-0.1, 100.5, math.nan, math.inf, "hot", None]),
    ("top_k", [-2, 2.5, 2**31, "5"]),
    ("top_p", [0.0, -0.1, 1.0001, math.nan, "0.5", None]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("repetition_penalty", [0.0, -1.0, math.inf, math.nan, "1"]),
    ("penalty_window", [0, -1, "1"]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, math.nan]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "7"]),
    ("max_tokens", [-1, 1.5]),
    ("min_tokens", [-1, 17, 0.5]),
    ("logprobs", [-1, 101, 1.5, True]),
    ("prompt_logprobs", [-1, 101, "1"]),
    ("stop", [[""], ["x" * 1025], ["x"] * 65, [3]]),
    ("stop_token_ids", [["a"], [1.0]]),
    (
        "logit_bias",
        [{3: 101.0}, {3: -100.5}, {3: math.nan}, {3: math.inf}, {"3": 1.0}, {3: "high"}],
    ),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG for value in values]
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"top_k": -1},
        {"top_p": 1},
        {"seed": -(2**63)},
        {"max_tokens": None, "min_tokens": 100},
        {"max_tokens": 5, "min_tokens": 5},
        {"stop": "end"},
        {"logit_bias": {0: -100, 5: 100.0}},
        {"logprobs": 0, "prompt_logprobs": 100},
    ],
)
def test_values_at_the_bounds_are_accepted(settings):
    SamplingParams(**settings)


def test_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=3)


def test_stop_strings_need_the_text():
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop=["x"], detokenize=False)


def test_minus_one_and_zero_mean_every_token():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()


def test_parameters_survive_encoding():
    params = SamplingParams(
        n=3,
        temperature=0.5,
        top_k=4,
        logit_bias={5: -1.0},
        stop=["a", "b"],
        seed=-9,
        max_tokens=None,
    )
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params
