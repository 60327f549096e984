"""Steps before the first request: they compile kernels, select products, and measure memory."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from toolkit.hardware.figures import SAMPLING_BYTES
from toolkit.hardware.graph_capture import empty_cache
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.sequence import SequenceSpec
from toolkit.worker.batch_state import StepShape
from toolkit.worker.cuda_runner import CudaRunner, graph_shapes
from toolkit.worker.encoder_runner import EncoderRunner
from toolkit.worker.info import WorkerInfo
from toolkit.worker.model_runner import ModelRunner

_RANDOM = SamplingParams(temperature=1.0)


class WarmUp:
    """Runs steps of random tokens, on rows and blocks that no request has yet."""

    def __init__(
        self, runner: ModelRunner | EncoderRunner, info: WorkerInfo, max_num_seqs: int
    ) -> None:
        self._runner, self._info, self._max_num_seqs = runner, info, max_num_seqs

    def run(self) -> None:
        """Run steps of every kind, so that no request waits for a kernel.

        These are prompts, and next tokens of many requests and of one, after long and short
        contexts (attention splits long ones)."""
        self.run_largest_step()
        self._run_step(
            1, 1, params=SamplingParams(temperature=1.0, repetition_penalty=1.1, logprobs=1)
        )
        for num_requests in (self._most_requests, 1):
            for context in (min(self._info.max_model_len - 1, 1023), 0):
                self._run_step(num_requests, 1, context)

    def run_largest_step(self) -> None:
        """Run a step of the most requests, and of about as many tokens as a step can have."""
        each = self._info.max_num_batched_tokens // self._most_requests
        self._run_step(self._most_requests, min(each, self._info.max_model_len))

    def compile(self, num_threads: int, *, padded: bool) -> None:
        """Compile the kernels of all kinds of steps in parallel: in turn, they dominate a start.

        `padded`: also those of captured steps, which are the shapes with small products, whose
        kernels depend on the number of tokens, and the largest."""
        info, kernels, shapes = self._info, self._cuda_runner.kernels, []
        if padded:
            shapes = graph_shapes(
                self._max_num_seqs, info.max_num_batched_tokens, info.max_model_len
            )
        with kernels.compiled_side_by_side(num_threads):
            self.run()
            small = [shape for shape in shapes if shape.num_tokens <= kernels.max_linear_tokens]
            self._cuda_runner.rehearse(small)
            self._cuda_runner.rehearse(shapes[:2])

    def choose_products(self) -> None:
        """Choose products for the largest step, which long prompts use."""
        runner, longest = self._cuda_runner, self._info.max_model_len
        num_tokens = min(self._info.max_num_batched_tokens, self._most_requests * longest)
        if num_tokens >= runner.kernels.min_choice_tokens:
            with runner.kernels.choosing_large_linear():
                runner.rehearse([StepShape(num_tokens, self._most_requests, num_tokens, longest)])

    def peak_bytes(self, *, samples: bool) -> int:
        """Return the peak bytes of the largest step, including those outside PyTorch.

        `samples`: include the memory of sampling with penalties."""
        torch.cuda.reset_peak_memory_stats()
        self.run_largest_step()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        sampling = self._max_num_seqs * self._info.vocab_size * SAMPLING_BYTES if samples else 0
        return int(torch.cuda.max_memory_allocated() + max(0, outside) + sampling)

    def graph_bytes(self, shapes: Sequence[StepShape]) -> int:
        """Return the bytes that CUDA graphs will take.

        The largest takes all its activations, which the others share. Each other one takes as much
        as the second does."""
        assert isinstance(self._runner, ModelRunner)
        empty_cache()  # else memory of earlier steps would count for the first
        free = [torch.cuda.mem_get_info()[0]]
        for shape in shapes[:2]:
            self._runner.capture([shape])
            free.append(torch.cuda.mem_get_info()[0])
        taken = [max(0, before - after) for before, after in itertools.pairwise(free)]
        return sum(taken) + max(0, len(shapes) - 2) * (taken[1] if len(taken) > 1 else 0)

    @property
    def _most_requests(self) -> int:
        """Most requests of one step."""
        return min(self._max_num_seqs, self._info.max_num_batched_tokens)

    @property
    def _cuda_runner(self) -> CudaRunner:
        assert isinstance(self._runner, CudaRunner)
        return self._runner

    def _run_step(
        self, num_requests: int, each: int, context: int = 0, params: SamplingParams = _RANDOM
    ) -> None:
        """Run a step of requests with `each` random tokens after `context`, each sampling one."""
        blocks_each = -(-(context + each) // self._info.block_size)
        tokens = np.random.default_rng(0).integers(0, self._info.vocab_size, (num_requests, each))
        step = SchedulerOutput(
            step=-1,
            rows=np.arange(num_requests, dtype=np.int32),
            num_tokens=np.full(num_requests, each, np.int32),
            num_computed=np.full(num_requests, context, np.int32),
            samples=np.ones(num_requests, np.bool_),
            new_rows=[
                NewRow(
                    row=row,
                    spec=SequenceSpec(
                        prompt_token_ids=tokens[row].tolist(),
                        params=params,
                        max_tokens=1,
                        eos_token_ids=[],
                    ),
                    seed=0,
                    output_token_ids=[],
                    num_computed_tokens=context,
                    # Requests may share blocks here: the contents do not matter.
                    blocks=[
                        i % self._info.num_blocks
                        for i in range(row * blocks_each, (row + 1) * blocks_each)
                    ],
                )
                for row in range(num_requests)
            ],
        )
        self._runner.execute(step).result()
