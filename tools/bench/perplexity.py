"""Measure perplexity by weight format on a CPU: `python -m tools.bench.perplexity [MODEL TEXT ...]`

MODEL is a folder or a GGUF file, whose weights are dequantized to bfloat16 first; TEXT are UTF-8
files, one text in this order. Without both: the demo model, and the chats of its held-out questions
(without stories). The text is cut into windows, and each token but the first of a window counts.
Weights are rounded to nearest and written as real checkpoints, which tk then loads. Only the linear
layers of the decoder are rounded; --quantization also rounds the output head to int8. With
`pip install gguf`, GGUF files are measured too. CPU kernels round inputs of integer weights to 8
bits, with a scale for 32 numbers, or for each token under --quantization int8; FP8 weights are
expanded, and their inputs are not rounded."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolkit import LLM, SamplingParams
from toolkit.demo import MODEL_DIR
from toolkit.text.tokenizer import load_tokenizer
from toolkit.weights.layout import while_loading
from tools.bench.rounded_checkpoints import (
    GGUF_COLUMNS,
    GGUF_TYPES,
    METHODS,
    Checkpoint,
    read_checkpoint,
    write_gguf,
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A model to measure."""

    name: str
    bits: float  # per weight of the linear layers, with scales
    settings: dict[str, Any]  # of LLM


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", type=Path, default=MODEL_DIR)
    parser.add_argument("texts", metavar="TEXT", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="of the text [8192]")
    parser.add_argument("--window", type=int, default=511, help="tokens [511]")
    parser.add_argument("--formats", default="", metavar="REGEX", help="of the names [all]")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--num-threads", type=int, help="[one for each core]")
    args = parser.parse_args()
    if not args.texts and args.model != MODEL_DIR:
        parser.error("MODEL needs at least one TEXT")
    text = "".join(path.read_text(encoding="utf-8") for path in args.texts) or demo_text()
    tokenizer = load_tokenizer(args.model)
    assert tokenizer is not None, f"{args.model} has no tokenizer"
    token_ids = tokenizer.encode(text, add_special_tokens=False)[: args.tokens]
    windows = [token_ids[at : at + args.window] for at in range(0, len(token_ids), args.window)]
    common = {
        "device": "cpu",
        "dtype": args.dtype,
        "num_threads": args.num_threads,
        "tokenizer": str(args.model),
        "max_model_len": args.window + 1,
        "kv_cache_memory": 0.25,
    }
    checkpoint = read_checkpoint(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        for variant in variants(checkpoint, Path(scratch), args.formats):
            llm = LLM(**common | variant.settings)
            row = {
                "format": variant.name,
                "bits_per_weight": round(variant.bits, 3),
                "perplexity": round(perplexity(llm, windows), 4),
                "tokens": len(token_ids),
            }
            llm.shutdown()
            print(json.dumps(row, ensure_ascii=False), flush=True)


def demo_text() -> str:
    """Return the chats of the demo model's held-out questions, without stories, in one text."""
    from transformers import AutoTokenizer

    from tools.demo.corpus import STORIES, held_out

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    chats = [
        [*question.before, ("user", question.text), ("assistant", question.answer)]
        for question in held_out()
        if question.category != STORIES
    ]
    return "".join(
        tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in chat], tokenize=False
        )
        for chat in chats
    )


def perplexity(llm: LLM, windows: Sequence[list[int]]) -> float:
    """Return exp of the mean negative log-probability of all tokens but the first of a window."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": window} for window in windows]
    results = llm.generate(prompts, params, use_tqdm=False)
    logprobs = [
        position[token].logprob
        for window, result in zip(windows, results, strict=True)
        for token, position in zip(window, result.prompt_logprobs or [], strict=True)
        if position is not None  # of a window's first token
    ]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def variants(checkpoint: Checkpoint, scratch: Path, formats: str = "") -> Iterator[Variant]:
    """Yield the model in each format that suits its sizes and whose name contains `formats`.

    Files in `scratch` are removed when the next is wanted."""
    columns = math.gcd(*(weight.shape[1] for weight in checkpoint.linear.values()))
    has_gguf = find_spec("gguf") is not None and columns % GGUF_COLUMNS == 0
    is_wanted = re.compile(formats).search
    plain = scratch / "plain"
    checkpoint.write(plain)
    if is_wanted("full precision"):
        yield Variant("full precision", 16.0, {"model": str(plain)})
    for method in ("int8", "int4"):
        if is_wanted(name := f"--quantization {method}"):
            settings = {"model": str(plain), "quantization": method}
            yield Variant(name, bits_while_loading(checkpoint, method), settings)
    for name, way in METHODS.items():
        if columns % way.columns == 0 and is_wanted(name):
            folder = scratch / "rounded"
            yield Variant(name, way.write(checkpoint, folder), {"model": str(folder)})
            shutil.rmtree(folder)
    for kind in GGUF_TYPES if has_gguf else ():
        if is_wanted(name := f"GGUF {kind}"):
            file = scratch / f"{kind}.gguf"
            yield Variant(name, write_gguf(checkpoint, file, kind), {"model": str(file)})
            file.unlink()


def bits_while_loading(checkpoint: Checkpoint, method: str) -> float:
    """Return the bits per linear weight, with scales, under --quantization `method`."""
    num_bytes = 0
    for rows, columns in (weight.shape for weight in checkpoint.linear.values()):
        num_bytes += while_loading(method, columns).nbytes(rows, columns, 2)
    return 8 * num_bytes / checkpoint.num_linear


if __name__ == "__main__":
    main()
