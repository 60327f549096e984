"""The CPU's attention backend against the reference: with kernels, and without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolkit.attention import (
    Attention,
    AttentionBatch,
    AttentionShape,
    GroupTable,
    HeadNorm,
    HeadTransform,
)
from toolkit.attention.cpu import CPUBackend
from toolkit.attention.torch import TorchBackend
from toolkit.kernels import cpu

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MIXED = [(1, 40), (20, 20), (7, 60), (1, 1)]


def make_batch(
    lens: list[tuple[int, int]], rope: tuple[torch.Tensor, ...] = (), *, both_ways: bool = False
) -> AttentionBatch:
    """`rope`: tables by position; both_ways: tokens see the others of their eight positions."""
    queries, contexts = np.array(lens, np.int32).T.copy()
    blocks = -(-contexts // BLOCK_SIZE)
    table = torch.zeros(len(lens), int(blocks.max()), dtype=torch.int32)
    unused = torch.randperm(int(blocks.sum())).int()
    for row, count in zip(table, blocks.tolist(), strict=True):
        row[:count], unused = unused[:count], unused[count:]
    request = np.repeat(np.arange(len(lens)), queries)
    ends = queries.cumsum()
    positions = torch.from_numpy(np.arange(ends[-1]) - (ends - contexts)[request])
    block = table[torch.from_numpy(request), positions // BLOCK_SIZE].long()
    return AttentionBatch(
        positions=positions,
        tables=(GroupTable(table, block * BLOCK_SIZE + positions % BLOCK_SIZE),),
        query_start_loc=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        seq_lens=torch.from_numpy(contexts),
        rows=torch.arange(len(lens)).int(),
        max_query_len=int(queries.max()),
        max_seq_len=int(contexts.max()),
        rope=tuple(table[positions] for table in rope),
        last_key=torch.from_numpy(contexts)[request].sub(1).minimum(positions | 7).int()
        if both_ways
        else None,
    )


def assert_equals_reference(
    shape: AttentionShape,
    transform: HeadTransform = HeadTransform(),  # noqa: B008  # frozen
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    tolerance: float = 1e-4,
    *,
    both_ways: bool = False,
) -> None:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    batch = make_batch(MIXED)
    num_blocks = int(batch.tables[0].blocks.max()) + 1
    angles = torch.randn(2, 64, shape.head_size // 2)
    tables = torch.stack((angles.cos(), angles.sin()), dim=2).to(dtype).unbind()
    # Two layers with their own caches. The second step reads what the first has written.
    size = BLOCK_SIZE + 3  # blocks are apart, as in pages of several layers
    caches = torch.randn(2, 2, num_blocks, size, shape.num_kv_heads, shape.head_size)
    ours, expected = (
        caches.clone().to(cache_dtype or dtype)[:, :, :, :BLOCK_SIZE] for _ in range(2)
    )
    backends = ((CPUBackend(CPU), ours), (TorchBackend(CPU), expected))
    for _ in range(2):
        qkv = torch.randn(len(batch.positions), width).to(dtype)
        for layer in range(2):
            found = []
            for backend, cache in backends:
                step = make_batch(MIXED, tables, both_ways=both_ways)
                step.tables = batch.tables
                own = Attention(shape, transform)
                own.bind(*cache[layer])
                query = backend.write(own, qkv.clone(), step)
                found.append(backend.attend(own, query, step).float())
            torch.testing.assert_close(found[0], found[1], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.float(), expected.float(), atol=tolerance, rtol=tolerance)


def normed(size: int, dtype: torch.dtype = torch.float32) -> HeadTransform:
    q_weight, k_weight = torch.randn(2, 1, size).to(dtype).unbind()
    return HeadTransform(rope=0, norm=HeadNorm(q_weight, k_weight, 1e-6))


@pytest.fixture(params=[True, False], ids=["kernels", "PyTorch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not cpu.available():
        pytest.skip(str(cpu.problem()))
    if not request.param:
        monkeypatch.setattr(cpu, "available", lambda: False)
    torch.manual_seed(0)
    return bool(request.param)


@pytest.mark.usefixtures("kernels")
def test_cpu_backend_equals_the_reference() -> None:
    assert_equals_reference(AttentionShape(4, 4, 64, 0.125))
    assert_equals_reference(AttentionShape(8, 2, 32, 0.2, sliding_window=11), normed(32))
    assert_equals_reference(AttentionShape(6, 3, 16, 0.25), normed(16))
    assert_equals_reference(AttentionShape(8, 2, 32, 0.2, chunk=7), normed(32))
    assert_equals_reference(AttentionShape(8, 2, 32, 0.2, chunk=7, soft_cap=3.0), normed(32))


@pytest.mark.usefixtures("kernels")
def test_cpu_backend_supports_every_transform() -> None:
    shape = AttentionShape(4, 2, 32, 0.2)
    q_weight, k_weight = torch.randn(4, 32), torch.randn(2, 32)
    assert_equals_reference(shape, HeadTransform(rope=1, q_rope=0, clip=0.5))
    for is_centered, is_last in ((True, False), (False, True)):
        norm = HeadNorm(q_weight, k_weight, 0.1, is_centered, is_last)
        assert_equals_reference(shape, HeadTransform(rope=1, norm=norm))


@pytest.mark.usefixtures("kernels")
def test_cpu_backend_supports_bfloat16_and_fp8_caches() -> None:
    shape = AttentionShape(4, 2, 64, 0.125)
    assert_equals_reference(shape, normed(64, torch.bfloat16), torch.bfloat16, tolerance=6e-2)
    assert_equals_reference(shape, normed(64), cache_dtype=torch.float8_e4m3fn)


def test_cpu_backend_supports_more_than_its_kernels() -> None:
    torch.manual_seed(0)
    assert_equals_reference(AttentionShape(2, 1, 264, 0.06))
    assert_equals_reference(AttentionShape(2, 2, 32, 0.2), dtype=torch.float16, tolerance=1e-2)


@pytest.mark.usefixtures("kernels")
def test_cpu_backend_caps_logits() -> None:
    assert_equals_reference(AttentionShape(4, 2, 32, 1.0, soft_cap=3.0))
    shape = AttentionShape(4, 1, 80, 1.0, sliding_window=11, soft_cap=20.0)
    assert_equals_reference(shape, normed(80, torch.bfloat16), torch.bfloat16, tolerance=6e-2)
    assert_equals_reference(shape, normed(80), cache_dtype=torch.float8_e4m3fn)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_cpu_backend_shows_later_keys(soft_cap: float) -> None:
    for window in (0, 4, 11):
        shape = AttentionShape(4, 2, 32, 0.2, sliding_window=window, soft_cap=soft_cap)
        assert_equals_reference(shape, normed(32), both_ways=True)


@pytest.mark.usefixtures("kernels")
def test_cpu_backend_adds_sinks() -> None:
    sinks = torch.tensor([-2.0, 0.0, 1.0, 4.0])
    assert_equals_reference(AttentionShape(4, 2, 32, 0.2, sinks=sinks))
    shape = AttentionShape(4, 2, 32, 0.2, sliding_window=11, soft_cap=5.0, sinks=sinks)
    assert_equals_reference(shape, normed(32), cache_dtype=torch.float8_e4m3fn)
