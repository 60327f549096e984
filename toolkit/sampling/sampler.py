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
from toolkit.kernels import cpu, reference
from toolkit.kernels.cpu.sampling import sample as cpu_sample
from toolkit.kernels.table import Kernels
from toolkit.sampling.grammar import Masks
from toolkit.sampling.sampling_state import SamplingState

IntArray = npt.NDArray[np.int32]
MAX_TOPK = 1024
"""If every filtering request keeps at most this many tokens, the vocabulary is not sorted."""
NEVER = 2**31 - 1
"""Number of tokens that no request reaches."""


def sample(
    logits: torch.Tensor,
    state: SamplingState,
    token_ids: torch.Tensor,
    rows: IntArray,
    lengths: IntArray,
    masked: tuple[npt.NDArray[np.int64], Masks] | None = None,
    kernels: Kernels | None = None,
    there: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the next tokens [n]; -1 where the logits are not finite.

    logits: [n, vocab] fp32, changed in place. token_ids: [num_rows, max_len], the rows' tokens so
    far. rows, lengths: [n] on the host, the rows and their numbers of tokens, which is the position
    of the sampled token. masked: indices of requests with a grammar, and their masks.

    With the device's `kernels` the tokens are int32, and are written into `token_ids`; else they
    are int64. there: rows and lengths on the device, int32 [n], where the host's lengths are only
    upper bounds; the tokens are then not written."""
    steps = (
        _TorchSteps(state, token_ids, rows, lengths)
        if kernels is None
        else _KernelSteps(kernels, state, token_ids, rows, lengths, there)
    )
    if state.processors.asked[rows].any():
        state.processors.apply(logits, token_ids, rows, lengths)
    if state.biases[rows].any():
        add_biases(logits, state, token_ids, rows, steps.lengths)
    if state.penalties[rows].any():
        steps.penalize(logits)
    if masked is not None:
        steps.mask(logits, *(to_device(torch.from_numpy(part), logits.device) for part in masked))
    return steps.choose(logits)


class _TorchSteps:
    """Steps of `sample` in PyTorch. On a CPU our C++ kernel chooses, if it was built."""

    def __init__(
        self, state: SamplingState, token_ids: torch.Tensor, rows: IntArray, lengths: IntArray
    ) -> None:
        self._state, self._token_ids, self._rows, self._lengths = state, token_ids, rows, lengths
        self.lengths = to_device(torch.from_numpy(lengths), token_ids.device)

    def penalize(self, logits: torch.Tensor) -> None:
        _penalize(logits, self._state, self._token_ids, self._rows, self._lengths)

    def mask(self, logits: torch.Tensor, index: torch.Tensor, masks: torch.Tensor) -> None:
        mask_logits(logits, index, masks)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        state, rows, lengths = self._state, self._rows, self._lengths
        if logits.device.type == "cpu" and cpu.available():
            return cpu_sample(
                logits, torch.from_numpy(rows), torch.from_numpy(lengths), state.floats, state.ints
            )
        return choose(logits, state, rows, lengths)


class _KernelSteps:
    """Steps of `sample` with GPU kernels."""

    def __init__(
        self,
        kernels: Kernels,
        state: SamplingState,
        token_ids: torch.Tensor,
        rows: IntArray,
        lengths: IntArray,
        there: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        device = token_ids.device
        self._kernels, self._token_ids = kernels, token_ids
        self._writes = there is None
        self._rows, self.lengths = there or (
            to_device(torch.from_numpy(one), device) for one in (rows, lengths)
        )
        self._tables = state.floats, state.ints

    def penalize(self, logits: torch.Tensor) -> None:
        self._kernels.penalize(logits, self._rows, self.lengths, *self._tables, self._token_ids)

    def mask(self, logits: torch.Tensor, index: torch.Tensor, masks: torch.Tensor) -> None:
        self._kernels.mask_logits(logits, index, masks)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        target = self._token_ids if self._writes else None
        self._kernels.sample(logits, self._rows, self.lengths, *self._tables, target, out)
        return out


def choose(
    logits: torch.Tensor, state: SamplingState, rows: IntArray, lengths: IntArray
) -> torch.Tensor:
    """Return the next tokens [n] int64 by temperature, min-p, top-k and top-p.

    -1 where the logits are not finite."""
    device = logits.device
    rows_on_device = torch.from_numpy(rows).to(device, torch.int64)
    best, greedy = logits.max(dim=-1)
    chosen = greedy
    if state.random[rows].any():
        temperature = state.floats[rows_on_device, 0]
        positions = torch.from_numpy(lengths).to(device, torch.int64)
        seeds = state.ints[rows_on_device, 1]
        # Minus the maximum, so that no small temperature overflows.
        scaled = (logits - best[:, None]) / torch.where(temperature > 0, temperature, 1.0)[:, None]
        probabilities = scaled.softmax(dim=-1)
        if state.filters[rows].any():
            probabilities = _keep_likely(probabilities, state, rows, rows_on_device)
        times = reference.exponentials(seeds, positions, logits.shape[1]) / probabilities
        chosen = torch.where(temperature > 0, times.argmin(dim=-1), greedy)
    return torch.where(best.isfinite(), chosen, -1)


def _keep_likely(
    probabilities: torch.Tensor, state: SamplingState, rows: IntArray, rows_on_device: torch.Tensor
) -> torch.Tensor:
    """Return the probabilities, zero where top-k, min-p or top-p exclude a token.

    They stay in vocabulary order, and tokens as likely as the last one kept are kept too. So the
    draw depends neither on the sorting of equals nor on the batch."""
    vocab = probabilities.shape[-1]
    top_k = state.ints[rows_on_device, 0]
    top_p, min_p = (state.floats[rows_on_device, i, None] for i in (1, 2))
    limits = [state.params[row].top_k or vocab for row in rows[state.random[rows]].tolist()]
    most = min(vocab, max(limits))
    if most <= MAX_TOPK:
        kept = probabilities.topk(most, dim=-1).values
    else:
        kept = probabilities.sort(dim=-1, descending=True).values
    rank = torch.arange(kept.shape[-1], device=kept.device)
    kept = kept.masked_fill(rank >= torch.where(top_k > 0, top_k, vocab)[:, None], 0.0)
    kept = kept.masked_fill(kept < min_p * kept[:, :1], 0.0)
    before = kept.cumsum(dim=-1, dtype=torch.float64)
    total = before[:, -1:].clone()
    before -= kept
    kept = kept.masked_fill((before >= top_p * total) & (rank > 0) & (top_p < 1), 0.0)
    least = kept.masked_fill(kept == 0, torch.inf).amin(dim=-1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0.0)


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


def mask_logits(logits: torch.Tensor, index: torch.Tensor, masks: torch.Tensor) -> None:
    """Exclude tokens whose bit is not set, in place.

    logits: [n, vocab]. index: [m] int64, rows of the logits. masks: [m, words] int32
    (`grammar.Masks`)."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    allowed = torch.zeros(len(masks), logits.shape[1], dtype=torch.bool, device=logits.device)
    known = bits.flatten(1)[:, : logits.shape[1]].bool()
    allowed[:, : known.shape[1]] = known
    logits[index] = logits[index].masked_fill(~allowed, -torch.inf)


def _penalize(
    logits: torch.Tensor,
    state: SamplingState,
    token_ids: torch.Tensor,
    rows: IntArray,
    lengths: IntArray,
) -> None:
    """Apply repetition (Keskar et al., 2019) over all tokens, the others over the output."""
    device = logits.device
    which = np.flatnonzero(state.penalties[rows])
    index = torch.from_numpy(which).to(device)
    row_index = torch.from_numpy(rows[which]).to(device, torch.int64)
    length = torch.from_numpy(lengths[which]).to(device)[:, None]
    longest = int(lengths[which].max())
    tokens = token_ids[row_index, :longest].to(torch.int64)
    position = torch.arange(longest, device=device)
    known = position < length
    output = known & (position >= state.ints[row_index, 2, None])
    # A token that is not known yet counts as token 0 with weight 0.
    counts = torch.zeros(len(which), logits.shape[-1], device=device)
    counts_all = counts.clone().scatter_add_(1, tokens, known.float())
    counts.scatter_add_(1, tokens, output.float())
    repetition, presence, frequency = (state.floats[row_index, i, None] for i in (3, 4, 5))
    part = logits[index]
    part = torch.where(
        counts_all > 0, torch.where(part > 0, part / repetition, part * repetition), part
    )
    logits[index] = part - frequency * counts - presence * (counts > 0)
