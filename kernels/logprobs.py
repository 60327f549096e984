"""Log-probabilities of chosen and likeliest tokens, as records.

A record is a row of 3 + 2k int32 numbers: the rank of the chosen token, 1 for the likeliest; then
pairs of a token and the bits of its fp32 log-probability, first of the chosen token, then of the k
likeliest, best first. The chosen one can be among these. The numbers stay packed until the front
end formats them: one copy from the device, one slice for each request."""

import numpy as np
import torch

ROWS = 8  # rows at once, so that they and what is computed from them stay in a CPU's cache
WIDTH = 256  # tokens of a block


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
    """Return records int32 [n, 3 + 2 min(k, vocab)].

    logits: [n, vocab]. token_ids: [n], the chosen tokens; negative ones stand for 0. All values of
    a token are one difference, so that they are equal to the last bit wherever it appears."""
    k = min(k, logits.shape[-1])
    parts = zip(torch.split(logits, ROWS), torch.split(token_ids, ROWS), strict=True)
    return torch.cat([_records(part.float(), chosen, k) for part, chosen in parts])


def _records(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
    tokens = token_ids.clamp(min=0).to(torch.int64)[:, None]
    own = values = logits.gather(-1, tokens)
    if k:
        top, top_ids = _likeliest(logits, k)
        tokens, values = torch.cat((tokens, top_ids), dim=-1), torch.cat((own, top), dim=-1)
    records = torch.empty(len(logits), 3 + 2 * k, dtype=torch.int32, device=logits.device)
    records[:, 0] = _num_likelier(logits, own) + 1
    records[:, 1::2] = tokens
    records[:, 2::2] = (values - logits.logsumexp(dim=-1, keepdim=True)).view(torch.int32)
    return records


def _likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits, tokens) [n, k] of the k greatest logits.

    They are in the k blocks with the greatest maxima: `topk` of a vocabulary takes ten times as
    long as the maxima of its blocks."""
    n, vocab = logits.shape
    num_blocks = vocab // WIDTH
    if num_blocks <= 2 * k:
        return logits.topk(k, dim=-1)
    end = num_blocks * WIDTH
    blocks = logits[:, :end].view(n, num_blocks, WIDTH)
    best = blocks.amax(dim=-1).topk(k, dim=-1).indices[:, :, None]
    tokens = (best * WIDTH + torch.arange(WIDTH, device=logits.device)).flatten(1)
    rest = torch.arange(end, vocab, device=logits.device).expand(n, -1)
    tokens = torch.cat((tokens, rest), dim=-1)
    top, at = logits.gather(-1, tokens).topk(k, dim=-1)
    return top, tokens.gather(-1, at)


def _num_likelier(logits: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return how many logits of each row are greater than its own [n, 1]."""
    if logits.device.type != "cpu":
        return (logits > own).sum(dim=-1)
    # PyTorch sums booleans at a sixth of NumPy's speed.
    pairs = zip(logits.numpy(), own.numpy(), strict=True)
    return torch.tensor([np.count_nonzero(row > one) for row, one in pairs], dtype=torch.int32)
