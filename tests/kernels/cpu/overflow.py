"""A test for sanitized kernels only, which `test_cpu_sanitized` runs: other kernels would crash."""

import os

import torch

from toolkit.kernels.cpu import linear


def test_writes_past_the_end_are_detected(tmp_path):
    packed = linear.PackedLinear(torch.ones(40, 8))
    indices, too_short = torch.zeros(9, dtype=torch.int64), torch.empty(8, 8)
    report = tmp_path / "report"
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(report, os.O_CREAT | os.O_WRONLY), 2)
            linear._rows.run(packed.address, indices.data_ptr(), 9, too_short.data_ptr(), 0)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] != 0
    assert "heap-buffer-overflow" in report.read_text()
