"""Runs steps on a GPU, common ones as CUDA graphs, from inputs to sampled tokens."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBatch, Backends
from toolkit.hardware.graph_capture import capture, empty_cache
from toolkit.hardware.memory import to_device
from toolkit.kernels.drafts import LATER, SAMPLES, Points
from toolkit.kernels.table import Kernels
from toolkit.models.model import CausalLM
from toolkit.sampling.grammar import Masks
from toolkit.sampling.sampler import sample
from toolkit.scheduler import SchedulerOutput
from toolkit.speculative.drafter import NO_DRAFT
from toolkit.speculative.lookup import DeviceLookup
from toolkit.worker.gpu.cuda_drafter import CudaDrafter
from toolkit.worker.gpu.cuda_state import CudaBatchState, StepInputs, first_points, points_of
from toolkit.worker.gpu.graph_policy import GraphPolicy, StepShape, num_own_tokens
from toolkit.worker.kv_cache import KVCache
from toolkit.worker.model_runner import ModelRunner, PendingOutput, Sample, Sampled


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step and its output."""

    shape: StepShape
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    """Logits [num_points, vocab]; before the last stage, hidden states [num_tokens, hidden]."""


class CudaRunner(ModelRunner):
    """Runs a step as a captured graph where one fits, else kernel by kernel.

    A graph is a complete step: inputs, model, sampler, state update. Special requests, those with
    penalties, biases, grammars or logits processors, are sampled again after it, from its logits.
    Pipeline stages receive hidden states before the graph and send them after it.

    If steps verify drafts, a request has several rows of logits, its points (`kernels.drafts`). The
    drafter is prompt lookup, in the step's graph, or a model, which runs after the step."""

    state: CudaBatchState
    lookup: DeviceLookup | None = None
    draft_runner: CudaDrafter | None = None

    def __init__(
        self,
        model: CausalLM,
        backends: Backends,
        cache: KVCache,
        state: CudaBatchState,
        kernels: Kernels,
        policy: GraphPolicy,
    ) -> None:
        super().__init__(model, backends, cache, state)
        self.kernels, self.policy = kernels, policy
        num_rows = len(state.block_table) - 1
        num_points = num_rows + policy.most_step_drafts
        if model.stage.is_last:
            head, group = model.lm_head.weight, model.lm_head.group
            self._logits = group.gather_buffer(
                (num_points, head.shape[0] * group.size), model.dtype, self.device
            )
        if not model.stage.is_first:
            shape = state.max_tokens, model.hidden_size
            self._received = torch.zeros(shape, dtype=model.dtype, device=self.device)
        self._sampled = torch.empty(num_points, dtype=torch.int32, device=self.device)
        self._again: tuple[torch.Tensor, ...] = ()
        """Changed logits, their rows, positions and tokens, and counts, which are zero."""
        self._graphs: dict[StepShape, Graph] = {}
        self._penalizing: dict[int, torch.cuda.CUDAGraph] = {}
        """Graphs that sample again with penalties, by number of rows of logits."""
        self._pool: Any = None

    @property
    def max_sampled_again(self) -> int:
        """Most rows of logits that are sampled again at once. Memory is reserved for so many."""
        return len(self._sampled)

    @property
    def why_eager(self) -> str | None:
        return (
            None if self._graphs else "the attention backend or the model's code does not allow it"
        )

    # ---- steps

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingOutput:
        if self.lookup is not None:
            for new in step.new_rows:
                self.lookup.place(new)
        return super().execute(step)

    def _send_to_next_stage(self, step: SchedulerOutput) -> None:
        graph = self._send_inputs(step)
        if graph is not None:
            graph.graph.replay()
        hidden = self._forward(self._exact_shape(step)) if graph is None else graph.out
        self.model.stage.send(hidden[: step.total_tokens])

    def _send_inputs(
        self, step: SchedulerOutput, later: npt.NDArray[np.bool_] | None = None
    ) -> Graph | None:
        """Send the step's inputs. Return the graph that it fits into."""
        self.state.send(step, later)
        if not self.model.stage.is_first:
            self.model.stage.receive(self._received[: step.total_tokens])
        return self._graph_for(step)

    def _compute(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        hidden = None if self.model.stage.is_first else self._received[: len(token_ids)]
        if hidden is not None and self.state.active is not None:
            # A kernel between the step's inputs and a product, which may read them early (`pdl`).
            hidden = hidden.clone()
        computed: torch.Tensor = self.model(token_ids, batch, hidden)
        return computed

    def _run(self, step: SchedulerOutput) -> tuple[torch.Tensor | None, Sample]:
        later = self.state.samples_later(step)
        graph = self._send_inputs(step, later)
        shape = self._exact_shape(step) if graph is None else graph.shape
        hidden = None
        if graph is not None:
            graph.graph.replay()
            logits = graph.out
        elif self._keeps_hidden(step):
            hidden, logits = self._forward_keeping_hidden(shape)
        else:
            logits = self._forward(shape)
        return hidden, functools.partial(self._collect_samples, step, shape, later, logits)

    def _forward(self, shape: StepShape) -> torch.Tensor:
        """Run the step that was sent, and sample its tokens.

        Return logits [num_points, vocab], or hidden states for the next stage."""
        inputs = self.state.expand(shape)
        if not self.model.stage.is_last:
            return self._hidden(inputs)
        if not shape.samples_all:
            inputs.batch.wanted = inputs.wanted
        return self._logits_of(self._hidden(inputs), inputs)

    def _forward_keeping_hidden(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the step that was sent. Return the hidden states of all tokens, and logits."""
        inputs = self.state.expand(shape)
        hidden = self._hidden(inputs)
        return hidden, self._logits_of(hidden[inputs.wanted], inputs)

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        active = self.state.active
        if active is None:
            return self._compute(inputs.token_ids, inputs.batch)
        inputs.batch.when_kept = active.keep_wanted
        with active.during(inputs.adapters):
            return self._compute(inputs.token_ids, inputs.batch)

    def _is_adapted(self, step: SchedulerOutput) -> bool:
        return self.state.active is not None and bool(self.state.adapters[step.rows].any())

    def _exact_shape(self, step: SchedulerOutput) -> StepShape:
        context_lens = step.num_computed + step.num_tokens
        longest, num_drafts = int(step.num_tokens.max()), int(step.num_drafts.sum())
        verifies = bool((num_own_tokens(step) == 1).all())
        if verifies and num_drafts:  # kernels are compiled for this number
            longest = 1 + self.policy.most_drafts
        return StepShape(
            step.total_tokens,
            len(step.rows),
            longest,
            int(context_lens.max()),
            self._is_adapted(step),
            num_drafts,
            verifies,
        )

    def _logits_of(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        active = self.state.active
        adapted = active.during(inputs.adapters, keeps_all=False) if active else nullcontext()
        with adapted:
            logits = self.model.logits(hidden, self._logits[: len(hidden)])
        self._sample(logits, inputs)
        return logits

    def _logits_of_row(self, row: int, hidden: torch.Tensor) -> torch.Tensor:
        active = self.state.active
        if active is None:
            return super()._logits_of_row(row, hidden)
        slot = int(self.state.adapters[row])
        with active.during(active.of_rows(slot, len(hidden), self.device)):
            return self.model.logits(hidden)

    def _sample(self, logits: torch.Tensor, inputs: StepInputs) -> None:
        state = self.state
        self.kernels.sample(
            logits,
            inputs.sample_rows,
            inputs.sample_positions,
            state.sampling.floats,
            state.sampling.ints,
            state.token_ids if inputs.points is None else None,
            self._sampled[: len(logits)],
        )
        if inputs.points is not None:
            self._accept(inputs.points, SAMPLES, inputs.batch.rows)

    def _accept(self, points: Points, when: int, rows: torch.Tensor) -> None:
        """Keep right drafts of requests that sampled with the step or later, and draft again."""
        state = self.state
        self.kernels.accept_drafts(
            points,
            when,
            rows,
            self._sampled,
            state.token_ids,
            state.row_lengths,
            state.counts,
            1 + self.policy.most_drafts,
        )
        if self.lookup is not None:
            self.lookup.propose(points, when, rows, state)

    def _collect_samples(
        self,
        step: SchedulerOutput,
        shape: StepShape,
        later: npt.NDArray[np.bool_] | None,
        logits: torch.Tensor,
        masks: Masks | None,
    ) -> Sampled:
        sampling, firsts = self.state.sampling, first_points(step)
        if later is not None:
            self._sample_again(step, logits, later, masks)
        tokens = self._sampled[: firsts[-1]]
        which = np.flatnonzero(step.samples)
        failures = sampling.processors.take_failures(step.rows[which])
        k = int(sampling.num_logprobs[step.rows[which]].max()) if len(which) else -1
        # Of all requests: a gather of those that want them would take longer on the host.
        logprobs = self._logprobs(logits[: len(tokens)], tokens, k) if k >= 0 else None
        counts = self.state.counts[: len(step.rows)] if self.state.verifies else None
        drafts = self._draft_after(step, shape)
        return Sampled(tokens, firsts[which], logprobs, failures, counts, drafts)

    def _draft_after(self, step: SchedulerOutput, shape: StepShape) -> torch.Tensor | None:
        """Return drafts for all requests of a step, which has sampled. None without a drafter."""
        n = len(step.rows)
        if self.lookup is not None:
            return self.lookup.drafts[:n]
        if self.draft_runner is None:
            return None
        self.draft_runner.run(shape, n, drafts=step.drafts)
        if step.drafts:
            return self.draft_runner.drafts[:n]
        return torch.full((n, self.policy.most_drafts), NO_DRAFT, dtype=torch.int32)

    def _logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
        records: torch.Tensor = self.kernels.logprobs(logits, token_ids, k)
        return records

    def _sample_again(
        self,
        step: SchedulerOutput,
        logits: torch.Tensor,
        later: npt.NDArray[np.bool_],
        masks: Masks | None,
    ) -> None:
        """Sample requests from changed logits: with penalties alone, by a graph."""
        state, sampling, most = self.state, self.state.sampling, self.max_sampled_again
        requests, points = points_of(step, later)
        rows = step.rows[requests]
        if masks is None and not sampling.needs_host(rows).any():
            size = next((n for n in self._penalizing if n >= len(points)), None)
            if size is not None:
                self._penalizing[size].replay()
                return
        # With drafts, upper bounds. Only logits processors read them, and those requests have none.
        lengths = (step.num_computed + step.num_tokens)[requests]
        constrained = np.isin(requests, step.constrained)
        for first in range(0, len(points), most):
            part = slice(first, first + most)
            masked = None
            if masks is not None and np.count_nonzero(constrained[part]):
                before = np.count_nonzero(constrained[:first])
                where = np.flatnonzero(constrained[part])
                masked = where, masks[before : before + len(where)]
            index = self._on_device(points[part])
            there = None
            if state.verifies:
                rows_there, positions = state.sample_places
                there = rows_there[index], positions[index]
            self._sampled[index] = sample(
                logits[index].float(),
                sampling,
                state.token_ids,
                rows[part],
                lengths[part],
                masked,
                self.kernels,
                there,
            )
        if state.verifies:
            self._accept(state.points(), LATER, state.rows_sent)

    def _penalize_and_sample(self, size: int, logits: torch.Tensor) -> None:
        """Sample again the rows of logits that were sent as `later`, up to `size` of them.

        logits: all rows, of which some are those of the step."""
        state, index, kernels = self.state, self.state.later[:size], self.kernels
        changed, rows, positions, sampled, counts = self._again
        changed, rows, positions, sampled = (
            one[:size] for one in (changed, rows, positions, sampled)
        )
        kernels.gather_logits(logits, index, *state.sample_places, (changed, rows, positions))
        tables = state.sampling.floats, state.sampling.ints
        kernels.penalize(changed, rows, positions, *tables, state.token_ids, counts)
        target = None if state.verifies else state.token_ids
        kernels.sample(changed, rows, positions, *tables, target, sampled)
        kernels.scatter(sampled, index, self._sampled)
        if state.verifies:
            self._accept(state.points(), LATER, state.rows_sent)

    def _on_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.device)

    # ---- graphs

    @torch.inference_mode()
    def rehearse(self, shapes: Sequence[StepShape]) -> None:
        """Run steps of these shapes without requests."""
        self.state.send(_EMPTY)
        drafted: set[int] = set()
        for shape in shapes:
            self._forward(shape)
            if self.draft_runner is not None:
                # Drafts depend on the number of requests only.
                drafts = shape.num_reqs not in drafted
                self.draft_runner.run(shape, shape.num_reqs, drafts=drafts)
                drafted.add(shape.num_reqs)

    @contextmanager
    def with_few_layers(self) -> Iterator[None]:
        """Run as few layers inside as launch all kernels, of the model and of a drafter's."""
        drafter = (
            nullcontext() if self.draft_runner is None else self.draft_runner.with_few_layers()
        )
        with self.model.with_few_layers(), drafter:
            yield

    @torch.inference_mode()
    def synchronizes(self) -> bool:
        """Return True if steps wait for the device. They cannot be captured."""
        shapes = StepShape(1, 1, 1, 1), StepShape(2, 1, 2, 2)
        self.rehearse(shapes)  # compiles kernels
        self.state.send(_EMPTY)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for shape in shapes:
                self._forward(shape)
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    @torch.inference_mode()
    def seconds(self, shape: StepShape) -> float:
        """Return how long the graph of a shape takes without requests.

        If it verifies drafts, with the next drafts."""
        self.state.send(_EMPTY)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2):  # the first one fills caches
            begin.record()
            self._graphs[shape].graph.replay()
            if self.draft_runner is not None:
                self.draft_runner.run(shape, shape.num_reqs, drafts=shape.verifies)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    @torch.inference_mode()
    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Capture a graph per shape, on the current stream."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        for shape in shapes:
            self.state.send(_EMPTY)
            graph, out = capture(functools.partial(self._forward, shape), self._pool)
            self._graphs[shape] = Graph(shape, graph, out)
            if self.draft_runner is not None:
                self.draft_runner.capture(shape, self._pool)
        torch.cuda.synchronize()
        empty_cache()  # memory of the steps before the captures

    @torch.inference_mode()
    def capture_penalties(self) -> None:
        """Capture the graphs that sample again, after all others, whose logits they read."""
        if not self.model.stage.is_last or not self._graphs:
            return
        out = next(iter(self._graphs.values())).out
        if out.data_ptr() != self._logits.data_ptr():
            return
        vocab, most = out.shape[1], self.max_sampled_again
        logits = self._logits.as_strided((len(self._logits), vocab), out.stride())
        self._again = (
            torch.empty(most, -(-vocab // 16) * 16, device=self.device)[:, :vocab],
            *torch.zeros(3, most, dtype=torch.int32, device=self.device),
            torch.zeros(most, vocab, dtype=torch.int32, device=self.device),
        )
        for size in self.policy.penalized_sizes:
            self.state.send(_EMPTY)
            run = functools.partial(self._penalize_and_sample, size, logits)
            self._penalizing[size], _ = capture(run, self._pool)

    def close(self) -> None:
        """Free the graphs, even while this object is referenced."""
        for graph in (*(one.graph for one in self._graphs.values()), *self._penalizing.values()):
            graph.reset()
        self._graphs, self._penalizing = {}, {}
        if self.draft_runner is not None:
            self.draft_runner.close()

    def _graph_for(self, step: SchedulerOutput) -> Graph | None:
        """Return the graph to replay for a step, or None. Graphs do not keep hidden states."""
        shape = self.policy.shape_for(step, self._is_adapted(step))
        if shape is None or self._keeps_hidden(step):
            return None
        return self._graphs.get(shape)  # None before it is captured


_NO_INTS = np.empty(0, np.int32)
_EMPTY = SchedulerOutput(-1, _NO_INTS, _NO_INTS, _NO_INTS, np.empty(0, np.bool_))
