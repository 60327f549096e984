"""Count the experts that a model's decode steps read: `python -m tools.bench.experts --model`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from toolkit import LLM
from toolkit.layers import Router
from toolkit.sampling.params import SamplingParams

PROMPT_TOKENS = 32
NEW_TOKENS = 33


@contextmanager
def recorded_choices() -> Iterator[dict[Router, list[Tensor]]]:
    """Yield the experts `[num_tokens, num_chosen]` of each call of each router that runs."""
    choices: dict[Router, list[Tensor]] = {}

    def record(module: nn.Module, _: object, chosen: Any) -> None:
        if isinstance(module, Router):
            choices.setdefault(module, []).append(chosen[0].clone())

    handle = nn.modules.module.register_module_forward_hook(record)
    try:
        yield choices
    finally:
        handle.remove()


def count_distinct(calls: list[Tensor], num_tokens: int) -> list[int]:
    """Return the number of distinct experts of each call of so many tokens, without padding."""
    calls = [ids[(ids >= 0).any(1)] for ids in calls]
    return [len(set(ids[ids >= 0].tolist())) for ids in calls if len(ids) == num_tokens]


def chosen_experts(
    folder: Path, batch_sizes: list[int], **settings: Any
) -> dict[int, list[tuple[int, float]]]:
    """Return (steps, mean number of experts read) of each layer, by number of requests.

    The model has random weights and runs without graphs. Requests have random prompts of different
    tokens, and sample at temperature 1. `settings`: further ones of `LLM`. Raises ValueError for a
    model without experts."""
    llm = LLM(
        str(folder),
        load_format="dummy",
        enforce_eager=True,
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
        max_num_seqs=max(batch_sizes),
        max_num_batched_tokens=PROMPT_TOKENS * max(batch_sizes),
        **settings,
    )
    try:
        return {size: _counts(llm, size) for size in batch_sizes}
    finally:
        llm.shutdown()


def _counts(llm: LLM, batch_size: int) -> list[tuple[int, float]]:
    rng = random.Random(batch_size)
    prompts: list[Any] = [
        [rng.randrange(llm.info.vocab_size) for _ in range(PROMPT_TOKENS)]
        for _ in range(batch_size)
    ]
    params = [
        SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=seed, detokenize=False)
        for seed in range(batch_size)
    ]
    with torch.inference_mode(), recorded_choices() as choices:
        llm.generate(prompts, params, use_tqdm=False)
        if not choices:
            raise ValueError(f"{llm.folder} has no router of experts that could be counted")
        counts = [count_distinct(calls, batch_size) for calls in choices.values()]
    return [(len(one), mean(one)) for one in counts]


def print_chosen_experts(folder: Path, batch_sizes: list[int]) -> None:
    for batch_size, layers in chosen_experts(folder, batch_sizes).items():
        means = [count for _, count in layers]
        each = " ".join(f"{count:.1f}" for count in means)
        print(
            f"{batch_size:5d} requests {layers[0][0]:4d} steps {mean(means):7.1f} experts a layer: "
            f"{each}",
            flush=True,
        )
