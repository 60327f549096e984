"""Counters shared by the programs of a kernel."""

import pytest
import torch

from toolkit.kernels.triton.counters import counters
from toolkit.kernels.triton.products import matmul


def test_each_count_has_its_own_counters():
    cpu = torch.device("cpu")
    assert counters(cpu, 3) is counters(cpu, 3)
    assert counters(cpu, 3).tolist() == [0, 0, 0]
    assert counters(cpu, 2) is not counters(cpu, 3)


@pytest.mark.gpu
def test_products_with_split_tiles_may_overlap_on_two_streams():
    torch.manual_seed(0)
    tile, device = matmul.Tile(32, stages=4, splits=4), torch.device("cuda")
    weight = torch.randn(1024, 4096, dtype=torch.bfloat16, device=device)
    inputs = [torch.randn(16, 4096, dtype=torch.bfloat16, device=device) for _ in range(2)]

    def product(x):
        out = torch.empty(16, 1024, dtype=torch.bfloat16, device=device)
        return matmul.matmul(x, weight, None, None, None, False, out, tile)

    expected = [product(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for stream, x, out in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                out.append(product(x))
    torch.cuda.synchronize()
    for found, one in zip(outs, expected, strict=True):
        assert all(torch.equal(out, one) for out in found)
