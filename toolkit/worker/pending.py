"""Results of steps in flight, and their copies to the host."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from toolkit.sampling.grammar import Masks
from toolkit.scheduler import ModelOutput
from toolkit.scheduler.output import IntArray


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


def empty_output(step: int) -> PendingOutput:
    """Return the output of a step that samples nothing."""
    return PendingOutput(lambda: ModelOutput(step, np.empty(0, np.int32)))


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens of all points of a step, on the device (`kernels.drafts`).

    `logprobs`: records of them, if any request asked for those. `failures`: errors of logits
    processors, by index among the sampling requests, which then have no token. `counts`: of all
    requests, see `ModelOutput`."""

    tokens: torch.Tensor
    firsts: npt.NDArray[np.int64]  # first point of each sampling request
    logprobs: torch.Tensor | None = None
    failures: dict[int, str] = field(default_factory=dict)
    counts: torch.Tensor | None = None

    def kept(self, counts: IntArray) -> npt.NDArray[np.int64]:
        """Return the points of the tokens of all sampling requests, given their counts."""
        before = counts.cumsum(dtype=np.int64) - counts
        starts = np.repeat(self.firsts - before, counts)
        kept: npt.NDArray[np.int64] = starts + np.arange(len(starts))
        return kept


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host. It is complete after `copy_barrier`."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def copy_barrier(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the copies started before."""
    if device.type == "cpu":
        return lambda: None
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    done.record()
    return done.synchronize
