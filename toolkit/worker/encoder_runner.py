"""Runs steps of an encoder: packed complete prompts, one vector each."""

from collections.abc import Callable

import numpy as np
import torch

from toolkit.attention.packed import PackedBatch
from toolkit.hardware.memory import to_device
from toolkit.models.model import Encoder
from toolkit.pooling.heads import Head
from toolkit.scheduler import ModelOutput, SchedulerOutput
from toolkit.worker.pending import PendingOutput, copy_barrier, to_host


class EncoderRunner:
    """Stateless: the only step of a request has all of its tokens."""

    num_compiled: Callable[[], int] = staticmethod(lambda: 0)  # see `Runner`

    def __init__(
        self, model: Encoder, head: Head, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.head, self.device, self.dtype = model, head, device, dtype

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingOutput:
        """Launch a step. The token -1 marks a vector that is not finite."""
        come = {new.row: new for new in step.new_rows}
        prompts = [come[row] for row in step.rows.tolist()]
        lengths = np.array([len(new.token_ids) for new in prompts], np.int64)
        seconds = np.array(
            [new.spec.pooling.second_text if new.spec.pooling else 0 for new in prompts], np.int64
        )
        batch = PackedBatch.of(lengths, seconds, self.device, self.dtype)
        token_ids = np.concatenate([np.array(new.token_ids, np.int64) for new in prompts])
        hidden = self.model(self._on_device(token_ids), batch)
        vectors = to_host(self.head(hidden, self._on_device(lengths)))
        wait = copy_barrier(self.device)

        def finish() -> ModelOutput:
            wait()
            found = vectors.numpy()
            is_finite = np.isfinite(found).all(axis=1)
            return ModelOutput(
                step.step,
                np.where(is_finite, 0, -1).astype(np.int32),
                pooled=dict(enumerate(found)),
                num_compiled=self.num_compiled(),
            )

        return PendingOutput(finish)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.device)
