"""A made-up server: requests arrive, wait, run and end by a few rules, in simulated time.

It stands in for real ones in `tk top --demo` and in tests. Nothing in it is measured; it behaves as servers do, so that every
number on the screen has something to show. The same seed gives the same course.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random

from toolkit.top.readings.reading import Histogram, LiveRequest

STEP = 0.1  # simulated seconds
BLOCK = 16  # tokens
MOST_WAITING = 100
BOUNDS = [0.0005 * 1.25**i for i in range(63)]  # seconds


@dataclass(frozen=True, slots=True)
class Traits:
    """What a made-up server is, and what it is asked for."""

    name: str
    model: str
    version: str
    is_tk: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    num_blocks: int = 6000
    prefill_speed: float = 30_000.0  # tokens per second
    itl: float = 0.009  # seconds between two tokens of a request that runs alone
    slope: float = 0.00012  # seconds more for each other request
    arrivals: float = 8.0  # requests per second, on average
    swing: float = 0.7  # how much the arrivals come and go, 0 to 1
    period: float = 70.0  # seconds of one coming and going
    prompt: int = 700  # tokens, the median
    answer: int = 260
    shared: float = 0.45  # of a prompt, found in the cache
    power_limit: float = 700.0  # watts


@dataclass(slots=True, eq=False)
class Simulated:
    """A request under way."""

    id: str
    arrived: float
    prompt: int
    cached: int
    answer: int
    origin: str
    priority: int
    began: float | None = None
    prefilled: float = 0.0
    generated: float = 0.0
    first_token: float | None = None
    num_preemptions: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that it holds while it runs."""
        tokens = self.cached + self.prefilled + self.generated
        return 0 if self.began is None else math.ceil(tokens / BLOCK)


@dataclass(slots=True)
class Observed:
    """A histogram that is being filled."""

    count: float = 0.0
    sum: float = 0.0
    counts: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, seconds: float, times: float = 1.0) -> None:
        """Takes in an observation, or several alike."""
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.count += times
        self.sum += seconds * times

    def histogram(self) -> Histogram:
        """What has been taken in until now."""
        bounds = [0.0, *BOUNDS, BOUNDS[-1]]
        return Histogram(
            self.count,
            self.sum,
            [(bounds[i], bounds[i + 1], n) for i, n in sorted(self.counts.items())],
        )


class Simulation:
    """The server at simulated second `time`. Counters are as Prometheus' are."""

    def __init__(self, traits: Traits, seed: int) -> None:
        self.traits = traits
        self.time = 0.0
        self.random = Random(seed)
        self.waiting: list[Simulated] = []
        self.running: list[Simulated] = []
        self.counters: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.observed: defaultdict[str, Observed] = defaultdict(Observed)
        self.busy = 0.0  # share of the last steps in which there was something to compute
        self._phase = self.random.uniform(0.0, math.tau)

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the KV cache in use."""
        return sum(one.num_blocks for one in self.running)

    def advance(self, seconds: float) -> None:
        """Goes on to `seconds`."""
        while self.time + STEP <= seconds:
            self.time += STEP
            self._arrive()
            self._admit()
            self._compute()

    def live(self) -> list[LiveRequest]:
        """As /tk/requests tells."""
        return [self._told(one, "running") for one in self.running] + [
            self._told(one, "waiting") for one in self.waiting
        ]

    def abort(self, id: str) -> bool:
        """Ends a request; whether there was one."""
        for those in (self.running, self.waiting):
            for one in those:
                if one.id == id:
                    those.remove(one)
                    self.finished["abort"] += 1
                    return True
        return False

    def _arrive(self) -> None:
        traits = self.traits
        wave = 1.0 + traits.swing * math.sin(math.tau * self.time / traits.period + self._phase)
        expected = traits.arrivals * wave * STEP
        while len(self.waiting) < MOST_WAITING and self.random.random() < expected:
            expected -= 1.0
            prompt = max(8, int(self.random.lognormvariate(math.log(traits.prompt), 0.8)))
            cached = int(prompt * self.random.random() * 2 * traits.shared) // BLOCK * BLOCK
            self.waiting.append(
                Simulated(
                    id=f"chatcmpl-{self.random.getrandbits(48):012x}",
                    arrived=self.time,
                    prompt=prompt,
                    cached=min(cached, prompt - 1),
                    answer=max(2, int(self.random.lognormvariate(math.log(traits.answer), 0.7))),
                    origin=f"10.0.{self.random.randrange(4)}.{self.random.randrange(2, 30)}",
                    priority=self.random.choice((0, 0, 0, 0, 1)),
                )
            )

    def _admit(self) -> None:
        free = self.traits.num_blocks - self.num_used_blocks
        while self.waiting and len(self.running) < self.traits.max_num_seqs:
            one = self.waiting[0]
            needed = math.ceil((one.prompt + one.generated) / BLOCK)
            if needed > free:
                return
            free -= needed
            self.running.append(self.waiting.pop(0))
            one.began = self.time
            self.observed["request_queue_time_seconds"].add(self.time - one.arrived + 0.002)
            self.counters["prefix_cache_queries_total"] += one.prompt
            self.counters["prefix_cache_hits_total"] += one.cached

    def _compute(self) -> None:
        budget = self.traits.prefill_speed * STEP
        spent = 0.0
        for one in self.running:
            left = one.prompt - one.cached - one.prefilled
            if left > 0 and spent < budget:
                share = min(left, budget - spent)
                one.prefilled += share
                spent += share
        load = spent / budget
        itl = (self.traits.itl + self.traits.slope * len(self.running)) * (1.0 + 1.5 * load)
        decoding = [one for one in self.running if one.cached + one.prefilled >= one.prompt]
        for one in decoding:
            if one.first_token is None:
                self._first_token(one)
            before = int(one.generated)
            one.generated = min(one.answer, one.generated + STEP / itl)
            new = int(one.generated) - before
            self.counters["generation_tokens_total"] += new
            self.observed["inter_token_latency_seconds"].add(
                itl * self.random.uniform(0.85, 1.2), new
            )
        steps = STEP / itl
        for _ in range(3 if self.running else 0):
            self.observed["iteration_num_requests"].add(len(self.running), steps / 3)
        self.observed["iteration_tokens_total"].add(len(decoding) + spent / steps, steps)
        self.busy = 0.8 * self.busy + 0.2 * (
            min(1.0, 0.55 + load / 3 + len(self.running) / 300) if self.running else 0.0
        )
        for one in [one for one in decoding if one.generated >= one.answer]:
            self._finish(one)
        while self.num_used_blocks > self.traits.num_blocks:
            self._preempt(self.running[-1])

    def _first_token(self, one: Simulated) -> None:
        jitter = self.random.uniform(0.01, STEP)
        one.first_token = self.time
        self.observed["time_to_first_token_seconds"].add(self.time - one.arrived + jitter)
        self.observed["request_prefill_time_seconds"].add(
            self.time - (one.began or self.time) + jitter
        )
        self.counters["prompt_tokens_total"] += one.prompt

    def _finish(self, one: Simulated) -> None:
        self.running.remove(one)
        begun = one.first_token if one.first_token is not None else self.time
        self.finished["stop" if self.random.random() < 0.8 else "length"] += 1
        self.observed["e2e_request_latency_seconds"].add(self.time - one.arrived + 0.01)
        self.observed["request_decode_time_seconds"].add(self.time - begun)
        self.observed["request_time_per_output_token_seconds"].add((self.time - begun) / one.answer)

    def _preempt(self, one: Simulated) -> None:
        """It gives up its blocks and computes them again later."""
        self.running.remove(one)
        one.began, one.prefilled = None, 0.0
        one.num_preemptions += 1
        self.waiting.insert(0, one)
        self.counters["num_preemptions_total"] += 1

    def _told(self, one: Simulated, state: str) -> LiveRequest:
        since = self.time - (one.first_token if one.first_token is not None else self.time)
        return LiveRequest(
            id=one.id,
            state=state,
            age=self.time - one.arrived,
            num_prompt_tokens=one.prompt,
            num_cached_tokens=one.cached,
            num_output_tokens=int(one.generated),
            tokens_per_second=one.generated / since if since > 0 else 0.0,
            num_blocks=one.num_blocks,
            num_preemptions=one.num_preemptions,
            priority=one.priority,
            origin=one.origin,
        )
