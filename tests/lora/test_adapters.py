"""Answers with LoRA adapters equal those of PEFT."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints, engines
from tests.lora.conftest import COUNT, CPU, OPTIONS, PROMPT, Adapter, engine, generate, tokens
from toolkit import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from toolkit.engine.cores import pool
from toolkit.engine.cores.core_client import CoreClient, CoreMessage
from toolkit.engine.messages import EngineOutputs
from toolkit.errors import CheckpointError, ConfigError, InvalidRequestError
from toolkit.kernels import cpu
from toolkit.lora.peft import read_adapter

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_equal_those_of_peft(adapter, checkpoint, name):
    one: Adapter = adapter(name)
    llm = engine(checkpoint(one.base), {"mine": one.folder})
    given = tokens(generate(llm, [PROMPT, PROMPT], ["mine", ""]))
    llm.shutdown()
    base = checkpoints.greedy(checkpoints.make_reference(one.base), PROMPT, COUNT)
    assert given == [one.greedy(PROMPT, COUNT), base]
    assert given[0] != given[1]


def test_prompts_and_ranks_have_the_ends_of_their_adapter(adapter, checkpoint):
    """Embeddings and output head: with two ranks, and for log-probabilities of prompts."""
    one, other = adapter("ends"), adapter("all")
    folders = {"ends": one.folder, "all": other.folder}
    llm = engine(checkpoint(one.base), folders, tensor_parallel_size=2, num_threads=1)
    names = ["ends", "", "all"]
    results = generate(llm, [PROMPT] * 3, names, prompt_logprobs=0)
    llm.shutdown()
    for model, result in zip((one.model, None, other.model), results, strict=True):
        model = model or checkpoints.make_reference(one.base)
        assert result.outputs[0].token_ids == checkpoints.greedy(model, PROMPT, COUNT)
        with torch.no_grad():
            expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        for position, found in enumerate(result.prompt_logprobs[1:]):
            token = PROMPT[position + 1]
            assert found[token].logprob == pytest.approx(expected[position, token].item(), abs=1e-4)


MODES = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 7},
    "preemption": {"num_gpu_blocks_override": 5, "block_size": 8, "max_model_len": 40},
    "two ranks": {"tensor_parallel_size": 2, "num_threads": 1},
    "two stages": {"pipeline_parallel_size": 2, "num_threads": 1},
}


@pytest.mark.parametrize("mode", MODES)
def test_requests_of_one_batch_have_their_own_adapters(adapter, checkpoint, mode):
    first, second = adapter("attention"), adapter("all")
    folders = {"first": first.folder, "second": second.folder}
    llm = engine(checkpoint(first.base), folders, **MODES[mode])
    names = ["first", "", "second", "first"]
    prompts = [PROMPT, PROMPT, PROMPT, PROMPT[::-1]]
    preempted = engines.count_stats(llm, "num_preemptions")
    results = generate(llm, prompts, names)
    llm.shutdown()
    base = checkpoints.greedy(checkpoints.make_reference(first.base), PROMPT, COUNT)
    assert tokens(results) == [
        first.greedy(PROMPT, COUNT),
        base,
        second.greedy(PROMPT, COUNT),
        first.greedy(PROMPT[::-1], COUNT),
    ]
    assert (preempted() > 0) == (mode == "preemption")


def test_prefixes_are_shared_only_with_the_same_adapter(adapter, checkpoint):
    one: Adapter = adapter("attention")
    llm = engine(checkpoint(one.base), {"mine": one.folder}, block_size=4)
    cached = [
        generate(llm, [PROMPT], [name])[0].num_cached_tokens for name in ("", "mine", "mine", "")
    ]
    given = tokens(generate(llm, [PROMPT], ["mine"]))
    llm.shutdown()
    assert cached == [0, 0, 8, 8]
    assert given == [one.greedy(PROMPT, COUNT)]


def test_steps_with_adapters_are_recorded_once_for_any(adapter, checkpoint):
    one, other = adapter("all"), adapter("attention")
    llm = engine(checkpoint(one.base), {"mine": one.folder, "other": other.folder}, max_loras=1)
    recorded = engines.recorded_steps(llm)
    for _ in range(2):
        assert tokens(generate(llm, [PROMPT], ["mine"])) == [one.greedy(PROMPT, COUNT)]
        assert tokens(generate(llm, [PROMPT], ["other"])) == [other.greedy(PROMPT, COUNT)]
    assert [is_adapted for *_, is_adapted in recorded] == [True]
    reference = checkpoints.make_reference(one.base)
    assert tokens(generate(llm, [PROMPT], [""])) == [checkpoints.greedy(reference, PROMPT, COUNT)]
    assert [is_adapted for *_, is_adapted in recorded] == [True, False]
    assert all(recorded.values()) == cpu.available()
    llm.shutdown()


def test_logprobs_are_those_of_the_adapter(adapter, checkpoint):
    one: Adapter = adapter("all")
    llm = engine(checkpoint(one.base), {"mine": one.folder})
    (result,) = generate(llm, [PROMPT], ["mine"], max_tokens=1, logprobs=0)
    llm.shutdown()
    with torch.no_grad():
        logits = one.model(torch.tensor([PROMPT])).logits[0, -1]
    (token,) = result.outputs[0].token_ids
    expected = logits.log_softmax(0)[token].item()
    assert result.outputs[0].logprobs[0][token].logprob == pytest.approx(expected, abs=1e-4)


def test_seeds_and_grammars_hold_in_mixed_batches(adapter, checkpoint):
    one: Adapter = adapter("all")
    llm = engine(checkpoint(one.base), {"mine": one.folder})
    sampled = {"temperature": 1.0, "seed": 3}
    alone = tokens(generate(llm, [PROMPT], ["mine"], **sampled))
    together = tokens(generate(llm, [PROMPT, PROMPT], ["", "mine"], **sampled))
    constraint = StructuredOutputsParams(regex="[ab]{4}")
    answers = generate(
        llm, [PROMPT, PROMPT], ["mine", ""], structured_outputs=constraint, ignore_eos=False
    )
    llm.shutdown()
    assert together[1] == alone[0] != together[0]
    assert all(re.fullmatch("[ab]{4}", one.outputs[0].text) for one in answers)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_models_have_adapters(adapter, checkpoint, quantization):
    """The adapter's weights stay as they are: it adds what it adds to the exact model."""
    one: Adapter = adapter("all")
    llm = engine(checkpoint(one.base), {"mine": one.folder}, quantization=quantization)
    base, adapted = generate(llm, [PROMPT] * 2, ["", "mine"], max_tokens=1, logprobs=0)
    llm.shutdown()
    with torch.no_grad():
        logits = one.model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(0)
    (token,) = adapted.outputs[0].token_ids
    assert adapted.outputs[0].logprobs[0][token].logprob == pytest.approx(
        logits[token].item(), abs=0.5
    )
    assert base.outputs[0].logprobs != adapted.outputs[0].logprobs


def test_adapters_are_scaled_like_the_weights_of_an_fp8_cache(adapter, checkpoint):
    """Its scales are folded into keys, values and the output projection."""
    one: Adapter = adapter("attention")
    llm = engine(checkpoint(one.base), {"mine": one.folder}, kv_cache_dtype="fp8")
    (result,) = generate(llm, [PROMPT], ["mine"], max_tokens=1, logprobs=0)
    llm.shutdown()
    with torch.no_grad():
        logits = one.model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(0)
    (token,) = result.outputs[0].token_ids
    assert result.outputs[0].logprobs[0][token].logprob == pytest.approx(
        logits[token].item(), abs=0.5
    )


async def test_streams_with_an_adapter_survive_their_core(
    adapter, checkpoint, tmp_path, monkeypatch
):
    """Even if the files of another adapter are gone."""

    class Lost(CoreClient):
        """A core that ends after its first token. Tokens that it has sent since are lost, too."""

        is_killed = False

        async def receive(self) -> list[CoreMessage]:
            messages = await super().receive()
            while self.is_killed:
                await super().receive()  # raises when the process has ended
            for index, message in enumerate(messages, 1):
                if isinstance(message, EngineOutputs) and (message.outputs or message.numbers):
                    shutil.rmtree(other)
                    psutil.Process(self.pid).kill()
                    self.is_killed = True
                    return messages[:index]
            return messages

    monkeypatch.setattr(pool, "CoreClient", Lost)
    one: Adapter = adapter("attention")
    other = copied(one, tmp_path)
    modules = [f"mine={one.folder}", f"other={other}"]
    folder = str(checkpoint(one.base))
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    async with AsyncLLM(folder, lora_modules=modules, num_threads=1, **CPU) as llm:
        first = llm.replicas[0].link.pid
        stream = await llm.submit(
            {"prompt_token_ids": PROMPT}, params, adapter=llm.adapters.find("mine")
        )
        async with asyncio.timeout(200):
            given = [list(delta.token_ids) async for delta in stream]
        assert llm.replicas[0].link.pid != first
    assert len(given[0]) == 1
    assert [token for delta in given for token in delta] == one.greedy(PROMPT, COUNT)


def copied(adapter: Adapter, folder: Path) -> Path:
    return Path(shutil.copytree(adapter.folder, folder / "copy"))


def change_config(**fields: object) -> Callable[[Path], None]:
    return lambda folder: checkpoints.edit_json(folder / "adapter_config.json", **fields)


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def replace_file(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BROKEN = {
    "no file": (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
    "no tensors": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "safe_serial"),
    "no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        "cannot be read",
    ),
    "truncated": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{"),
        r"\): adapter_model\.safetensors is [^/]*\. Fetch or copy it again\.$",
    ),
    "no folder": (shutil.rmtree, r"/copy\): there is no such folder\.$"),
    "file": (lambda folder: [shutil.rmtree(folder), folder.touch()], "it is not a folder"),
    "nested": (
        lambda folder: (folder / "adapter_config.json").write_text('{"a":' + "[" * 100_000),
        "cannot be read: maximum recursion depth",
    ),
    "large": (change_config(a="a" * (1 << 20)), "cannot be read: it has"),
    "pipe": (
        lambda folder: replace_file(folder / "adapter_model.safetensors", os.mkfifo),
        "adapter_model.safetensors is not a regular file",
    ),
    "folder": (
        lambda folder: replace_file(folder / "adapter_config.json", os.mkdir),
        "adapter_config.json is not a regular file",
    ),
    "slow pattern": (
        change_config(r=100, rank_pattern={r"([\w.]+)+!": 8}),
        "the rank of .* is 100",
    ),
    "pattern": (
        change_config(alpha_pattern={"(?=q)_proj": 8}),
        r"the pattern '\(\?=q\)_proj' is not",
    ),
    "targets": (
        change_config(target_modules=r".*\.(q_proj|o_proj"),
        r"target_modules .* is not a regular expression: missing \)",
    ),
    "rank 0": (change_config(rank_pattern={"k_proj": 0}), "its rank is 0"),
    "scale": (change_config(lora_alpha=1e40), "not finite"),
    "other kind": (change_config(peft_type="IA3"), "peft_type is 'IA3'"),
    "DoRA": (change_config(use_dora=True), "DoRA"),
    "stacked experts": (
        change_config(target_parameters=["mlp.experts.gate_up_proj"]),
        r"changes parameters, as of experts \(target_parameters: mlp\.experts\.gate_up_proj\)",
    ),
    "biases": (change_config(bias="all"), "bias='none'"),
    "modules": (change_config(modules_to_save=["lm_head"]), "modules_to_save: lm_head"),
    "rank": (change_config(r=100), "the rank of .* is 100, but lora_A is"),
    "NaN": (change_tensors(lambda t: t[NAME].fill_(torch.nan)), "not finite"),
    "no layer": (
        change_tensors(lambda t: [t.pop(NAME), t.pop(NAME.replace("lora_A", "lora_B"))]),
        r"no factors of model\.layers\.0\.self_attn\.q_proj, which its target_modules have",
    ),
    "half": (change_tensors(lambda t: t.pop(NAME)), "one of lora_A and lora_B only"),
    "unknown layer": (
        change_tensors(
            lambda t: [
                t.update({key.replace("layers.0", "layers.9"): t.pop(key)}) for key in list(t)
            ]
        ),
        "not a linear layer of this model. It may be for another base model",
    ),
    "unknown tensor": (
        change_tensors(lambda t: t.update({"lora_embedding_A": torch.zeros(1)})),
        "does not know the tensor lora_embedding_A",
    ),
    "twice": (
        change_tensors(
            lambda t: t.update(
                {key.replace(".model.model", ".model.other.model"): t[key] + 1 for key in list(t)}
            )
        ),
        "are the same layer",
    ),
    "shape": (
        change_tensors(lambda t: t.update({NAME: torch.zeros(8, 24)})),
        "of another shape. It is for another base model",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8])
def test_factors_of_other_types_become_fp32(adapter, tmp_path, dtype):
    folder = copied(adapter("attention"), tmp_path)
    change_tensors(lambda t: t.update({NAME: t[NAME].to(dtype)}))(folder)
    module = NAME.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    low = read_adapter("mine", folder, 64)[module].low
    assert torch.equal(low, load_file(folder / "adapter_model.safetensors")[NAME].float())


@pytest.mark.parametrize(
    ("number", "alpha", "dtype", "is_finite"),
    [
        (0.0, 1e40, torch.bfloat16, False),  # 0 * inf
        (1e-30, 1e60, torch.bfloat16, False),
        (60000.0, 8, torch.float16, True),
        (60000.0, 16, torch.float16, False),
        (60000.0, 16, torch.bfloat16, True),
    ],
)
def test_factors_are_finite_in_the_type_of_the_products(
    adapter, tmp_path, number, alpha, dtype, is_finite
):
    """In a kernel, infinite factors would spoil tokens of other requests too: 0 * inf is NaN."""
    folder = copied(adapter("attention"), tmp_path)
    change_tensors(lambda t: t[NAME.replace("lora_A", "lora_B")].fill_(number))(folder)
    change_config(lora_alpha=alpha)(folder)
    if is_finite:
        read_adapter("mine", folder, 64, dtype)
        return
    with pytest.raises(CheckpointError, match="not finite, or too large for"):
        read_adapter("mine", folder, 64, dtype)


def test_parts_for_unread_tensors_are_skipped(adapter, checkpoint, tmp_path):
    """Gemma 4's layers that share memory had keys in earlier versions of Transformers."""
    one: Adapter = adapter("keys as values")
    folder, name = copied(one, tmp_path), "base_model.model.model.layers.4.self_attn.k_proj.lora"
    change_tensors(
        lambda t: (
            t.update({f"{name}_A.weight": torch.ones(4, 64)})
            or t.update({f"{name}_B.weight": torch.ones(32, 4)})
        )
    )(folder)
    with pytest.raises(
        CheckpointError, match=r"layers\.4\.self_attn\.k_proj, which is not a linear"
    ):
        engine(checkpoint(one.base), {"mine": folder})
    change_tensors(lambda t: [t.pop(key) for key in list(t) if not key.startswith(name)])(folder)
    change_config(target_modules=r".*layers\.4\.self_attn\.k_proj")(folder)
    engine(checkpoint("gemma4"), {"mine": folder}).shutdown()


def test_the_head_may_have_the_name_of_gpt_neox(adapter, checkpoint, tmp_path):
    one: Adapter = adapter("ends")
    folder = copied(one, tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".lm_head." in name]:
            tensors[name.replace("lm_head", "embed_out")] = tensors.pop(name)

    change_tensors(rename)(folder)
    llm = engine(checkpoint(one.base), {"mine": folder})
    given = tokens(generate(llm, [PROMPT], ["mine"]))
    llm.shutdown()
    assert given == [one.greedy(PROMPT, COUNT)]


@pytest.mark.parametrize("problem", BROKEN)
def test_broken_adapters_are_refused_by_name(adapter, checkpoint, tmp_path, problem):
    folder = copied(adapter("attention"), tmp_path)
    spoil, says = BROKEN[problem]
    spoil(folder)
    with pytest.raises(CheckpointError, match=rf"(?s)adapter 'mine' .*{says}"):
        engine(checkpoint("llama3-gqa"), {"mine": folder})


@pytest.mark.parametrize(
    ("base", "module"),
    [
        ("qwen2-moe", "mlp.experts.2.gate_proj"),
        ("granite-moe", "block_sparse_moe.input_linear"),
        ("granite-moe", "block_sparse_moe.router.layer"),
        ("gpt-oss", "mlp.experts.gate_up_proj"),
        ("llama4", "feed_forward.experts.gate_up_proj"),
    ],
)
def test_adapters_of_experts_are_refused(adapter, checkpoint, tmp_path, base, module):
    folder, name = copied(adapter("attention"), tmp_path), f"model.layers.1.{module}"

    def only_of_experts(tensors: dict[str, torch.Tensor]) -> None:
        tensors.clear()
        for part, shape in (("lora_A", (8, 64)), ("lora_B", (32, 8))):
            tensors[f"base_model.model.{name}.{part}.weight"] = torch.ones(shape)

    change_tensors(only_of_experts)(folder)
    says = f"it changes {name}, and adapters of experts are not supported"
    with pytest.raises(CheckpointError, match=re.escape(says)):
        engine(checkpoint(base), {"mine": folder})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_modules": ["mine"]}, "NAME=PATH"),
        ({"lora_modules": ["a=x", "a=y"]}, "two adapters are called 'a'"),
        ({"model_impl": "transformers"}, "cannot be combined with LoRA adapters"),
        ({"max_lora_rank": 4}, "Start with --max-lora-rank 8"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(adapter, checkpoint, settings, says):
    one: Adapter = adapter("attention")
    settings = {"lora_modules": [f"mine={one.folder}"], **settings}
    with pytest.raises((ConfigError, CheckpointError), match=says):
        LLM(str(checkpoint(one.base)), **CPU | settings)


def test_unknown_adapters_are_refused(adapter, checkpoint):
    one: Adapter = adapter("attention")
    llm = engine(checkpoint(one.base), {"mine": one.folder})
    with pytest.raises(InvalidRequestError, match=r"no adapter 'other'\. Known: 'mine'"):
        generate(llm, [PROMPT], ["other"])
    with pytest.raises(InvalidRequestError, match=r"Pass LoRARequest\('mine'\)"):
        llm.generate([PROMPT], lora_request="mine")
    with pytest.raises(InvalidRequestError, match=r"Pass LoRARequest\('mine'\)"):
        llm.chat([{"role": "user", "content": "hi"}], lora_request="mine")
    with pytest.raises(InvalidRequestError, match="1 prompts and 2 LoRA requests"):
        generate(llm, [PROMPT], ["mine", "mine"])
    llm.shutdown()


def test_config_of_peft_is_read_completely(adapter):
    """Fields of PEFT's file that change what an adapter computes are known, or off."""
    from toolkit.lora.peft import PeftConfig

    stored = json.loads((adapter("all").folder / "adapter_config.json").read_text())
    ignored = {"auto_mapping", "base_model_name_or_path", "inference_mode", "revision"}
    known = {*PeftConfig.__struct_fields__, *ignored}
    rest = {key for key, value in stored.items() if value not in (None, False, {}, [])} - known
    assert rest <= {
        "task_type",
        "target_modules",
        "peft_version",
        "init_lora_weights",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
    }
