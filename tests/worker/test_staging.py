"""Copies of the host's numbers to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolkit.worker.staging import Staging


@pytest.mark.parametrize("num_rows", range(1, 6))
def test_each_array_arrives_at_an_aligned_address(num_rows: int) -> None:
    # Triton compiles a kernel again for an address that is not a multiple of 16 bytes.
    arrays = [np.arange(num_rows * width, dtype=np.int32) for width in (1, 6, 1, 4, 0, 3)]
    sent = Staging(torch.device("cpu")).send(arrays)
    assert [part.tolist() for part in sent] == [array.tolist() for array in arrays]
    assert all(part.data_ptr() % 16 == 0 for part in sent if part.numel())
