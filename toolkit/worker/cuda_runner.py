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
from toolkit.kernels.table import Kernels
from toolkit.models.model import CausalLM
from toolkit.sampling.grammar import Masks
from toolkit.sampling.sampler import sample
from toolkit.scheduler import SchedulerOutput
from toolkit.worker.cuda_state import CudaBatchState, StepInputs
from toolkit.worker.graph_policy import GraphPolicy, StepShape
from toolkit.worker.kv_cache import KVCache
from toolkit.worker.model_runner import ModelRunner, Sample, Sampled


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step and its output."""

    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    """Logits [num_reqs, vocab]; before the last stage, hidden states [num_tokens, hidden]."""


class CudaRunner(ModelRunner):
    """Runs a step as a captured graph where one fits, else kernel by kernel.

    A graph is a complete step: inputs, model, sampler, state update. Special requests, those with
    penalties, biases, grammars or logits processors, are sampled again after it, from its logits.
    Pipeline stages receive hidden states before the graph and send them after it."""

    state: CudaBatchState

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
        if model.stage.is_last:
            head, group = model.lm_head.weight, model.lm_head.group
            self._logits = group.gather_buffer(
                (num_rows, head.shape[0] * group.size), model.dtype, self.device
            )
        if not model.stage.is_first:
            shape = state.max_tokens, model.hidden_size
            self._received = torch.zeros(shape, dtype=model.dtype, device=self.device)
        self._sampled = torch.empty(num_rows, dtype=torch.int32, device=self.device)
        self._graphs: dict[StepShape, Graph] = {}
        self._pool: Any = None

    # ---- steps

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
        if graph is not None:
            graph.graph.replay()
            logits = graph.out
        elif self._keeps_hidden(step):
            hidden, logits = self._forward_keeping_hidden(self._exact_shape(step))
        else:
            logits = self._forward(self._exact_shape(step))
        return hidden, functools.partial(self._collect_samples, step, logits)

    def _forward(self, shape: StepShape) -> torch.Tensor:
        """Run the step that was sent, and sample its tokens.

        Return logits [num_reqs, vocab], or hidden states for the next stage."""
        inputs = self.state.expand(shape)
        if not self.model.stage.is_last:
            return self._hidden(inputs)
        if shape.max_query_len > 1:
            inputs.batch.wanted = _last_tokens(inputs)
        return self._logits_of(self._hidden(inputs), inputs)

    def _forward_keeping_hidden(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the step that was sent. Return the hidden states of all tokens, and logits."""
        inputs = self.state.expand(shape)
        hidden = self._hidden(inputs)
        return hidden, self._logits_of(hidden[_last_tokens(inputs)], inputs)

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
        )

    def _logits_of(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        logits = self.model.logits(hidden, self._logits[: len(hidden)])
        self._sample(logits, inputs)
        return logits

    def _sample(self, logits: torch.Tensor, inputs: StepInputs) -> None:
        state = self.state
        self.kernels.sample(
            logits,
            inputs.batch.rows,
            inputs.sample_positions,
            state.sampling.floats,
            state.sampling.ints,
            state.token_ids,
            self._sampled[: len(logits)],
        )

    def _collect_samples(
        self, step: SchedulerOutput, logits: torch.Tensor, masks: Masks | None
    ) -> Sampled:
        sampling = self.state.sampling
        is_special = step.samples & sampling.is_special(step.rows)
        is_special[step.constrained] = True
        if is_special.any():
            self._sample_again(step, logits, np.flatnonzero(is_special), masks)
        tokens = self._sampled[: len(step.rows)]
        which = np.flatnonzero(step.samples)
        failures = sampling.processors.take_failures(step.rows[which])
        k = int(sampling.num_logprobs[step.rows[which]].max()) if len(which) else -1
        # Of all requests: a gather of those that want them would take longer on the host.
        logprobs = self._logprobs(logits[: len(tokens)], tokens, k) if k >= 0 else None
        return Sampled(tokens, which, logprobs, failures)

    def _logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
        records: torch.Tensor = self.kernels.logprobs(logits, token_ids, k)
        return records

    def _sample_again(
        self,
        step: SchedulerOutput,
        logits: torch.Tensor,
        which: npt.NDArray[np.int64],
        masks: Masks | None,
    ) -> None:
        """Sample the special requests, from changed logits."""
        state, index = self.state, self._on_device(which)
        rows, lengths = step.rows[which], (step.num_computed + step.num_tokens)[which]
        masked = None if masks is None else (np.searchsorted(which, step.constrained), masks)
        self._sampled[index] = sample(
            logits[index].float(),
            state.sampling,
            state.token_ids,
            rows,
            lengths,
            masked,
            self.kernels,
        )

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


def _last_tokens(inputs: StepInputs) -> torch.Tensor:
    """Return the index of each request's last token in the step."""
    return (inputs.batch.query_start_loc[1:] - 1).clamp(min=0).long()


_NO_INTS = np.empty(0, np.int32)
_EMPTY = SchedulerOutput(-1, _NO_INTS, _NO_INTS, _NO_INTS, np.empty(0, np.bool_))
