"""One request for text, as it is carried from the front end to the device."""

from __future__ import annotations

import msgspec

from toolkit.sampling.params import PoolingParams, SamplingParams


class SequenceSpec(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Everything that a request brings, checked and resolved. Never changed afterwards.

    The front end makes it and keeps it, so that a request survives its core. The scheduler and the
    workers hold it by reference. A new per-request attribute is one field here, and is read where
    it is needed.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Output tokens, resolved against the context length."""
    eos_token_ids: list[int]
    priority: int = 0
    cache_salt: str = ""
    """Requests with different salts share no cached blocks."""
    grammar: str = ""
    """Constraint on the output, in llguidance's format. Empty: none."""
    pooling: PoolingParams | None = None
    """Set if the prompt is pooled instead of continued."""
    is_final_only: bool = False
    """All tokens are reported together at the end."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
