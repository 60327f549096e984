"""The flash backend calls flash-attn as documented.

A fake of its documented interface computes with plain loops over pages. With a GPU, flash-attn
itself is tested too.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from toolkit.attention import (
    Attention,
    AttentionBatch,
    AttentionShape,
    GroupTable,
    HeadTransform,
    choose_backend,
)
from toolkit.attention import flash as flash_module
from toolkit.attention.flash import FlashBackend
from toolkit.attention.torch import TorchBackend
from toolkit.attention.triton import TritonBackend
from toolkit.errors import ConfigError
from toolkit.kernels.table import TritonKernels

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 8
LENS = ((5, 12), (1, 30), (20, 20), (3, 9))  # (queries, context)


def attend_by_pages(q, k, v, starts, lengths, table, *, scale, window, cap):
    """Causal attention, aligned at the last key. A query sees `window[0]` keys before its own."""
    out = torch.zeros_like(q)
    for request in range(len(lengths)):
        keys = torch.cat([k[page] for page in table[request].tolist()])[: lengths[request]]
        values = torch.cat([v[page] for page in table[request].tolist()])[: lengths[request]]
        for token in range(starts[request], starts[request + 1]):
            last = lengths[request] - (starts[request + 1] - token)
            first = 0 if window[0] in (None, -1) else max(0, last - window[0])
            for head in range(q.shape[1]):
                group = head // (q.shape[1] // k.shape[2])
                logits = (keys[first : last + 1, group] @ q[token, head]) * scale
                if cap:
                    logits = cap * torch.tanh(logits / cap)
                out[token, head] = logits.softmax(0) @ values[first : last + 1, group]
    return out


def flash_4(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    seqused_k,
    page_table,
    softmax_scale,
    causal,
    window_size,
    softcap,
    **bounds,
):
    assert causal
    assert set(bounds) == {"max_seqlen_q", "max_seqlen_k"}
    lengths = seqused_k.tolist()
    return attend_by_pages(
        q,
        k,
        v,
        cu_seqlens_q.tolist(),
        lengths,
        page_table,
        scale=softmax_scale,
        window=window_size,
        cap=softcap,
    ), None


def flash_2(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    block_table,
    softmax_scale,
    causal,
    window_size,
    softcap,
    **bounds,
):
    assert causal
    assert set(bounds) == {"max_seqlen_q", "max_seqlen_k"}
    lengths = cu_seqlens_k.diff().tolist()
    return attend_by_pages(
        q,
        k,
        v,
        cu_seqlens_q.tolist(),
        lengths,
        block_table,
        scale=softmax_scale,
        window=window_size,
        cap=softcap,
    )


def a_step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    torch.manual_seed(0)
    counts = torch.tensor([0] + [queries for queries, _ in LENS])
    most = max(context for _, context in LENS)
    batch = AttentionBatch(
        positions=torch.empty(0),
        tables=(GroupTable(torch.randperm(60).int().view(6, 10), torch.empty(0)),),
        query_start_loc=counts.cumsum(0).int(),
        seq_lens=torch.tensor([context for _, context in LENS], dtype=torch.int32),
        rows=torch.tensor([4, 0, 2, 5], dtype=torch.int32),
        max_query_len=20,
        max_seq_len=most,
    )
    caches = torch.randn(2, 60, BLOCK, KV_HEADS, SIZE)
    return torch.randn(int(counts.sum()), HEADS, SIZE), caches[0], caches[1], batch


def layer_of(k: torch.Tensor, v: torch.Tensor, options: dict[str, float]) -> Attention:
    shape = AttentionShape(HEADS, KV_HEADS, SIZE, SIZE**-0.5, **options)
    layer = Attention(shape, HeadTransform())
    layer.bind(k, v)
    return layer


@pytest.fixture(params=[True, False], ids=["flash-attn-4", "flash-attn 2"])
def flash(monkeypatch, request) -> FlashBackend:
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.flash_attn_varlen_func, interface.flash_attn_varlen_func = flash_2, flash_4
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", interface)
    monkeypatch.setattr(flash_module, "_prefers_cute", lambda device: request.param)
    monkeypatch.setattr(
        "toolkit.attention.triton.triton_kernels_for", lambda device: TritonKernels()
    )
    return FlashBackend(torch.device("cpu"))


def assert_attends(flash: FlashBackend, batch: AttentionBatch, q, layer: Attention) -> None:
    expected = TorchBackend(torch.device("cpu")).attend(layer, q, batch)
    torch.testing.assert_close(flash.attend(layer, q, batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape_options", [{}, {"sliding_window": 7}, {"soft_cap": 2.0}])
def test_flash_attn_gets_the_prompts_and_their_pages(flash, shape_options):
    q, k, v, batch = a_step()
    assert_attends(flash, batch, q, layer_of(k, v, shape_options))


@pytest.mark.usefixtures("triton_runs")
def test_later_keys_and_chunks_take_our_kernel(flash, monkeypatch):
    monkeypatch.setattr(flash, "_flash", None)
    q, k, v, batch = a_step()
    lasts = [torch.arange(context - queries, context) | 3 for queries, context in LENS]
    bounds = [one.clamp(max=context - 1) for one, (_, context) in zip(lasts, LENS, strict=True)]
    batch.last_key = torch.cat(bounds).int()
    assert_attends(flash, batch, q, layer_of(k, v, {"sliding_window": 7}))
    batch.last_key = None
    assert_attends(flash, batch, q, layer_of(k, v, {"chunk": 7}))


@pytest.mark.parametrize(
    ("major", "size", "is_supported"), [(9, 256, True), (10, 128, True), (10, 256, False)]
)
def test_flash_attn_4_has_small_heads_on_blackwell(monkeypatch, major, size, is_supported):
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *args: None)
    monkeypatch.setattr(flash_module, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    reason = FlashBackend.unsupported_reason(torch.device("cuda"), torch.bfloat16, size, 16)
    assert reason is None if is_supported else "up to 128 on Blackwell" in reason


def test_without_a_gpu_flash_is_rejected_with_the_reason():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    cpu = torch.device("cpu")
    backend, reason = choose_backend("auto", cpu, torch.float32, 64, 16)
    assert backend.name == "cpu"
    assert "flash: needs an NVIDIA GPU" in reason
    with pytest.raises(ConfigError, match="flash: needs an NVIDIA GPU"):
        choose_backend("flash", cpu, torch.float32, 64, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("shape_options", [{}, {"sliding_window": 7}, {"soft_cap": 2.0}])
def test_flash_attn_matches_the_reference(shape_options):
    device = torch.device("cuda", 0)
    reason = FlashBackend.unsupported_reason(device, torch.bfloat16, SIZE, BLOCK)
    if reason is not None:
        pytest.skip(reason)
    q, k, v, batch = a_step()
    q, k, v = (x.to(device, torch.bfloat16) for x in (q, k, v))
    for name in ("query_start_loc", "seq_lens", "rows"):
        setattr(batch, name, getattr(batch, name).to(device))
    batch.tables = (GroupTable(*(one.to(device) for one in batch.tables[0])),)
    layer = layer_of(k, v, shape_options)
    actual, expected = (
        backend(device).attend(layer, q, batch) for backend in (FlashBackend, TorchBackend)
    )
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
