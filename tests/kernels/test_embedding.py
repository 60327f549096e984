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


def test_reference_places_rows():
    table = torch.arange(24.0).view(4, 6)
    x, index = torch.ones(3, 2), torch.tensor([2, -1, 0], dtype=torch.int32)
    reference.place_rows(x, table, index, 2, adds=True)
    assert x.tolist() == [[15, 16], [1, 1], [3, 4]]
    reference.place_rows(x, table, index, 0, adds=False)
    assert x.tolist() == [[12, 13], [1, 1], [0, 1]]


@pytest.mark.parametrize("adds", [False, True])
def test_place_rows_equals_reference(embedding, device, adds):
    torch.manual_seed(0)
    table = torch.randn(5, 15000, device=device, dtype=torch.float16)
    index = torch.tensor([4, -1, 0, 4], dtype=torch.int32, device=device)
    found = torch.randn(4, 5000, device=device, dtype=torch.float16)
    expected = found.clone()
    embedding.place_rows(found, table, index, 10000, adds=adds)
    reference.place_rows(expected, table, index, 10000, adds=adds)
    assert torch.equal(found, expected)
