"""`tk bench --find-max-rps`: the highest request rate at which a server meets the objectives."""

import dataclasses
import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from toolkit.bench.load.record import RequestRecord
from toolkit.bench.report.document import SCHEMA, as_json
from toolkit.bench.report.outcome import Outcome
from toolkit.bench.report.saturation import REMEDY
from toolkit.bench.report.stats import is_good
from toolkit.bench.run import measure, run_loop, run_seed, save_numbered, to_json_text
from toolkit.client.wire import ServerError
from toolkit.config.load import BenchConfig
from toolkit.logs import escape_line

DEFAULT_DURATION = 20.0
"""Seconds of a run if the config has neither a duration nor a number of requests."""
FIRST_RATE = 1.0  # requests per second of the first run if the config has no rate
PRECISION = 1.05
"""Ratio of the lowest rate that failed to the highest that passed at which the search ends."""
LOWEST, HIGHEST = 0.01, 100_000.0  # limits of the search, in requests per second


@dataclass(frozen=True, slots=True)
class Bracket:
    """The highest rate that passed and the lowest that failed; 0 and infinity if there is none."""

    passed: float = 0.0
    failed: float = math.inf

    @property
    def is_close(self) -> bool:
        is_narrow = self.failed <= self.passed * PRECISION
        return is_narrow or self.failed <= LOWEST or self.passed >= HIGHEST

    def next(self, first: float) -> float:
        """Return the rate to try: double or halve, then bisect once both ends are known."""
        if self.passed == 0.0 and math.isinf(self.failed):
            return first
        if self.passed == 0.0:
            return self.failed / 2
        if math.isinf(self.failed):
            return self.passed * 2
        return math.sqrt(self.passed * self.failed)


async def find_max_rate(passes: Callable[[float], Awaitable[bool]], first: float) -> float:
    """Return the highest rate that passes, within 5 %, or 0.0 if none does."""
    bracket = Bracket()
    while not bracket.is_close:
        rate = bracket.next(first)
        if await passes(rate):
            bracket = Bracket(rate, bracket.failed)
        else:
            bracket = Bracket(bracket.passed, rate)
    return bracket.passed


def meets_objectives(outcome: Outcome) -> bool | None:
    """Return True if a run met the objectives, or None if a saturated client may have broken them.

    A late client makes requests look slower. A run that is good nevertheless passes, if requests
    were sent at the configured rate. A run that is bad without the client's delays fails."""
    config, result = outcome.config, outcome.result
    if (result.good_share or 0.0) >= config.goodput_ratio:
        behind = (result.offered_rate or 0.0) > (result.sent_rate or 0.0) * PRECISION
        return None if result.saturated is not None and behind else True
    if result.saturated is None:
        return False
    delay = 0.0 if result.loop_delay is None else result.loop_delay.at(99)

    def may_be_good(record: RequestRecord) -> bool:
        late = (record.started or record.scheduled) - record.scheduled + delay
        added = {"ttft": late, "e2el": late, "tpot": delay / max(record.output_tokens - 1, 1)}
        return is_good(
            record, {name: limit + added[name] for name, limit in config.objectives.items()}
        )

    good = sum(may_be_good(record) for record in outcome.records if record.ok)
    required = config.goodput_ratio * (result.num_succeeded + result.num_failed)
    return None if good >= required else False


class SearchStoppedError(Exception):
    """The search cannot continue and reports the result so far."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


def run_search(config: BenchConfig) -> int:
    """Search and report. Returns the exit code of the command."""
    tried: list[Outcome] = []
    passed: list[float] = []

    async def passes(rate: float) -> bool:
        run_config = dataclasses.replace(
            config,
            request_rate=rate,
            seed=run_seed(config.seed, len(tried)),
            find_max_rps=False,
            duration=DEFAULT_DURATION
            if config.num_prompts is None and config.duration is None
            else config.duration,
        )
        try:
            outcome = await measure(run_config)
        except ServerError as error:
            if not tried:
                raise
            raise SearchStoppedError(str(error).rstrip(".")) from None
        result = outcome.result
        if outcome.interrupted:
            raise SearchStoppedError("Interrupted", 130)
        if not result.num_sent:
            raise SearchStoppedError(
                f"No request arrived at {rate:.2f} requests/s in {run_config.duration or 0.0:g} s; "
                "set a longer --duration"
            )
        tried.append(outcome)
        save_numbered(outcome, len(tried))
        if not result.num_succeeded:
            first_error = result.errors[0]
            raise SearchStoppedError(
                f"Every request failed at {rate:.2f} requests/s: {first_error.cause}: "
                f"{first_error.example.rstrip('.')}"
            )
        is_met = meets_objectives(outcome)
        if is_met is None:
            raise SearchStoppedError(
                f"CLIENT SATURATED at {rate:.2f} requests/s: {result.saturated} ({REMEDY})"
            )
        if is_met:
            passed.append(rate)
        print(_line(outcome, is_met=is_met), file=sys.stderr)
        return is_met

    first = config.request_rate if math.isfinite(config.request_rate) else FIRST_RATE
    stopped: SearchStoppedError | None = None
    try:
        run_loop(lambda: find_max_rate(passes, first))
    except SearchStoppedError as error:
        stopped = error
    except KeyboardInterrupt:  # between two loads
        stopped = SearchStoppedError("Interrupted", 130)
    found = max(passed, default=0.0)
    if config.json:
        runs = [as_json(outcome) for outcome in sorted(tried, key=lambda o: o.config.request_rate)]
        document = {
            "schema": f"{SCHEMA}-search",
            "max_requests_per_s": found,
            "ended_early": None if stopped is None else stopped.reason,
            "runs": runs,
        }
        print(to_json_text(document), end="")
    else:
        print(escape_line(_conclusion(config, found, stopped)))
    if stopped is not None:
        return stopped.exit_code
    return 0 if found else 1


def _line(outcome: Outcome, *, is_met: bool) -> str:
    result = outcome.result
    return (
        f"{outcome.config.request_rate:10.2f} requests/s: {result.good_share or 0.0:7.2%} good, "
        f"{result.per_second(result.output_tokens):,.0f} output tok/s, "
        f"{'passed' if is_met else 'failed'}"
        f"{'' if result.saturated is None else ' (the client was late)'}"
    )


def _conclusion(config: BenchConfig, found: float, stopped: SearchStoppedError | None) -> str:
    objective = f"{' '.join(config.goodput)} ms for {config.goodput_ratio:.1%} of requests"
    if stopped is not None:
        return (
            f"{stopped.reason}. The search did not finish. Highest rate so far that meets "
            f"{objective}: {found:.2f} requests/s."
        )
    if found == 0.0:
        return f"No rate meets {objective}, down to {LOWEST:g} requests/s."
    return f"{found:.2f} requests/s is the highest rate that meets {objective} (within 5%)."
