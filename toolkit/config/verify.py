"""Settings of `tk verify`."""

from dataclasses import dataclass
from typing import Literal

from toolkit.config.fields import check_all, option


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """Settings of the comparisons."""

    json: bool = option(
        False, "Print one JSON object instead of a table.", subject="Output", common=True
    )

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyEngineConfig:
    """Settings of cache and scheduling that change how steps are computed.

    The defaults keep steps and cache small, so that prompts are chunked and blocks are reused."""

    block_size: int = option(
        16, "Tokens per KV cache block.", minimum=1, maximum=256, subject="KV cache and scheduling"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto", "Data type of the KV cache. auto: that of the activations."
    )
    enable_prefix_caching: bool = option(
        True, "Compare answers from cached prefixes with those computed from the start."
    )
    max_num_seqs: int = option(8, "Maximum number of running requests.", minimum=1)
    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of a step. Default: four blocks, less than the prompts of a batch have.",
        minimum=1,
    )
    async_scheduling: bool | None = option(
        None,
        "Schedule the next step before the tokens of the current one are known. Default: on for a "
        "GPU.",
    )

    def __post_init__(self) -> None:
        check_all(self)
