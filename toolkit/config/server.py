"""Settings of the HTTP server."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError

TEMPLATE_NAMES = frozenset(
    {
        "tokenize", "return_tensors", "return_dict", "chat_template", "conversation", "messages",
        "allow_special_tokens", "self", "tools",
    }
)  # fmt: skip
"""Input of chat templates that chat_template_kwargs cannot set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server."""

    host: str = option(
        "127.0.0.1",
        "Address to listen on. 0.0.0.0: all networks, not only this machine.",
        subject="Listening",
        common=True,
    )
    port: int = option(
        8000, "Port to listen on. 0: any free port.", minimum=0, maximum=65535, common=True
    )
    uds: str | None = option(
        None,
        "Unix socket to listen on, instead of an address and a port.",
        metavar="FILE",
    )
    root_path: str = option(
        "",
        "Path under which a proxy publishes the server, such as /llm. The proxy may strip it "
        "or not.",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "Name of the model in the API. More names may follow if MODEL is before the flag: requests "
        "may have any of them, answers have the first. Default: MODEL, or its folder's name.",
        metavar="NAME...",
    )

    api_key: tuple[str, ...] = option(
        (),
        "Key that requests must send. The header is 'Authorization: Bearer KEY'. May be repeated; "
        "TK_API_KEY separates several with commas. Probes, /metrics, /version, /docs and / need no "
        "key. ps shows the flag to every user of the machine; --api-key-file and TK_API_KEY keep "
        "the key out of it.",
        metavar="KEY...",
        subject="Keys, TLS and browsers",
        common=True,
    )
    api_key_file: str | None = option(
        None, "File with more API keys, one per line.", metavar="FILE"
    )
    admin_key: str | None = option(
        None,
        "Key for the operator's endpoints, which API keys then cannot use. It also works for all "
        "other endpoints. TK_ADMIN_KEY keeps it out of ps.",
    )
    ssl_keyfile: str | None = option(None, "Private key for TLS (PEM).", metavar="FILE")
    ssl_certfile: str | None = option(
        None, "Certificate for TLS, with its intermediate certificates (PEM).", metavar="FILE"
    )
    ssl_ca_certs: str | None = option(
        None,
        "CA certificates (PEM). Clients then need a certificate that one of them signed.",
        metavar="FILE",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the server from a browser (CORS); * for all. May be repeated.",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Name in the Host header that a server on this machine without keys answers, besides those "
        "of this machine; * for all. A reverse proxy needs it. May be repeated.",
    )
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP methods allowed for those origins.")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers allowed for those origins.")
    allow_credentials: bool = option(
        False, "Allow cookies and client certificates from those origins."
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        (),
        "Address or network of a proxy whose X-Forwarded-For header is trusted; * for all. May be "
        "repeated.",
    )

    max_queue: int = option(
        16384,
        "Maximum number of waiting requests. Further requests get status 429.",
        minimum=1,
        subject="Limits",
    )
    max_queue_tokens: int | None = option(
        None,
        "Maximum number of prompt tokens of waiting requests. A single request may have more. "
        "Default: no limit.",
        minimum=1,
    )
    max_requests_per_key: int | None = option(
        None,
        "Maximum number of open requests per API key, or per client address without keys. Each "
        "API worker counts its own. Default: no limit.",
        minimum=1,
    )
    requests_per_minute: int | None = option(
        None,
        "Maximum number of requests per minute and API key (or address), counted in the same way. "
        "Default: no limit.",
        minimum=1,
    )
    request_timeout: float | None = option(
        None,
        "Seconds after which an unfinished request ends with an error. Default: no limit.",
        minimum=0.001,
    )
    max_audio_mb: int = option(
        256,
        "Largest sound file of a request, in MiB. Beyond 1 MiB it is on disk while the request "
        "runs (TMPDIR).",
        minimum=1,
        maximum=16384,
    )
    max_audio_seconds: int = option(
        14400,
        "Longest sound of a request, in seconds.",
        minimum=1,
        maximum=86400,
    )
    shutdown_timeout: float = option(
        120.0, "Seconds for running requests to finish after SIGTERM or Ctrl-C.", minimum=0.0
    )
    idle_timeout: float | None = option(
        None,
        "Seconds without a request after which the server ends. Running requests, and those after "
        "them, come first; probes and /metrics do not count. Needs --api-workers 1. Default: "
        "never.",
        minimum=0.1,
    )
    api_workers: int = option(
        1,
        "Processes that serve HTTP. Use more than one if a single CPU core cannot tokenize and "
        "stream fast enough for the GPU.",
        minimum=1,
        maximum=64,
    )
    web: bool = option(
        True,
        "Serve a chat page at /, for browsers. It works offline and needs no key; its requests do, "
        "if the server has keys.",
        subject="Requests and answers",
    )
    strict: bool = option(
        False,
        "Reject requests with unknown fields, instead of naming the fields in a response header.",
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "Input of the chat template that requests may replace, as a JSON object such as "
        '{"enable_thinking": false}.',
        metavar="JSON",
    )
    trust_request_chat_template: bool = option(
        False,
        "Allow requests with their own chat template. It runs in a sandbox, in a separate process.",
    )
    allow_special_tokens_in_messages: bool = option(
        False,
        "Parse special tokens in the text of chat messages. By default they are plain text.",
    )
    tool_call_parser: str = option(
        "auto",
        "Format of the model's tool calls: hermes, llama3_json, mistral, openai, generic, none, or "
        "a plug-in's. generic describes the tools in the system message, for any model. auto: "
        "detect it from the chat template, else generic.",
        metavar="FORMAT",
    )
    reasoning_parser: str = option(
        "auto",
        "Return the model's reasoning separately, as reasoning_content. qwen3: the text between "
        "<think> and </think>. deepseek_r1: all text up to </think>; <think> is optional. "
        "openai_gptoss: the format of gpt-oss, tool calls included. auto: openai_gptoss if the "
        "chat template is of that format, else none. Plug-ins add names.",
        metavar="FORMAT",
    )
    transcription_fallback: bool = option(
        False,
        "Repeat transcripts that are unlikely or repetitive at higher temperatures, and leave out "
        "sound without speech, unless a request's temperature_fallback says otherwise. Costs time.",
    )
    response_store: int = option(
        1000,
        "Number of the newest responses of /v1/responses that the server keeps in memory, 256 MiB "
        "at most, for previous_response_id and GET /v1/responses/ID. 0: none.",
        minimum=0,
    )
    sse_keep_alive: float = option(
        15.0,
        "Seconds after which an idle stream sends a comment, so that proxies keep it; 0: never.",
        minimum=0.0,
    )
    metrics_prefix: str = option(
        "tk",
        "Prefix of every metric's name. With vllm, vLLM's dashboards read the metrics.",
        subject="Metrics, log and traces",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Minimum level of log messages."
    )
    log_format: Literal["auto", "text", "json"] = option(
        "auto", "Format of log lines. auto: text on a terminal, else JSON."
    )
    disable_log_requests: bool = option(False, "Do not log a line per finished request.")
    disable_log_stats: bool = option(
        False, "Do not log throughput, which is logged every ten seconds under load."
    )
    uvicorn_log_level: Literal["debug", "info", "warning", "error"] = option(
        "warning",
        "Minimum level of uvicorn's log messages. info: a line per HTTP request, also for probes.",
    )
    disable_uvicorn_access_log: bool = option(
        False, "Do not log uvicorn's line per HTTP request, at any level."
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL for OpenTelemetry traces over HTTP, such as http://127.0.0.1:4318/v1/traces (needs "
        "pip install '.[otlp]' in tk's checkout).",
    )
    middleware: tuple[str, ...] = option(
        (),
        "ASGI middleware: a class, or an async function (request, call_next). It runs inside that "
        "of installed packages. May be repeated; the first is the outermost.",
        metavar="MODULE:NAME",
        subject="Plug-ins",
    )
    tool_parser_plugin: str | None = option(
        None,
        "Python file with a dict TOOL_PARSERS of more formats for --tool-call-parser.",
        metavar="FILE",
    )
    reasoning_parser_plugin: str | None = option(
        None,
        "Python file with a dict REASONING_PARSERS of more formats for --reasoning-parser.",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        check_all(self)
        self._check_tls()
        reserved = sorted(TEMPLATE_NAMES & set(self.default_chat_template_kwargs or {}))
        if reserved:
            raise ConfigError(
                f"--default-chat-template-kwargs cannot set {', '.join(reserved)}.",
                param="default_chat_template_kwargs",
            )
        if self.idle_timeout is not None and self.api_workers > 1:
            raise ConfigError(
                f"--idle-timeout needs --api-workers 1, and there are {self.api_workers}.",
                param="idle_timeout",
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", endpoint):
            raise ConfigError(
                "--otlp-traces-endpoint must be a URL such as http://127.0.0.1:4318/v1/traces, not "
                f"{endpoint!r}.",
                param="otlp_traces_endpoint",
            )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "--allow-credentials would let every site use this server with the visitor's "
                "cookies. Name the sites with --allowed-origins instead of *.",
                param="allow_credentials",
            )
        for proxy in self.forwarded_allow_ips:
            if not _is_network(proxy):
                raise ConfigError(
                    "--forwarded-allow-ips must be an address such as 10.0.0.1, a network such as "
                    f"10.0.0.0/8, or *, not {proxy!r}.",
                    param="forwarded_allow_ips",
                )
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ConfigError(
                "--root-path must be a path such as /llm, without a slash at the end, not "
                f"{self.root_path!r}.",
                param="root_path",
            )
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(
                "--metrics-prefix must be letters, digits and underscores, with no digit first, "
                f"not {self.metrics_prefix!r}.",
                param="metrics_prefix",
            )

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError(
                "TLS needs both --ssl-keyfile and --ssl-certfile.",
                param="ssl_certfile",
            )
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError(
                "--ssl-ca-certs needs TLS: set --ssl-keyfile and --ssl-certfile too.",
                param="ssl_ca_certs",
            )


def _is_network(text: str) -> bool:
    """Return True for an address, a network, or * (all)."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return text == "*"
    return True
