"""Change of a model's log-probabilities through rounding, on text that the demo model knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

import tools.demo
from toolkit import LLM, SamplingParams

FACTS = Path(tools.demo.__file__).with_name("facts.txt")
LIKELIEST = 20


@dataclass(frozen=True)
class Comparison:
    """Ratios are relative to the model without rounding."""

    error: float
    """RMS change of the likeliest tokens' log-probabilities, over their standard deviation."""
    agreement: float
    """Fraction of positions with the same likeliest token."""
    perplexity: float  # ratio
    weight_bytes: float  # ratio
    blocks: float  # ratio of KV cache blocks in the same memory


def compare(settings: dict, change: dict) -> Comparison:
    """Compare the demo model with and without `change`, on prompts of 70 to 180 tokens."""
    before, after = LLM(**_SIZES | settings), LLM(**_SIZES | settings | change)
    pairs = list(zip(_likeliest(before), _likeliest(after), strict=True))
    differences, values, losses = [], [], []
    for (token, old), (_, new) in pairs:
        losses.append(old[token].logprob - new[token].logprob)
        differences += [
            old[token].logprob - new[token].logprob for token in old.keys() & new.keys()
        ]
        values += [entry.logprob for entry in old.values()]
    error = torch.tensor(differences).square().mean().sqrt() / torch.tensor(values).std()
    same = sum(_first(old) == _first(new) for (_, old), (_, new) in pairs)
    found = Comparison(
        error=float(error),
        agreement=same / len(pairs),
        perplexity=math.exp(sum(losses) / len(losses)),
        weight_bytes=after.info.weight_bytes / before.info.weight_bytes,
        blocks=after.info.num_blocks / before.info.num_blocks,
    )
    before.shutdown()
    after.shutdown()
    return found


_SIZES = {"max_num_seqs": 8, "kv_cache_memory": 0.05}


def _likeliest(llm: LLM) -> list[tuple[int, dict]]:
    """Return (token, likeliest tokens) of each position in the prompts."""
    lines = [line for line in FACTS.read_text().splitlines() if line]
    prompts = [llm.tokenizer.encode("\n".join(lines[at : at + 6])) for at in range(0, 48, 12)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=LIKELIEST)
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return [
        pair
        for prompt, result in zip(prompts, results, strict=True)
        for pair in list(zip(prompt, result.prompt_logprobs, strict=True))[1:]
    ]


def _first(position: dict) -> int:
    return next(token for token, entry in position.items() if entry.rank == 1)
