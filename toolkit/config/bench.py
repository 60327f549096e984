"""What can be set of `tk bench offline`, `latency` and `prefill`, which measure the engine without a server."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.engine import CacheConfig
from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCacheConfig(CacheConfig):
    """The KV cache of a benchmark: a repeated prompt is computed anew."""

    enable_prefix_caching: bool = option(False, "Reuse the KV cache of prompts that begin alike.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchConfig:
    """What the three have in common."""

    temperature: float = option(
        0.6,
        "Of all requests; 0 always takes the likeliest token.",
        minimum=0.0,
        subject="Measurement",
    )
    repeats: int = option(
        3, "Measured runs after a warm-up; the best counts.", minimum=1, common=True
    )
    profile: str | None = option(
        None,
        "Run once more, write a Chrome trace of a third of a second of it to this file, and say for what "
        "share of that time the GPU was busy.",
        metavar="FILE",
    )
    json: bool = option(False, "Print one JSON object for each row instead of a table.")

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig(EngineBenchConfig):
    """Many requests of mixed lengths at once."""

    num_prompts: int = option(256, "Requests, all given at once.", minimum=1, common=True)
    min_len: int | None = option(
        None,
        "Shortest prompt and answer, in tokens. Default: 100; 16 in a context of 1024.",
        minimum=1,
        common=True,
    )
    max_len: int | None = option(
        None,
        "Longest prompt and answer, in tokens. Default: 1024; 512 in a context of 1024.",
        minimum=1,
        common=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig(EngineBenchConfig):
    """A few requests of one length."""

    batch_sizes: str = option(
        "1,8,64", "Requests at once, one row for each.", metavar="N,N,...", common=True
    )
    input_len: int = option(128, "Length of a prompt, in tokens.", minimum=1, common=True)
    output_len: int = option(256, "Length of an answer, in tokens.", minimum=1, common=True)

    def __post_init__(self) -> None:
        check_all(self)
        if not self.sizes:
            raise ConfigError(
                f"--batch-sizes is a list such as 1,8,64; it got {self.batch_sizes!r}.",
                param="batch_sizes",
            )

    @property
    def sizes(self) -> list[int]:
        """The batch sizes; empty when one of them is no positive number."""
        parts = [part.strip() for part in self.batch_sizes.split(",")]
        sizes = [int(part) for part in parts if part.isdecimal()]
        return sizes if len(sizes) == len(parts) and min(sizes) > 0 else []


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(EngineBenchConfig):
    """Prompts alone: every answer is one token."""

    num_prompts: int = option(32, "Requests, all given at once.", minimum=1, common=True)
    input_len: int | None = option(
        None,
        "Length of a prompt, in tokens. Default: 2048; 1000 in a context of 1024.",
        minimum=1,
        common=True,
    )
