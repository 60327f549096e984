"""Run every kernel on small inputs under compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python -m tests.kernels.sanitize gpt2 eager

Arguments are names of architectures (`tests.checkpoints`), `eager` to run without graphs, and `fp8`
for weights and cache in FP8. Without PyTorch's cache each tensor has its own allocation, so a read
past its end is an error.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests import checkpoints
from toolkit import LLM, SamplingParams, StructuredOutputsParams

KINDS = [
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.9, max_tokens=6, seed=1, top_k=7, top_p=0.8, n=2),
    SamplingParams(
        temperature=0.9, max_tokens=6, min_p=0.05, repetition_penalty=1.2, logit_bias={3: 2.0}
    ),
    SamplingParams(
        temperature=1.0, max_tokens=6, structured_outputs=StructuredOutputsParams(regex="[ab]{4}")
    ),
]


def main(names: list[str]) -> None:
    eager, fp8 = "eager" in names, "fp8" in names
    for name in names:
        if name not in checkpoints.ARCHITECTURES:
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoints.save(checkpoints.make_reference(name), Path(folder))
            llm = LLM(
                folder,
                dtype="bfloat16",
                enforce_eager=eager,
                quantization="fp8" if fp8 else None,
                kv_cache_dtype="fp8" if fp8 else "auto",
                max_num_seqs=20,
                max_num_batched_tokens=48,
                num_gpu_blocks_override=64,
            )
            prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (1, 3, 17, 40, 55)]
            for count in (1, 4, 20):  # one row, a few, more than one tile of rows
                many = (prompts * 4)[:count]
                found = llm.generate(
                    many, [KINDS[i % len(KINDS)] for i in range(count)], use_tqdm=False
                )
                assert all(answer.token_ids for result in found for answer in result.outputs)
            llm.shutdown()
        print(f"{name}: done")


if __name__ == "__main__":
    main(sys.argv[1:])
