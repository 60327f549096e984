"""What can be set of the server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The OpenAI-compatible server."""

    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0 opens the server to the network.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    served_model_name: str | None = option(None, "Name of the model in the API. Default: MODEL as given.")
    api_key: str | None = option(
        None, "Key that requests under /v1 must carry as 'Authorization: Bearer KEY'."
    )
    shutdown_timeout: float = option(
        120.0, "Seconds that running requests get to finish after SIGTERM or Ctrl-C.", minimum=0.0
    )
    api_workers: int = option(
        1,
        "Processes that answer requests: more than one where a single core cannot tokenize and stream for the GPU.",
        minimum=1,
        maximum=64,
    )
    metrics_prefix: str = option("tk", "First part of every metric's name; vllm fits existing dashboards.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "What the log tells of.")

    def __post_init__(self) -> None:
        check_all(self)
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(
                f"--metrics-prefix takes letters, digits and underscores; it got {self.metrics_prefix!r}.",
                param="metrics_prefix",
            )
