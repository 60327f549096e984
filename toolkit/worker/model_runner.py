"""Runs a step: inputs, model, sampler, state update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBackend
from toolkit.models.registry import CausalLM
from toolkit.sampling.logprobs import gather_logprobs
from toolkit.sampling.sampler import sample
from toolkit.scheduler import ModelOutput, PromptLogprobs, SchedulerOutput, TokenLogprobs
from toolkit.worker.batch_state import BatchState, StepShape
from toolkit.worker.kv_cache import KVCache

PROMPT_LOGPROBS_CHUNK = 256
"""Positions whose logits over the vocabulary are held at once."""

Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PendingOutput:
    """A step under way. `result` waits for it."""

    def __init__(self, finish: Callable[[], ModelOutput]) -> None:
        self._finish = finish

    def result(self) -> ModelOutput:
        return self._finish()


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled, on the device: the tokens of its sampling requests at the indices `which` of `tokens`, and their
    log-probabilities, in that order, when a request asked.
    """

    tokens: torch.Tensor
    which: npt.NDArray[np.int64]
    logprobs: Logprobs | None = None


class ModelRunner:
    """Owns the device's state; every call applies one step to it."""

    def __init__(self, model: CausalLM, backend: AttentionBackend, cache: KVCache, state: BatchState) -> None:
        self.model, self.backend, self.cache, self.state = model, backend, cache, state
        self.device = state.device
        cache.bind(model, backend)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingOutput:
        """Launches a step; its copies of the cache first."""
        self.cache.copy_out(step.swap_out)
        self.cache.copy_in(step.swap_in)
        self.state.apply(step)
        if not len(step.rows):
            return PendingOutput(lambda: ModelOutput(step.step, np.empty(0, np.int32)))
        hidden, sampled = self._run(step)
        prompt_logprobs = {}
        if step.prompt_logprobs:
            assert hidden is not None, "a step with prompt log-probabilities keeps its hidden states"
            prompt_logprobs = self._prompt_logprobs(step, hidden)
        return self._deliver(step, sampled, prompt_logprobs)

    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Makes a CUDA graph of each shape of step; raises RuntimeError where there are none."""
        raise RuntimeError("CUDA graphs need an NVIDIA GPU and Triton")

    def _run(self, step: SchedulerOutput) -> tuple[torch.Tensor | None, Sampled]:
        """(hidden states [num_tokens, hidden], what was sampled); the tokens are written into the state, too. The hidden
        states may be left out of steps without `prompt_logprobs`.
        """
        token_ids, batch = self.state.inputs(step)
        hidden = self.model(token_ids, batch)
        which = np.flatnonzero(step.samples)
        if not len(which):
            return hidden, Sampled(torch.empty(0, dtype=torch.int64), which)
        rows, lengths = step.rows[which], (step.num_computed + step.num_tokens)[which]
        last = torch.from_numpy(step.num_tokens.cumsum()[which] - 1).to(self.device, torch.int64)
        logits = self.model.logits(hidden[last]).float()
        k = int(self.state.sampling.num_logprobs[rows].max())
        raw = logits.clone() if k >= 0 else logits
        tokens = sample(logits, self.state.sampling, self.state.token_ids, rows, lengths)
        place = torch.from_numpy(np.stack((rows, lengths))).to(self.device, torch.int64)
        self.state.token_ids[place[0], place[1]] = tokens.clamp(min=0).to(torch.int32)
        logprobs = gather_logprobs(raw, tokens, k) if k >= 0 else None
        return hidden, Sampled(tokens, np.arange(len(which)), logprobs)

    def _prompt_logprobs(
        self, step: SchedulerOutput, hidden: torch.Tensor
    ) -> dict[int, tuple[int, Logprobs]]:
        """By index of the request in the step: (first position, log-probabilities of the prompt tokens from
        there on).
        """
        ends = step.num_tokens.cumsum()
        found = {}
        for index in step.prompt_logprobs:
            row, computed, count = (int(a[index]) for a in (step.rows, step.num_computed, step.num_tokens))
            params = self.state.sampling.params[row]
            # The logits at position p tell of the token at p + 1; the prompt's last tell of the first output.
            count = min(count, int(self.state.sampling.num_prompt_tokens[row]) - 1 - computed)
            if count <= 0 or params.prompt_logprobs is None:
                continue
            start = int(ends[index] - step.num_tokens[index])
            wanted = self.state.token_ids[row, computed + 1 : computed + 1 + count]
            parts = [
                gather_logprobs(self.model.logits(part), ids, params.prompt_logprobs)
                for part, ids in zip(
                    torch.split(hidden[start : start + count], PROMPT_LOGPROBS_CHUNK),
                    torch.split(wanted, PROMPT_LOGPROBS_CHUNK),
                    strict=True,
                )
            ]
            tokens, logprobs, ranks = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
            found[index] = (computed + 1, (tokens, logprobs, ranks))
        return found

    def _deliver(
        self,
        step: SchedulerOutput,
        sampled: Sampled,
        prompt_logprobs: dict[int, tuple[int, Logprobs]],
    ) -> PendingOutput:
        """Starts the copies to the host; waiting for them is left to whoever asks for the result."""
        tokens = self._to_host(sampled.tokens)
        values = [self._to_host(part) for part in sampled.logprobs] if sampled.logprobs else None
        prompts = {
            i: (start, [self._to_host(part) for part in lp]) for i, (start, lp) in prompt_logprobs.items()
        }
        arrived = self._arrived()

        def finish() -> ModelOutput:
            arrived()
            return ModelOutput(
                step.step,
                tokens.numpy()[sampled.which].astype(np.int32),
                _logprobs(values) if values else None,
                {i: PromptLogprobs(start, _logprobs(parts)) for i, (start, parts) in prompts.items()},
            )

        return PendingOutput(finish)

    def _arrived(self) -> Callable[[], None]:
        """What waits for the copies to the host that were started before."""
        if self.device.type == "cpu":
            return lambda: None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        done.record()
        return done.synchronize

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _logprobs(parts: list[torch.Tensor]) -> TokenLogprobs:
    tokens, logprobs, ranks = (part.numpy() for part in parts)
    return TokenLogprobs(tokens.astype(np.int32), logprobs.astype(np.float32), ranks.astype(np.int32))
