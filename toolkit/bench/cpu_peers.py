"""One engine on a CPU, behind a pipe: `python -P cpu_peers.py ENGINE FOLDER DTYPE [THREADS]`, in the engine's own environment.

Each line of standard input is a workload, {"prompts": [[token, ...], ...], "lengths": [n, ...]}; each line of standard output is the
seconds that it took, {"seconds": s}; the first is what loading took. It imports nothing of ours but for the engine `tk`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[list[list[int]], list[int]], Any]


def tk(folder: str, dtype: str, threads: int) -> Run:
    from toolkit.engine.llm import LLM
    from toolkit.sampling.params import SamplingParams

    kind: dict[str, Any] = (
        {"quantization": "int8", "dtype": "float32"} if dtype == "int8" else {"dtype": dtype}
    )
    llm = LLM(
        folder, device="cpu", num_threads=threads, enable_prefix_caching=False, kv_cache_memory=1.0, **kind
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> Any:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return run


def transformers(folder: str, dtype: str, threads: int) -> Run:
    """`generate` over one left-padded batch, until the longest answer is done."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], lengths: list[int]) -> Any:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        n = max(lengths)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0
        )

    return run


def ctranslate2(folder: str, dtype: str, threads: int) -> Run:
    """One batch, until the longest answer is done."""
    import ctranslate2 as ct2  # type: ignore[import-not-found]  # of the peer's environment

    out = Path(tempfile.mkdtemp(), "model")
    ct2.converters.TransformersConverter(folder).convert(str(out), quantization=dtype)
    generator = ct2.Generator(str(out), compute_type=dtype, intra_threads=threads, inter_threads=1)
    words = json.loads((out / "vocabulary.json").read_text())

    def run(prompts: list[list[int]], lengths: list[int]) -> Any:
        n = max(lengths)
        return generator.generate_batch(
            [[words[token] for token in prompt] for prompt in prompts],
            max_length=n,
            min_length=n,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=64,
        )

    return run


def vllm(folder: str, dtype: str, threads: int) -> Run:
    """vLLM-CPU takes its threads from VLLM_CPU_OMP_THREADS_BIND."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # of the peer's environment

    llm = LLM(folder, dtype=dtype, max_model_len=1024, enable_prefix_caching=False, max_num_seqs=64)

    def run(prompts: list[list[int]], lengths: list[int]) -> Any:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False) for n in lengths
        ]
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return run


def llama_cpp(folder: str, dtype: str, threads: int) -> Run:
    """Of a GGUF file of the type in the folder (`*-Q8_0.gguf` for int8, `*-F16.gguf`); one request after the other."""
    from llama_cpp import Llama  # type: ignore[import-not-found]  # of the peer's environment

    (file,) = Path(folder).glob(f"*{'Q8_0' if dtype == 'int8' else 'F16'}.gguf")
    llama = Llama(str(file), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(prompts: list[list[int]], lengths: list[int]) -> Any:
        for prompt, n in zip(prompts, lengths, strict=True):
            llama.reset()
            for made, _ in enumerate(llama.generate(prompt, temp=0.0), 1):
                if made == n:
                    break

    return run


ENGINES = {engine.__name__: engine for engine in (tk, transformers, ctranslate2, vllm, llama_cpp)}


def main() -> None:
    name, folder, dtype, *threads = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # what engines print is no answer
    start = time.perf_counter()
    run = ENGINES[name](folder, dtype, int(threads[0]) if threads else 2)
    print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        start = time.perf_counter()
        run(work["prompts"], work["lengths"])
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
