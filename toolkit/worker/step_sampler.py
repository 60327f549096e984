"""Samples the tokens of a step from its logits, and writes them into the state."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from toolkit.hardware.graph_capture import capture
from toolkit.hardware.memory import to_device
from toolkit.kernels.drafts import LATER, SAMPLES, Points
from toolkit.kernels.reference import SpeechRules
from toolkit.kernels.table import Kernels, TritonKernels
from toolkit.models.model import CausalLM
from toolkit.sampling.grammar import Masks
from toolkit.sampling.sampler import sample
from toolkit.scheduler import SchedulerOutput
from toolkit.worker.batch_state import BatchState, StepInputs
from toolkit.worker.drafter import Drafter
from toolkit.worker.graph_policy import GraphPolicy
from toolkit.worker.pending import Sampled

PROMPT_LOGPROBS_CHUNK = 256  # positions whose logits are in memory at once


class StepSampler:
    """Samples all requests of a step at once, then special ones again, from changed logits.

    Logits and samples have fixed addresses on a GPU, so that CUDA graphs can write them."""

    def __init__(
        self,
        model: CausalLM,
        state: BatchState,
        kernels: Kernels,
        policy: GraphPolicy,
        drafter: Drafter | None = None,
        rules: SpeechRules | None = None,
    ) -> None:
        """rules: of transcriptions, if the model hears."""
        self._model, self._state, self._drafter = model, state, drafter
        self._rules = rules
        self.kernels, self.device = kernels, state.device
        self._most_points = 1 + policy.most_drafts
        num_points = len(state.rows_sent) + policy.most_step_drafts
        self._buffer: torch.Tensor | None = None
        if model.stage.is_last and isinstance(kernels, TritonKernels):
            head, group = model.lm_head.weight, model.lm_head.group
            shape = num_points, head.shape[0] * group.size
            self._buffer = group.gather_buffer(shape, model.dtype, self.device)
        self._sampled = torch.empty(num_points, dtype=torch.int32, device=self.device)
        self._again: tuple[torch.Tensor, ...] = ()
        """Changed logits, their rows, positions and tokens, and counts, which are zero."""
        self._penalizing: dict[int, torch.cuda.CUDAGraph] = {}
        """Graphs that sample again with penalties, by number of rows of logits."""

    @property
    def max_sampled_again(self) -> int:
        """Most rows of logits that are sampled again at once. Memory is reserved for so many."""
        return len(self._sampled)

    def choose(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Sample after hidden states of the points. Return logits [num_points, vocab].

        Can be captured."""
        state, active = self._state, self._state.active
        adapted = active.during(inputs.adapters, keeps_all=False) if active else nullcontext()
        with adapted:
            buffer = None if self._buffer is None else self._buffer[: len(hidden)]
            logits = self._model.logits(hidden, buffer)
        rows, positions = inputs.sample_rows, inputs.sample_positions
        ints = state.sampling.ints
        if self._rules is not None:
            self.kernels.speech_rules(logits, rows, positions, state.token_ids, ints, self._rules)
        self.kernels.sample(
            logits,
            rows,
            positions,
            state.sampling.floats,
            ints,
            state.token_ids if inputs.points is None else None,
            self._sampled[: len(logits)],
        )
        self.accept(inputs)
        return logits

    def accept(self, inputs: StepInputs) -> None:
        """Count the tokens that each request got. Called for steps without samples, too."""
        if inputs.points is not None:
            self._accept(inputs.points, SAMPLES, inputs.batch.rows)

    def _accept(self, points: Points, when: int, rows: torch.Tensor) -> None:
        """Keep right drafts of requests that sampled with the step or later, and draft again."""
        state = self._state
        self.kernels.accept_drafts(
            points,
            when,
            rows,
            self._sampled,
            state.token_ids,
            state.lengths,
            state.counts,
            self._most_points,
        )
        if self._drafter is not None:
            self._drafter.accepted(points, when, rows)

    def collect(
        self,
        step: SchedulerOutput,
        later: npt.NDArray[np.bool_] | None,
        logits: torch.Tensor | None,
        masks: Masks | None,
    ) -> Sampled:
        """Return the samples of a step that ran. logits: None if no request samples.

        later: requests that sample now."""
        sampling, firsts = self._state.sampling, step.first_points
        if later is not None:
            assert logits is not None
            self._sample_again(step, logits, later, masks)
        tokens = self._sampled[: firsts[-1]]
        which = step.samples.nonzero()[0]
        failures = sampling.processors.take_failures(step.rows[which])
        records = None if logits is None else self._logprobs(step, logits, tokens)
        counts = self._state.counts[: len(step.rows)] if self._state.verifies else None
        return Sampled(tokens, firsts[which], records, failures, counts)

    def _logprobs(
        self, step: SchedulerOutput, logits: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Return records of all points, of which those of requests that want none mean nothing."""
        counts = self._state.sampling.num_logprobs[step.rows]
        wants = step.samples & (counts >= 0)
        if not np.count_nonzero(wants):
            return None
        k = int(counts[wants].max())
        _, points = step.points_of(wants)
        # Triton's kernel reads padded rows, for which it was compiled. A gather would have others.
        if isinstance(self.kernels, TritonKernels) or len(points) > len(tokens) // 4:
            return self.kernels.logprobs(logits[: len(tokens)], tokens, k)
        index = to_device(torch.from_numpy(points), self.device)
        found = self.kernels.logprobs(logits[index], tokens[index], k)
        return found.new_zeros(len(tokens), found.shape[1]).index_copy_(0, index, found)

    def _sample_again(
        self,
        step: SchedulerOutput,
        logits: torch.Tensor,
        later: npt.NDArray[np.bool_],
        masks: Masks | None,
    ) -> None:
        """Sample requests from changed logits: with penalties alone, by a graph."""
        state, sampling = self._state, self._state.sampling
        requests, points = step.points_of(later)
        rows = step.rows[requests]
        if masks is None and not sampling.needs_host(rows).any():
            size = next((n for n in self._penalizing if n >= len(points)), None)
            if size is not None:
                self._penalizing[size].replay()
                return
        # With drafts, upper bounds. Only logits processors read them, and those requests have none.
        lengths = (step.num_computed + step.num_tokens)[requests]
        masked = None
        if masks is not None:
            masked = np.flatnonzero(np.isin(requests, step.constrained)), masks
        index = to_device(torch.from_numpy(points), self.device)
        there = None
        if state.verifies:
            rows_there, positions = state.sample_places
            there = rows_there[index], positions[index]
        self._sampled[index] = sample(
            logits[index].float(),
            sampling,
            state.token_ids,
            rows,
            lengths,
            self.kernels,
            masked,
            there,
        )
        if state.verifies:
            self._accept(state.points(), LATER, state.rows_sent)

    def _penalize_and_sample(self, size: int, logits: torch.Tensor) -> None:
        """Sample again the rows of logits that were sent as `later`, up to `size` of them.

        logits: all rows, of which some are those of the step."""
        state, index, kernels = self._state, self._state.later[:size], self.kernels
        assert isinstance(kernels, TritonKernels), "only its steps are captured"
        changed, rows, positions, sampled, counts = self._again
        changed, rows, positions, sampled = (
            one[:size] for one in (changed, rows, positions, sampled)
        )
        kernels.gather_logits(logits, index, *state.sample_places, (changed, rows, positions))
        tables = state.sampling.floats, state.sampling.ints
        kernels.penalize_in_graph(
            changed, rows, positions, *tables, state.sampling.windows, state.token_ids, counts
        )
        target = None if state.verifies else state.token_ids
        kernels.sample(changed, rows, positions, *tables, target, sampled)
        kernels.scatter(sampled, index, self._sampled)
        if state.verifies:
            self._accept(state.points(), LATER, state.rows_sent)

    def capture(
        self, out: torch.Tensor, sizes: Sequence[int], pool: Any, send: Callable[[], None]
    ) -> None:
        """Capture the graphs that sample again. out: logits of a captured step.

        send: sends inputs without requests."""
        buffer = self._buffer
        if buffer is None or out.data_ptr() != buffer.data_ptr():
            return
        vocab, most = out.shape[1], self.max_sampled_again
        logits = buffer.as_strided((len(buffer), vocab), out.stride())
        self._again = (
            torch.empty(most, -(-vocab // 16) * 16, device=self.device)[:, :vocab],
            *torch.zeros(3, most, dtype=torch.int32, device=self.device),
            torch.zeros(most, vocab, dtype=torch.int32, device=self.device),
        )
        for size in sizes:
            send()
            run = functools.partial(self._penalize_and_sample, size, logits)
            self._penalizing[size], _ = capture(run, pool)

    def close(self) -> None:
        """Free the graphs, even while this object is referenced."""
        for graph in self._penalizing.values():
            graph.reset()
        self._penalizing = {}

    def prompt_logprobs(
        self, step: SchedulerOutput, hidden: torch.Tensor
    ) -> dict[int, tuple[int, torch.Tensor]]:
        """Return (first position, records from there on) by index of the request.

        hidden: [num_tokens, hidden]."""
        ends = step.num_tokens.cumsum()
        found, sampling = {}, self._state.sampling
        for index in step.prompt_logprobs:
            row, computed, count = (
                int(a[index]) for a in (step.rows, step.num_computed, step.num_tokens)
            )
            params = sampling.params[row]
            # Logits at position p are for the token at p + 1; the last ones, for the output.
            count = min(count, int(sampling.num_prompt_tokens[row]) - 1 - computed)
            if count <= 0 or params.prompt_logprobs is None:
                continue
            start = int(ends[index] - step.num_tokens[index])
            wanted = self._state.token_ids[row, computed + 1 : computed + 1 + count]
            parts = [
                self.kernels.logprobs(self._logits_of_row(row, part), ids, params.prompt_logprobs)
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
        active = self._state.active
        if active is None:
            return self._model.logits(hidden)
        slot = int(self._state.adapters[row])
        with active.during(active.of_rows(slot, len(hidden), self.device)):
            return self._model.logits(hidden)
