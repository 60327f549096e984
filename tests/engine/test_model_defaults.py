"""Sampling defaults from a model's generation_config.json."""

from __future__ import annotations

import json

import pytest

from tests import checkpoints
from tests.models.gguf_models import write_model
from toolkit import LLM, BeamSearchParams, SamplingParams
from toolkit.config import ModelConfig
from toolkit.engine.front.input_processor import load_default_sampling, load_output_limit
from toolkit.errors import CheckpointError, ConfigError, InvalidRequestError
from toolkit.inventory.card import sampling
from toolkit.inventory.checkpoint import read_folder
from toolkit.sampling.params import describe_sampling


@pytest.fixture
def folder(tmp_path):
    return checkpoints.save(checkpoints.make_reference("gpt2"), tmp_path / "model")


def write_defaults(folder, **values):
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": checkpoints.EOS} | values)
    )


def test_a_request_without_parameters_uses_the_models_defaults(folder):
    write_defaults(folder, temperature=0.0, top_k=7)
    llm = LLM(str(folder), device="cpu")
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=7)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    default = llm.generate(prompt, use_tqdm=False)[0].outputs[0].token_ids
    greedy = (
        llm.generate(prompt, SamplingParams(temperature=0.0), use_tqdm=False)[0]
        .outputs[0]
        .token_ids
    )
    assert default == greedy


def test_defaults_out_of_range_are_refused_at_start(folder):
    write_defaults(folder, top_p=7.0)
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*top_p"):
        LLM(str(folder), device="cpu")


def test_settings_replace_the_models_defaults(folder, tmp_path):
    write_defaults(folder, temperature=0.5, top_k=7)
    other = tmp_path / "other"
    other.mkdir()
    for settings, expected in (
        ({"generation_config": "none"}, {}),
        ({"override_generation_config": {"top_k": 3}}, {"temperature": 0.5, "top_k": 3}),
        ({"generation_config": "none", "override_generation_config": {"top_p": 0.5}},
         {"top_p": 0.5}),
    ):  # fmt: skip
        assert load_default_sampling(folder, ModelConfig(**settings)) == expected
    chosen = ModelConfig(generation_config=str(other))
    with pytest.raises(ConfigError, match=r"--generation-config: there is no .*other"):
        load_default_sampling(folder, chosen)
    write_defaults(other, top_k=9)
    assert load_default_sampling(folder, chosen) == {"top_k": 9}
    with pytest.raises(ConfigError, match=r"unknown field 'temp'; known: .* Did you mean"):
        ModelConfig(override_generation_config={"temp": 0.1})


def test_only_the_operator_limits_the_output_of_requests(folder, tmp_path):
    write_defaults(folder, max_new_tokens=5)
    other = tmp_path / "other"
    other.mkdir()
    write_defaults(other, max_new_tokens=6)
    for settings, limit in (
        ({}, None),
        ({"generation_config": str(other)}, 6),
        ({"generation_config": str(other), "override_generation_config": {"max_new_tokens": 3}}, 3),
    ):
        assert load_output_limit(folder, ModelConfig(**settings)) == limit
    for wrong in (0, "5", 1.5):
        with pytest.raises(ConfigError, match="max_new_tokens must be a whole number of at least"):
            ModelConfig(override_generation_config={"max_new_tokens": wrong})
    write_defaults(other, max_new_tokens=0)
    with pytest.raises(CheckpointError, match="max_new_tokens must be a whole number of at least"):
        load_output_limit(folder, ModelConfig(generation_config=str(other)))


def test_limits_of_all_requests(folder):
    settings = {"override_generation_config": {"max_new_tokens": 3}, "max_logprobs": 4}
    llm = LLM(str(folder), device="cpu", **settings)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    for asked in (2, 3, 50, None):
        params = SamplingParams(max_tokens=asked, ignore_eos=True, logprobs=4)
        [answer] = llm.generate(prompt, params, use_tqdm=False)[0].outputs
        assert len(answer.token_ids) == (2 if asked == 2 else 3)
    [found] = llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=50))
    assert all(len(beam.token_ids) <= 3 for beam in found.outputs)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidRequestError, match=rf"{name} must be at most 4 \(--max-log"):
            llm.generate(prompt, SamplingParams(**{name: 5}), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"is 5\. The maximum is 4 \(--max-logprobs\)"):
        llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=5))


def test_do_sample_false_is_greedy(folder):
    write_defaults(folder, do_sample=False)
    assert LLM(str(folder), device="cpu").get_default_sampling_params() == SamplingParams(
        temperature=0.0
    )


@pytest.mark.parametrize(
    ("metadata", "expected", "text"),
    [
        (
            {},
            {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
            "temperature 0.8, top-p 0.95, top-k 40, min-p 0.05",
        ),
        (
            {"general.sampling.temp": 0.5, "general.sampling.penalty_repeat": 1.5},
            {"temperature": 0.5, "repetition_penalty": 1.5},
            "temperature 0.5, repetition penalty 1.5",
        ),
    ],
)
def test_gguf_files_have_their_own_defaults_or_those_of_llama_cpp(
    tmp_path, metadata, expected, text
):
    model = checkpoints.make_reference("llama3-gqa")
    path = write_model(tmp_path / "model.gguf", model, "llama", **metadata)
    found = load_default_sampling(path, ModelConfig())
    assert found == pytest.approx(expected)
    assert describe_sampling(found) == text
    assert sampling(read_folder(path, "model")) == text


def test_every_end_token_of_a_list_ends_an_answer(folder):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    prompt = {"prompt_token_ids": [1, 2, 3]}

    def answer() -> list[int]:
        llm = LLM(str(folder), device="cpu")
        return list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)

    whole = answer()
    for position in (0, len(set(whole)) - 1):
        token = list(dict.fromkeys(whole))[position]
        write_defaults(folder, eos_token_id=[checkpoints.EOS, token])
        assert answer() == whole[: whole.index(token) + 1]
