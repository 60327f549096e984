"""Log-probabilities of chosen and likeliest tokens."""

import torch


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (tokens [n, 1 + k], log-probabilities [n, 1 + k] fp32, rank of the first [n]).

    logits: [n, vocab]. token_ids: [n], reported first, then the k likeliest. All values of a token
    come from one tensor, so that they are equal to the last bit wherever it appears."""
    logprobs = logits.float().log_softmax(dim=-1)
    wanted = token_ids.clamp(min=0).to(torch.int64)[:, None]
    own = logprobs.gather(-1, wanted)
    rank = (logprobs > own).sum(dim=-1) + 1
    if k == 0:
        return wanted, own, rank
    top, top_ids = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
    return torch.cat((wanted, top_ids), dim=-1), torch.cat((own, top), dim=-1), rank
