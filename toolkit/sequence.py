"""The specification of one request, carried from the front end to the device."""

import msgspec

from toolkit.sampling.params import PoolingParams, SamplingParams


class SequenceSpec(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Everything a request specifies, checked and resolved. Immutable.

    The front end creates and keeps it, so that a request survives its core. The scheduler and the
    workers hold references to it. A new per-request attribute is one field here."""

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # resolved against the context length
    eos_token_ids: list[int]
    priority: int = 0
    cache_salt: str = ""  # requests with different salts share no cached blocks
    grammar: str = ""  # constraint on the output in llguidance's format; empty: none
    pooling: PoolingParams | None = None  # set if the prompt is pooled instead of continued
    is_final_only: bool = False  # all tokens are reported together at the end

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
