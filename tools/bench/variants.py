"""Time requests with adapters or drafts on one or several GPUs: `python -m tools.bench.variants`.

The model has the shape of Llama-3.1-8B and continues cycles of 32 tokens, so that drafts copied
from the prompt are right. Prints output tokens per second, the fastest of three runs after one that
is discarded, as `tk bench latency`."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from toolkit import LLM, LoRARequest
from toolkit.sampling.params import SamplingParams
from tools.bench.models import CONFIGS, make_model

RUNS = 3
CYCLE = 32
INPUT, OUTPUT = 128, 256
RANK = 16
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}
VARIANTS = ("base", "int4", "adapters", "drafts")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time requests with adapters or drafts.")
    parser.add_argument("--tensor-parallel-size", type=int, nargs="+", default=[1])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        folder = Path(path)
        config = CONFIGS["llama-3.1-8b"] | {"num_hidden_layers": args.layers}
        save_model(folder / "model", config)
        adapters = [save_adapter(folder / f"adapter-{i}", config) for i in range(8)]
        for size in args.tensor_parallel_size:
            for variant in args.variants:
                # In a process of its own: ranks share memory in the first engine of a process.
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    process.submit(
                        time_engine, folder / "model", variant, adapters, size, args.batch_sizes
                    ).result()


def time_engine(
    folder: Path, variant: str, adapters: list[str], size: int, batch_sizes: list[int]
) -> None:
    """Print a row for each batch size, with adapters for each number of them."""
    with running(folder, variant, adapters, size) as llm:
        for number in batch_sizes:
            for used in (1, 8) if variant == "adapters" else (0,):
                if used <= number:
                    rate, going_on = measure(llm, number, used)
                    name = f"{used} {variant}" if used else variant
                    note = f"{going_on} continue the cycle"
                    print(f"TP {size}  {name:12}batch {number:3}{rate:9.0f}   {note}", flush=True)


@contextmanager
def running(folder: Path, variant: str, adapters: list[str], size: int) -> Iterator[LLM]:
    of_variant: dict[str, dict[str, Any]] = {
        "int4": {"quantization": "int4"},
        "adapters": {"lora_modules": adapters, "max_loras": len(adapters), "max_lora_rank": RANK},
        "drafts": {"speculative_config": DRAFTS},
    }
    llm = LLM(
        str(folder),
        max_model_len=4096,
        enable_prefix_caching=False,
        tensor_parallel_size=size,
        **of_variant.get(variant, {}),
    )
    try:
        yield llm
    finally:
        llm.shutdown()


def measure(llm: LLM, number: int, used: int) -> tuple[float, int]:
    """Return output tokens per second, and the number of answers that continue the cycle.

    used: adapters that the requests use in turn."""
    prompts: list[Any] = [
        {"prompt_token_ids": [(1 + i) * CYCLE + j % CYCLE for j in range(INPUT)]}
        for i in range(number)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    names = [LoRARequest(f"a{i % used}") if used else None for i in range(number)]
    found = []
    for _ in range(1 + RUNS):
        begin = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False, lora_request=names)
        found.append(time.perf_counter() - begin)
    going_on = sum(
        list(result.outputs[0].token_ids)
        == [prompt["prompt_token_ids"][j % CYCLE] for j in range(OUTPUT)]
        for prompt, result in zip(prompts, results, strict=True)
    )
    return number * OUTPUT / min(found[1:]), going_on


def save_model(folder: Path, config: dict[str, Any]) -> None:
    """Write a model whose layers add nothing, so that its head decides: the cycle's next token."""
    make_model(folder, config)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def random(rows: int, columns: int) -> torch.Tensor:
        weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        return weight.mul_(columns**-0.5).cpu()

    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    table = random(vocabulary, hidden)
    ids = torch.arange(vocabulary)
    # The row of token i is the embedding of the token before it in its cycle.
    before = ids - ids % CYCLE + (ids - 1) % CYCLE
    ends = {
        "model.embed_tokens.weight": table,
        "lm_head.weight": table[before].contiguous(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    save_file(ends, folder / "ends.safetensors")
    files = dict.fromkeys(ends, "ends.safetensors")
    for layer in range(config["num_hidden_layers"]):
        tensors = {
            f"model.layers.{layer}.{name}_layernorm.weight": torch.ones(hidden).bfloat16()
            for name in ("input", "post_attention")
        }
        for name, (rows, columns) in shapes(config).items():
            weight = random(rows, columns)
            if name.endswith(("o_proj", "down_proj")):
                weight.zero_()
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        file = f"layer-{layer}.safetensors"
        save_file(tensors, folder / file)
        files |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def save_adapter(folder: Path, config: dict[str, Any]) -> str:
    """Write a random adapter of all linear layers. Returns it for --lora-modules."""
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes(config).items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            low = torch.randn(RANK, columns) * columns**-0.5
            tensors[f"{key}.lora_A.weight"] = low.bfloat16()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(rows, RANK) * 0.01).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return f"a{folder.name.removeprefix('adapter-')}={folder}"


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of each linear layer of a block."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


if __name__ == "__main__":
    main()
