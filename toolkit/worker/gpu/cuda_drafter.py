"""Runs a drafter's model on a GPU after each step: `speculative.model_drafter` without the host."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from toolkit.hardware.graph_capture import capture
from toolkit.kernels.table import Kernels
from toolkit.speculative.model_drafter import Network
from toolkit.worker.gpu.cuda_state import CudaBatchState
from toolkit.worker.gpu.graph_policy import GraphPolicy, StepShape


class CudaDrafter:
    """Computes the positions of each step's tokens, then drafts, which it writes after the tokens.

    The numbers of tokens are on the device, so each run computes all tokens of the step: what it
    computes for wrong drafts is overwritten by the next. Positions past a row's own blocks lie in
    spare blocks. It samples as the model does, but without penalties.

    Runs are CUDA graphs where one was captured: the network may not allow it."""

    def __init__(
        self,
        network: Network,
        state: CudaBatchState,
        kernels: Kernels,
        policy: GraphPolicy,
        limit: int,
        *,
        is_capturable: bool,
    ) -> None:
        """`limit`: positions that the network can compute."""
        self.is_capturable = is_capturable
        self._network, self._state, self._sample = network, state, kernels.sample
        self._limit, self._max_model_len = limit, policy.max_model_len
        num_reqs, device = len(state.rows_sent), state.device
        shape = policy.most_drafts, num_reqs
        self._drafts = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._hidden, self._features = (
            torch.zeros(num_reqs, size, dtype=network.dtype, device=device)
            for size in (network.hidden_size, network.feature_size)
        )
        """By request: output of the network before the newest token, and what it passes on."""
        network.reserve(state.max_tokens)
        self._observing: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._proposing: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def drafts(self) -> torch.Tensor:
        """[num_reqs, most]: the drafts of the last step's requests; negative: none."""
        return self._drafts.T

    def run(self, shape: StepShape, num_reqs: int, *, drafts: bool) -> None:
        """Follow a step of this shape and, if `drafts`, draft for its first `num_reqs` requests."""
        _replay_or(self._observing.get(shape), lambda: self._observe(shape))
        if drafts:
            size = min((n for n in self._proposing if n >= num_reqs), default=0)
            _replay_or(self._proposing.get(size), lambda: self._propose(num_reqs))

    def capture(self, shape: StepShape, pool: Any) -> None:
        """Capture the runs that follow a step of this shape, if that is possible."""
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
        """Free the graphs, even while this object is referenced."""
        for graph in (*self._observing.values(), *self._proposing.values()):
            graph.reset()
        self._observing, self._proposing = {}, {}

    def _observe(self, shape: StepShape) -> None:
        network, n = self._network, shape.num_reqs
        token_ids, batch = self._state.observed(shape, network.ahead)
        if self._limit < self._max_model_len:  # there are no drafts after its last position
            batch.positions = batch.positions.clamp(max=self._limit - 1)
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
            if nth >= network.ahead:  # `_observe` has computed the others
                hidden, features = network.run(inputs.token_ids, batch, features)
            logits = network.logits(hidden)
            self._sample(logits, batch.rows, inputs.sample_positions, *tables, drafts[:n])


def _replay_or(graph: torch.cuda.CUDAGraph | None, run: Callable[[], None]) -> None:
    if graph is None:
        run()
    else:
        graph.replay()
