"""Ids and texts compared with AutoTokenizer, for small tokenizers with the files of real models."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from tests import checkpoints
from toolkit.errors import CheckpointError, InvalidRequestError
from toolkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = [
    "The sea is wide — naïve text, ☃ and 👩‍👩‍👧 families. It's 2024, isn't it? " * 3,
    "日本語 テキスト العربية עברית 12345 x  y\n\n\tdef f(x):\r\n    return x  # don't",
    "user assistant system hello Hello HELLO [INST] [/INST] ééé e\u0301e\u0301",
]
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_WORDS = QWEN_WORDS.replace(r"\p{N}| ", r"\p{N}{1,3}| ")


def save(folder: Path, backend: Backend, config: dict, model: dict, **files: dict) -> Path:
    """Write the files of a published model."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(model))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def train_bytes(*special: str) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(WORDS, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return backend


def split_by(pattern: str) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )


def gpt2(folder: Path) -> Path:
    """A tokenizer whose files name no special tokens; its class does."""
    backend = train_bytes("<|endoftext|>")
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return save(folder, backend, {"model_max_length": 1024}, {"model_type": "gpt2"})


def qwen(folder: Path, model_type: str) -> Path:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = train_bytes(*special)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split_by(QWEN_WORDS)
    backend.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token in ("<tool_call>", "</think>")]
    )
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": declarations(backend),
        "additional_special_tokens": special[1:],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "split_special_tokens": False,
    }
    return save(folder, backend, config, {"model_type": model_type})


def declarations(backend: Backend) -> dict:
    keys = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {
        str(id): {key: getattr(token, key) for key in keys}
        for id, token in backend.get_added_tokens_decoder().items()
    }


def llama3(folder: Path, tokenizer_class: str) -> Path:
    backend = train_bytes(
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"
    )
    backend.pre_tokenizer = split_by(LLAMA_WORDS)
    bos = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
                special_tokens=[("<|begin_of_text|>", bos)],
            ),
        ]
    )
    config = {
        "tokenizer_class": tokenizer_class,
        "added_tokens_decoder": declarations(backend),
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True,
    }
    return save(folder, backend, config, {"model_type": "llama"})


def llama2(
    folder: Path, model_type: str, special_tokens_map: bool = False, **flags: object
) -> Path:
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for character in ["▁", *"abcdefghijklmnopqrstuvwxyz[]/INST.,'0123456789"]:
        vocab.setdefault(character, len(vocab))
    merges = []
    for word in ("▁the", "▁sea", "▁is", "▁[", "INST", "▁▁", "▁user", "hello", "▁hello", "12"):
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if "".join(pair) not in vocab:
                vocab["".join(pair)] = len(vocab)
                merges.append(pair)
    backend = Backend(
        models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    flagged = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        **flags,
    }
    if special_tokens_map:
        files = {
            "special_tokens_map": {
                name: {"content": text, **flagged} for name, text in named.items()
            }
        }
        return save(folder, backend, config, {"model_type": model_type}, **files)
    config |= {
        name: {"__type": "AddedToken", "content": text, **flagged} for name, text in named.items()
    }
    return save(folder, backend, config, {"model_type": model_type})


def word_pieces(folder: Path) -> Path:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        WORDS, trainers.WordPieceTrainer(vocab_size=220, special_tokens=special)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = dict(
        zip(
            ["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], special, strict=True
        )
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    return save(folder, backend, config, {"model_type": "gpt2"})


def late_specials(folder: Path) -> Path:
    """A tokenizer with special tokens, some of them new, that only the other files name."""
    backend = train_bytes("<|endoftext|>")
    return save(
        folder,
        backend,
        {"tokenizer_class": "PreTrainedTokenizerFast", "image_token": "<image>"},
        {"model_type": "llama"},
        special_tokens_map={
            "eos_token": "hello",
            "pad_token": "<pad>",
            "additional_special_tokens": ["<x>"],
        },
        added_tokens={"<plain>": 420},
    )


def split_specials(folder: Path) -> Path:
    """A tokenizer that reads special tokens in a text as ordinary text."""
    made = llama3(folder, "PreTrainedTokenizerFast")
    checkpoints.edit_json(made / "tokenizer_config.json", split_special_tokens=True)
    return made


KINDS: dict[str, Callable[[Path], Path]] = {
    "gpt2": gpt2,
    "qwen2": lambda folder: qwen(folder, "qwen2"),
    "qwen3": lambda folder: qwen(folder, "qwen3"),
    "llama3": lambda folder: llama3(folder, "PreTrainedTokenizerFast"),
    "llama3-named-llama": lambda folder: llama3(folder, "LlamaTokenizerFast"),
    "llama2": lambda folder: llama2(folder, "llama", legacy=False),
    "llama2-legacy": lambda folder: llama2(folder, "llama", legacy=True),
    "llama2-no-prefix": lambda folder: llama2(folder, "llama", add_prefix_space=False),
    "llama2-special-tokens-map": lambda folder: llama2(folder, "llama", special_tokens_map=True),
    "mistral": lambda folder: llama2(folder, "mistral", legacy=True),
    "word-pieces": word_pieces,
    "late-specials": late_specials,
    "split-specials": split_specials,
}

PIECES = [
    *"aetx.,!?'\"[]/ \t\n\r\0\x07\x1b\x7f\u200b\u200f\u202e\ufeff\ufffd\u2581",
    *["the", " sea", "The", "hello", " Hello", "  ", "\n\n", "\r\n", "12345", "don't", "[INST]"],
    *[" 2024", "Ġ", "é", "e\u0301", "ﬁ", "Å", "日本", "العربية", "עברית", "☃", "👩‍👩‍👧"],
    *["🏴󠁧󠁢󠁥󠁮󠁧󠁿", "𝕏", "\U0010ffff", "ß", "İ", "<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    *["<tool_call>", "</think>", "<|begin_of_text|>", "<|eot_id|>", "<s>", "</s>", "<unk>"],
    *["<0x41>", "[CLS]", "[MASK]", "##ing", "<image>", "<pad>", "<x>", "<plain>", "<|im"],
]  # fmt: skip


def texts() -> list[str]:
    choose = random.Random(0)
    alone = ["", *PIECES, *WORDS]
    return alone + ["".join(choose.choices(PIECES, k=choose.randint(2, 14))) for _ in range(400)]


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory) -> tuple[str, PreTrainedTokenizerBase, Tokenizer]:
    from transformers import AutoTokenizer

    folder = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    return request.param, AutoTokenizer.from_pretrained(folder), Tokenizer(folder)


class TestParity:
    @pytest.mark.parametrize("special", [True, False])
    def test_encode_equals_transformers(self, both, special):
        _, theirs, ours = both
        for text in texts():
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected, repr(text)

    @pytest.mark.parametrize("skip", [True, False])
    def test_decode_equals_transformers(self, both, skip):
        """Transformers drops the space before the first word; tk keeps it."""
        name, theirs, ours = both
        for text in texts():
            ids = theirs.encode(text)
            expected = theirs.decode(ids, skip_special_tokens=skip)
            found = ours.decode(ids, skip_special_tokens=skip)
            first = "" if not name.startswith(("llama2", "mistral", "word")) else " "
            assert found in (expected, first + expected), repr(text)

    def test_token_properties_equal_transformers(self, both):
        _, theirs, ours = both
        special = {id for id, token in theirs.added_tokens_decoder.items() if token.special}
        special |= set(theirs.all_special_ids)
        assert ours.size == len(theirs)
        assert ours.eos_token_id == theirs.eos_token_id
        assert {id for id in range(ours.size + 5) if ours.is_special(id)} == special
        assert ours._files.special_tokens == theirs.special_tokens_map
        assert not ours.has_chat_template

    def test_tokenizers_have_words_and_special_tokens(self, both):
        """Without them, equal results would prove little."""
        name, theirs, ours = both
        assert len(ours.encode("the sea is the sea")) < 18
        if name not in ("word-pieces", "split-specials"):
            assert theirs.eos_token_id in ours.encode(f"a{theirs.eos_token}b")


def test_vocabulary_and_merges_are_read_by_transformers(tmp_path):
    from transformers import AutoTokenizer

    made = gpt2(tmp_path)
    vocabulary = json.loads((made / "tokenizer.json").read_text())["model"]
    (made / "tokenizer.json").unlink()
    (made / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in vocabulary["merges"])
    (made / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    theirs, ours = AutoTokenizer.from_pretrained(made), Tokenizer(made)
    assert (ours.size, ours.eos_token_id) == (len(theirs), theirs.eos_token_id)
    for text in texts()[:200]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_encode_neither_truncates_nor_pads(tmp_path):
    backend = train_bytes("<|endoftext|>")
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    folder = save(tmp_path, backend, {"tokenizer_class": "PreTrainedTokenizerFast"}, {})
    assert len(Tokenizer(folder).encode("q" * 50)) == 50
    assert len(Tokenizer(folder).encode("q")) == 1


def test_half_a_surrogate_pair_is_an_invalid_request(tmp_path):
    with pytest.raises(InvalidRequestError, match="UTF-16"):
        Tokenizer(gpt2(tmp_path)).encode("a\ud800b")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("special_tokens_map.json", '{"eos_token": {}}'),
    ],
)
def test_unusable_file_is_an_error_that_names_the_folder(tmp_path, name, content):
    folder = gpt2(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(folder)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message


def test_front_end_imports_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "import toolkit.serving.lifecycle, toolkit.serving.api_worker, toolkit.engine.async_llm\n"
        "from toolkit.demo import MODEL_DIR\n"
        "from toolkit.text.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(MODEL_DIR)\n"
        "text = tokenizer.render_chat([{'role': 'user', 'content': 'Hello there'}])\n"
        "ids = tokenizer.encode(text, add_special_tokens=False)\n"
        "print(len(tokenizer.encode(text)) > 3, tokenizer.decode(ids))\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    result, modules = done.stdout.splitlines()
    assert result.split(maxsplit=1) == ["True", "hello there"]
    assert modules == "[]"
