"""Runs steps on a GPU: the common ones as CUDA graphs, from the inputs to the sampled tokens in the state."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBackend, AttentionBatch
from toolkit.hardware.graph_capture import captured, empty_cache
from toolkit.models.registry import CausalLM
from toolkit.sampling.grammar import Masks
from toolkit.sampling.sampler import add_biases
from toolkit.sampling.sampling_state import to_device
from toolkit.scheduler import SchedulerOutput
from toolkit.worker.batch_state import StepShape
from toolkit.worker.cuda_state import CudaBatchState, StepInputs
from toolkit.worker.kv_cache import KVCache
from toolkit.worker.model_runner import ModelRunner, Sample, Sampled

MIXED_TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Padded sizes of captured steps in which prompts and next tokens are mixed."""
SMALL_MIXED = 512
"""Up to this many tokens padding costs next to nothing."""
MOSTLY = 0.75
"""How much of a larger captured step must be tokens for it to be better than a step without a graph."""
LONGEST_MIXED = 8192
"""Context, in tokens, of a request with one token up to which those are used: they do not split it over programs."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step, and where it leaves what it computes."""

    shape: StepShape
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    """Logits [num_reqs, vocab]; on another stage than the last hidden states [num_tokens, hidden]."""


class CudaRunner(ModelRunner):
    """Steps as captured graphs where one fits, else kernel by kernel.

    A graph holds a whole step: inputs, model, sampler, state update. What few requests ask for (penalties, biases) is
    done after it, by sampling those again from its logits. Between stages of a pipeline hidden states are received before the
    graph and sent after it.
    """

    state: CudaBatchState

    def __init__(
        self, model: CausalLM, backend: AttentionBackend, cache: KVCache, state: CudaBatchState
    ) -> None:
        from toolkit.kernels.triton.bitmask import mask_logits
        from toolkit.kernels.triton.logprobs import logprobs
        from toolkit.kernels.triton.penalties import penalize
        from toolkit.kernels.triton.sampling import sample

        super().__init__(model, backend, cache, state)
        self._kernels = SimpleNamespace(
            sample=sample, logprobs=logprobs, penalize=penalize, mask_logits=mask_logits
        )
        num_rows = len(state.block_table) - 1
        if model.stage.is_last:
            head, group = model.lm_head.weight, model.lm_head.group
            self._logits = group.room(
                (num_rows, head.shape[0] * group.size), head.dtype, self.device
            )
        if not model.stage.is_first:
            shape = state.max_tokens, model.hidden_size
            self._received = torch.zeros(shape, dtype=model.dtype, device=self.device)
        self._sampled = torch.empty(num_rows, dtype=torch.int32, device=self.device)
        self._decode: list[Graph] = []
        """By number of requests, rising; likewise `_mixed`, by number of tokens."""
        self._mixed: list[Graph] = []
        self._pool: Any = None

    # ---- steps

    def _pass_on(self, step: SchedulerOutput) -> None:
        graph = self._begin(step)
        if graph is not None:
            graph.graph.replay()
        hidden = self._forward(_exact(step)) if graph is None else graph.out
        self.model.stage.send(hidden[: step.total_tokens])

    def _begin(self, step: SchedulerOutput) -> Graph | None:
        """Takes to the device what the step starts from; the graph that it fits into."""
        self.state.send(step)
        if not self.model.stage.is_first:
            self.model.stage.receive(self._received[: step.total_tokens])
        return self._graph_for(step)

    def _compute(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        hidden = None if self.model.stage.is_first else self._received[: len(token_ids)]
        computed: torch.Tensor = self.model(token_ids, batch, hidden)
        return computed

    def _run(self, step: SchedulerOutput) -> tuple[torch.Tensor | None, Sample]:
        graph = self._begin(step)
        hidden = None
        if graph is not None:
            graph.graph.replay()
            logits = graph.out
        elif self._keeps_hidden(step):
            hidden, logits = self._forward_whole(_exact(step))
        else:
            logits = self._forward(_exact(step))
        return hidden, functools.partial(self._sampled_of, step, logits)

    def _forward(self, shape: StepShape) -> torch.Tensor:
        """Logits [num_reqs, vocab] of the step that was sent, whose tokens it samples; or what the next stage is to be given."""
        inputs = self.state.expanded(shape)
        if not self.model.stage.is_last:
            return self._compute(inputs.token_ids, inputs.batch)
        if shape.max_query_len > 1:
            inputs.batch.wanted = _last_tokens(inputs)
        return self._logits_of(self._compute(inputs.token_ids, inputs.batch), inputs)

    def _forward_whole(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with the hidden states of all tokens."""
        inputs = self.state.expanded(shape)
        hidden = self._compute(inputs.token_ids, inputs.batch)
        return hidden, self._logits_of(hidden[_last_tokens(inputs)], inputs)

    def _logits_of(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        logits = self.model.logits(hidden, self._logits[: len(hidden)])
        self._sample(logits, inputs)
        return logits

    def _sample(self, logits: torch.Tensor, inputs: StepInputs) -> None:
        state = self.state
        self._kernels.sample(
            logits,
            inputs.batch.rows,
            inputs.sample_positions,
            state.sampling.floats,
            state.sampling.ints,
            state.token_ids,
            self._sampled[: len(logits)],
        )

    def _sampled_of(
        self, step: SchedulerOutput, logits: torch.Tensor, masks: Masks | None
    ) -> Sampled:
        sampling = self.state.sampling
        special = step.samples & (sampling.penalties[step.rows] | sampling.biases[step.rows])
        special[step.constrained] = True
        if special.any():
            self._sample_again(step, logits, np.flatnonzero(special), masks)
        tokens = self._sampled[: len(step.rows)]
        which = np.flatnonzero(step.samples)
        k = int(sampling.num_logprobs[step.rows[which]].max()) if len(which) else -1
        if k < 0:
            return Sampled(tokens, which)
        index = self._on_device(which)
        return Sampled(tokens, which, self._kernels.logprobs(logits[index], tokens[index], k))

    def _sample_again(
        self,
        step: SchedulerOutput,
        logits: torch.Tensor,
        which: npt.NDArray[np.int64],
        masks: Masks | None,
    ) -> None:
        """Samples the requests that have penalties, biases or grammars, from changed logits."""
        state, index = self.state, self._on_device(which)
        rows, lengths = step.rows[which], (step.num_computed + step.num_tokens)[which]
        rows_there, lengths_there = self._on_device(rows), self._on_device(lengths)
        changed = logits[index].float()
        add_biases(changed, state.sampling, state.token_ids, rows, lengths)
        parameters = (state.sampling.floats, state.sampling.ints, state.token_ids)
        self._kernels.penalize(changed, rows_there, lengths_there, *parameters)
        if masks is not None:
            masked = np.searchsorted(which, step.constrained)
            self._kernels.mask_logits(changed, self._on_device(masked), self._on_device(masks))
        out = torch.empty(len(which), dtype=torch.int32, device=self.device)
        self._kernels.sample(changed, rows_there, lengths_there, *parameters, out)
        self._sampled[index] = out

    def _on_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.device)

    # ---- graphs

    @torch.inference_mode()
    def rehearse(self, shapes: Sequence[StepShape]) -> None:
        """Steps of these shapes and of no requests."""
        self.state.send(_EMPTY)
        for shape in shapes:
            self._forward(shape)

    @torch.inference_mode()
    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Captures a graph for each shape, on the current stream. The largest comes first: the others then fit into its
        memory.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        for shape in shapes:
            self.state.send(_EMPTY)
            self._forward(shape)  # compiles what is not compiled yet
            graph = torch.cuda.CUDAGraph()
            with captured(graph, self._pool):
                out = self._forward(shape)
            kept = self._decode if shape.max_query_len == 1 else self._mixed
            bisect.insort(kept, Graph(shape, graph, out), key=lambda g: g.shape.num_tokens)
        torch.cuda.synchronize()
        empty_cache()  # what the steps before the captures took

    def close(self) -> None:
        """Gives up the graphs, whoever still refers to this."""
        for graph in (*self._decode, *self._mixed):
            graph.graph.reset()
        self._decode, self._mixed = [], []

    def _graph_for(self, step: SchedulerOutput) -> Graph | None:
        """The smallest graph that the step fits into."""
        total = step.total_tokens
        decode = total == len(step.rows)
        graphs = self._decode if decode else self._mixed
        at = bisect.bisect_left(graphs, total, key=lambda g: g.shape.num_tokens)
        if at == len(graphs):
            return None
        if self._keeps_hidden(step):  # which graphs do not
            return None
        padded = graphs[at].shape.num_tokens
        if not decode and padded > SMALL_MIXED and total < MOSTLY * padded:
            return None
        if not decode and (step.num_computed[step.num_tokens == 1] >= LONGEST_MIXED).any():
            return None
        return graphs[at]


def graph_shapes(max_num_seqs: int, max_num_tokens: int, max_model_len: int) -> list[StepShape]:
    """The steps worth capturing, the largest first: next tokens of any number of requests, and small mixed ones."""
    most = min(max_num_seqs, max_num_tokens)
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, most, 64))
    counts = {n for n in sizes if n < most} | {most}
    most_tokens = min(max_num_tokens, max_num_seqs * max_model_len)
    useful = bisect.bisect_left(MIXED_TOKENS, most_tokens) + 1
    shapes = [StepShape(n, n, 1, max_model_len) for n in counts]
    shapes += [
        StepShape(tokens, min(tokens, max_num_seqs), tokens, max_model_len)
        for tokens in MIXED_TOKENS[:useful]
        if tokens <= max_num_tokens
    ]
    return sorted(shapes, key=lambda s: (s.num_tokens, s.max_query_len), reverse=True)


def _last_tokens(inputs: StepInputs) -> torch.Tensor:
    """Each request's last token of the step."""
    return (inputs.batch.query_start_loc[1:] - 1).clamp(min=0).long()


def _exact(step: SchedulerOutput) -> StepShape:
    context_lens = step.num_computed + step.num_tokens
    return StepShape(
        step.total_tokens, len(step.rows), int(step.num_tokens.max()), int(context_lens.max())
    )


_NONE = np.empty(0, np.int32)
_EMPTY = SchedulerOutput(-1, _NONE, _NONE, _NONE, np.empty(0, np.bool_))
