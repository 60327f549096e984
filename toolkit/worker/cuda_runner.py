"""Runs steps on a GPU, common ones as CUDA graphs, from inputs to sampled tokens."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBackend, AttentionBatch
from toolkit.hardware.graph_capture import captured, empty_cache
from toolkit.hardware.memory import to_device
from toolkit.kernels.drafts import LATER, SAMPLES, Points
from toolkit.kernels.table import Kernels
from toolkit.models.model import CausalLM
from toolkit.sampling.grammar import Masks
from toolkit.sampling.sampler import sample
from toolkit.scheduler import SchedulerOutput
from toolkit.speculative.lookup import DeviceLookup
from toolkit.worker.cuda_state import CudaBatchState, StepInputs, first_points
from toolkit.worker.graph_policy import GraphPolicy, StepShape, num_own_tokens
from toolkit.worker.kv_cache import KVCache
from toolkit.worker.model_runner import ModelRunner, PendingOutput, Sample, Sampled


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step and its output."""

    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    """Logits [num_points, vocab]; before the last stage, hidden states [num_tokens, hidden]."""


class CudaRunner(ModelRunner):
    """Runs a step as a captured graph where one fits, else kernel by kernel.

    A graph is a complete step: inputs, model, sampler, state update. Special requests, those with
    penalties, biases, grammars or logits processors, are sampled again after it, from its logits.
    Pipeline stages receive hidden states before the graph and send them after it.

    If steps verify drafts, a request has several rows of logits, its points (`kernels.drafts`)."""

    state: CudaBatchState
    lookup: DeviceLookup | None = None
    """Drafter, if steps verify drafts."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        cache: KVCache,
        state: CudaBatchState,
        kernels: Kernels,
        policy: GraphPolicy,
    ) -> None:
        super().__init__(model, backend, cache, state)
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
        self._counts = torch.zeros(num_rows, dtype=torch.int32, device=self.device)
        self._graphs: dict[StepShape, Graph] = {}
        self._pool: Any = None

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

    def _send_inputs(self, step: SchedulerOutput) -> Graph | None:
        """Send the step's inputs. Return the graph that it fits into."""
        self.state.send(step)
        if not self.model.stage.is_first:
            self.model.stage.receive(self._received[: step.total_tokens])
        return self._graph_for(step)

    def _compute(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        hidden = None if self.model.stage.is_first else self._received[: len(token_ids)]
        computed: torch.Tensor = self.model(token_ids, batch, hidden)
        return computed

    def _run(self, step: SchedulerOutput) -> tuple[torch.Tensor | None, Sample]:
        graph = self._send_inputs(step)
        hidden = None
        shape = self._exact_shape(step)
        if graph is not None:
            graph.graph.replay()
            logits = graph.out
        elif self._keeps_hidden(step):
            hidden, logits = self._forward_keeping_hidden(shape)
        else:
            logits = self._forward(shape)
        return hidden, functools.partial(self._collect_samples, step, shape, logits)

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
        return StepShape(
            step.total_tokens,
            len(step.rows),
            int(step.num_tokens.max()),
            int(context_lens.max()),
            self._is_adapted(step),
            int(step.num_drafts.sum()),
            verifies=bool((num_own_tokens(step) == 1).all()),
        )

    def _logits_of(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        logits = self.model.logits(hidden, self._logits[: len(hidden)])
        self._sample(logits, inputs)
        return logits

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
            self._counts,
            1 + self.policy.most_drafts,
        )
        if self.lookup is not None:
            self.lookup.propose(points, when, rows, state)

    def _collect_samples(
        self, step: SchedulerOutput, shape: StepShape, logits: torch.Tensor, masks: Masks | None
    ) -> Sampled:
        sampling, firsts = self.state.sampling, first_points(step)
        later = self.state.samples_later(step)
        if later.any():
            self._sample_again(step, shape, logits, np.flatnonzero(later), masks)
        tokens = self._sampled[: shape.num_points]
        which = np.flatnonzero(step.samples)
        failures = sampling.processors.take_failures(step.rows[which])
        k = int(sampling.num_logprobs[step.rows[which]].max()) if len(which) else -1
        # Of all requests: a gather of those that want them would take longer on the host.
        logprobs = self._logprobs(logits[: len(tokens)], tokens, k) if k >= 0 else None
        counts = drafts = None
        if self.state.verifies:
            counts = self._counts[: len(step.rows)]
            if self.lookup is not None:
                drafts = self.lookup.drafts[: len(step.rows)]
        return Sampled(tokens, firsts[which], logprobs, failures, counts, drafts)

    def _logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
        records: torch.Tensor = self.kernels.logprobs(logits, token_ids, k)
        return records

    def _sample_again(
        self,
        step: SchedulerOutput,
        shape: StepShape,
        logits: torch.Tensor,
        which: npt.NDArray[np.int64],
        masks: Masks | None,
    ) -> None:
        """Sample the special requests, from changed logits."""
        state, firsts = self.state, first_points(step)
        counts = np.diff(firsts)[which]
        of_points = np.repeat(which, counts)
        nth = np.arange(len(of_points)) - np.repeat(counts.cumsum() - counts, counts)
        index = self._on_device(firsts[of_points] + nth)
        masked = None
        if masks is not None:
            masked = np.flatnonzero(np.isin(of_points, step.constrained)), masks
        points = state.points(shape) if state.verifies else None
        there = None
        if points is not None:
            there = points.rows[index], points.positions[index]
        self._sampled[index] = sample(
            logits[index].float(),
            state.sampling,
            state.token_ids,
            step.rows[of_points],
            # With drafts, an upper bound: those who must know it have none.
            (step.num_computed + step.num_tokens)[of_points],
            masked,
            self.kernels,
            there,
        )
        if points is not None:
            self._accept(points, LATER, state.rows_sent(shape))

    def _on_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.device)

    # ---- graphs

    @torch.inference_mode()
    def rehearse(self, shapes: Sequence[StepShape]) -> None:
        """Run steps of these shapes without requests."""
        self.state.send(_EMPTY)
        for shape in shapes:
            self._forward(shape)

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
        """Return how long the graph of a shape takes without requests."""
        self.state.send(_EMPTY)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(2):  # the first one fills caches
            begin.record()
            self._graphs[shape].graph.replay()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    @torch.inference_mode()
    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Capture a graph per shape, on the current stream."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        for shape in shapes:
            self.state.send(_EMPTY)
            self._forward(shape)  # compiles missing kernels
            graph = torch.cuda.CUDAGraph()
            with captured(graph, self._pool):
                out = self._forward(shape)
            self._graphs[shape] = Graph(graph, out)
        torch.cuda.synchronize()
        empty_cache()  # memory of the steps before the captures

    def close(self) -> None:
        """Free the graphs, even while this object is referenced."""
        for graph in self._graphs.values():
            graph.graph.reset()
        self._graphs = {}

    def _graph_for(self, step: SchedulerOutput) -> Graph | None:
        """Return the graph to replay for a step, or None. Graphs do not keep hidden states."""
        shape = self.policy.shape_for(step, self._is_adapted(step))
        if shape is None or self._keeps_hidden(step):
            return None
        return self._graphs.get(shape)  # None before it is captured


_NO_INTS = np.empty(0, np.int32)
_EMPTY = SchedulerOutput(-1, _NO_INTS, _NO_INTS, _NO_INTS, np.empty(0, np.bool_))
