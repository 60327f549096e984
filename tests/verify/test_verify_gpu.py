"""`tk verify` on a GPU: right models, a graph with a stale pointer, and a wrong scale."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from toolkit.attention import Attention
from toolkit.attention.triton import TritonBackend
from toolkit.config import EngineConfig
from toolkit.config.sources import CHECK_MEMORY
from toolkit.models.decoder import Decoder
from toolkit.verify.run import Result, verify

pytestmark = pytest.mark.gpu


def verified(checkpoint, name: str, **settings: object) -> Result:
    given = {"model": str(checkpoint(name)), "device": "cuda", **settings}
    return verify(EngineConfig.from_settings(given), lambda what: None)


def differing(result: Result) -> list[str]:
    return [one.subject for one in result.comparisons if one.verdict == "differs"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {}),
        ("llama3-gqa", {"dtype": "float32"}),
        ("qwen3", {"dtype": "float16"}),
        ("gemma3", {"dtype": "bfloat16"}),
        ("qwen3", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ],
)
def test_right_models_are_ok(checkpoint, name, settings):
    result = verified(checkpoint, name, **settings)
    assert [one.verdict for one in result.comparisons] == ["ok"] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graph_with_a_stale_pointer_is_found(checkpoint, monkeypatch, dtype):
    """A graph reads the cache slots of the step before its capture; other steps read their own."""
    monkeypatch.delenv(CHECK_MEMORY)  # whose NaN would show it at once
    run_layers, copies = Decoder._run_layers, {}
    kept = []  # freed slots would be overwritten by anything, and then written to

    def run(model: Decoder, x: torch.Tensor, batch: Any) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            copies[len(x)] = batch.tables[0].slots.clone()
            kept.append(copies[len(x)])
        tables = (batch.tables[0]._replace(slots=copies[len(x)]),)
        return run_layers(model, x, dataclasses.replace(batch, tables=tables))

    monkeypatch.setattr(Decoder, "_run_layers", run)
    assert differing(verified(checkpoint, "llama3-gqa", dtype=dtype)) == ["graphs"]


def test_wrong_attention_scale_is_found(checkpoint, monkeypatch):
    forward = TritonBackend.forward

    def scaled(backend: Any, layer: Attention, *rest: Any) -> torch.Tensor:
        wrong = copy.copy(layer)
        wrong.shape = dataclasses.replace(layer.shape, scale=1.2 * layer.shape.scale)
        return forward(backend, wrong, *rest)

    monkeypatch.setattr(TritonBackend, "forward", scaled)
    assert differing(verified(checkpoint, "qwen3", dtype="bfloat16")) == ["kernels"]
