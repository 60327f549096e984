"""Settings of the load generator: `tk bench`, `tk bench serve`, `sweep` and `compare`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.config.clients import CACERT, INSECURE, server_url
from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError, did_you_mean

ROUTES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "transcriptions": "/v1/audio/transcriptions",
}
METRICS = ("ttft", "tpot", "itl", "e2el")
"""vLLM's names: time to first token, per output token, inter-token latency, end to end."""
DEFAULT_NUM_PROMPTS = 200
MEASURED_FIELDS = ("model", "prompt", "messages", "max_tokens", "stream", "stream_options")
"""Fields of a request that --extra-body cannot set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Settings of a run."""

    url: str = option(
        "",
        "The server to load. Default: one that runs on this machine; asks if there are several.",
        aliases=("--base-url",),
        subject="Server",
        common=True,
    )
    model: str | None = option(
        None, "Model to request. Default: the first one the server lists.", metavar="NAME"
    )
    endpoint: Literal[
        "completions",
        "chat",
        "transcriptions",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/audio/transcriptions",
    ] = option(
        "completions",
        "API route to load. transcriptions: WAV files of noise, each another, of --clip-seconds.",
        metavar="ROUTE",
    )
    api_key: str | None = option(None, "API key to send. TK_API_KEY keeps it out of ps.")
    cacert: str | None = option(None, CACERT, metavar="FILE")
    insecure: bool = option(False, INSECURE)
    header: tuple[str, ...] = option((), "Extra headers for every request.", metavar="KEY=VALUE")
    ready_check_timeout_sec: float = option(
        0.0, "Seconds to wait for the server to become ready.", minimum=0.0
    )
    request_rate: float = option(
        math.inf,
        "Requests per second; inf sends all at once. Arrivals are random (see --burstiness).",
        aliases=("--rps",),
        minimum=0.0,
        subject="Load",
        common=True,
    )
    burstiness: float = option(
        1.0,
        "Shape of the gamma distribution of the gaps between arrivals, as in vLLM. "
        "1 is Poisson, below 1 is clustered, above 1 is more even, inf is constant.",
        minimum=0.0,
    )
    burst_size: int = option(1, "Requests per arrival. The rate still counts requests.", minimum=1)
    ramp_up_strategy: Literal["linear", "exponential"] | None = option(
        None,
        "Change the rate from --ramp-up-start-rps to --ramp-up-end-rps between the first request "
        "and the last, as in vLLM. With --duration alone, over that time.",
    )
    ramp_up_start_rps: float | None = option(None, "Rate at the start of the ramp.", minimum=0.0)
    ramp_up_end_rps: float | None = option(None, "Rate at the end of the ramp.", minimum=0.0)
    num_prompts: int | None = option(
        None,
        f"Requests to send. Default: {DEFAULT_NUM_PROMPTS}; all of a trace; with --duration, "
        "no limit.",
        minimum=1,
        common=True,
    )
    duration: float | None = option(
        None,
        "Seconds to send for. Requests still running at the end are waited for.",
        minimum=0.0,
    )
    max_concurrency: int | None = option(
        None,
        "Maximum requests in flight. Without a rate, each answer starts the next request.",
        minimum=1,
        common=True,
    )
    clients: int | None = option(
        None,
        "Processes to send from. Default: as many as the load needs, at most a quarter of the "
        "cores.",
        minimum=1,
    )
    find_max_rps: bool = option(
        False,
        "Find the highest rate that meets --goodput. Each run takes 20 seconds unless --duration "
        "or --num-prompts is given.",
    )
    dataset_name: Literal["random", "prefix", "sharegpt", "custom", "trace"] = option(
        "random",
        "Source of the prompts. random: generated, all different. prefix: generated, many share a "
        "prefix (--prefix-len, --num-prefixes). The others are read from --dataset-path. sharegpt: "
        "a JSON list of conversations; the first question of each is sent. custom: lines such as "
        '{"prompt": "...", "output_len": 64} or {"messages": [...]}. trace: lines such as '
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]} '
        "(milliseconds, tokens, and ids of shared blocks of 512 tokens), or CSV with such columns. "
        "A trace is replayed at its recorded times unless a rate is given.",
        subject="Prompts and answers",
        metavar="NAME",
    )
    dataset_path: str | None = option(None, "Dataset file.", metavar="FILE")
    random_input_len: int = option(
        128,
        "Prompt length in tokens; with --endpoint chat, in words.",
        minimum=1,
        common=True,
    )
    random_output_len: int = option(128, "Output tokens per request.", minimum=1, common=True)
    random_range_ratio: float = option(
        0.0,
        "Draw lengths uniformly from length x (1 - r) to length x (1 + r), as in vLLM.",
        minimum=0.0,
        maximum=1.0,
    )
    random_vocab_size: int = option(1000, "Draw prompts from token ids below this.", minimum=1)
    clip_seconds: float = option(
        30.0,
        "Length of each file, with --endpoint transcriptions.",
        minimum=0.1,
        maximum=3600.0,
    )
    prefix_len: int = option(
        256, "Length of the shared prefixes of the dataset prefix, in tokens.", minimum=1
    )
    num_prefixes: int = option(10, "Number of shared prefixes.", minimum=1)
    output_len: int | None = option(
        None, "Output tokens per request; overrides the dataset.", minimum=1
    )
    ignore_eos: bool = option(
        True, "Request answers of full length, past the end-of-sequence token."
    )
    extra_body: Mapping[str, Any] | None = option(
        None,
        'Fields to add to the body of every request, as a JSON object such as {"temperature": '
        "0.7}. Without it requests are greedy.",
        metavar="JSON",
    )
    seed: int | None = option(
        None,
        "Seed of arrivals, lengths and prompts. Each run of a sweep or a search adds one. "
        "Default: random, so that no prompt is already in the server's prefix cache.",
        minimum=0,
    )
    num_warmups: int = option(
        0, "Requests to finish before the measurement starts.", minimum=0, subject="Measurement"
    )
    goodput: tuple[str, ...] = option(
        (),
        "Limits of a good request, in milliseconds, counted from its scheduled arrival: "
        "ttft:200 tpot:50 e2el:5000. Good requests per second are reported.",
        metavar="NAME:MS",
    )
    goodput_ratio: float = option(
        0.99, "Fraction of good requests --find-max-rps requires.", minimum=0.0, maximum=1.0
    )
    percentile_metrics: str = option(
        ",".join(METRICS), "Latencies to report.", metavar="NAME,NAME,..."
    )
    metric_percentiles: str = option("50,90,99", "Percentiles to report.", metavar="P,P,...")
    json: bool = option(False, "Print the result as JSON instead of a table.", subject="Result")
    save_result: bool = option(
        False,
        "Save the result as NAME.json, one line per request as NAME.jsonl, and a report with plots "
        "as NAME.html.",
    )
    result_dir: str | None = option(
        None,
        "Folder to save in. Implies --save-result. Default: the current folder.",
        metavar="FOLDER",
    )
    result_filename: str | None = option(
        None,
        "Name to save under. Implies --save-result. Default: model, load and time.",
        metavar="NAME",
    )
    metadata: tuple[str, ...] = option(
        (), "Extra fields to store in the result.", metavar="KEY=VALUE"
    )

    def __post_init__(self) -> None:
        check_all(self)
        if self.url:
            object.__setattr__(self, "url", server_url(self.url))
        self._check_load()
        self._check_dataset()
        self._check_lists()
        if self.find_max_rps and not self.goodput:
            raise ConfigError(
                "--find-max-rps needs limits to meet, such as --goodput ttft:200 tpot:50.",
                param="goodput",
            )

    def _check_load(self) -> None:
        for name in ("request_rate", "burstiness", "ramp_up_start_rps", "ramp_up_end_rps"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN too
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be above 0; got {value!r}.", param=name
                )
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if any(part is not None for part in ramp):
            if None in ramp:
                raise ConfigError(
                    "A ramp needs all of --ramp-up-strategy, --ramp-up-start-rps and "
                    "--ramp-up-end-rps.",
                    param="ramp_up_strategy",
                )
            if math.isfinite(self.request_rate):
                raise ConfigError(
                    "A ramp sets its own rates; remove --request-rate.", param="request_rate"
                )
        if (
            self.duration is not None
            and not self.is_paced
            and self.max_concurrency is None
            and not self.find_max_rps
        ):
            raise ConfigError(
                "--duration needs --rps or --max-concurrency; without them every request is sent "
                "at once.",
                param="duration",
            )

    def _check_dataset(self) -> None:
        is_generated = self.dataset_name in ("random", "prefix")
        if is_generated and self.dataset_path is not None:
            raise ConfigError(
                f"The dataset {self.dataset_name} reads no file. Did you mean --dataset-name "
                "custom?",
                param="dataset_path",
            )
        if not is_generated and self.dataset_path is None:
            raise ConfigError(
                f"The dataset {self.dataset_name} needs a file: set --dataset-path.",
                param="dataset_path",
            )

        if self.is_sound and self.dataset_name != "random":
            raise ConfigError(
                "--endpoint transcriptions sends generated sound: leave out --dataset-name.",
                param="dataset_name",
            )
        for name in MEASURED_FIELDS:
            if name in (self.extra_body or {}):
                raise ConfigError(
                    f"--extra-body cannot set {name}, which the measurement sets.",
                    param="extra_body",
                )

    def _check_lists(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"Unknown latency {name!r} in --percentile-metrics."
                    f"{did_you_mean(name, METRICS)} Supported: {', '.join(METRICS)}.",
                    param="percentile_metrics",
                )
        if not self.percentiles or not all(0 < share < 100 for share in self.percentiles):
            raise ConfigError(
                "--metric-percentiles takes numbers between 0 and 100, such as 50,90,99; got "
                f"{self.metric_percentiles!r}.",
                param="metric_percentiles",
            )
        for flag, texts in (("header", self.header), ("metadata", self.metadata)):
            for text in texts:
                if not re.fullmatch(r"[^=\s]+=[^\r\n]*", text):
                    raise ConfigError(f"--{flag} takes KEY=VALUE; got {text!r}.", param=flag)
        for text in self.goodput:
            found = re.fullmatch(r"(ttft|tpot|e2el):(\d+\.?\d*)", text)
            if found is None:
                raise ConfigError(
                    "--goodput takes ttft, tpot and e2el with milliseconds, such as ttft:200; it "
                    f"got {text!r}.",
                    param="goodput",
                )

    @property
    def is_chat(self) -> bool:
        """True if prompts are conversations."""
        return self.endpoint in ("chat", ROUTES["chat"])

    @property
    def is_sound(self) -> bool:
        """True if prompts are sound files."""
        return self.endpoint in ("transcriptions", ROUTES["transcriptions"])

    @property
    def route(self) -> str:
        """URL path of the requests."""
        return ROUTES.get(self.endpoint, self.endpoint)

    @property
    def is_paced(self) -> bool:
        """True if arrivals follow a rate or a trace."""
        return self._has_rate or self.is_replayed

    @property
    def is_replayed(self) -> bool:
        """True if requests arrive at the times of a trace."""
        return self.dataset_name == "trace" and not self._has_rate and self.max_concurrency is None

    @property
    def _has_rate(self) -> bool:
        return math.isfinite(self.request_rate) or self.ramp_up_strategy is not None

    @property
    def max_requests(self) -> int | None:
        """Requests to send at most. None if `duration` or the end of a trace ends the run."""
        if self.num_prompts is None and self.duration is None and self.dataset_name != "trace":
            return DEFAULT_NUM_PROMPTS
        return self.num_prompts

    @property
    def metrics(self) -> tuple[str, ...]:
        """Latencies to report."""
        return tuple(part.strip() for part in self.percentile_metrics.split(",") if part.strip())

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Percentiles to report, ascending. Empty if the list cannot be parsed."""
        try:
            return tuple(
                sorted({float(part) for part in self.metric_percentiles.split(",") if part.strip()})
            )
        except ValueError:
            return ()

    @property
    def objectives(self) -> dict[str, float]:
        """Limits of a good request by metric, in seconds."""
        return {
            name: float(limit) / 1e3
            for name, _, limit in (text.partition(":") for text in self.goodput)
        }

    @property
    def saves_files(self) -> bool:
        """True if the result is written to files."""
        return self.save_result or self.result_dir is not None or self.result_filename is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig(BenchConfig):
    """Settings of several runs."""

    vary: tuple[str, ...] = option(
        (),
        "Flags and the values to run with. Several flags are combined. "
        "Default: max-concurrency=1,2,4,8,16,32,64.",
        metavar="FLAG=V,V,...",
        subject="Sweep",
        common=True,
    )

    def __post_init__(self) -> None:
        check_all(self)  # combinations are checked once the varied flags have values


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """Settings of a comparison of two results."""

    before: str | None = option(None, "Baseline result.", argument=True, metavar="A", common=True)
    after: str | None = option(None, "Result to check.", argument=True, metavar="B", common=True)
    threshold: float = option(
        5.0,
        "Percent by which a number may be worse. A significant change beyond it is a regression "
        "and exits with 1.",
        minimum=0.0,
        subject="Comparison",
        common=True,
    )
    json: bool = option(False, "Print JSON instead of a table.", common=True)

    def __post_init__(self) -> None:
        check_all(self)
        if self.before is None or self.after is None:
            raise ConfigError(
                "Two results are needed: tk bench compare A.json B.json.", param="before"
            )
