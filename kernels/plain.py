"""Sampling in PyTorch, for all rows at once: on CPUs without C++ kernels, and GPUs without Triton.

`kernels.reference` defines what these functions compute."""

import torch
from torch import Tensor

from toolkit.kernels.reference import exponentials

MAX_TOPK = 1024
"""If every filtering request keeps at most this many tokens, the vocabulary is not sorted."""
NOT_SAMPLED, NOT_FINITE = -2, -1


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    token_ids: Tensor | None,
    out: Tensor,
) -> None:
    """Choose tokens by temperature, min-p, top-k and top-p. See `reference.sample`."""
    own, is_sampled = rows.long(), positions >= 0
    chosen = _choose(logits.float(), positions.long(), floats[own, :3], ints[own, :2])
    out.copy_(torch.where(is_sampled, chosen, NOT_SAMPLED))
    if token_ids is not None:
        token_ids[own[is_sampled], positions[is_sampled].long()] = out[is_sampled].clamp(min=0)


def _choose(logits: Tensor, positions: Tensor, floats: Tensor, ints: Tensor) -> Tensor:
    """Return tokens [n] int64 of fp32 logits [n, vocab]. floats, ints: of each entry."""
    temperature, top_k, seeds = floats[:, 0], ints[:, 0], ints[:, 1]
    best, greedy = logits.max(dim=-1)
    chosen, is_random = greedy, temperature > 0
    if is_random.any():
        # Minus the maximum, so that no small temperature overflows.
        scaled = (logits - best[:, None]) / torch.where(is_random, temperature, 1.0)[:, None]
        probabilities = scaled.softmax(dim=-1)
        filters = (top_k > 0) | (floats[:, 1] < 1) | (floats[:, 2] > 0)
        if (filters & is_random).any():
            probabilities = _keep_likely(probabilities, is_random, floats, top_k)
        times = exponentials(seeds, positions, logits.shape[1]) / probabilities
        chosen = torch.where(is_random, times.argmin(dim=-1), greedy)
    return torch.where(best.isfinite(), chosen, NOT_FINITE)


def _keep_likely(probabilities: Tensor, is_random: Tensor, floats: Tensor, top_k: Tensor) -> Tensor:
    """Return the probabilities, zero where top-k, min-p or top-p exclude a token.

    They stay in vocabulary order, and tokens as likely as the last one kept are kept too. So the
    draw depends neither on the sorting of equals nor on the batch."""
    vocab = probabilities.shape[-1]
    top_p, min_p = floats[:, 1, None], floats[:, 2, None]
    limits = torch.where(top_k > 0, top_k, vocab)
    most = min(vocab, int(limits[is_random].max()))
    if most <= MAX_TOPK:
        kept = probabilities.topk(most, dim=-1).values
    else:
        kept = probabilities.sort(dim=-1, descending=True).values
    rank = torch.arange(kept.shape[-1], device=kept.device)
    kept = kept.masked_fill(rank >= limits[:, None], 0.0)
    kept = kept.masked_fill(kept < min_p * kept[:, :1], 0.0)
    before = kept.cumsum(dim=-1, dtype=torch.float64)
    total = before[:, -1:].clone()
    before -= kept
    kept = kept.masked_fill((before >= top_p * total) & (rank > 0) & (top_p < 1), 0.0)
    least = kept.masked_fill(kept == 0, torch.inf).amin(dim=-1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0.0)


def mask_logits(logits: Tensor, index: Tensor, masks: Tensor) -> None:
    """Exclude tokens whose bit is not set, in place. See `reference.mask_logits`."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    allowed = torch.zeros(len(masks), logits.shape[1], dtype=torch.bool, device=logits.device)
    known = bits.flatten(1)[:, : logits.shape[1]].bool()
    allowed[:, : known.shape[1]] = known
    logits[index] = logits[index].masked_fill(~allowed, -torch.inf)


def penalize(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    floats: Tensor,
    ints: Tensor,
    windows: Tensor,
    token_ids: Tensor,
) -> None:
    """Apply repetition (Keskar et al., 2019) over all tokens, the others over the output.

    Both count the last `windows` tokens alone."""
    own = rows.long()
    repetition, presence, frequency = factors = floats[own, 3:].unbind(1)
    index = ((repetition != 1) | (presence != 0) | (frequency != 0)).nonzero()[:, 0]
    if not len(index):
        return
    own, length = own[index], lengths[index, None]
    repetition, presence, frequency = (one[index, None] for one in factors)
    longest = int(length.max())
    tokens = token_ids[own, :longest].long()
    position = torch.arange(longest, device=logits.device)
    known = (position < length) & (position >= length - windows[own, None])
    output = known & (position >= ints[own, 2, None])
    # A token that is not known yet counts as token 0 with weight 0.
    counts = torch.zeros(len(index), logits.shape[-1], device=logits.device)
    counts_all = counts.clone().scatter_add_(1, tokens, known.float())
    counts.scatter_add_(1, tokens, output.float())
    part = logits[index]
    part = torch.where(
        counts_all > 0, torch.where(part > 0, part / repetition, part * repetition), part
    )
    logits[index] = part - frequency * counts - presence * (counts > 0)
