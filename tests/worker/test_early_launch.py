"""Kernels that start before the ones ahead of them have ended change no result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints, engines
from toolkit import LLM, SamplingParams

pytest.importorskip("triton")
from toolkit.kernels.triton import pdl

GPU = torch.device("cuda", 0)
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1500}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
CONFIGS = {
    "Qwen3": SIZES | HEADS,
    "GPT2": {"n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 1500},
}
CASES = {
    "Qwen3": ("Qwen3", {}),
    "Qwen3, FP8": ("Qwen3", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "GPT-2": ("GPT2", {}),
}
COUNTS = (1, 3, 12, 40, 70)
"""Requests that run together. The last are more than rows, so that prompts join next tokens."""


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_early_launch_is_turned_off_by_its_variable(monkeypatch, value, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv(pdl.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(pdl.VARIABLE, value)
    assert pdl.supported.__wrapped__(GPU) == expected


def answers(folder: Path, settings: dict[str, Any], repeats: int) -> list[list[Any]]:
    """Return tokens and log-probabilities of all requests, once for each repeat.

    Steps do not overlap, so that the same requests run together each time."""
    llm = LLM(
        str(folder),
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_memory=0.3,  # GB. Other tests may use the same GPU
        max_num_seqs=64,
        max_num_batched_tokens=512,
        async_scheduling=False,
        enable_prefix_caching=False,
        **settings,
    )
    assert engines.graphs(llm)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    seeded = SamplingParams(temperature=1.0, seed=1, top_p=0.9, max_tokens=24, ignore_eos=True)
    found = []
    for _ in range(repeats):
        results = []
        for count in COUNTS:
            prompts = [
                {"prompt_token_ids": [(7 * i + 13 * j) % 1500 for j in range(4 + 41 * i % 300)]}
                for i in range(count)
            ]
            params = [seeded if i % 4 == 3 else greedy for i in range(count)]
            for result in llm.generate(prompts, params, use_tqdm=False):
                output = result.outputs[0]
                chances = [
                    {token: one.logprob for token, one in position.items()}
                    for position in output.logprobs or []
                ]
                results.append((list(output.token_ids), chances))
        found.append(results)
    llm.shutdown()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_results_are_bitwise_equal_without_early_launch(tmp_path, monkeypatch, case):
    if not pdl.supported(GPU):
        pytest.skip("needs Hopper or a later GPU")
    name, settings = CASES[case]
    checkpoints.save_config(name, CONFIGS[name], tmp_path)
    early = answers(tmp_path, settings, repeats=3)
    monkeypatch.setenv(pdl.VARIABLE, "0")
    pdl.supported.cache_clear()
    try:
        (late,) = answers(tmp_path, settings, repeats=1)
    finally:
        pdl.supported.cache_clear()
    assert len({tuple(tokens) for tokens, _ in late}) > 20
    for found in early:
        assert found == late
