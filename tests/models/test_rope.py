"""Every rope scaling, with many parameters, against Transformers' formulas."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from toolkit.errors import CheckpointError
from toolkit.models.config.registry import parse_config
from toolkit.models.describe import ROPE_PARAMETERS, Rope
from toolkit.models.rotary import SCALINGS, inverse_frequencies


def every(**choices: list) -> list[dict]:
    """Return all combinations. A choice of None leaves the key out."""
    combinations = (
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    )
    return [{key: value for key, value in c.items() if value is not None} for c in combinations]


HALF = 32
PARAMETERS: dict[str, list[dict]] = {
    "linear": every(
        factor=[1.0, 2, 7.5], rope_theta=[1e4, 5e5], partial_rotary_factor=[None, 0.25]
    ),
    "dynamic": every(
        factor=[1.0, 2, 7.5], rope_theta=[1e4, 5e5], partial_rotary_factor=[None, 0.5]
    ),
    "proportional": every(
        factor=[None, 4.0], rope_theta=[1e4, 1e6], partial_rotary_factor=[None, 0.25, 0.3, 0.0]
    ),
    "yarn": [
        *every(factor=[1.0, 2.0, 40], rope_theta=[1e4, 1e6], partial_rotary_factor=[None, 0.5]),
        *every(
            factor=[4.0],
            rope_theta=[1e4],
            beta_fast=[None, 16, 64.0],
            beta_slow=[None, 2],
            truncate=[None, True, False],
        ),
        *every(
            factor=[4.0],
            rope_theta=[1e4],
            attention_factor=[None, 1.0, 1.7],
            mscale=[0, 0.7],
            mscale_all_dim=[1.2],
        ),
        *every(
            factor=[40.0],
            rope_theta=[1e4],
            mscale=[None, 0.7, 1.0],
            mscale_all_dim=[None, 1.2, 1.0],
        ),
        {"factor": None, "rope_theta": 1e4, "original_max_position_embeddings": 300},
        {"factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8},
    ],
    "longrope": every(
        factor=[None, 1.0, 4.0],
        rope_theta=[1e4],
        attention_factor=[None, 1.3],
        short_factor=[[1.0 + i / 9 for i in range(HALF)]],
        long_factor=[[2.0 + i * i / 9 for i in range(HALF)]],
    ),
    "llama3": every(
        factor=[2.0, 8, 32.0],
        low_freq_factor=[1.0, 2],
        high_freq_factor=[4.0, 8.0],
        rope_theta=[1e4, 5e5],
    ),
}
CONTEXTS = ((1024, 4096), (4096, 4096), (2048, 2048 * 3))
CASES = [
    (kind, parameters, *context)
    for kind, several in PARAMETERS.items()
    for index, parameters in enumerate(several)
    for context in (CONTEXTS if index == 0 else [CONTEXTS[(index + index // 3) % 3]])
]


@pytest.mark.parametrize(
    ("kind", "parameters", "trained", "extended"), CASES, ids=lambda value: json.dumps(value)[:70]
)
def test_frequencies_equal_transformers(kind, parameters, trained, extended):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind in ("yarn", "longrope", "llama3"):
        parameters = {"original_max_position_embeddings": trained} | parameters
    raw = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "max_position_embeddings": extended,
        "rope_parameters": {"rope_type": kind, **parameters},
    }
    ours = parse_config(raw | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    theirs = LlamaConfig(**raw)
    for length in (64, trained, trained + 1, extended):
        expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](
            theirs, torch.device("cpu"), seq_len=length
        )
        inv_freq, factor = inverse_frequencies(ours.rope(), length)
        torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
        assert inv_freq.dtype == torch.float32
        assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_each_set_of_factors_may_have_a_magnitude():
    parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 100,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "short_mscale": 1.2, "long_mscale": 1.5,
    }  # fmt: skip
    found = [inverse_frequencies(Rope(parameters, 8, 400), length) for length in (100, 101)]
    assert [factor for _, factor in found] == [1.2, 1.5]
    assert torch.equal(found[0][0], 2 * found[1][0])


def test_unscaled_frequencies_are_the_papers():
    inv_freq, factor = inverse_frequencies(Rope({"rope_theta": 1e4}, 8, 100), 100)
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert factor == 1.0


def test_all_scalings_are_tested():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert list(SCALINGS) == list(ROPE_PARAMETERS)
    assert set(SCALINGS) == set(PARAMETERS) | {"default"} == set(ROPE_INIT_FUNCTIONS) | {"default"}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "linear"}, "lack 'factor'"),
        ({"rope_type": "linear", "factor": "8"}, "cannot be used"),
        ({"rope_type": "linear", "factor": None}, "cannot be used"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "lack 'high_freq_factor'"),
        ({"rope_type": "yarn", "factor": 8.0}, "lack 'original_max_position_embeddings'"),
        ({"rope_type": "spiral"}, "Unsupported rope_type 'spiral'. Supported: default, linear"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [1.0, 2.0, 3.0],
                "factor": 1.0,
                "original_max_position_embeddings": 10,
            },
            "cannot be used",
        ),
    ],
)
def test_invalid_parameters_are_named(parameters, words):
    with pytest.raises(CheckpointError) as caught:
        inverse_frequencies(Rope({"rope_theta": 1e4} | parameters, 32, 1000), 1000)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("factor", [float("inf"), "2", True, [2]])
def test_factors_that_are_no_finite_numbers_are_refused(factor):
    parameters = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": factor}
    with pytest.raises(CheckpointError, match="cannot be used: factor is"):
        Rope(parameters, 32, 1000)


def test_odd_head_size_is_refused():
    with pytest.raises(CheckpointError, match="size is 33"):
        inverse_frequencies(Rope({"rope_theta": 1e4}, 33, 100), 100)
