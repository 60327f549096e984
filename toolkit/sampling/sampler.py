"""Chooses tokens from logits.

The order is vLLM's: log-probabilities of the raw logits; then logits processors, logit bias and
forbidden end tokens, penalties, grammars, temperature, min-p, top-k, top-p. `sample` is the only
place that has it.

A random choice takes the token with the least e / weight, where e is an exponential number that
depends on the request's seed, the position and the token alone (`kernels.reference.exponentials`).
The same seed gives the same text in any batch and after any preemption, and models with similar
logits choose the same token at most positions."""

import numpy as np
import numpy.typing as npt
import torch

from toolkit.hardware.memory import to_device
from toolkit.kernels.table import Kernels
from toolkit.sampling.grammar import Masks
from toolkit.sampling.sampling_state import SamplingState

IntArray = npt.NDArray[np.int32]
NEVER = 2**31 - 1
"""Number of tokens that no request reaches."""


def sample(
    logits: torch.Tensor,
    state: SamplingState,
    token_ids: torch.Tensor,
    rows: IntArray,
    lengths: IntArray,
    kernels: Kernels,
    masked: tuple[npt.NDArray[np.int64], Masks] | None = None,
    there: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the next tokens [n] int32; -1 where the logits are not finite.

    logits: [n, vocab] fp32, changed in place. token_ids: [num_rows, max_len], the rows' tokens so
    far. rows, lengths: [n] on the host, the rows and their numbers of tokens, which is the position
    of the sampled token, where it is written. kernels: of the device. masked: indices of requests
    with a grammar, and their masks. there: rows and lengths on the device, int32 [n], where the
    host's lengths are only upper bounds; the tokens are then not written."""
    device, tables = logits.device, (state.floats, state.ints)
    own, places = there or (to_device(torch.from_numpy(one), device) for one in (rows, lengths))
    if state.processors.asked[rows].any():
        state.processors.apply(logits, token_ids, rows, lengths)
    if state.biases[rows].any():
        add_biases(logits, state, token_ids, rows, places)
    if state.penalties[rows].any():
        kernels.penalize(logits, own, places, *tables, state.windows, token_ids)
    if masked is not None:
        kernels.mask_logits(logits, *(to_device(torch.from_numpy(part), device) for part in masked))
    tokens = torch.empty(len(logits), dtype=torch.int32, device=device)
    kernels.sample(logits, own, places, *tables, token_ids if there is None else None, tokens)
    return tokens


def add_biases(
    logits: torch.Tensor,
    state: SamplingState,
    token_ids: torch.Tensor,
    rows: IntArray,
    lengths: torch.Tensor,
) -> None:
    """Add logit biases and exclude forbidden tokens, in place.

    Forbidden are tokens other than `allowed_token_ids`, completions of bad words, and end tokens
    before `min_tokens`. lengths: [n] int32, on the device: the host may not know them."""
    where, tokens, values, ends = [], [], [], []
    for index, row in enumerate(rows.tolist()):
        if not state.biases[row]:
            continue
        params, num_prompt = state.params[row], int(state.num_prompt_tokens[row])
        allowed = state.allowed[row]
        if allowed is not None:
            _allow_only(logits[index], allowed)
        if params.bad_words_token_ids:
            _forbid(
                logits[index],
                token_ids[row],
                num_prompt,
                lengths[index],
                params.bad_words_token_ids,
            )
        bias = params.logit_bias or {}
        tokens += list(bias.keys())
        values += list(bias.values())
        ends += [NEVER] * len(bias)
        stops: list[int] = []
        # A grammar's masks contain `min_tokens`: if only an end token is left, the answer ends.
        if params.min_tokens and params.structured_outputs is None:
            stops = state.stop_ids[row]
        tokens += stops
        values += [-float("inf")] * len(stops)
        ends += [num_prompt + params.min_tokens] * len(stops)
        where += [index] * (len(bias) + len(stops))
    if where:
        index, token, end = to_device(torch.tensor((where, tokens, ends)), logits.device)
        added = to_device(torch.tensor(values, dtype=logits.dtype), logits.device)
        added = torch.where(lengths[index] < end, added, 0.0)
        logits.index_put_((index, token), added, accumulate=True)


def _allow_only(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """Exclude other tokens. logits: [vocab]; allowed: [n] int64, on the same device."""
    kept = logits[allowed]
    logits.fill_(-float("inf"))
    logits[allowed] = kept


def _forbid(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_prompt_tokens: int,
    length: torch.Tensor,
    sequences: list[list[int]],
) -> None:
    """Exclude the last token of each sequence whose other tokens end the output.

    logits: [vocab]. token_ids: [max_len] int32, of which the output is from `num_prompt_tokens` to
    `length`, a number on the device."""
    longest = max(map(len, sequences)) - 1
    # Aligned at the end. -1 pads shorter sequences, and matches everything.
    before = [[-1] * (longest - len(one) + 1) + one[:-1] for one in sequences]
    last = to_device(torch.tensor([one[-1] for one in sequences]), logits.device)
    wanted = to_device(torch.tensor(before, dtype=torch.int32), logits.device)
    places = torch.arange(-longest, 0, device=logits.device) + length
    output = token_ids[places.clamp(min=0)]
    is_same = (wanted == output) & (places >= num_prompt_tokens)
    matches = (is_same | (wanted < 0)).all(dim=1)
    logits.index_put_(
        (last,), torch.where(matches, -float("inf"), 0.0).to(logits.dtype), accumulate=True
    )
