"""Folders of CTranslate2 appear as the original Whisper; broken ones have one clear error."""

from __future__ import annotations

import json
import struct
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from tests import ctranslate2_writer as writer
from toolkit.config import ModelConfig
from toolkit.ctranslate2.file import is_ctranslate2
from toolkit.distributed import Shard
from toolkit.errors import CheckpointError, ConfigError
from toolkit.gguf.folder import read_file
from toolkit.inventory.checkpoint import read_folder
from toolkit.models.build import load_config
from toolkit.models.config.overrides import read_config
from toolkit.weights.loading.loader import stored_tensors
from toolkit.weights.loading.safetensors import read_buffered, read_mapped
from toolkit.weights.slots import Slot

TENSORS = writer.whisper_tensors()
NEAR = {torch.int8: 0.02, torch.int16: 0.003, torch.float16: 2e-3}


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize(
    "read", [read_mapped, partial(read_buffered, pinned=False)], ids=["mapped", "buffered"]
)
def test_tensors_have_their_original_names_and_values(tmp_path, kind, read):
    stored = stored_tensors(writer.write(tmp_path, TENSORS, kind=kind))
    assert sorted(one.name for one in stored) == sorted(TENSORS)
    found = {one.name: torch.zeros(one.shape) for one in stored}
    read([(one, one.slot_for(Slot(found[one.name]))) for one in stored], threading.Event())
    for name, expected in TENSORS.items():
        bound = NEAR.get(kind, 0.0)
        torch.testing.assert_close(found[name], expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("rows", [Shard(8, 0, 8), Shard(8, 2, 4)], ids=str)
@pytest.mark.parametrize("columns", [Shard(8, 0, 8), Shard(8, 4, 4)], ids=str)
def test_parts_of_a_joined_projection_are_read(tmp_path, kind, rows, columns):
    stored = {one.name: one for one in stored_tensors(writer.write(tmp_path, TENSORS, kind=kind))}
    name = "model.decoder.layers.1.encoder_attn.v_proj.weight"
    part = stored[name].part((rows, columns))
    target = torch.zeros(rows.count, columns.count)
    read_mapped([(part, part.slot_for(Slot(target)))])
    expected = TENSORS[name][rows.begin : rows.begin + rows.count]
    expected = expected[:, columns.begin : columns.begin + columns.count]
    torch.testing.assert_close(target, expected, rtol=0, atol=NEAR.get(kind, 0.0))


def test_configuration_is_that_of_transformers(tmp_path):
    folder = writer.write(tmp_path, TENSORS, kind=torch.float16)
    size = len(writer.VOCABULARY)
    expected = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": writer.WIDTH,
        "num_mel_bins": writer.BINS,
        "vocab_size": size,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": writer.HIDDEN,
        "decoder_ffn_dim": writer.HIDDEN,
        "max_source_positions": 6,
        "max_target_positions": 7,
        "tie_word_embeddings": True,
        "dtype": "float16",
        "eos_token_id": 20,
        "decoder_start_token_id": 21,
    }
    assert read_config(folder).items() >= expected.items()
    checkpoint = read_folder(folder, "tiny")
    assert checkpoint.has_weights
    assert checkpoint.stored_type == "float16"
    assert {one.name for one in checkpoint.tensors} == set(TENSORS)


def test_generation_settings_are_derived(tmp_path):
    made = json.loads(read_file(writer.write(tmp_path, TENSORS), "generation_config.json") or "")
    assert made["suppress_tokens"] == [1, 2]
    assert made["begin_suppress_tokens"] == [3]
    assert made["alignment_heads"] == [[1, 0]]
    assert made["no_timestamps_token_id"] == 29
    assert made["prev_sot_token_id"] == 27
    assert not made["is_multilingual"]
    assert "lang_to_id" not in made


def test_languages_and_tasks_of_many_tokens_are_listed(tmp_path):
    names = [*(f"text {i}" for i in range(51865 - len(writer.VOCABULARY))), *writer.VOCABULARY]
    tokens = {"model.decoder.embed_tokens.weight": torch.zeros(51865, writer.WIDTH)}
    writer.write(tmp_path, TENSORS | tokens)
    (tmp_path / "vocabulary.json").unlink()
    (tmp_path / "vocabulary.txt").write_text("\n".join(names) + "\n")
    made = json.loads(read_file(tmp_path, "generation_config.json") or "")
    assert made["is_multilingual"]
    assert made["lang_to_id"] == {"<|en|>": 51855, "<|de|>": 51856}
    assert made["task_to_id"] == {"transcribe": 51858, "translate": 51857}


def test_equal_tensors_are_read_by_each_name(tmp_path):
    folder = writer.write(tmp_path, TENSORS)
    same = {"encoder/layer_norm/beta": torch.ones(writer.WIDTH)}
    aliases = {"decoder/layer_norm/beta": "encoder/layer_norm/beta"}
    (folder / "model.bin").write_bytes(writer.serialize(same, aliases))
    stored = stored_tensors(folder)
    assert [one.name for one in stored] == [
        "model.encoder.layer_norm.bias",
        "model.decoder.layer_norm.bias",
    ]
    assert stored[0].start == stored[1].start


def test_output_projection_of_its_own_is_read(tmp_path):
    head = {"model.decoder.projection.weight": torch.ones(len(writer.VOCABULARY), writer.WIDTH)}
    folder = writer.write(tmp_path, TENSORS | head)
    content = (folder / "model.bin").read_bytes()
    alias = writer.text("decoder/projection/weight") + writer.text("decoder/embeddings/weight")
    (folder / "model.bin").write_bytes(content.replace(struct.pack("<I", 1) + alias, bytes(4)))
    assert "proj_out.weight" in {one.name for one in stored_tensors(folder)}
    assert read_config(folder)["tie_word_embeddings"] is False


NUMBER = torch.tensor(1, dtype=torch.int16)
BROKEN = {
    "version": (writer.serialize({}, {}, version=3), "has version 3 of CTranslate2's format"),
    "layout": (writer.serialize({}, {}, layout="TransformerSpec"), "the layout TransformerSpec"),
    "unknown": (writer.serialize({"encoder/x/weight": torch.ones(2)}, {}), "encoder/x/weight"),
    "alias": (writer.serialize({}, {"a": "b"}), "the name a for the variable b"),
    "end": (writer.serialize({}, {}) + b"x", "1 bytes after its end"),
    "rows": (
        writer.serialize({"encoder/layer_0/self_attention/linear_0/bias": torch.ones(4)}, {}),
        "4 rows for 3 projections",
    ),
    "no scales": (
        writer.serialize({"encoder/conv1/weight": torch.ones(2, 2, 3, dtype=torch.int8)}, {}),
        "I8 without scales",
    ),
    "wrong scales": (
        writer.serialize(
            {
                "encoder/conv1/weight": torch.ones(2, 2, 3, dtype=torch.int8),
                "encoder/conv1/weight_scale": torch.ones(3),
            },
            {},
        ),
        r"with scales \[3\] in F32",
    ),
    "size": (
        writer.serialize({"a": NUMBER}, {}).replace(b"\x02\x02\0\0\0", b"\x02\xff\xff\xff\xff"),
        "says that a has 4294967295 bytes",
    ),
    "count": (
        struct.pack("<I", 6) + writer.text("WhisperSpec") + struct.pack("<II", 3, 2**32 - 1),
        "4294967295 variables",
    ),
    "type": (
        writer.serialize({"a": NUMBER}, {}).replace(b"\x02\x02\0\0\0", b"\x09\x02\0\0\0"),
        "a has the unsupported type 9",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_one_clear_error(tmp_path, case):
    content, problem = BROKEN[case]
    writer.write(tmp_path, TENSORS)
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=problem):
        stored_tensors(tmp_path)


def test_file_cut_anywhere_is_one_clear_error(tmp_path):
    content = (writer.write(tmp_path, TENSORS) / "model.bin").read_bytes()
    assert is_ctranslate2(tmp_path)
    for length in [*range(20, 200), *range(200, len(content), 997)]:
        (tmp_path / "model.bin").write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"decoder/activation": 0}, "decoder/activation 0"),
        ({"encoder/num_heads": 3}, "3 heads for 8"),
        ({"encoder/num_heads": -1}, "-1 heads"),
    ],
)
def test_decoder_of_another_kind_is_refused(tmp_path, numbers, problem):
    with pytest.raises(CheckpointError, match=problem):
        read_config(writer.write(tmp_path, TENSORS, numbers=numbers))


def test_layers_with_gaps_are_refused(tmp_path):
    tensors = {name.replace("layers.1", "layers.7"): one for name, one in TENSORS.items()}
    with pytest.raises(CheckpointError, match="lacks some layers of the encoder"):
        read_config(writer.write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{}", "must be a list"), ("[", "cannot be read"), ('["a"]', r"lacks <\|endoftext\|>")],
)
def test_wrong_vocabulary_is_one_clear_error(tmp_path, content, problem):
    writer.write(tmp_path, TENSORS)
    (tmp_path / "vocabulary.json").write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        read_config(tmp_path)


def test_other_files_are_not_taken_for_ctranslate2(tmp_path: Path):
    assert not is_ctranslate2(tmp_path)
    for content in (b"", b"\x06\0\0", b"PK\x03\x04" + bytes(200)):
        (tmp_path / "model.bin").write_bytes(content)
        assert not is_ctranslate2(tmp_path)


def test_folder_is_not_run_by_transformers(tmp_path):
    folder = writer.write(tmp_path, TENSORS)
    with pytest.raises(ConfigError, match=r"cannot run .*, CTranslate2's"):
        load_config(folder, ModelConfig(model_impl="transformers"))
