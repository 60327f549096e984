"""Runs steps: inputs, model, sampler, state update.

`ModelRunner` serves CPUs, and GPUs without Triton. `CudaRunner` does the same with Triton's kernels
and CUDA graphs."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBatch, Backends
from toolkit.attention.cpu import kernels_support
from toolkit.config.sources import checks_memory
from toolkit.hardware.parent import is_own_process
from toolkit.lora.adapters import Adapters
from toolkit.lora.weight import Active
from toolkit.models.model import CausalLM
from toolkit.pooling.accumulator import PromptPooling
from toolkit.sampling.grammar import Masks
from toolkit.sampling.logprobs import gather_logprobs
from toolkit.sampling.sampler import sample
from toolkit.scheduler import ModelOutput, PromptLogprobs, SchedulerOutput
from toolkit.scheduler.output import IntArray
from toolkit.speculative.drafter import NO_DRAFT, Drafter, Drafts
from toolkit.worker.batch_state import BatchState
from toolkit.worker.delivery import copy_barrier, to_host
from toolkit.worker.kv_cache import KVCache, RowStates
from toolkit.worker.sample_points import SamplePoints

PROMPT_LOGPROBS_CHUNK = 256  # positions whose logits are in memory at once


class PendingOutput:
    """A step in flight. `result` waits for it."""

    def __init__(self, finish: Callable[[], ModelOutput]) -> None:
        self._finish = finish

    def result(self) -> ModelOutput:
        return self._finish()

    def constrain(self, masks: Masks) -> None:
        """Do nothing: no request of this step is constrained."""


class UnsampledOutput(PendingOutput):
    """A step that samples when the masks of its constrained requests arrive."""

    def __init__(self, sample: Callable[[Masks], PendingOutput], device: torch.device) -> None:
        self._sample = sample
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @torch.inference_mode()
    def constrain(self, masks: Masks) -> None:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            self._finish = self._sample(masks).result


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens, on the device.

    The step's sampling requests have the tokens at the indices `firsts` of `tokens` and after, as
    many as `counts` says; without it one each. `logprobs`: records of all `tokens`, if any request
    asked for them. `failures`: errors of logits processors, by index into `firsts`; those have no
    token. `drafts`: see `ModelOutput`. `counts` and `drafts` are those of all requests of the step.
    """

    tokens: torch.Tensor
    firsts: npt.NDArray[np.int64]
    logprobs: torch.Tensor | None = None
    failures: dict[int, str] = field(default_factory=dict)
    counts: torch.Tensor | None = None
    drafts: torch.Tensor | None = None

    def kept(self, counts: IntArray) -> npt.NDArray[np.int64]:
        """Return the indices of the tokens of all sampling requests, given their counts."""
        before = counts.cumsum(dtype=np.int64) - counts
        starts = np.repeat(self.firsts - before, counts)
        kept: npt.NDArray[np.int64] = starts + np.arange(len(starts))
        return kept


Sample = Callable[[Masks | None], Sampled]
"""Samples a step's tokens. The masks belong to `SchedulerOutput.constrained`."""


class ModelRunner:
    """Owns the device's state; every call applies one step to it."""

    pooling: PromptPooling | None = None  # set if the model pools prompts
    adapters: Adapters | None = None  # set if there are LoRA adapters
    drafter: Drafter | None = None  # set if steps verify drafts
    num_compiled: Callable[[], int] = staticmethod(lambda: 0)
    """Returns how many kernels were compiled since its last call."""

    def __init__(
        self, model: CausalLM, backends: Backends, cache: KVCache, state: BatchState
    ) -> None:
        self.model, self.backends, self.cache, self.state = model, backends, cache, state
        self.caches = [cache]
        """The model's, and that of a drafter. They have the same block numbers."""
        self.device = state.device
        kernels_compute = backends.name == "cpu" and all(
            map(kernels_support, cache.blocks.values())
        )
        self._uses_one_torch_thread = kernels_compute and is_own_process()
        """True if our CPU kernels do nearly all work, in a process of our own."""
        cache.bind(model, backends)
        self._states = RowStates(model, num_rows=len(state.block_table), device=state.device)
        self._spoils = checks_memory()

    @property
    def why_eager(self) -> str | None:
        """Return why no step replays a CUDA graph or a recording, None if some do."""
        if self.device.type == "cuda":
            return "CUDA graphs need the package triton"
        return self.model.why_unrecorded

    def _spoil(self, step: SchedulerOutput) -> None:
        """Fill blocks and rows that requests get in this step with NaN, but for cached blocks."""
        blocks = step.new_blocks[:, 2].tolist()
        for new in step.new_rows:
            blocks += new.blocks[new.num_computed_tokens // self.state.block_size :]
        if blocks:
            for cache in self.caches:
                cache.spoil(blocks)
        self._states.spoil([new.row for new in step.new_rows])

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingOutput:
        """Launch a step, after its cache copies."""
        for cache in self.caches:
            cache.copy_out(step.swap_out)
        if self._spoils:
            self._spoil(step)
        for cache in self.caches:
            cache.copy_in(step.swap_in)
        if self.adapters is not None:
            for slot, key in step.adapters:
                self.adapters.place(slot, key)
        self.state.apply(step)
        if self.pooling is not None:
            self.pooling.apply(step)
        if self.drafter is not None:
            for new in step.new_rows:
                self.drafter.place(new)
        if not len(step.rows):
            return _empty_output(step)
        self._set_adapters(step)
        if not self.model.stage.is_last:
            self._send_to_next_stage(step)
            return _empty_output(step)
        hidden, sample = self._run(step)
        prompt_logprobs = {}
        if step.prompt_logprobs:
            assert hidden is not None, (
                "a step with prompt log-probabilities keeps its hidden states"
            )
            prompt_logprobs = self._prompt_logprobs(step, hidden)
        pooled = None
        if self.pooling is not None and self._pools(step):
            assert hidden is not None, "a step that pools keeps its hidden states"
            pooled = self.pooling.pool(step, hidden)
        if len(step.constrained):
            return UnsampledOutput(
                lambda masks: self._start_output(step, sample(masks), prompt_logprobs, pooled),
                self.device,
            )
        return self._start_output(step, sample(None), prompt_logprobs, pooled)

    def _set_adapters(self, step: SchedulerOutput) -> None:
        if self.adapters is not None and isinstance(self.adapters.active, Active):
            slots = self.state.adapters[step.rows]
            wanted = np.repeat(slots[step.samples], step.num_sampled)
            self.adapters.active.set(np.repeat(slots, step.num_tokens), wanted)

    def _set_head_adapters(self, rows: npt.NDArray[np.int32]) -> None:
        """Set the adapter of each row of hidden states that the head computes next."""
        if self.adapters is not None:
            slots = self.state.adapters[rows]
            self.adapters.head_active.set(slots, slots)

    def _pools(self, step: SchedulerOutput) -> bool:
        return self.pooling is not None and self.pooling.is_needed(step)

    def close(self) -> None:
        """Free graphs. No step follows."""

    def _keeps_hidden(self, step: SchedulerOutput) -> bool:
        """True if the hidden states of all tokens of the step are needed."""
        return bool(step.prompt_logprobs) or self._pools(step)

    def _send_to_next_stage(self, step: SchedulerOutput) -> None:
        """Compute this stage's layers, and send the hidden states to the next one."""
        self.model.stage.send(self._compute(*self.state.inputs(step)))

    def _compute(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Run the model on tokens and, after another stage, on its hidden states."""
        hidden = None
        if not self.model.stage.is_first:
            shape = len(token_ids), self.model.hidden_size
            empty = torch.empty(shape, dtype=self.model.dtype, device=self.device)
            hidden = self.model.stage.receive(empty)
        with self._computing():
            computed: torch.Tensor = self.model(token_ids, batch, hidden)
        return computed

    def _computing(self) -> AbstractContextManager[None]:
        return _single_threaded_torch() if self._uses_one_torch_thread else nullcontext()

    def _run(self, step: SchedulerOutput) -> tuple[torch.Tensor | None, Sample]:
        """Return (hidden states [num_tokens, hidden] if needed, the sampling function).

        Sampling also writes the tokens into the state."""
        token_ids, batch = self.state.inputs(step)
        points = SamplePoints.of(step, self.state.context_lens(step)[step.samples])
        choose = functools.partial(self._choose, step, points)
        if len(points) == len(token_ids) and not self._keeps_hidden(step):
            return None, functools.partial(choose, self._compute(token_ids, batch))
        wanted = torch.from_numpy(points.tokens).to(self.device, torch.int64)
        if self._keeps_hidden(step):
            hidden = self._compute(token_ids, batch)
            return hidden, functools.partial(choose, hidden[wanted])
        batch.wanted = wanted
        return None, functools.partial(choose, self._compute(token_ids, batch))

    def _choose(
        self, step: SchedulerOutput, points: SamplePoints, hidden: torch.Tensor, masks: Masks | None
    ) -> Sampled:
        """Sample. `hidden`: of the tokens before the points."""
        if not len(points):
            self._draft(step, points)
            return Sampled(torch.empty(0, dtype=torch.int64), points.firsts)
        rows, positions, state = points.rows, points.positions, self.state
        self._set_head_adapters(rows)
        logits = self.model.logits(hidden).float()
        keep = self._keep_logprobs(logits, rows, is_constrained=masks is not None)
        masked = None if masks is None else (points.of_requests(step.constrained), masks)
        tokens = sample(logits, state.sampling, state.token_ids, rows, positions, masked)
        counts = state.commit(points, tokens)
        logprobs = None if keep is None else keep(tokens)
        failures = state.sampling.processors.take_failures(rows[points.firsts])
        drafts = self._draft(step, points)
        return Sampled(
            tokens,
            points.firsts,
            logprobs,
            failures,
            None if counts is None else _of_all(step, counts),
            None if drafts is None else _of_all(step, drafts),
        )

    def _draft(self, step: SchedulerOutput, points: SamplePoints) -> Drafts | None:
        """Return drafts for the step's sampling requests, whose tokens are committed.

        None without a drafter."""
        if self.drafter is None:
            return None
        if self.adapters is not None and isinstance(self.adapters.active, Active):
            # A drafter may share tables of the model, but has no adapters.
            nothing = np.empty(0, np.int32)
            self.adapters.active.set(nothing, nothing)
            self.adapters.head_active.set(nothing, nothing)
        rows = points.rows[points.firsts]
        # A logits processor may count on seeing each position once, in order.
        wanting = ~self.state.sampling.processors.asked[rows] & step.drafts
        with self._computing():
            self.drafter.observe(step)
            found = self.drafter.propose(rows[wanting])
        drafts = np.full((len(rows), found.shape[1]), NO_DRAFT, np.int32)
        drafts[wanting] = found
        self.state.put_drafts(rows, drafts)
        return drafts

    def _keep_logprobs(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int32], *, is_constrained: bool
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function from sampled tokens to records of these logits. None: none are wanted.

        Sampling may change the logits meanwhile. Records of rows that want none are 0."""
        sampling = self.state.sampling
        counts = sampling.num_logprobs[rows]
        k, wanted = int(counts.max()), np.flatnonzero(counts >= 0)
        if k < 0:
            return None
        if len(wanted) < len(rows):
            index = torch.from_numpy(wanted).to(self.device)
            some = logits[index]

            def gather_some(tokens: torch.Tensor) -> torch.Tensor:
                found = self._logprobs(some, tokens[index], k)
                return found.new_zeros(len(tokens), found.shape[1]).index_copy_(0, index, found)

            return gather_some
        changes = is_constrained or bool(sampling.is_special(rows).any())
        raw = logits.clone() if changes else logits
        return lambda tokens: self._logprobs(raw, tokens, k)

    def _logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
        """Return records of log-probabilities (`sampling.logprobs`)."""
        return gather_logprobs(logits, token_ids, k)

    def _prompt_logprobs(
        self, step: SchedulerOutput, hidden: torch.Tensor
    ) -> dict[int, tuple[int, torch.Tensor]]:
        """Return (first position, records from there on) by index of the request."""
        ends = step.num_tokens.cumsum()
        found = {}
        for index in step.prompt_logprobs:
            row, computed, count = (
                int(a[index]) for a in (step.rows, step.num_computed, step.num_tokens)
            )
            params = self.state.sampling.params[row]
            # Logits at position p are for the token at p + 1; the last ones, for the output.
            count = min(count, int(self.state.sampling.num_prompt_tokens[row]) - 1 - computed)
            if count <= 0 or params.prompt_logprobs is None:
                continue
            start = int(ends[index] - step.num_tokens[index])
            wanted = self.state.token_ids[row, computed + 1 : computed + 1 + count]
            parts = [
                self._logprobs(self._logits_of_row(row, part), ids, params.prompt_logprobs)
                for part, ids in zip(
                    torch.split(hidden[start : start + count], PROMPT_LOGPROBS_CHUNK),
                    torch.split(wanted, PROMPT_LOGPROBS_CHUNK),
                    strict=True,
                )
            ]
            found[index] = (computed + 1, torch.cat(parts))
        return found

    def _logits_of_row(self, row: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states of one request."""
        self._set_head_adapters(np.full(len(hidden), row, np.int32))
        return self.model.logits(hidden)

    def _start_output(
        self,
        step: SchedulerOutput,
        sampled: Sampled,
        prompt_logprobs: dict[int, tuple[int, torch.Tensor]],
        pooled: tuple[list[int], torch.Tensor] | None,
    ) -> PendingOutput:
        """Start the copies to the host. `result` waits for them."""
        tokens = to_host(sampled.tokens)
        logprobs = None if sampled.logprobs is None else to_host(sampled.logprobs)
        prompts = {i: (start, to_host(records)) for i, (start, records) in prompt_logprobs.items()}
        samples, vectors = ([], None) if pooled is None else (pooled[0], to_host(pooled[1]))
        counts_there = None if sampled.counts is None else to_host(sampled.counts)
        drafts_there = None if sampled.drafts is None else to_host(sampled.drafts)
        wait = copy_barrier(self.device)

        def finish() -> ModelOutput:
            wait()
            kept, counts, failures = sampled.firsts, None, sampled.failures
            if counts_there is not None:
                counts = counts_there.numpy()[step.samples]
                kept = sampled.kept(counts)
                firsts = counts.cumsum() - counts
                failures = {firsts.item(i): error for i, error in failures.items()}
            return ModelOutput(
                step.step,
                tokens.numpy()[kept].astype(np.int32),
                None if logprobs is None else logprobs.numpy()[kept],
                {
                    i: PromptLogprobs(start, records.numpy())
                    for i, (start, records) in prompts.items()
                },
                {} if vectors is None else dict(zip(samples, vectors.numpy(), strict=True)),
                self.num_compiled(),
                failures,
                counts,
                None if drafts_there is None else drafts_there.numpy()[step.samples],
            )

        return PendingOutput(finish)


@contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """Run PyTorch's operations on the calling thread.

    Its threads would compete with those of our kernels: on two cores, an int8 gpt2 step of 64
    requests takes 5 % longer with them. Threads that first call PyTorch in here keep the setting.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _of_all(step: SchedulerOutput, values: IntArray) -> torch.Tensor:
    """Return the sampling requests' values [n, …] among those of all requests of a step."""
    found = np.zeros((len(step.rows), *values.shape[1:]), np.int32)
    found[step.samples] = values
    return torch.from_numpy(found)


def _empty_output(step: SchedulerOutput) -> PendingOutput:
    return PendingOutput(lambda: ModelOutput(step.step, np.empty(0, np.int32)))
