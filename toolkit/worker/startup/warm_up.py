"""Steps before the first request: they compile kernels, select products, and measure memory."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from toolkit.hardware.figures import SAMPLING_BYTES
from toolkit.hardware.graph_capture import empty_cache
from toolkit.kernels.table import TritonKernels
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.scheduler.speculation import StepTimes
from toolkit.sequence import SequenceSpec
from toolkit.worker.encoder_runner import EncoderRunner
from toolkit.worker.graph_policy import StepShape, new_drafter_graphs
from toolkit.worker.info import WorkerInfo
from toolkit.worker.runner import Runner

_RANDOM = SamplingParams(temperature=1.0)
_CONTEXTS = tuple(64 << i for i in range(7))  # one for each power of two of key splits

STEP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
LONG_MEASUREMENT = 330  # milliseconds, of two steps


def drop_graphs_that_wait(runner: Runner) -> bool:
    """Have the runner capture nothing if the model's code waits for the GPU. Return if so.

    Call it after loading, which waits too: PyTorch watches all threads."""
    if not runner.policy.captures or not runner.model.may_synchronize or not runner.synchronizes():
        return False
    runner.policy = replace(runner.policy, captures=False)
    return True


class WarmUp:
    """Runs steps of random tokens, on rows and blocks that no request has yet."""

    def __init__(self, runner: Runner | EncoderRunner, info: WorkerInfo, max_num_seqs: int) -> None:
        self._runner, self._info, self._max_num_seqs = runner, info, max_num_seqs

    def run(self) -> None:
        """Run steps of every kind, so that no request waits for a kernel.

        These are prompts, and next tokens of many requests and of one, after long and short
        contexts (attention splits long ones)."""
        self.run_largest_step()
        self._run_step([1], params=SamplingParams(repetition_penalty=1.1, logprobs=1))
        for num_requests in (self._most_requests, 1):
            for context in (min(self._info.max_model_len - 1, 1023), 0):
                self._run_step([1] * num_requests, context)

    def run_largest_step(self) -> None:
        """Run a step of the most requests, and of about as many tokens as a step can have."""
        self._encode_largest()
        each = self._info.max_num_batched_tokens // self._most_requests
        self._run_step([min(each, self._info.max_model_len)] * self._most_requests)

    def _encode_largest(self) -> None:
        """Compute the largest picture or clips, if the model sees or hears."""
        if isinstance(self._runner, Runner):
            self._runner.rehearse_encoder()

    def compile(self, kernels: TritonKernels, num_threads: int) -> None:
        """Compile the kernels of all steps that can occur, in parallel.

        Compiled where they are first launched, they would dominate a start, or make a request
        wait. Choices of kernels are the same within each of `Kernels.row_classes`."""
        runner = self._runner
        with kernels.compiled_side_by_side(num_threads):
            if isinstance(runner, EncoderRunner):
                sizes = (*kernels.row_classes, *kernels.more_row_classes)
                for num_tokens in self._up_to(sizes, self._info.max_model_len):
                    self._run_step([num_tokens])
                return
            with self._step_runner.with_few_layers():
                self.run()
                self._run_step([1], is_constrained=True)
                shapes = self._shapes(kernels.row_classes)
                if runner.backends.is_capturable:
                    self._step_runner.rehearse(shapes)
                    return
                for shape in shapes:  # padding is for graphs
                    each, more = divmod(shape.num_tokens, shape.num_reqs)
                    counts = [each + 1] * more + [each] * (shape.num_reqs - more)
                    context = shape.max_seq_len - counts[0]
                    self._run_step(counts, context, is_adapted=shape.is_adapted)

    def _shapes(self, row_classes: Sequence[int]) -> list[StepShape]:
        """Return shapes whose steps launch every kernel.

        Decode kernels depend on how many programs share a request's keys; other kernels, on the
        number of tokens and, after the last layer's attention, of requests."""
        policy = self._step_runner.policy
        longest, most = policy.max_model_len, policy.most_requests
        contexts = self._up_to(_CONTEXTS, longest)
        shapes = [StepShape(1, 1, 1, context) for context in contexts]
        shapes += [StepShape(n, n, 1, longest) for n in policy.decode_sizes]
        verifying = [policy.verify_shape(n) for n in policy.verify_sizes]
        shapes += verifying + [
            replace(one, max_seq_len=max(one.max_query_len, context))
            for one in verifying[:1]
            for context in contexts
        ]
        sizes = self._up_to(sorted({*row_classes, *policy.mixed_sizes}), policy.most_tokens)
        for tokens in sizes:
            is_any_count = tokens <= row_classes[-1] or tokens == sizes[-1]
            for count in self._up_to(row_classes, most) if is_any_count else [most]:
                n = min(count, tokens - 1)
                if n > 0 and tokens <= n * longest:
                    shapes.append(StepShape(tokens, n, tokens - n + 1, longest))
        if policy.adapts:
            # Adapters do not depend on contexts.
            found = [one for one in shapes if one.max_seq_len == longest]
            shapes += [replace(one, is_adapted=True) for one in found]
        return shapes

    @staticmethod
    def _up_to(values: Sequence[int], most: int) -> list[int]:
        return [*(value for value in values if value < most), most]

    def choose_products(self, kernels: TritonKernels) -> None:
        """Choose products for the largest step, which long prompts use."""
        runner, policy = self._step_runner, self._step_runner.policy
        most = policy.most_tokens
        if most >= kernels.min_choice_tokens:
            with kernels.choosing_products():
                runner.rehearse([StepShape(most, policy.most_requests, most, policy.max_model_len)])
                self._encode_largest()

    def step_times(self, total: Callable[[int], int]) -> StepTimes:
        """Measure steps of the next tokens of some requests, and their drafts.

        Stops at the first one that takes long: longer steps take as much more for each token.
        `total` returns the sum of all ranks' numbers, since all must stop at the same."""
        fastest: dict[int, float] = {}
        drafting: dict[int, float] = {}
        for num_requests in self._up_to(STEP_SIZES, self._most_requests):
            seconds = [self._step_time(num_requests) for _ in range(2)]  # may record the step
            fastest[num_requests] = min(seconds)
            drafting[num_requests] = self._step_time(num_requests, drafts=True)
            if len(fastest) > 2 and total(int(sum(seconds) * 1000)) > LONG_MEASUREMENT:
                break
        # Later again: other processes may have kept the cores busy for a while.
        for num_requests, seconds_before in fastest.items():
            plain = min(seconds_before, self._step_time(num_requests))
            both = min(drafting[num_requests], self._step_time(num_requests, drafts=True))
            fastest[num_requests], drafting[num_requests] = plain, max(0.0, both - plain)
        return StepTimes(plain=list(fastest.items()), drafting=list(drafting.items()))

    def _step_time(self, num_requests: int, *, drafts: bool = False) -> float:
        """Return the seconds of one step of the next token of some requests."""
        start = time.perf_counter()
        self._run_step([1] * num_requests, drafts=drafts)
        return time.perf_counter() - start

    def graph_times(self) -> StepTimes:
        """Measure graphs, if steps verify drafts."""
        runner = self._runner
        if isinstance(runner, EncoderRunner):
            return StepTimes()
        policy = runner.policy
        if not policy.captures or not policy.most_step_drafts:
            return StepTimes()
        plain = [shape for shape in policy.shapes if shape.max_query_len == 1]
        verifying = [policy.verify_shape(size) for size in policy.verify_sizes]
        sizes = set(policy.verify_sizes)
        both = []
        for shapes in (plain, verifying):
            chosen = [one for one in shapes if one.num_reqs in sizes and not one.is_adapted]
            chosen.sort(key=lambda shape: shape.num_reqs)
            both.append([(one.num_reqs, runner.seconds(one)) for one in chosen])
        return StepTimes(plain=both[0], verifying=both[1])

    def peak_bytes(self, *, samples: bool) -> int:
        """Return the peak bytes of the largest step, including those outside PyTorch.

        `samples`: include the memory of sampling with penalties."""
        torch.cuda.reset_peak_memory_stats()
        self.run_largest_step()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        rows = self._max_num_seqs if samples else 0
        if rows:
            rows = self._step_runner.sampler.max_sampled_again
        sampling = rows * self._info.vocab_size * SAMPLING_BYTES
        return int(torch.cuda.max_memory_allocated() + max(0, outside) + sampling)

    def graph_bytes(self) -> int:
        """Return the bytes that CUDA graphs will take.

        The largest takes all its activations, which the others share. Each other one takes as much
        as the first with as many graphs of a drafter's model."""
        shapes = self._step_runner.policy.shapes
        if not shapes:
            return 0
        empty_cache()
        free = torch.cuda.mem_get_info()[0]
        self._step_runner.capture_encoder()
        taken = max(0, free - torch.cuda.mem_get_info()[0])
        drafter = self._step_runner.drafter
        if drafter is None or not drafter.is_capturable:
            kinds = [(False, False)] * len(shapes)
        else:
            kinds = new_drafter_graphs(shapes)
        empty_cache()  # else memory of earlier steps would count for the first
        taken += self._captured_bytes(shapes[0])
        for kind, count in Counter(kinds[1:]).items():
            taken += count * self._captured_bytes(shapes[kinds.index(kind, 1)])
        return taken

    def _captured_bytes(self, shape: StepShape) -> int:
        """Capture a shape and return the bytes that it takes."""
        before = torch.cuda.mem_get_info()[0]
        self._step_runner.capture([shape])
        return max(0, before - torch.cuda.mem_get_info()[0])

    @property
    def _most_requests(self) -> int:
        """Most requests of one step."""
        return min(self._max_num_seqs, self._info.max_num_batched_tokens)

    @property
    def _step_runner(self) -> Runner:
        assert isinstance(self._runner, Runner)
        return self._runner

    def _run_step(
        self,
        counts: Sequence[int],
        context: int = 0,
        params: SamplingParams = _RANDOM,
        *,
        is_constrained: bool = False,
        is_adapted: bool = False,
        drafts: bool = True,
    ) -> None:
        """Run a step of requests with these numbers of random tokens, each sampling one.

        `context`: tokens before them. `is_constrained`: with a grammar that allows all tokens.
        `is_adapted`: with the LoRA adapter of the first slot. `drafts`: with drafts after it."""
        num_requests, longest = len(counts), max(counts)
        page_tokens = [self._info.block_size * one.blocks_per_page for one in self._info.groups]
        pages_each = [
            -(-(group.feature or context + longest) // tokens)
            for group, tokens in zip(self._info.groups, page_tokens, strict=True)
        ]
        tokens = np.random.default_rng(0).integers(
            0, self._info.vocab_size, (num_requests, longest)
        )
        step = SchedulerOutput(
            step=-1,
            rows=np.arange(num_requests, dtype=np.int32),
            num_tokens=np.array(counts, np.int32),
            num_computed=np.full(num_requests, context, np.int32),
            samples=np.ones(num_requests, np.bool_),
            drafts=drafts,
            new_rows=[
                NewRow(
                    row=row,
                    spec=SequenceSpec(
                        prompt_token_ids=tokens[row, : counts[row]].tolist(),
                        params=params,
                        max_tokens=1,
                        eos_token_ids=[],
                    ),
                    seed=0,
                    output_token_ids=[],
                    num_computed_tokens=context,
                    # Requests may share pages here: the contents do not matter.
                    blocks=[
                        [i % self._info.num_blocks for i in range(row * each, (row + 1) * each)]
                        for each in pages_each
                    ],
                    adapter=int(is_adapted),
                )
                for row in range(num_requests)
            ],
        )
        # Requests may share states, too.
        step.state_reads = step.state_writes = step.rows % max(1, self._info.num_state_slots)
        step.state_keeps = np.full((num_requests, 2), -1, np.int32)
        if is_constrained:
            step.constrained = np.arange(num_requests)
        pending = self._runner.execute(step)
        if is_constrained:
            words = -(-self._info.vocab_size // 32)
            pending.constrain(np.full((num_requests, words), -1, np.int32))
        pending.result()
