"""A smaller model as drafter: the answers are those of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import pictured
from tests.checkpoints import VOCAB, edit_json, make_model, save
from tests.speculative.drafting import (
    SETTINGS,
    answers,
    drafting_engine,
    few_measured_steps,
    logged_steps,
    random_prompts,
    save_llama,
)
from toolkit import LLM, LoRARequest, SamplingParams
from toolkit.config import EngineConfig
from toolkit.config.engine import MEMORY_VARIABLE
from toolkit.engine.front import pictures
from toolkit.errors import ConfigError, ModelNotFoundError, OutOfMemoryError
from toolkit.hardware.devices import find_device
from toolkit.inventory.checkpoint import read_folder
from toolkit.inventory.drafters import drafter_of
from toolkit.inventory.estimate import estimate
from toolkit.scheduler.speculation import StepCosts, StepTimes
from toolkit.speculative.network import DraftModel
from toolkit.worker.startup.warm_up import WarmUp
from toolkit.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_processes")

USEFUL, PAYS = StepCosts.useful, StepCosts.pays_to_draft  # before the folder's fixture
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
MODULE = "model.layers.0.self_attn.o_proj"
CASES = {
    "greedy": GREEDY,
    "sampled": {"temperature": 1.0, "seed": 3, "max_tokens": 16, "top_p": 0.9, "top_k": 50},
    "penalties": {
        **GREEDY,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    },
    "biases": {**GREEDY, "logit_bias": {65: 2.0}, "min_tokens": 4},
    "log-probabilities": {**GREEDY, "logprobs": 3},
    "stop tokens": {**GREEDY, "stop_token_ids": list(range(0, 256, 16))},
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter with other weights and another shape of keys, whose drafts are mostly wrong."""
    changes = {"num_hidden_layers": 1, "num_key_value_heads": 4, "hidden_size": 32}
    return save_llama(tmp_path_factory.mktemp("other"), seed=1, **changes)


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.BertConfig(vocab_size=VOCAB, num_attention_heads=2, **sizes)
    return save(transformers.BertModel(config), tmp_path_factory.mktemp("bert"))


def test_a_drafter_that_is_always_wrong_stops(monkeypatch, target_folder, other_folder):
    """Its time counts, and it reads only now and then what it has missed."""
    times = StepTimes(plain=[(1, 1.0), (64, 1.0)], drafting=[(1, 0.5), (64, 0.5)])
    monkeypatch.setattr(WarmUp, "step_times", lambda *_: times)
    monkeypatch.setattr(StepCosts, "useful", USEFUL)
    monkeypatch.setattr(StepCosts, "pays_to_draft", PAYS)
    network, runs = DraftModel.run, []
    monkeypatch.setattr(DraftModel, "run", lambda *given: runs.append(given) or network(*given))
    settings = SETTINGS | {"max_num_seqs": 1, "max_model_len": 160, "num_gpu_blocks_override": 64}
    plain = LLM(str(target_folder), **settings)
    given = GREEDY | {"max_tokens": 100}
    expected = answers(plain, random_prompts(1), **given)
    llm = drafting_engine(target_folder, other_folder, **settings)
    runs.clear()
    with logged_steps(llm) as log:
        assert answers(llm, random_prompts(1), **given) == expected
    assert 0 < log.num_drafts < 40
    assert 80 < len(log.steps) <= 101
    assert len(runs) < 45


def test_drafts_are_right_after_tokens_that_waited(monkeypatch, target_folder: Path):
    """While no drafts are wanted, up to 64 tokens wait. Requests wait for different times."""
    calls: list[None] = []

    def pays(*_: object) -> bool:
        calls.append(None)
        return not 4 < len(calls) < 12 and not 20 < len(calls) < 100

    monkeypatch.setattr(StepCosts, "pays_to_draft", pays)
    settings = {"max_model_len": 240, "max_num_batched_tokens": 100}
    llm = drafting_engine(target_folder, target_folder, **settings)
    prompts = [one[:length] for one, length in zip(random_prompts(3, 90), (90, 30, 5), strict=True)]
    with logged_steps(llm) as log:
        answers(llm, prompts, **GREEDY | {"max_tokens": 140})
    llm.shutdown()
    paused = [not step.drafts for step, _ in log.steps]
    assert paused.count(True) > 70
    assert log.num_drafts > 30
    assert log.acceptance_rate == 1.0


@pytest.mark.parametrize(
    "params", [GREEDY, {"temperature": 1.0, "seed": 5, "max_tokens": 32, "ignore_eos": True}]
)
def test_drafts_of_the_model_itself_are_right(target_folder: Path, params: dict):
    llm = drafting_engine(target_folder, target_folder)
    with logged_steps(llm) as log:
        answers(llm, random_prompts(3), **params)
    assert log.num_drafts > 30
    assert log.acceptance_rate == 1.0
    # 1 + 3 tokens in each step but the first, which has no drafts yet
    assert len(log.steps) <= 2 + params["max_tokens"] / 4
    llm.shutdown()


def test_answers_are_those_of_plain_decoding(engine, target_folder: Path, other_folder: Path):
    plain = engine(target_folder, **SETTINGS)
    drafting = drafting_engine(target_folder, other_folder)
    prompts = random_prompts(3)
    for name, params in CASES.items():
        expected = answers(plain, prompts, **params)
        with logged_steps(drafting) as log:
            assert answers(drafting, prompts, **params) == expected, name
        assert log.num_drafts > 10
    drafting.shutdown()


@pytest.mark.parametrize(
    ("settings", "drafts_well"),
    [
        ({"max_num_batched_tokens": 16}, False),
        ({"num_gpu_blocks_override": 16, "block_size": 8, "swap_space": 0.001}, True),
        ({"num_gpu_blocks_override": 16, "block_size": 8}, False),
        ({"block_size": 2}, True),
        ({"async_scheduling": True, "num_gpu_blocks_override": 16, "block_size": 8}, True),
    ],
    ids=["chunks", "swap", "recomputation", "small blocks", "overlap"],
)
def test_drafts_survive_chunks_and_preemption(
    engine, target_folder: Path, other_folder: Path, settings: dict, drafts_well: bool
):
    given = {"max_model_len": 120, **settings}
    plain = engine(target_folder, **SETTINGS)
    drafting = drafting_engine(
        target_folder, target_folder if drafts_well else other_folder, **given
    )
    prompts = random_prompts(4, 40)
    expected = answers(plain, prompts, **GREEDY)
    with logged_steps(drafting) as log:
        assert answers(drafting, prompts, **GREEDY) == expected
    if drafts_well:
        assert log.acceptance_rate == 1.0
    num_placed = sum(len(step.new_rows) for step, _ in log.steps)
    assert (num_placed > len(prompts)) == ("num_gpu_blocks_override" in settings)
    assert any(step.swap_in for step, _ in log.steps) == ("swap_space" in settings)
    with logged_steps(drafting) as log:  # prefixes are in the cache
        assert answers(drafting, prompts, **GREEDY) == expected
    if drafts_well:
        assert log.acceptance_rate == 1.0
    drafting.shutdown()


def test_padding_of_the_vocabulary_may_differ(target_folder: Path, tmp_path: Path):
    """Two tokens only one of the models has."""
    drafter = save_llama(tmp_path, 1, num_hidden_layers=1)
    file = drafter / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:260].contiguous()
    save_file(tensors, file, {"format": "pt"})
    edit_json(drafter / "config.json", vocab_size=260)
    prompts = random_prompts(2)
    for one, other in ((target_folder, drafter), (drafter, target_folder)):
        llm, plain = drafting_engine(one, other), drafting_engine(one, None)
        bias = {"logit_bias": {261: 8.0} if one == target_folder else {}}
        with logged_steps(llm) as log:
            expected = answers(plain, prompts, **GREEDY, **bias)
            assert answers(llm, prompts, **GREEDY, **bias) == expected
        assert log.num_drafts


def test_drafts_stop_where_the_drafters_positions_end(engine, target_folder: Path, tmp_path: Path):
    model = make_model("GPT2", {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 48}, 2)
    drafter = save(model, tmp_path)
    prompts = random_prompts(3, 38)
    expected = answers(engine(target_folder, **SETTINGS), prompts, **GREEDY)
    llm = drafting_engine(target_folder, drafter)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **GREEDY) == expected
    ends = [int((step.num_computed + step.num_tokens).max()) for step, _ in log.steps]
    drafted = [end for end, (step, _) in zip(ends, log.steps, strict=True) if step.num_drafts.any()]
    assert 44 <= max(drafted) <= 49 < max(ends)


def test_quantization_holds_for_the_drafter(target_folder: Path):
    llm = drafting_engine(target_folder, target_folder, quantization="int8")
    with logged_steps(llm) as log:
        answers(llm, random_prompts(2), **GREEDY)
    assert log.acceptance_rate > 0.9


def test_ranks_share_the_drafter(engine, target_folder: Path):
    prompts = random_prompts(2)
    expected = answers(engine(target_folder, **SETTINGS), prompts, **GREEDY)
    llm = drafting_engine(target_folder, target_folder, tensor_parallel_size=2)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **GREEDY) == expected
    assert log.acceptance_rate == 1.0
    llm.shutdown()


def test_adapters_do_not_change_the_drafter(target_folder: Path, tmp_path: Path):
    config = {"r": 2, "lora_alpha": 8, "peft_type": "LORA", "target_modules": [MODULE]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = f"base_model.model.{MODULE}"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(2, 64),
        f"{name}.lora_B.weight": torch.randn(64, 2),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    adapter = LoRARequest("own", 1, str(tmp_path))
    plain = drafting_engine(target_folder, None, enable_lora=True)
    llm = drafting_engine(target_folder, target_folder, enable_lora=True)
    prompts = random_prompts(2)
    with logged_steps(llm) as log:
        assert answers(llm, prompts, **GREEDY) == answers(plain, prompts, **GREEDY)
    assert log.acceptance_rate == 1.0
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    of_adapter = [
        [
            list(output.outputs[0].token_ids)
            for output in one.generate(
                requests, SamplingParams(**GREEDY), lora_request=[adapter, None], use_tqdm=False
            )
        ]
        for one in (llm, plain)
    ]
    assert of_adapter[0] == of_adapter[1]


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_logits_processors_see_each_position_once(target_folder: Path, method: str):
    """Their requests get no drafts; others in the batch do."""
    processors = {"logits_processors": ["tests.inside.plugged:Unseen"]}
    given = {"method": method} | ({"model": str(target_folder)} if method != "ngram" else {})
    plain = drafting_engine(target_folder, None, **processors)
    llm = drafting_engine(target_folder, None, speculative_config=given, **processors)
    params = [SamplingParams(**GREEDY, extra_args={"unseen": True}), SamplingParams(**GREEDY)]
    prompts = [{"prompt_token_ids": [1, 2, 3] * 8}] * 2
    with logged_steps(llm) as log:
        found, expected = (
            [list(one.outputs[0].token_ids) for one in engine.generate(prompts, params)]
            for engine in (llm, plain)
        )
    assert found == expected
    assert log.num_drafts


def test_dry_run_counts_the_drafter(target_folder: Path, other_folder: Path):
    given = {"method": "draft_model", "model": str(other_folder), "num_speculative_tokens": 3}
    for settings in ({}, {"kv_cache_memory": 0.01}, {"max_num_seqs": 200}):
        config = EngineConfig.from_settings(
            {"device": "cpu", "dtype": "float32", "speculative_config": given} | settings
        )
        target = read_folder(target_folder, "target")
        result = estimate(target, config, find_device("cpu"), drafter_of(target, config))
        with few_measured_steps():
            info = Worker(config, target_folder).start(lambda phase, seconds: None)
        assert (result.num_blocks, result.cache) == (info.num_blocks, info.cache_bytes)
        assert result.weights <= info.weight_bytes < 1.25 * result.weights
        assert result.block_bytes == 2 * 16 * 4 * (4 * 2 * 16 + 4 * 8)


def test_names_of_drafters_are_relative_to_the_current_folder(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(target_folder.parent)
    llm = drafting_engine(target_folder, Path(target_folder.name))
    with logged_steps(llm) as log:
        answers(llm, random_prompts(1), **GREEDY)
    assert log.acceptance_rate == 1.0


def test_a_missing_drafter_is_reported(target_folder: Path, tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=r"the drafter of --speculative-config: .*missing"):
        drafting_engine(target_folder, tmp_path / "missing")


def test_another_vocabulary_is_refused(target_folder: Path, tmp_path: Path):
    drafter = save_llama(tmp_path / "drafter", num_hidden_layers=1)
    edit_json(drafter / "tokenizer.json", truncation={"max_length": 9})
    drafting_engine(target_folder, drafter).shutdown()  # the tokens are the same
    content = json.loads((drafter / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    edit_json(drafter / "tokenizer.json", model=content["model"])
    with pytest.raises(ConfigError) as raised:
        drafting_engine(target_folder, drafter)
    assert str(drafter) in raised.value.message
    assert str(target_folder) in raised.value.message


def test_stages_are_refused(target_folder: Path):
    with pytest.raises(ConfigError, match="draft_model does not support --pipeline-parallel-size"):
        drafting_engine(target_folder, target_folder, pipeline_parallel_size=2)


def test_encoders_are_refused(target_folder: Path, bert_folder: Path):
    for target, drafter in ((bert_folder, target_folder), (target_folder, bert_folder)):
        with pytest.raises(ConfigError, match="generates no text"):
            drafting_engine(target, drafter)


def test_too_little_memory_for_both_is_reported(target_folder: Path, monkeypatch):
    need = (
        Worker(EngineConfig.from_settings({"device": "cpu", "dtype": "float32"}), target_folder)
        .start(lambda phase, seconds: None)
        .weight_bytes
    )
    monkeypatch.setenv(MEMORY_VARIABLE, str(int(1.5 * need)))
    with pytest.raises(OutOfMemoryError, match="weights of the model and its drafter take"):
        drafting_engine(target_folder, target_folder)


def test_drafter_reads_the_tokens_of_pictures_as_text(tmp_path, monkeypatch):
    """The model has these tokens at positions on several axes, which the drafter has not."""
    monkeypatch.setattr(pictures, "PicturePool", pictured.InlinePool)
    folder = pictured.save("qwen2.5-vl", tmp_path / "seeing")
    drafter = save_llama(tmp_path / "text", num_hidden_layers=1)
    prompts, asked = pictured.prompts(pictured.ASKED), SamplingParams(**GREEDY)
    found = []
    for one in (None, drafter):
        llm = drafting_engine(folder, one, max_num_batched_tokens=24)
        with logged_steps(llm) as log:
            outputs = llm.generate(prompts, asked, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        llm.shutdown()
    assert found[0] == found[1]
    assert log.num_drafts > 10
