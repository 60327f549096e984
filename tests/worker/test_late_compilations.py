"""No step compiles a kernel once the engine is ready (`make test-gpu`)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests import checkpoints, engines
from toolkit import LLM, SamplingParams
from toolkit.worker.graph_policy import StepShape

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

HIDDEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
ROOM = {"vocab_size": 1500, "max_position_embeddings": 16384}
SIZES = HIDDEN | HEADS | ROOM
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CONFIGS = {
    "qwen3": ("Qwen3", SIZES),
    "mistral": ("Mistral", SIZES | {"sliding_window": 100}),
    "two groups": ("Gemma3", SIZES | {"sliding_window": 100, "sliding_window_pattern": 3}),
    "fp8 in blocks": ("Qwen3", SIZES | {"quantization_config": FP8}),
    "hybrid": (
        "Qwen3_5Moe",
        {
            "vocab_size": 1500,
            "max_position_embeddings": 16384,
            "hidden_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
    ),
    "gpt2": ("GPT2", {"n_layer": 3, "n_embd": 768, "n_head": 12, "vocab_size": 1501}),
}
DRAFTS = {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}}
DRAFTERS = {
    "draft_model": ("Qwen3", SIZES | {"hidden_size": 512, "num_hidden_layers": 2}),
    "eagle": ("Llama", SIZES | {"num_hidden_layers": 2}),
    "eagle3": ("Llama", SIZES | {"num_hidden_layers": 1, "draft_vocab_size": 700}),
}
"""Families and fields of networks, by method."""
CASES = {
    "qwen3": ("qwen3", {"dtype": "bfloat16"}),
    "fp8": ("qwen3", {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "fp8 in blocks": ("fp8 in blocks", {"dtype": "bfloat16"}),
    "int4": ("qwen3", {"dtype": "bfloat16", "quantization": "int4"}),
    "eager, given blocks": ("qwen3", {"enforce_eager": True, "num_gpu_blocks_override": 4096}),
    "window, float16": ("mistral", {"dtype": "float16"}),
    "two groups": ("two groups", {"dtype": "bfloat16"}),
    "two groups, drafts": ("two groups", {"dtype": "bfloat16", **DRAFTS}),
    "drafts": ("qwen3", {"dtype": "bfloat16", **DRAFTS}),
    "drafts, eager": ("mistral", {"dtype": "bfloat16", "enforce_eager": True, **DRAFTS}),
    "draft model": ("qwen3", {"dtype": "bfloat16", "drafter": "draft_model"}),
    "EAGLE-3": ("qwen3", {"dtype": "bfloat16", "drafter": "eagle3"}),
    "EAGLE, eager": ("mistral", {"dtype": "float16", "enforce_eager": True, "drafter": "eagle"}),
    "EAGLE-3, fp8": (
        "qwen3",
        {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8", "drafter": "eagle3"},
    ),
    "hybrid": ("hybrid", {"dtype": "bfloat16"}),
    "hybrid, drafts": ("hybrid", {"dtype": "bfloat16", **DRAFTS}),
    "gpt2": ("gpt2", {"dtype": "float16"}),
    "float32, fewer requests": ("gpt2", {"dtype": "float32", "max_num_seqs": 5}),
}


@pytest.fixture(scope="module", params=CASES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    name, settings = CASES[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    checkpoints.save_config(*CONFIGS[name], folder)
    if "drafter" in settings:
        method, drafter = settings["drafter"], tmp_path_factory.mktemp("drafter")
        checkpoints.save_config(*DRAFTERS[method], drafter)
        settings = {name: value for name, value in settings.items() if name != "drafter"}
        settings["speculative_config"] = {"method": method, "model": str(drafter)}
    settings = {"max_num_seqs": 96, "gpu_memory_utilization": 0.2} | settings
    engine = LLM(str(folder), load_format="dummy", **settings)
    assert (engine.info.expanded_weight_bytes > 0) == (settings.get("quantization") == "int4")
    yield engine
    engine.shutdown()


def test_no_shape_of_a_step_compiles(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    worker = engines.worker(llm)
    most = len(worker.runner.state.tables[0]) - 1
    longest = worker.info.max_model_len
    decode = [
        StepShape(n, n, 1, context)
        for n in range(1, most + 1)
        for context in (1, 65, 200, 1000, longest)
        if n < 4 or context == longest
    ]
    mixed = [
        StepShape(tokens, n, tokens - n + 1, longest)
        for tokens in (*range(2, 70), 100, 513, 1000, 2500)
        for n in range(1, min(most, tokens - 1) + 1)
        if tokens <= n * longest
    ]
    drafts = worker.runner.policy.most_drafts
    verifying = [
        StepShape(tokens, n, 1 + drafts, context, num_drafts=tokens - n, verifies=True)
        for n in (range(1, most + 1) if drafts else ())
        for tokens in {n + 1, n * (1 + drafts)}
        for context in (65, 1000, longest)
    ]
    with caplog.at_level(logging.WARNING), torch.inference_mode(), worker.on_stream():
        worker.runner.rehearse(decode + mixed + verifying)
        torch.cuda.synchronize()
    assert worker.runner.num_compiled() == 0, caplog.text


def test_no_option_of_a_request_compiles(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    options = [
        *({"logprobs": k, "temperature": 0.0} for k in (0, 1, 2, 3, 5, 10, 20, 33, 100)),
        {"prompt_logprobs": 2},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"logit_bias": {3: 4.0}},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.01},
        {"allowed_token_ids": [3, 4, 9], "seed": 5},
        {"n": 3},
    ]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, **more) for more in options]
    prompts = [{"prompt_token_ids": list(range(1, 5 + 9 * i)) * 2} for i in range(len(params))]
    worker = engines.worker(llm)
    worker.runner.num_compiled()
    counts: list[int] = []
    take = worker.runner.num_compiled
    worker.runner.num_compiled = lambda: (counts.append(count := take()), count)[1]
    with caplog.at_level(logging.WARNING):
        for prompt, one in zip(prompts, params, strict=True):
            llm.generate([prompt], one, use_tqdm=False)
        llm.generate(prompts, params, use_tqdm=False)
    assert counts, "steps have run"
    assert sum(counts) == 0, caplog.text
