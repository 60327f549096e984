"""Quantized GGUF tensors are read in parts, and a model in a file answers as Transformers does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.gguf_writer import Stored, plain, q8_0, write
from tests.models import gguf_models
from tests.models.architectures import ARCHITECTURES
from toolkit import LLM
from toolkit.distributed import Shard
from toolkit.errors import CheckpointError, ConfigError
from toolkit.kernels.switch import only_pytorch
from toolkit.weights.gguf.decode import dequantize
from toolkit.weights.gguf.reader import read_header, slot_of
from toolkit.weights.loading import safetensors
from toolkit.weights.loading.safetensors import read_buffered, read_mapped
from toolkit.weights.slots import Slot

METADATA = {
    "general.architecture": "llama",
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}
ROWS, COLUMNS, HEAD = 32, 96, 8


def decoded(stored: Stored) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8)
    return dequantize("Q8_0", raw.view(stored.shape[0], -1), stored.shape[1])


@pytest.fixture(scope="module")
def weight() -> Stored:
    torch.manual_seed(0)
    return q8_0(torch.randn(ROWS, COLUMNS))


@pytest.fixture(scope="module")
def file(weight: Stored, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {
        "blk.0.attn_q.weight": weight,
        "blk.0.attn_q.bias": plain(torch.arange(32.0)),
        "blk.0.ffn_down.weight": weight,
    }
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", METADATA, tensors)


@pytest.mark.parametrize(
    "read", [read_mapped, partial(read_buffered, pinned=False)], ids=["mapped", "buffered"]
)
@pytest.mark.parametrize("chunk", [100, 1000, 10**6])
@pytest.mark.parametrize("rows", [Shard(ROWS, 0, ROWS), Shard(ROWS, 16, 8)], ids=str)
@pytest.mark.parametrize("columns", [Shard(COLUMNS, 0, COLUMNS), Shard(COLUMNS, 32, 64)], ids=str)
def test_any_rows_and_whole_blocks_are_read(file, weight, read, chunk, rows, columns, monkeypatch):
    monkeypatch.setattr(safetensors, "CHUNK", chunk)
    monkeypatch.setattr(safetensors, "MAPPED_CHUNK", chunk)
    stored = {tensor.name: tensor for tensor in read_header(file)}
    tensor = stored["model.layers.0.mlp.down_proj.weight"].part((rows, columns))
    raw = torch.zeros(rows.count, columns.count // 32 * 34, dtype=torch.uint8)
    target = torch.zeros(rows.count, columns.count)
    read([(tensor, Slot(raw)), (tensor, slot_of(tensor, Slot(target)))])
    expected = decoded(weight)[rows.begin : rows.begin + rows.count]
    expected = expected[:, columns.begin : columns.begin + columns.count]
    torch.testing.assert_close(dequantize("Q8_0", raw, columns.count), expected, rtol=0, atol=0)
    torch.testing.assert_close(target, expected, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [Shard(ROWS, 0, ROWS), Shard(ROWS, 8, 16)], ids=str)
def test_rows_of_queries_are_put_in_the_original_order(file, weight, rows):
    part = slice(rows.begin, rows.begin + rows.count)
    halves = [0, 2, 4, 6, 1, 3, 5, 7]  # of the rows of a head
    stored = {tensor.name: tensor for tensor in read_header(file)}
    for name, whole in (("weight", decoded(weight)), ("bias", torch.arange(32.0))):
        expected = whole.unflatten(0, (-1, HEAD))[:, halves].flatten(0, 1)[part]
        region = (rows, *(Shard(size, 0, size) for size in whole.shape[1:]))
        tensor = stored[f"model.layers.0.self_attn.q_proj.{name}"].part(region)
        target = torch.zeros(expected.shape)
        read_mapped([(tensor, slot_of(tensor, Slot(target)))])
        torch.testing.assert_close(target, expected, rtol=0, atol=0)


@pytest.mark.parametrize("columns", [Shard(COLUMNS, 0, 48), Shard(COLUMNS, 40, 8)], ids=str)
def test_blocks_that_a_shard_cuts_are_read_whole(file, weight, columns):
    (stored,) = [one for one in read_header(file) if "down_proj" in one.name]
    tensor = stored.part((Shard(ROWS, 16, 8), columns))
    target = torch.zeros(8, columns.count)
    read_mapped([(tensor, slot_of(tensor, Slot(target)))])
    expected = decoded(weight)[16:24, columns.begin : columns.begin + columns.count]
    torch.testing.assert_close(target, expected, rtol=0, atol=0)


def test_types_are_listed_by_original_names(file):
    assert {tensor.name: tensor.kind for tensor in read_header(file)} == {
        "model.layers.0.self_attn.q_proj.weight": "Q8_0",
        "model.layers.0.self_attn.q_proj.bias": "F32",
        "model.layers.0.mlp.down_proj.weight": "Q8_0",
    }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "unsupported architecture 'mamba'. Supported in GGUF"),
        ({"llama.expert_count": 8}, "no metadata llama.expert_used_count"),
        ({"llama.novelty": 1.5}, "has llama.novelty: 1.5, which tk does not know"),
        ({"llama.block_count": "two"}, "which is not a size"),
        ({"llama.block_count": 3}, "block_count 3, and tensors of 2 layers"),
        ({"llama.block_count": 2**31}, "which is not a size"),
        ({"llama.embedding_length": 32}, r"it has \[262, 64\]"),
        ({"llama.feed_forward_length": 2**30}, r"it has \[64, 96\]"),
        ({"llama.attention.head_count": 0}, "which is not a size"),
        ({"llama.attention.head_count_kv": 2**20}, r"blk.0.attn_k.weight the shape"),
        ({"llama.attention.head_count": [4, 2]}, "for each layer"),
        ({"llama.attention.value_length": 8}, "values of 8"),
        ({"llama.rope.scaling.type": "odd", "llama.rope.scaling.factor": 2.0}, "'odd'"),
        ({"llama.context_length": None}, "no metadata llama.context_length"),
    ],
)
def test_wrong_metadata_is_one_clear_error(tmp_path, model, metadata, message):
    given = gguf_models.metadata_of(model, "llama") | metadata
    given = {key: value for key, value in given.items() if value is not None}
    tensors = gguf_models.tensors_of(model, "llama")
    file = write(
        tmp_path / "m.gguf", given, {name: plain(tensor) for name, tensor in tensors.items()}
    )
    with pytest.raises((CheckpointError, ConfigError), match=message):
        LLM(str(file), device="cpu")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """A model whose matrices are exact in Q8_0."""
    settings = ARCHITECTURES["llama3-gqa"][1] | {"hidden_size": 64, "intermediate_size": 96}
    found = checkpoints.make_model("Llama", settings)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() == 2:
                parameter.copy_(decoded(q8_0(parameter)))
    return found


def test_quantized_model_in_a_file_answers_as_the_original(tmp_path, model):
    tokenizer = checkpoints.make_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(range(260))
    file = gguf_models.write_model(
        tmp_path / "m.gguf",
        model,
        "llama",
        quantized=True,
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__pre="gpt-2",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[1] * 256 + [3] * 4,
        tokenizer__ggml__merges=[],
        tokenizer__ggml__eos_token_id=256,
        tokenizer__chat_template=tokenizer.chat_template,
        general__sampling__temp=0.0,
    )
    with only_pytorch("dequantized"):  # the kernels round x to 8 bits
        llm = LLM(str(file), device="cpu", max_num_seqs=2)
    messages = [{"role": "user", "content": "Hé?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    (answer,) = llm.chat(messages)
    assert answer.prompt_token_ids == prompt
    expected = checkpoints.greedy(model, prompt, 16)
    if 256 in expected:
        expected = expected[: expected.index(256) + 1]
    assert list(answer.outputs[0].token_ids) == expected[: len(answer.outputs[0].token_ids)]
    assert checkpoints.generate(llm, [prompt], max_tokens=24)[0].outputs[
        0
    ].token_ids == checkpoints.greedy(model, prompt, 24)
