"""Settings of `tk bench offline`, `throughput`, `latency` and `prefill`, without a server."""

from dataclasses import dataclass

from toolkit.config.engine import CacheConfig
from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCacheConfig(CacheConfig):
    """KV cache settings. Repeated prompts are computed again by default."""

    enable_prefix_caching: bool = option(False, "Reuse the KV cache of shared prefixes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchConfig:
    """Settings common to the four commands."""

    temperature: float = option(
        0.6,
        "Sampling temperature of all requests; 0 is greedy.",
        minimum=0.0,
        subject="Measurement",
    )
    repeats: int = option(
        3, "Measured runs after a warm-up; the best is reported.", minimum=1, common=True
    )
    profile: str | None = option(
        None,
        "Run once more, write a Chrome trace of a third of a second of it to this file, and report "
        "the fraction of that time the GPU was busy.",
        metavar="FILE",
    )
    json: bool = option(False, "Print one JSON object per row instead of a table.")

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig(EngineBenchConfig):
    """Settings of `tk bench offline`: many requests of mixed lengths at once."""

    num_prompts: int = option(256, "Requests, all submitted at once.", minimum=1, common=True)
    min_len: int | None = option(
        None,
        "Shortest prompt and answer in tokens. Default: 100; 16 if the context is at most 1024.",
        minimum=1,
        common=True,
    )
    max_len: int | None = option(
        None,
        "Longest prompt and answer in tokens. Default: 1024; 512 if the context is at most 1024.",
        minimum=1,
        common=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig(EngineBenchConfig):
    """Settings of `tk bench throughput`: many requests of one length at once."""

    repeats: int = option(
        1, "Measured runs after a warm-up; the best is reported.", minimum=1, common=True
    )
    input_len: int | None = option(
        None,
        "Prompt length in tokens. Default: 1000; 200 if the context is at most 1024.",
        minimum=1,
        common=True,
    )
    output_len: int | None = option(
        None,
        "Output length in tokens. Default: 1000; 200 if the context is at most 1024.",
        minimum=1,
        common=True,
    )
    num_requests: int | None = option(
        None,
        "Requests, all submitted at once. Default: three times as many as run at once "
        "(--max-num-seqs of each engine).",
        minimum=1,
        aliases=("--num-prompts",),
        common=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig(EngineBenchConfig):
    """Settings of `tk bench latency`: a few requests of one length."""

    batch_sizes: str = option(
        "1,8,64", "Batch sizes, one row for each.", metavar="N,N,...", common=True
    )
    input_len: int = option(128, "Prompt length in tokens.", minimum=1, common=True)
    output_len: int = option(256, "Output length in tokens.", minimum=1, common=True)

    def __post_init__(self) -> None:
        check_all(self)
        if not self.sizes:
            raise ConfigError(
                f"--batch-sizes takes a list such as 1,8,64; got {self.batch_sizes!r}.",
                param="batch_sizes",
            )

    @property
    def sizes(self) -> list[int]:
        """Batch sizes. Empty if one of them is not a positive integer."""
        parts = [part.strip() for part in self.batch_sizes.split(",")]
        sizes = [int(part) for part in parts if part.isdecimal()]
        return sizes if len(sizes) == len(parts) and min(sizes) > 0 else []


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(EngineBenchConfig):
    """Settings of `tk bench prefill`: prompts only, each answered with one token."""

    num_prompts: int = option(32, "Requests, all submitted at once.", minimum=1, common=True)
    input_len: int | None = option(
        None,
        "Prompt length in tokens. Default: 2048; 1000 if the context is at most 1024.",
        minimum=1,
        common=True,
    )
