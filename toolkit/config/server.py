"""What can be set of the server."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The OpenAI-compatible server."""

    host: str = option(
        "127.0.0.1",
        "Address to listen on. 0.0.0.0 opens the server to the network.",
        subject="Listening",
        common=True,
    )
    port: int = option(
        8000, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535, common=True
    )
    uds: str | None = option(
        None,
        "Path of a Unix socket to listen on, instead of an address and a port.",
        metavar="FILE",
    )
    root_path: str = option(
        "", "Path under which a proxy offers the server, such as /llm, and which it strips."
    )
    served_model_name: str | None = option(
        None, "Name of the model in the API. Default: MODEL as given."
    )

    api_key: tuple[str, ...] = option(
        (),
        "Key that requests must carry as 'Authorization: Bearer KEY'; may be repeated. In TK_API_KEY, commas part "
        "several. Probes, /metrics, /version and /docs need none.",
        subject="Keys, TLS and browsers",
        common=True,
    )
    api_key_file: str | None = option(
        None, "File with more API keys, one on each line.", metavar="FILE"
    )
    admin_key: str | None = option(
        None,
        "Key of the operator's endpoints, which API keys then do not open; it opens all others too.",
    )
    ssl_keyfile: str | None = option(None, "Private key for TLS, in PEM.", metavar="FILE")
    ssl_certfile: str | None = option(
        None, "Certificate for TLS, and those between it and its root, in PEM.", metavar="FILE"
    )
    ssl_ca_certs: str | None = option(
        None, "Certificates, in PEM, one of which must have signed a client's.", metavar="FILE"
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the server from a browser (CORS), * for all; may be repeated.",
    )
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP methods that those pages may use.")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that those pages may send.")
    allow_credentials: bool = option(
        False, "Whether those pages may send cookies and certificates."
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        (),
        "Address or network of a proxy that is believed about who its clients are, * for all; may be repeated.",
    )

    max_queue: int = option(
        16384,
        "Most requests that wait to run; the next ones get 429 until some run.",
        minimum=1,
        subject="Limits",
    )
    max_queue_tokens: int | None = option(
        None,
        "Most prompt tokens of requests that wait to run; one alone may have more. Default: no limit.",
        minimum=1,
    )
    max_requests_per_key: int | None = option(
        None,
        "Most requests of one API key that are open at once; without keys, of one address. Each API worker counts "
        "for itself. Default: no limit.",
        minimum=1,
    )
    requests_per_minute: int | None = option(
        None,
        "Most requests of one API key (or address) in a minute, counted likewise. Default: no limit.",
        minimum=1,
    )
    request_timeout: float | None = option(
        None,
        "Seconds after which a request that is not finished ends with an error. Default: none.",
        minimum=0.001,
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
    strict: bool = option(
        False,
        "Refuse requests with fields that the server does not know, instead of naming them in a header.",
        subject="Requests and answers",
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring a chat template of their own, which runs in a sandbox."
    )
    allow_special_tokens_in_messages: bool = option(
        False,
        "Take control tokens that somebody types in a chat message as such. By default they are text like any other.",
    )
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = option(
        "auto",
        "How the model writes calls of tools. auto: as its chat template says, where it is one of these.",
    )
    reasoning_parser: Literal["none", "qwen3", "deepseek_r1"] = option(
        "none",
        "Tell the reasoning of models that begin with it apart, as reasoning_content. qwen3: what an answer has between "
        "<think> and </think>; deepseek_r1: all up to </think>, with or without the first mark.",
    )
    sse_keep_alive: float = option(
        15.0,
        "Seconds after which a stream that waits sends a comment, so that nobody on the way closes it; 0: never.",
        minimum=0.0,
    )
    metrics_prefix: str = option(
        "tk",
        "First part of every metric's name; vllm fits existing dashboards.",
        subject="Metrics, log and traces",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "What the log tells of."
    )
    log_format: Literal["auto", "text", "json"] = option(
        "auto", "One line of text or of JSON for each event. auto: text on a terminal, else JSON."
    )
    disable_log_requests: bool = option(
        False, "Leave the line for each finished request out of the log."
    )
    disable_log_stats: bool = option(
        False, "Leave the line on throughput, every ten seconds of work, out of the log."
    )
    uvicorn_log_level: Literal["debug", "info", "warning", "error"] = option(
        "warning",
        "What the log tells of connections; info has a line for every HTTP request, probes too.",
    )
    disable_uvicorn_access_log: bool = option(False, "Leave those lines out whatever the level.")
    otlp_traces_endpoint: str | None = option(
        None,
        "URL that takes OpenTelemetry traces over HTTP, such as http://127.0.0.1:4318/v1/traces (needs the extra "
        "tk-llm[otlp]).",
    )

    def __post_init__(self) -> None:
        check_all(self)
        self._check_tls()
        if self.admin_key is not None and not self.admin_key.strip():
            raise ConfigError(
                "--admin-key (TK_ADMIN_KEY) is empty, and would protect nothing: give a key, or leave it out.",
                param="admin_key",
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint is a URL such as http://127.0.0.1:4318/v1/traces; it got {endpoint!r}.",
                param="otlp_traces_endpoint",
            )
        for proxy in self.forwarded_allow_ips:
            if not _is_network(proxy):
                raise ConfigError(
                    "--forwarded-allow-ips is an address such as 10.0.0.1, a network such as 10.0.0.0/8, or *; it got "
                    f"{proxy!r}.",
                    param="forwarded_allow_ips",
                )
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ConfigError(
                f"--root-path is a path such as /llm, without a slash at its end; it got {self.root_path!r}.",
                param="root_path",
            )
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(
                f"--metrics-prefix takes letters, digits and underscores; it got {self.metrics_prefix!r}.",
                param="metrics_prefix",
            )

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError(
                "--ssl-keyfile and --ssl-certfile go together: TLS needs a key and its certificate.",
                param="ssl_certfile",
            )
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError(
                "--ssl-ca-certs asks clients for certificates, which needs --ssl-keyfile and --ssl-certfile.",
                param="ssl_ca_certs",
            )


def _is_network(text: str) -> bool:
    """Whether it is an address, a network, or * for all."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return text == "*"
    return True
