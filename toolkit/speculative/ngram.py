"""Prompt lookup (Saxena, 2023): what followed the last tokens when they occurred before."""

import numpy as np
import numpy.typing as npt

from toolkit.config import Speculation
from toolkit.kernels.drafts import Tokens, look_up
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.speculative.drafter import NO_DRAFT, Drafts


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
        sizes = self._config.prompt_lookup_min, self._config.prompt_lookup_max
        for at, row in enumerate(rows.tolist()):
            tokens = self._token_ids[row, : self._lengths[row]]
            prediction = self._predictions.get(row, (tokens[:0], 0))
            found = look_up(tokens, *prediction, most, sizes)
            drafts[at, : len(found)] = found
        return drafts
