"""`tk bench --find-max-rps`: the highest rate of requests that a server answers within the objectives."""

from __future__ import annotations

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
from toolkit.bench.run import measure, run_loop, save_numbered, seed_of_run, to_text
from toolkit.client.wire import ServerError
from toolkit.config.load import BenchConfig

SECONDS = 20.0
"""Of a run, unless the config says how long or how many."""
FIRST_RATE = 1.0
"""Requests per second of the first run, unless the config has a rate."""
PRECISION = 1.05
"""Between the highest rate that held and the lowest that did not."""
LOWEST, HIGHEST = 0.01, 100_000.0
"""Requests per second: beyond them nothing is looked for."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """The highest rate that held and the lowest that did not: 0 and infinity while there is none."""

    holds: float = 0.0
    fails: float = math.inf

    @property
    def is_close(self) -> bool:
        return self.fails <= self.holds * PRECISION or self.fails <= LOWEST or self.holds >= HIGHEST

    def next(self, first: float) -> float:
        """The rate to try: twice or half of what was tried, and once both ends are known, between them."""
        if self.holds == 0.0 and math.isinf(self.fails):
            return first
        if self.holds == 0.0:
            return self.fails / 2
        if math.isinf(self.fails):
            return self.holds * 2
        return math.sqrt(self.holds * self.fails)


async def find_max_rate(holds: Callable[[float], Awaitable[bool]], first: float) -> float:
    """The highest rate at which `holds`, within 5 %; 0.0 when it holds at none."""
    bracket = Bracket()
    while not bracket.is_close:
        rate = bracket.next(first)
        if await holds(rate):
            bracket = Bracket(rate, bracket.fails)
        else:
            bracket = Bracket(bracket.holds, rate)
    return bracket.holds


def judge(outcome: Outcome) -> bool | None:
    """Whether a run kept the objectives; None where it may be the client that broke them.

    A late client adds to the times. So what keeps the objectives nevertheless keeps them, if only it was sent as fast as
    it was to be; and what breaks them even without what the client added breaks them.
    """
    config, result = outcome.config, outcome.result
    if (result.good_share or 0.0) >= config.goodput_ratio:
        behind = (result.offered_rate or 0.0) > (result.sent_rate or 0.0) * PRECISION
        return None if result.saturated is not None and behind else True
    if result.saturated is None:
        return False
    delay = 0.0 if result.loop_delay is None else result.loop_delay.at(99)

    def may_be_good(record: RequestRecord) -> bool:
        late = (record.woken or record.scheduled) - record.scheduled + delay
        added = {"ttft": late, "e2el": late, "tpot": delay / max(record.output_tokens - 1, 1)}
        return is_good(
            record, {name: most + added[name] for name, most in config.objectives.items()}
        )

    good = sum(may_be_good(record) for record in outcome.records if record.ok)
    return (
        None if good >= config.goodput_ratio * (result.num_succeeded + result.num_failed) else False
    )


class SearchEndedError(Exception):
    """The search cannot go on, and ends with what it has."""

    def __init__(self, why: str, exit_code: int) -> None:
        super().__init__(why)
        self.why = why
        self.exit_code = exit_code


def run_search(config: BenchConfig) -> int:
    """Searches and reports; the exit code of the command."""
    tried: list[Outcome] = []
    held: list[float] = []

    async def holds(rate: float) -> bool:
        probe = dataclasses.replace(
            config,
            request_rate=rate,
            seed=seed_of_run(config.seed, len(tried)),
            find_max_rps=False,
            duration=SECONDS
            if config.num_prompts is None and config.duration is None
            else config.duration,
        )
        try:
            outcome = await measure(probe)
        except ServerError as error:
            if not tried:
                raise
            raise SearchEndedError(str(error).rstrip("."), 1) from None
        result = outcome.result
        if outcome.interrupted:
            raise SearchEndedError("Interrupted", 130)
        if not result.num_sent:
            why = f"At {rate:.2f} requests/s none came in {probe.duration or 0.0:g} s: --duration says how long to look"
            raise SearchEndedError(why, 1)
        tried.append(outcome)
        save_numbered(outcome, len(tried))
        if not result.num_succeeded:
            first_error = result.errors[0]
            why = f"Every request failed at {rate:.2f} requests/s: {first_error.cause}: {first_error.example.rstrip('.')}"
            raise SearchEndedError(why, 1)
        verdict = judge(outcome)
        if verdict is None:
            why = f"CLIENT SATURATED at {rate:.2f} requests/s: {result.saturated} ({REMEDY})"
            raise SearchEndedError(why, 1)
        if verdict:
            held.append(rate)
        print(_line(outcome, held=rate in held), file=sys.stderr)
        return rate in held

    first = config.request_rate if math.isfinite(config.request_rate) else FIRST_RATE
    ended: SearchEndedError | None = None
    try:
        run_loop(lambda: find_max_rate(holds, first))
    except SearchEndedError as error:
        ended = error
    except KeyboardInterrupt:  # between two loads
        ended = SearchEndedError("Interrupted", 130)
    found = max(held, default=0.0)
    if config.json:
        runs = [as_json(outcome) for outcome in sorted(tried, key=lambda o: o.config.request_rate)]
        document = {
            "schema": f"{SCHEMA}-search",
            "max_requests_per_s": found,
            "ended_early": None if ended is None else ended.why,
            "runs": runs,
        }
        print(to_text(document), end="")
    else:
        print(_conclusion(config, found, ended))
    if ended is not None:
        return ended.exit_code
    return 0 if found else 1


def _line(outcome: Outcome, *, held: bool) -> str:
    result = outcome.result
    return (
        f"{outcome.config.request_rate:10.2f} requests/s: {result.good_share or 0.0:7.2%} good, "
        f"{result.per_second(result.output_tokens):,.0f} output tok/s, {'holds' if held else 'fails'}"
        f"{'' if result.saturated is None else ' (the client was late)'}"
    )


def _conclusion(config: BenchConfig, found: float, ended: SearchEndedError | None) -> str:
    wanted = f"{' '.join(config.goodput)} ms for {config.goodput_ratio:.1%} of requests"
    if ended is not None:
        return f"{ended.why}. The search has not ended; the highest rate that held {wanted} is {found:.2f} so far."
    if found == 0.0:
        return f"No rate holds {wanted}: not even {LOWEST:g} requests/s."
    return f"{found:.2f} requests/s hold {wanted} (within 5%)."
