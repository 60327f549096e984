"""What can be set of the load generator: `tk bench`, `tk bench serve`, `sweep` and `compare`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from toolkit.config.clients import DEFAULT_URL, server_url
from toolkit.config.fields import check_all, option
from toolkit.errors import ConfigError, did_you_mean

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
"""Latencies by vLLM's names: to the first token, per output token, between tokens, end to end."""
COUNT = 200
"""Requests of a run when nothing says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The load generator."""

    url: str = option(
        DEFAULT_URL, "The server to load.", aliases=("--base-url",), subject="Server", common=True
    )
    model: str | None = option(
        None, "Model to ask for. Default: the first that the server lists.", metavar="NAME"
    )
    endpoint: Literal["completions", "chat", "/v1/completions", "/v1/chat/completions"] = option(
        "completions", "Which route of the API to load.", metavar="ROUTE"
    )
    api_key: str | None = option(None, "Key of the server.")
    header: tuple[str, ...] = option((), "Further headers of every request.", metavar="KEY=VALUE")
    ready_check_timeout_sec: float = option(
        0.0, "Seconds to wait for a server that does not answer yet.", minimum=0.0
    )
    request_rate: float = option(
        math.inf,
        "Requests per second; inf sends all at once. They arrive at random (see --burstiness).",
        aliases=("--rps",),
        minimum=0.0,
        subject="Load",
        common=True,
    )
    burstiness: float = option(
        1.0,
        "How even arrivals are: the shape of the gamma distribution that their gaps follow, as in vLLM. 1 is "
        "Poisson, less comes in clusters, more is more even, inf is constant.",
        minimum=0.0,
    )
    burst_size: int = option(
        1, "Requests that arrive together; the rate counts requests.", minimum=1
    )
    ramp_up_strategy: Literal["linear", "exponential"] | None = option(
        None,
        "Let the rate change from --ramp-up-start-rps to --ramp-up-end-rps from the first request to the last, "
        "as in vLLM; with --duration alone, from its beginning to its end.",
    )
    ramp_up_start_rps: float | None = option(
        None, "Rate at the beginning of the ramp.", minimum=0.0
    )
    ramp_up_end_rps: float | None = option(None, "Rate at its end.", minimum=0.0)
    num_prompts: int | None = option(
        None,
        f"Requests to send. Default: {COUNT}, a trace's all, or with --duration as many as it takes.",
        minimum=1,
        common=True,
    )
    duration: float | None = option(
        None,
        "Seconds to send for; requests that run then are waited for.",
        minimum=0.0,
        common=True,
    )
    max_concurrency: int | None = option(
        None,
        "Most requests in flight. Without a rate, each answer starts the next request.",
        minimum=1,
        common=True,
    )
    clients: int | None = option(
        None,
        "Processes to send from. Default: as many as the load needs, at most a quarter of the cores.",
        minimum=1,
    )
    find_max_rps: bool = option(
        False,
        "Search the highest rate at which --goodput holds, by runs of 20 seconds; or --duration, --num-prompts.",
    )
    dataset_name: Literal["random", "prefix", "sharegpt", "custom", "trace"] = option(
        "random",
        "Where prompts come from. random: made, all different. prefix: made, many begin alike (--prefix-len, "
        "--num-prefixes). The others are read from --dataset-path: sharegpt is a JSON list of conversations, of "
        'which the first question is asked; custom has lines such as {"prompt": "...", "output_len": 64} or '
        '{"messages": [...]}; trace has lines such as {"timestamp": 27482, "input_length": 6955, "output_length": '
        '52, "hash_ids": [46, 47]} (milliseconds, tokens, and ids of blocks of 512 tokens that prompts share), or '
        "such columns as CSV, and is replayed at its own times unless a rate is given.",
        subject="Prompts and answers",
        metavar="NAME",
    )
    dataset_path: str | None = option(None, "File of the dataset.", metavar="FILE")
    random_input_len: int = option(
        128,
        "Length of a prompt, in tokens; in a chat, in words.",
        minimum=1,
        common=True,
    )
    random_output_len: int = option(128, "Tokens asked for in an answer.", minimum=1, common=True)
    random_range_ratio: float = option(
        0.0,
        "Lengths are uniform between length x (1 - r) and length x (1 + r), as in vLLM.",
        minimum=0.0,
        maximum=1.0,
    )
    random_vocab_size: int = option(1000, "Prompts are drawn from token ids below this.", minimum=1)
    prefix_len: int = option(
        256, "Tokens that prompts of the dataset prefix have in common.", minimum=1
    )
    num_prefixes: int = option(10, "How many such beginnings there are.", minimum=1)
    output_len: int | None = option(
        None, "Tokens asked for in every answer, whatever the dataset says.", minimum=1
    )
    ignore_eos: bool = option(
        True, "Ask for answers of full length, past the end-of-sequence token."
    )
    seed: int | None = option(
        None,
        "Seeds the arrivals, lengths and prompts; each further run of a sweep or a search adds one. Default: another "
        "one in each run, so that no prompt is in the server's prefix cache already.",
        minimum=0,
    )
    num_warmups: int = option(
        0, "Requests sent and finished before the measurement.", minimum=0, subject="Measurement"
    )
    goodput: tuple[str, ...] = option(
        (),
        "What a good request keeps, in milliseconds: ttft:200 tpot:50 e2el:5000. Good requests per second are "
        "reported; the times count from the scheduled arrival.",
        metavar="NAME:MS",
    )
    goodput_ratio: float = option(
        0.99, "Share of requests that must be good for --find-max-rps.", minimum=0.0, maximum=1.0
    )
    percentile_metrics: str = option(
        ",".join(METRICS), "Latencies to report.", metavar="NAME,NAME,..."
    )
    metric_percentiles: str = option("50,90,99", "Percentiles to report.", metavar="P,P,...")
    json: bool = option(False, "Print the result as JSON instead of a table.", subject="Result")
    save_result: bool = option(
        False,
        "Save the result as NAME.json, each request as a line of NAME.jsonl, and a report with plots as NAME.html.",
    )
    result_dir: str | None = option(
        None,
        "Folder to save in (implies --save-result). Default: the current one.",
        metavar="FOLDER",
    )
    result_filename: str | None = option(
        None,
        "Name to save under (implies --save-result). Default: made of model, load and time.",
        metavar="NAME",
    )
    metadata: tuple[str, ...] = option(
        (), "What else the result says of itself.", metavar="KEY=VALUE"
    )

    def __post_init__(self) -> None:
        check_all(self)
        object.__setattr__(self, "url", server_url(self.url))
        self._check_load()
        self._check_dataset()
        self._check_lists()
        if self.find_max_rps and not self.goodput:
            raise ConfigError(
                "--find-max-rps needs to know what to hold: --goodput ttft:200 tpot:50.",
                param="goodput",
            )

    def _check_load(self) -> None:
        for name in ("request_rate", "burstiness", "ramp_up_start_rps", "ramp_up_end_rps"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN too
                raise ConfigError(
                    f"--{name.replace('_', '-')} is above 0; it got {value!r}.", param=name
                )
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if any(part is not None for part in ramp):
            if None in ramp:
                raise ConfigError(
                    "A ramp needs all of --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps.",
                    param="ramp_up_strategy",
                )
            if math.isfinite(self.request_rate):
                raise ConfigError(
                    "A ramp has its own rates; leave --request-rate out.", param="request_rate"
                )
        if (
            self.duration is not None
            and not self.paced
            and self.max_concurrency is None
            and not self.find_max_rps
        ):
            raise ConfigError(
                "--duration needs --rps or --max-concurrency: without them every request is sent at once.",
                param="duration",
            )

    def _check_dataset(self) -> None:
        made = self.dataset_name in ("random", "prefix")
        if made and self.dataset_path is not None:
            raise ConfigError(
                f"The dataset {self.dataset_name} reads no file; did you mean --dataset-name custom?",
                param="dataset_path",
            )
        if not made and self.dataset_path is None:
            raise ConfigError(
                f"The dataset {self.dataset_name} is read from a file: name it with --dataset-path.",
                param="dataset_path",
            )

    def _check_lists(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"--percentile-metrics has no {name!r}.{did_you_mean(name, METRICS)} There are: "
                    f"{', '.join(METRICS)}.",
                    param="percentile_metrics",
                )
        if not self.percentiles or not all(0 < share < 100 for share in self.percentiles):
            raise ConfigError(
                "--metric-percentiles is a list of numbers between 0 and 100, such as 50,90,99; it got "
                f"{self.metric_percentiles!r}.",
                param="metric_percentiles",
            )
        for flag, texts in (("header", self.header), ("metadata", self.metadata)):
            for text in texts:
                if not re.fullmatch(r"[^=\s]+=[^\r\n]*", text):
                    raise ConfigError(f"--{flag} takes KEY=VALUE; it got {text!r}.", param=flag)
        for text in self.goodput:
            found = re.fullmatch(r"(ttft|tpot|e2el):(\d+\.?\d*)", text)
            if found is None:
                raise ConfigError(
                    f"--goodput takes ttft, tpot and e2el with milliseconds, such as ttft:200; it got {text!r}.",
                    param="goodput",
                )

    @property
    def chat(self) -> bool:
        """Whether prompts are conversations."""
        return self.endpoint in ("chat", ROUTES["chat"])

    @property
    def route(self) -> str:
        """The path that requests go to."""
        return ROUTES["chat" if self.chat else "completions"]

    @property
    def paced(self) -> bool:
        """Whether requests arrive by a clock."""
        return (
            math.isfinite(self.request_rate) or self.ramp_up_strategy is not None or self.replayed
        )

    @property
    def replayed(self) -> bool:
        """Whether they arrive when a trace says."""
        rated = math.isfinite(self.request_rate) or self.ramp_up_strategy is not None
        return self.dataset_name == "trace" and not rated and self.max_concurrency is None

    @property
    def count(self) -> int | None:
        """Most requests to send; None when only `duration`, or the end of a trace, ends the run."""
        if self.num_prompts is None and self.duration is None and self.dataset_name != "trace":
            return COUNT
        return self.num_prompts

    @property
    def metrics(self) -> tuple[str, ...]:
        """The latencies to report."""
        return tuple(part.strip() for part in self.percentile_metrics.split(",") if part.strip())

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to report, ascending; empty when the list cannot be read."""
        try:
            return tuple(
                sorted({float(part) for part in self.metric_percentiles.split(",") if part.strip()})
            )
        except ValueError:
            return ()

    @property
    def objectives(self) -> dict[str, float]:
        """Most seconds of a good request, by metric."""
        return {
            name: float(most) / 1e3
            for name, _, most in (text.partition(":") for text in self.goodput)
        }

    @property
    def saves(self) -> bool:
        """Whether the result is written to files."""
        return self.save_result or self.result_dir is not None or self.result_filename is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig(BenchConfig):
    """Several runs, of one setting or of more."""

    vary: tuple[str, ...] = option(
        (),
        "Flags and the values that each takes; several are combined. Default: max-concurrency=1,2,4,8,16,32,64.",
        metavar="FLAG=V,V,...",
        subject="Sweep",
        common=True,
    )

    def __post_init__(self) -> None:
        check_all(self)  # whether settings go together is only known with those that vary


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """Two results, side by side."""

    before: str | None = option(
        None, "Result to compare with.", argument=True, metavar="A", common=True
    )
    after: str | None = option(None, "Result to judge.", argument=True, metavar="B", common=True)
    threshold: float = option(
        5.0,
        "Per cent that a number may be worse by. More, when it is significant, is a regression and ends with 1.",
        minimum=0.0,
        subject="Comparison",
        common=True,
    )
    json: bool = option(False, "Print JSON instead of a table.", common=True)

    def __post_init__(self) -> None:
        check_all(self)
        if self.before is None or self.after is None:
            raise ConfigError(
                "Two results are compared: tk bench compare A.json B.json.", param="before"
            )
