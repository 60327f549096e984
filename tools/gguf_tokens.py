"""Write small GGUF files with a vocabulary, and llama.cpp's tokens of texts with them.

pip install --target /tmp/gguf gguf llama-cpp-python
PYTHONPATH=/tmp/gguf python -m tools.gguf_tokens tests/text/gguf_files
"""

import argparse
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

TEXTS = (
    " Hello  world,\n\n it's  I'LL we've 12345 67.8!?\t\tx",
    "naïve café Ångström ½ ² ٣٤٥ Ⅷ",
    "日本語のテキスト。中文,汉字 한국어 hello世界",
    "def f(x):\r\n    return x**2  # comment\r\n\r\n\tpass",
    "CamelCaseWORDSand123abc $100 €50 <=> ...--- `a|b`",
    "<s>one<|end|> two</s>  <|end|>three <use",
    "emoji 😀👩\u200d👩 end \u00a0\u2003wide \u200b ",
    "Привет, Мир! ΚΑΛΗΜΕΡΑ שלום",
    "   \n \n  ",
    "a",
    "e\u0301o हिन्दी ไทย",
)
PRE = (
    *("gpt-2", "llama-bpe", "qwen2", "qwen35", "starcoder", "smollm", "falcon", "default"),
    *("tekken", "gpt-4o", "seed-coder", "olmo", "command-r", "glm4", "hunyuan", "stablelm2"),
)
SPECIAL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|end|>": 3, "<user>": 4}  # texts and their types
SIZE = 700


def train(*, is_byte_level: bool) -> Any:
    """Return a BPE tokenizer whose merges cross words, so that it shows how text is split."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    alphabet = []
    if is_byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=alphabet, show_progress=False, max_token_length=6
    )
    texts = [re.sub("|".join(map(re.escape, SPECIAL)), "", text) for text in TEXTS]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_byte_level(path: Path, pre: str) -> None:
    from gguf import GGUFWriter

    model = json.loads(train(is_byte_level=True).to_str())["model"]
    writer = GGUFWriter(path, "llama")
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *SPECIAL])
    writer.add_token_types([1] * len(tokens) + list(SPECIAL.values()))
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    finish(writer, len(tokens))


def write_sentencepiece(path: Path, *, has_prefix: bool) -> None:
    from gguf import GGUFWriter

    model = json.loads(train(is_byte_level=False).to_str())["model"]
    writer = GGUFWriter(path, "llama")
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = [token for token in tokens if not set(token) & set("한😀ไ")]  # they become bytes
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*of_bytes, *tokens, *SPECIAL])
    writer.add_token_scores(
        [0.0] * 256 + [-float(i) for i in range(len(tokens))] + [-1000.0] * len(SPECIAL)
    )
    writer.add_token_types([6] * 256 + [1] * len(tokens) + list(SPECIAL.values()))
    writer.add_add_space_prefix(has_prefix)
    finish(writer, 256 + len(tokens))


def finish(writer: Any, first_special: int) -> None:
    unknown, begin, end, turn, _ = range(first_special, first_special + len(SPECIAL))
    writer.add_context_length(64)
    writer.add_unk_token_id(unknown)
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(turn)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}<|end|>")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokens_of(path: Path) -> list[list[int]]:
    """Return llama.cpp's tokens of each text, with special tokens and what begins a text."""
    from llama_cpp import Llama

    model = Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    found = {}
    for pre in PRE:
        write_byte_level(folder / "bpe.gguf", pre)
        found[pre] = tokens_of(folder / "bpe.gguf")
    for has_prefix in (False, True):
        file = folder / "sentencepiece.gguf"
        write_sentencepiece(file, has_prefix=has_prefix)
        found["prefix" if has_prefix else "no prefix"] = tokens_of(file)
    content = {
        "writers": [f"{name} {version(name)}" for name in ("gguf", "llama_cpp_python")],
        "texts": TEXTS,
        "tokens": found,
    }
    (folder / "tokens.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
