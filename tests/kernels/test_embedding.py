"""Rows of a shard of a table: the reference against PyTorch, Triton against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from toolkit.kernels import reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="session")
def embedding(triton):
    from toolkit.kernels.triton import embedding

    return embedding


def test_shards_of_all_ranks_add_up_to_pytorchs_embedding():
    table, indices = torch.randn(10, 6), torch.tensor([9, 0, 4, 5, 4])
    parts = [
        reference.embed_shard(indices, table[b : b + 4], b, len(table[b : b + 4]))
        for b in (0, 4, 8)
    ]
    assert torch.equal(sum(parts), F.embedding(indices, table))


@pytest.mark.on_cpu(
    "torch.float32-torch.int32-1",
    "torch.float32-torch.int32-5000",
    "torch.float16-torch.int64-48",
    "torch.bfloat16-torch.int32-4096",
)
@pytest.mark.parametrize("size", [1, 48, 4096, 5000])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_other_shards_are_zeros(embedding, device, size, index_dtype, dtype):
    """The table's rows after the shard are NaN, and must not be read."""
    table = torch.randn(7, size, device=device).to(dtype)
    table[5:] = torch.nan
    indices = torch.tensor([2, 3, 7, 8, 100, 0, 5], dtype=index_dtype, device=device)
    found = embedding.embed_shard(indices, table, 3, 5)
    assert torch.equal(found, reference.embed_shard(indices, table[:5], 3, 5))
    assert found[[0, 3, 4, 5]].count_nonzero() == 0


def test_tables_that_are_not_contiguous_are_errors(embedding, device):
    table = torch.ones(4, 8, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        embedding.embed_shard(torch.zeros(2, dtype=torch.int32, device=device), table.T, 0, 4)
