"""Drafters: they guess the next tokens of requests. A wrong guess costs time and changes no token.

`kernels.drafts` has their contract."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from toolkit.attention import AttentionBatch
from toolkit.config import Speculation
from toolkit.hardware.graph_capture import capture
from toolkit.hardware.memory import lazy_zeros, to_device
from toolkit.kernels.drafts import Points
from toolkit.kernels.table import Kernels, TritonKernels
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.scheduler.output import IntArray
from toolkit.speculative.network import Network
from toolkit.worker.batch_state import BatchState
from toolkit.worker.features import FeatureRequests
from toolkit.worker.graph_policy import GraphPolicy, StepShape

NO_DRAFT = -1
MOST_WAITING = 64  # tokens of a request


class Drafter(Protocol):
    """Writes drafts after the tokens of requests that sampled."""

    is_capturable: bool
    may_wait: bool  # tokens may wait while no drafts are wanted

    def place(self, new: NewRow) -> None:
        """Give a row to a request."""

    def accepted(self, points: Points, when: int, rows: torch.Tensor) -> None:
        """Read the tokens of the requests whose end is `when`. A part of the step's graph."""

    def follow(self, step: SchedulerOutput, shape: StepShape) -> torch.Tensor:
        """Run after a step of this shape. Return drafts [num_reqs, most]; negative ones: none."""

    def rehearse(self, shape: StepShape, *, drafts: bool) -> None:
        """Launch all kernels that follow a step of this shape. `drafts`: those of drafts, too."""

    def capture(self, shape: StepShape, pool: Any) -> None:
        """Capture the runs that follow a step of this shape, if that is possible."""

    def with_few_layers(self) -> AbstractContextManager[None]:
        """Run as few layers inside as launch all kernels."""

    def close(self) -> None:
        """Free the graphs, even while this object is referenced."""


class PromptLookup:
    """Prompt lookup (Saxena, 2023): what followed the last tokens when they occurred before.

    It looks in the request's prediction, then in its own tokens, as the last part of a step."""

    is_capturable = may_wait = True

    def __init__(self, config: Speculation, kernels: Kernels, state: BatchState) -> None:
        self._config, self._state, self._look_up = config, state, kernels.look_up_drafts
        num_rows, width = state.token_ids.shape
        device = state.device
        self._predictions = lazy_zeros((num_rows, width), torch.int32, device)
        self._lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._predicted: set[int] = set()
        """Rows with a prediction."""
        shape = num_rows, config.num_speculative_tokens
        self._drafts = torch.full(shape, NO_DRAFT, dtype=torch.int32, device=device)

    def place(self, new: NewRow) -> None:
        prediction = (new.spec.prediction_token_ids or [])[: self._predictions.shape[1]]
        if prediction:
            tokens = torch.tensor(prediction, dtype=torch.int32)
            self._predictions[new.row, : len(tokens)] = to_device(tokens, self._predictions.device)
        if prediction or new.row in self._predicted:
            self._lengths[new.row] = len(prediction)
        (self._predicted.add if prediction else self._predicted.discard)(new.row)

    def accepted(self, points: Points, when: int, rows: torch.Tensor) -> None:
        state, config = self._state, self._config
        self._look_up(
            points,
            when,
            rows,
            state.token_ids,
            state.lengths,
            state.sampling.ints[:, 2],
            self._predictions,
            self._lengths,
            self._drafts[: len(rows)],
            config.prompt_lookup_min,
            config.prompt_lookup_max,
        )

    def follow(self, step: SchedulerOutput, shape: StepShape) -> torch.Tensor:
        return self._drafts[: len(step.rows)]

    def rehearse(self, shape: StepShape, *, drafts: bool) -> None:
        """Do nothing: all that it runs is a part of the step."""

    def capture(self, shape: StepShape, pool: Any) -> None:
        """Do nothing: all that it runs is a part of the step."""

    def with_few_layers(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Do nothing: it has no graphs."""


class ModelDrafter:
    """Computes the positions of each step's tokens, then drafts, with keys and values of its own.

    It uses the model's block table and block numbers, so cached blocks of a prefix hold its keys
    and values, too. The numbers of tokens are on the device, so each run computes all tokens of
    the step: what it computes for wrong drafts is overwritten by the next. Positions past a row's
    own blocks lie in spare blocks. It samples as the model does, with the same noise, since a draft
    is right only if it is the token that the model samples, but without penalties.

    Runs are CUDA graphs where one was captured: the network may not allow it."""

    def __init__(
        self,
        network: Network,
        state: BatchState,
        kernels: Kernels,
        policy: GraphPolicy,
        limit: int,
        *,
        is_capturable: bool,
        features: FeatureRequests | None = None,
    ) -> None:
        """`limit`: positions that the network can compute; `features`: those of the requests, with
        the embeddings after tokens if the network reads features."""
        self.is_capturable = is_capturable
        self._requests = features if network.reads_features else None
        self._network, self._state, self._sample = network, state, kernels.sample
        self._limit, self._max_model_len = limit, policy.max_model_len
        num_reqs, device = len(state.rows_sent), state.device
        shape = policy.most_drafts, num_reqs
        self._drafts = torch.full(shape, NO_DRAFT, dtype=torch.int32, device=device)
        self._hidden, self._features = (
            torch.zeros(num_reqs, size, dtype=network.dtype, device=device)
            for size in (network.hidden_size, network.feature_size)
        )
        """By request: output of the network before the newest token, and what it passes on."""
        network.reserve(state.max_tokens)
        # Keys of tokens that still wait at a request's end are missing in its cached blocks. On a
        # GPU nothing waits: a run takes little time there, and other steps would compile kernels.
        reads_tokens = not network.feature_size and not network.ahead
        self.may_wait = reads_tokens and not isinstance(kernels, TritonKernels)
        self._num_waiting = np.zeros(len(state.tables[0]), np.int32)
        """By row, tokens before the next step's that the network has not computed."""
        self._most_at_once = max(1, state.max_tokens // MOST_WAITING)  # requests
        self._observing: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._proposing: dict[int, torch.cuda.CUDAGraph] = {}

    def follow(self, step: SchedulerOutput, shape: StepShape) -> torch.Tensor:
        n, drafts = len(step.rows), step.drafts and bool(step.samples.any())
        if drafts or not self._waits(step):
            self._catch_up(step.rows)
            self._run(shape, n, drafts=drafts)
        if drafts:
            return self._drafts.T[:n]
        return torch.full((len(self._drafts), n), NO_DRAFT, dtype=torch.int32).T

    def rehearse(self, shape: StepShape, *, drafts: bool) -> None:
        self._run(shape, shape.num_reqs, drafts=drafts)

    def place(self, new: NewRow) -> None:
        self._num_waiting[new.row] = 0

    def accepted(self, points: Points, when: int, rows: torch.Tensor) -> None:
        """Do nothing: it runs after the step."""

    def capture(self, shape: StepShape, pool: Any) -> None:
        if not self.is_capturable:
            return
        plain = replace(shape, is_adapted=False)
        if plain not in self._observing:
            self._observing[plain], _ = capture(lambda: self._observe(shape), pool)
        self._observing[shape] = self._observing[plain]
        n = shape.num_reqs
        if shape.num_drafts and n not in self._proposing:
            self._proposing[n], _ = capture(lambda: self._propose(n), pool)

    def with_few_layers(self) -> AbstractContextManager[None]:
        return self._network.model.with_few_layers()

    def close(self) -> None:
        for graph in (*self._observing.values(), *self._proposing.values()):
            graph.reset()
        self._observing, self._proposing = {}, {}

    def _waits(self, step: SchedulerOutput) -> bool:
        """Return True if the step's tokens wait: a few take little longer than one."""
        # How many drafts of a step are right is known on the device only.
        if not self.may_wait or len(step.num_drafts):
            return False
        waiting = self._num_waiting[step.rows] + step.num_tokens
        if waiting.max() > MOST_WAITING:
            return False
        self._num_waiting[step.rows] = waiting
        return True

    def _catch_up(self, rows: IntArray) -> None:
        """Compute the tokens of a step's requests that wait."""
        which, at_once = np.flatnonzero(self._num_waiting[rows]), self._most_at_once
        for part in np.split(which, range(at_once, len(which), at_once)):
            if len(part):
                counts = self._num_waiting[rows[part]]
                self._network.run(*self._limited(*self._state.before_step(part, counts)), None)
        self._num_waiting[rows] = 0

    def _run(self, shape: StepShape, num_reqs: int, *, drafts: bool) -> None:
        """Follow a step of this shape and, if `drafts`, draft for its first `num_reqs` requests."""
        _replay_or(self._observing.get(shape), lambda: self._observe(shape))
        if drafts:
            size = min((n for n in self._proposing if n >= num_reqs), default=0)
            _replay_or(self._proposing.get(size), lambda: self._propose(num_reqs))

    def _limited(
        self, token_ids: torch.Tensor, batch: AttentionBatch
    ) -> tuple[torch.Tensor, AttentionBatch]:
        if self._limit < self._max_model_len:  # there are no drafts after its last position
            batch.positions = batch.positions.clamp(max=self._limit - 1)
        return token_ids, batch

    def _observe(self, shape: StepShape) -> None:
        network, n = self._network, shape.num_reqs
        token_ids, batch = self._limited(*self._state.observed(shape, network.ahead))
        if self._requests is None:
            batch.rope_positions = None
        elif self._requests.has_tokens or not shape.samples_all:  # as the model's step
            self._requests.place(batch, ahead=True)
        features = network.features(slice(shape.num_tokens))
        hidden, features = network.run(token_ids, batch, features)
        self._hidden[:n] = hidden
        if features is not None:
            self._features[:n] = features

    def _propose(self, n: int) -> None:
        network, state, limits = self._network, self._state, (self._limit, self._max_model_len)
        hidden = self._hidden[:n]
        features: torch.Tensor | None = self._features[:n]
        tables = state.sampling.floats, state.sampling.ints, state.token_ids
        for nth, drafts in enumerate(self._drafts):
            inputs, batch = state.before_draft(nth, n, network.ahead, *limits)
            if self._requests is not None:
                batch.rope_positions = state.shifted(batch)
            if nth >= network.ahead:  # `_observe` has computed the others
                hidden, features = network.run(inputs.token_ids, batch, features)
            logits = network.logits(hidden)
            self._sample(logits, batch.rows, inputs.sample_positions, *tables, drafts[:n])


def _replay_or(graph: torch.cuda.CUDAGraph | None, run: Callable[[], None]) -> None:
    if graph is None:
        run()
    else:
        graph.replay()
