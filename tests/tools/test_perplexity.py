"""The perplexity tool, compared with Transformers."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from toolkit import LLM, EngineConfig
from toolkit.kernels import cpu
from toolkit.models.build import load_config
from toolkit.weights.loading.dense import read_dense
from tools.bench.perplexity import perplexity, variants
from tools.bench.rounded_checkpoints import METHODS, read_checkpoint, write_gguf

SETTINGS = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 0.05, "max_model_len": 64}
MODELS = {
    "GPT2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Llama": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
}
WINDOWS = [[(7 * i + i * i * start) % 250 for i in range(40)] for start in (1, 2, 3)] + [[5, 9]]


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> torch.nn.Module:
    return checkpoints.make_model(request.param, MODELS[request.param])


def test_perplexity_is_that_of_transformers(model, tmp_path: Path):
    folder = checkpoints.save(model, tmp_path / "model")
    llm = LLM(str(folder), **SETTINGS)
    assert perplexity(llm, WINDOWS) == pytest.approx(expected(model), rel=1e-4)
    llm.shutdown()


@pytest.mark.skipif(not cpu.available(), reason=cpu.problem() or "")
def test_rounded_weights_change_the_perplexity_a_little(model, tmp_path: Path):
    folder = checkpoints.save(model, tmp_path / "model")
    names = []
    for variant in variants(read_checkpoint(folder), tmp_path, r"n int8|FP8, blocks"):
        llm = LLM(**SETTINGS | {"tokenizer": str(folder)} | variant.settings)
        change = abs(math.log(perplexity(llm, WINDOWS) / expected(model)))
        assert 1e-4 < change < 0.06
        names.append(variant.name)
        llm.shutdown()
    assert names == ["--quantization int8", "FP8, blocks of 128 × 128"]


@pytest.mark.parametrize(
    ("name", "bits", "limit"),
    [
        ("FP8, a scale for each row", 8 + 16 / 128, 0.03),
        ("FP8, blocks of 128 × 128", 8 + 32 / 128**2, 0.03),
        ("int8, a scale for each row", 8 + 16 / 128, 0.01),
        ("int4, zero points, groups of 128", 4 + 20 / 128, 0.12),
        ("int4, zero points, groups of 32", 4 + 20 / 32, 0.10),
    ],
)
def test_tk_reads_weights_near_those_that_were_rounded(model, tmp_path: Path, name, bits, limit):
    """Errors are relative to the weights' norm."""
    given = read_checkpoint(checkpoints.save(model, tmp_path / "model"))
    folder = tmp_path / "rounded"
    assert METHODS[name].write(given, folder) == pytest.approx(bits, rel=0.01)
    packings = load_config(
        folder, EngineConfig.from_settings({"model": str(folder)}).model
    ).packings
    shapes = {f"{module}.weight": tuple(weight.shape) for module, weight in given.linear.items()}
    dense = read_dense(folder, packings, shapes)
    for module, weight in given.linear.items():
        error = (dense[f"{module}.weight"] - weight).norm() / weight.norm()
        assert 1e-3 < error < limit


@pytest.mark.skipif(find_spec("gguf") is None, reason="the package gguf is not installed")
@pytest.mark.parametrize(("kind", "limit"), [("Q8_0", 0.01), ("Q4_1", 0.1)])
def test_gguf_file_is_the_model(model, tmp_path: Path, kind, limit):
    given = read_checkpoint(checkpoints.save(model, tmp_path / "model"))
    write_gguf(given, tmp_path / "model.gguf", kind)
    read = read_checkpoint(tmp_path / "model.gguf")
    for one, other, bound in (
        (given.linear, read.linear, limit),
        (given.others, read.others, 4e-3),
    ):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert (other[name] - tensor).norm() < bound * tensor.norm()


def expected(model: torch.nn.Module) -> float:
    """Return the perplexity from Transformers' loss, which is a mean over a window."""
    total = 0.0
    for window in WINDOWS:
        ids = torch.tensor([window])
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * (len(window) - 1)
    return math.exp(total / sum(len(window) - 1 for window in WINDOWS))
