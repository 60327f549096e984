"""Grammar masks on logits: PyTorch's and Triton's against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit.kernels import plain, reference

SHAPES = [(1, 1, 31), (3, 2, 64), (5, 5, 100), (4, 1, 4099), (6, 3, 9000)]


@pytest.fixture(scope="session")
def mask_logits(triton):
    from toolkit.kernels.triton.sampling.bitmask import mask_logits

    return mask_logits


def example(
    n: int, num_masked: int, vocab: int, missing_words: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n * vocab)
    words = -(-vocab // 32) - missing_words
    index = torch.randperm(n)[:num_masked]
    masks = torch.randint(-(2**31), 2**31, (num_masked, words), dtype=torch.int64).to(torch.int32)
    return torch.randn(n, vocab), index, masks


def masked(function, logits: Tensor, index: Tensor, masks: Tensor) -> Tensor:
    logits = logits.clone()
    function(logits, index, masks)
    return logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("missing_words", [0, 1])
def test_plain_masks_equal_reference(shape, missing_words):
    if missing_words == -(-shape[2] // 32):
        pytest.skip("no word is left")
    example_ = example(*shape, missing_words)
    assert torch.equal(
        masked(plain.mask_logits, *example_), masked(reference.mask_logits, *example_)
    )


@pytest.mark.on_cpu("0-shape0", "0-shape2", "0-shape3", "0-shape4", "1-shape1")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("missing_words", [0, 1])
def test_triton_equals_reference(mask_logits, device, shape, missing_words):
    if missing_words == -(-shape[2] // 32):
        pytest.skip("no word is left")
    logits, index, masks = example(*shape, missing_words)
    expected = masked(reference.mask_logits, logits, index, masks)
    found = masked(mask_logits, logits.to(device), index.to(device), masks.to(device))
    assert torch.equal(found.cpu(), expected)


def test_strided_rows_are_masked_without_their_padding(mask_logits, device):
    logits, index, masks = example(4, 2, 70)
    wide = torch.zeros(4, 96, device=device)
    wide[:, :70] = logits.to(device)
    mask_logits(wide[:, :70], index.to(device), masks.to(device))
    assert torch.equal(wide[:, :70].cpu(), masked(reference.mask_logits, logits, index, masks))
    assert not wide[:, 70:].any()


def test_no_masks_change_nothing_and_other_types_are_errors(mask_logits, device):
    index = torch.empty(0, dtype=torch.int64, device=device)
    masks = torch.empty(0, 1, dtype=torch.int32, device=device)
    logits = torch.randn(2, 20, device=device)
    assert torch.equal(masked(mask_logits, logits, index, masks), logits)
    with pytest.raises(ValueError, match="fp32"):
        mask_logits(logits.half(), index, masks)
