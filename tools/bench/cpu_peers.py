"""Run one CPU engine behind a pipe: `python -P cpu_peers.py ENGINE FOLDER DTYPE [THREADS]`.

It runs in the engine's environment and imports toolkit only for the engine `tk`. Each line of
standard input is a workload, {"prompts": [[token, ...], ...], "lengths": [n, ...]}. Each line of
standard output has its seconds and the greedy tokens, {"seconds": s, "tokens": [[token, ...],
...]}. The first line has the seconds of loading, without the conversion of the checkpoint."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tokens = list[list[int]]
Run = Callable[[Tokens, list[int]], Tokens]
"""Generates answers for prompts and the length of each answer."""


def tk(folder: str, dtype: str, threads: int) -> Run:
    from toolkit.engine.llm import LLM
    from toolkit.sampling.params import SamplingParams

    kind: dict[str, Any] = (
        {"quantization": "int8", "dtype": "float32"} if dtype == "int8" else {"dtype": dtype}
    )
    llm = LLM(
        folder,
        device="cpu",
        num_threads=threads,
        enable_prefix_caching=False,
        kv_cache_memory=1.0,
        **kind,
    )

    def run(prompts: Tokens, lengths: list[int]) -> Tokens:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return run


def transformers(folder: str, dtype: str, threads: int) -> Run:
    """Run `generate` over one left-padded batch until the longest answer is done."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def run(prompts: Tokens, lengths: list[int]) -> Tokens:
        longest, n = max(map(len, prompts)), max(lengths)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
        )
        return _cut(out[:, longest:].tolist(), lengths)

    return run


def ctranslate2(folder: str, dtype: str, threads: int) -> Run:
    """Run one batch until the longest answer is done."""
    import ctranslate2 as ct2  # type: ignore[import-not-found]  # of the peer's environment

    generator = ct2.Generator(folder, compute_type=dtype, intra_threads=threads, inter_threads=1)
    words = json.loads(Path(folder, "vocabulary.json").read_text())

    def run(prompts: Tokens, lengths: list[int]) -> Tokens:
        n = max(lengths)
        results = generator.generate_batch(
            [[words[token] for token in prompt] for prompt in prompts],
            max_length=n,
            min_length=n,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=64,
        )
        return _cut([result.sequences_ids[0] for result in results], lengths)

    return run


def _cut(tokens: Tokens, lengths: list[int]) -> Tokens:
    """Cut the answers of a batch to their requested lengths."""
    return [row[:n] for row, n in zip(tokens, lengths, strict=True)]


def vllm(folder: str, dtype: str, threads: int) -> Run:
    """Bind its threads to this process's first cores; by default it leaves one core idle."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # the peer's environment

    llm = LLM(folder, dtype=dtype, max_model_len=1024, enable_prefix_caching=False, max_num_seqs=64)

    def run(prompts: Tokens, lengths: list[int]) -> Tokens:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in lengths
        ]
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return run


def llama_cpp(file: str, dtype: str, threads: int) -> Run:
    """Run all requests at once like its server: prompts in batches of up to 2,048 tokens, then one
    token per request and step."""
    import llama_cpp as lib
    import numpy as np

    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8192, 2048, 512, 64
    params.kv_unified = True  # requests may be of any length
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model, params)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(params.n_batch, 0, 1)

    def decode(items: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, request, needs_logits) items. Returns greedy next tokens."""
        for i, (token, position, request, needs_logits) in enumerate(items):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, needs_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, request
        batch.n_tokens = len(items)
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        rows = (lib.llama_get_logits_ith(context, i) for i, item in enumerate(items) if item[3])
        return [int(np.ctypeslib.as_array(row, shape=(vocab,)).argmax()) for row in rows]

    def run(prompts: Tokens, lengths: list[int]) -> Tokens:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        items = [(t, i, r, i + 1 == len(p)) for r, p in enumerate(prompts) for i, t in enumerate(p)]
        answers = [
            [token]
            for start in range(0, len(items), params.n_batch)
            for token in decode(items[start : start + params.n_batch])
        ]
        while running := [r for r, n in enumerate(lengths) if len(answers[r]) < n]:
            items = [
                (answers[r][-1], len(prompts[r]) + len(answers[r]) - 1, r, True) for r in running
            ]
            for r, token in zip(running, decode(items), strict=True):
                answers[r].append(token)
        return answers

    return run


def _to_ctranslate2(folder: str, dtype: str, scratch: str) -> str:
    import ctranslate2 as ct2

    ct2.converters.TransformersConverter(folder).convert(f"{scratch}/model", quantization=dtype)
    return f"{scratch}/model"


def _to_gguf(folder: str, dtype: str, scratch: str) -> str:
    file = f"{scratch}/model.gguf"
    write = runpy.run_path(str(Path(__file__).with_name("cpu_gguf.py")))["write"]
    write(Path(folder), Path(file), "Q8_0" if dtype == "int8" else "F16")
    return file


ENGINES = {engine.__name__: engine for engine in (tk, transformers, ctranslate2, vllm, llama_cpp)}
CONVERTERS = {"ctranslate2": _to_ctranslate2, "llama_cpp": _to_gguf}
"""Functions of (folder, dtype, scratch folder) that return the path to load."""


def main() -> None:
    name, folder, dtype, *threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of engines and their processes out of the answers
    with tempfile.TemporaryDirectory() as scratch:
        if name in CONVERTERS:
            folder = CONVERTERS[name](folder, dtype, scratch)
        start = time.perf_counter()
        run = ENGINES[name](folder, dtype, int(threads[0]) if threads else 2)
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)
        for line in sys.stdin:
            work = json.loads(line)
            start = time.perf_counter()
            tokens = run(work["prompts"], work["lengths"])
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
