"""Compare tk with Transformers' `generate`: `python -m tools.bench.versus_transformers`.

Without --model: GPT-2's shape (124M) with the same random weights in both. Rounds alternate between
the engines, so that a drift of the machine's speed affects both. The best round counts."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Workload = tuple[list[list[int]], list[int]]
"""Token ids of each prompt, and length of each answer."""

Engine = Callable[[list[list[int]], list[int]], list[list[int]]]


def batch1(vocab: int) -> Workload:
    rng = random.Random(1)
    return [[rng.randrange(vocab) for _ in range(128)]], [64]


def ragged(vocab: int) -> Workload:
    """Return 16 requests with prompts of 16-256 tokens and answers of 16-128."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(16, 256))] for _ in range(16)]
    return prompts, [rng.randint(16, 128) for _ in prompts]


def make_gpt2(folder: Path) -> None:
    """Write a checkpoint of GPT-2's shape with random weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)


def transformers_engine(folder: Path) -> Engine:
    """Run `generate` over one left-padded batch until the longest answer is done."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(lengths),
            do_sample=False,
            eos_token_id=model.config.vocab_size,
            pad_token_id=0,
        )
        return [row[longest : longest + n].tolist() for row, n in zip(out, lengths, strict=True)]

    return run


def tk_engine(folder: Path) -> Engine:
    from toolkit.engine.llm import LLM
    from toolkit.sampling.params import SamplingParams

    llm = LLM(str(folder), device="cpu", dtype="float32", enable_prefix_caching=False)

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model folder; default: GPT-2's shape, random weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model or scratch)
        if not args.model:
            make_gpt2(folder)
        engines = {"transformers": transformers_engine(folder), "tk": tk_engine(folder)}
        rows = [
            measure(name, work(10_000), engines, args.rounds) for name, work in WORKLOADS.items()
        ]
    for row in rows:
        print(json.dumps(row) if args.json else _line(row))


def measure(name: str, work: Workload, engines: dict[str, Engine], rounds: int) -> dict[str, Any]:
    """Return a row: output tokens/s of both, their ratio, and the share of equal tokens."""
    prompts, lengths = work
    best = dict.fromkeys(engines, float("inf"))
    answers: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):  # the first is a warm-up
        for engine, run in engines.items():
            start = time.perf_counter()
            answers[engine] = run(prompts, lengths)
            if turn:
                best[engine] = min(best[engine], time.perf_counter() - start)
    ours, theirs = answers["tk"], answers["transformers"]
    equal = sum(
        a == b
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    total = sum(lengths)
    print(f"{name} done", file=sys.stderr)
    return {
        "work": name,
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": total,
        "transformers_tok_s": round(total / best["transformers"], 1),
        "tk_tok_s": round(total / best["tk"], 1),
        "ratio": round(best["transformers"] / best["tk"], 2),
        "equal_tokens": round(equal / total, 4),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['work']:<10} transformers {row['transformers_tok_s']:8.1f} tok/s   "
        f"tk {row['tk_tok_s']:8.1f} tok/s   "
        f"tk is {row['ratio']:.2f}x; {row['equal_tokens']:.1%} of the tokens equal"
    )


WORKLOADS: dict[str, Callable[[int], Workload]] = {"batch1": batch1, "ragged16": ragged}

if __name__ == "__main__":
    main()
