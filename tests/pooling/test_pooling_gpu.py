"""Encoders and pooling decoders give the same vectors on a GPU as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

PROMPTS = [[(7 * i + n) % 250 for i in range(n)] for n in (1, 2, 5, 16, 17, 33, 70, 64, 128)] * 5


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    folder = tmp_path_factory.mktemp("encoder")
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def embed(folder: Path, **settings: object) -> np.ndarray:
    llm = LLM(str(folder), max_num_batched_tokens=256, **settings)
    found = np.array([one.outputs.embedding for one in llm.embed(PROMPTS)])
    llm.shutdown()
    return found


@pytest.mark.parametrize(
    ("dtype", "least"), [("float32", 0.9999), ("bfloat16", 0.999), ("float16", 0.9999)]
)
def test_encoder(dtype: str, least: float, encoder: Path):
    expected = embed(encoder, device="cpu", dtype="float32")
    cosines = (embed(encoder, device="cuda", dtype=dtype) * expected).sum(axis=1)
    assert cosines.min() > least


def test_encoder_with_fp8_weights(encoder: Path):
    expected = embed(encoder, device="cpu", dtype="float32")
    cosines = (embed(encoder, device="cuda", dtype="bfloat16", quantization="fp8") * expected).sum(
        axis=1
    )
    assert cosines.min() > 0.99


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_decoder(pooling: str, checkpoint: Callable[[str], Path]):
    folder = checkpoint("llama3-gqa")
    expected = embed(folder, device="cpu", pooling=pooling)
    cosines = (embed(folder, device="cuda", dtype="float32", pooling=pooling) * expected).sum(
        axis=1
    )
    assert cosines.min() > 0.9999
