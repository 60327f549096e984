"""Prompt lookup (Saxena, 2023): what followed the last tokens when they occurred before."""

import numpy as np
import numpy.typing as npt

from toolkit.config import Speculation
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.speculative.drafter import NO_DRAFT, Drafts

Tokens = npt.NDArray[np.int32]


class NgramDrafter:
    """Looks for the last tokens in the request's prediction, then in its own tokens."""

    def __init__(self, config: Speculation, token_ids: Tokens, lengths: Tokens) -> None:
        """token_ids: [num_rows, max_len]; lengths: [num_rows], the tokens that are known."""
        self._config, self._token_ids, self._lengths = config, token_ids, lengths
        self._predictions: dict[int, tuple[Tokens, int]] = {}
        """By row: the prediction, and the number of tokens of the prompt."""

    def place(self, new: NewRow) -> None:
        self._predictions.pop(new.row, None)
        if prediction := new.spec.prediction_token_ids:
            number = new.spec.num_prompt_tokens
            self._predictions[new.row] = np.array(prediction, np.int32), number

    def observe(self, step: SchedulerOutput) -> None:
        """Do nothing: the tokens are all that it reads."""

    def propose(self, rows: npt.NDArray[np.int32]) -> Drafts:
        most = self._config.num_speculative_tokens
        drafts = np.full((len(rows), most), NO_DRAFT, np.int32)
        for at, row in enumerate(rows.tolist()):
            found = self._find(row, self._token_ids[row, : self._lengths[row]])
            drafts[at, : len(found)] = found
        return drafts

    def _find(self, row: int, tokens: Tokens) -> Tokens:
        """Return the drafts that follow a row's tokens, or none."""
        config, most = self._config, self._config.num_speculative_tokens
        if row in self._predictions:
            prediction, num_prompt = self._predictions[row]
            output = tokens[num_prompt:]
            if np.array_equal(prediction[: len(output)], output):
                return prediction[len(output) : len(output) + most]
            end = match(prediction, tokens, config.prompt_lookup_min, config.prompt_lookup_max)
            if 0 <= end < len(prediction):
                return prediction[end : end + most]
        end = match(tokens[:-1], tokens, config.prompt_lookup_min, config.prompt_lookup_max)
        if end < 0:
            return tokens[:0]
        # A repetition goes on past the end of the tokens: draft j is the token one period earlier.
        return np.resize(tokens[end:], most)


def match(text: Tokens, tokens: Tokens, least: int, most: int) -> int:
    """Return the end of the latest of the longest matches of the end of `tokens` in `text`.

    A match has `least` to `most` tokens. -1: there is none."""
    if not len(tokens):
        return -1
    ends, found, length = np.flatnonzero(text == tokens[-1]) + 1, -1, 1
    while len(ends):
        if length >= least:
            found = int(ends[-1])
        length += 1
        if length > min(most, len(tokens)):
            break
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == tokens[-length]]
    return found
