"""Folders and files of models that are broken or hostile: one clear error, soon."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.models.gguf_models import write_model
from toolkit import LLM, SamplingParams
from toolkit.errors import InvalidRequestError, ToolkitError
from toolkit.inventory.card import describe
from toolkit.inventory.checkpoint import read_folder

Change = Callable[[Path], object]
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LONG = "x" * 3_000_000
WEIGHTS = "model.safetensors"


def fields(name: str, **values: Any) -> Change:
    return lambda folder: checkpoints.edit_json(folder / name, **values)


def config(**values: Any) -> Change:
    return fields("config.json", **values)


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def tensor(name: str) -> Change:
    return lambda folder: save_file(
        load_file(folder / WEIGHTS) | {name: torch.zeros(2)}, folder / WEIGHTS
    )


def deflated(folder: Path) -> None:
    """PyTorch's own file, compressed: a few bytes for any number of zeros."""
    torch.save(load_file(folder / WEIGHTS), folder / "plain.bin")
    (folder / WEIGHTS).unlink()
    with (
        zipfile.ZipFile(folder / "plain.bin") as plain,
        zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as file,
    ):
        for name in plain.namelist():
            file.writestr(name, plain.read(name))
    (folder / "plain.bin").unlink()


def rules(*rules: dict[str, Any]) -> Change:
    return fields("tokenizer.json", normalizer={"type": "Sequence", "normalizers": list(rules)})


def rule(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


HOSTILE: dict[str, tuple[Change, str]] = {
    "compressed weights": (deflated, "pytorch_model.bin cannot be read .*it is compressed"),
    "growing text": (rules(*[rule("a", "a" * 10)] * 8), "normalizer makes over 4096 characters"),
    "growing by a chain": (rules(rule("a", "b" * 99), rule("b", "c" * 99)), "normalizer makes"),
    "growing by expressions": (rules(*[rule(".", "aa", "Regex")] * 13), "normalizer makes"),
    "a large template": (text("chat_template.jinja", "{{ 1 }}" * 80_000), "chat template has 5600"),
    "a large template in JSON": (
        lambda folder: (
            (folder / "chat_template.jinja").unlink(),
            fields("tokenizer_config.json", chat_template="{{ 1 }}" * 80_000)(folder),
        ),
        "chat template has 560000 characters",
    ),
    "a pipe for weights": (pipe(WEIGHTS), "has no weights"),
    "a pipe for config.json": (pipe("config.json"), "has no config.json"),
    "no list of architectures": (config(architectures=7), "architectures are 7, not a list"),
    "a factor that overflows": (
        config(
            rope_parameters={
                "rope_type": "yarn",
                "factor": 1e308,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
            }
        ),
        "config.json cannot be used: .*cannot be computed with",
    ),
    "many layers": (config(num_hidden_layers=10**9), "num_hidden_layers 1000000000: more"),
    "many experts": (config(num_hidden_layers=2000, num_experts=10**6), "num_experts 1000000"),
    "a large hidden size": (config(hidden_size=2**40), "<= 2147483647 - at `hidden_size`"),
    "a large vocabulary": (config(vocab_size=2**31 - 1), "weights take .* GiB"),
    "nested config.json": (text("config.json", DEEP), "config.json cannot be read: .*too deeply"),
    "nested defaults": (text("generation_config.json", DEEP), "generation_config.json .*deeply"),
    "nested tokenizer": (text("tokenizer_config.json", DEEP), "tokenizer .*too deeply"),
    "nested index": (text(f"{WEIGHTS}.index.json", DEEP), "index.json cannot be read.*deeply"),
    "an object as end token": (
        fields("generation_config.json", eos_token_id=[1, {"a": 2}]),
        "generation_config.json cannot be used: eos_token_id: Expected `int`",
    ),
    "an object as config.json's": (config(eos_token_id={}), "config.json cannot be used: eos"),
    "a line break in a name": (tensor("model.\n\x1b[31mx"), r"tensor model\.\\n\\x1b\[31mx that"),
    "a long name": (tensor(LONG), r"tensor xx+\.\.\.xx+ that"),
    "a long index": (
        text(f"{WEIGHTS}.index.json", json.dumps({"weight_map": {"a": LONG}})),
        r"index.json cannot be read: .*too long",
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folder_is_one_clear_error(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    change, says = HOSTILE[name]
    folder = shutil.copytree(checkpoint("llama3-gqa"), tmp_path / "model")
    change(folder)
    require_one_line(folder, says)


GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "many layers": ({"llama__block_count": 10**9}, "block_count 1000000000, and tensors of 2"),
    "a large size": ({"llama__feed_forward_length": 2**32 - 1}, "is not a size"),
    "a line break in a name": ({"extra": {"a\nb": torch.zeros(2)}}, r"a\\nb"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", GGUF)
def test_hostile_gguf_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    more, says = GGUF[name]
    model = checkpoints.make_reference("llama3-gqa")
    require_one_line(write_model(tmp_path / "model.gguf", model, "llama", **more), says)


def require_one_line(model: Path, says: str) -> None:
    """Require the error of loading a model, and that `tk show` ends, too."""
    with pytest.raises(ToolkitError, match=says) as caught:
        LLM(str(model), device="cpu")
    assert len(caught.value.message) < 2000
    assert caught.value.message.isprintable()
    with suppress(ToolkitError):
        describe(read_folder(model, "model"))


def test_normal_rules_of_a_tokenizer_are_read(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("llama3-gqa"), tmp_path / "model")
    many = [rule(letter, f"{letter.upper()}{letter.upper()}") for letter in "abcdefghijklmnop"]
    rules(*many, {"type": "NFKC"}, rule(r"\s+", " ", "Regex"), rule(" ", "▁"))(folder)
    llm = LLM(str(folder), device="cpu")
    assert llm.tokenize("ab  c") == llm.tokenize("AABB▁CC")


def test_a_text_on_which_the_tokenizer_gives_up_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The library panics with an error that is not derived from Exception."""
    folder = shutil.copytree(checkpoint("llama3-gqa"), tmp_path / "model")
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated"}
    parts = [split | {"invert": False}, {"type": "ByteLevel", "use_regex": False}]
    parts[1] |= {"add_prefix_space": False, "trim_offsets": True}
    fields("tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": parts})(folder)
    llm = LLM(str(folder), device="cpu")
    params = SamplingParams(max_tokens=2)
    with pytest.raises(InvalidRequestError, match=r"cannot read this text: .*retry-limit"):
        llm.generate("a" * 40 + "c", params, use_tqdm=False)
    assert llm.generate("ab", params, use_tqdm=False)[0].outputs[0].token_ids
