"""A simulated server: requests arrive, wait, run and finish by a few rules, in simulated time.

For `tk top --demo` and tests. No number in it is measured. The same seed gives the same run."""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random

from toolkit.top.readings.reading import Histogram, LiveRequest

STEP = 0.1  # simulated seconds
BLOCK = 16  # tokens
MAX_WAITING = 100
BOUNDS = [0.0005 * 1.25**i for i in range(63)]  # seconds


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings and load of a simulated server."""

    name: str
    model: str
    version: str
    is_tk: bool = True
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    num_blocks: int = 6000
    prefill_speed: float = 30_000.0  # tokens per second
    itl: float = 0.009  # seconds between two tokens at batch size 1
    slope: float = 0.00012  # additional seconds per further request
    arrivals: float = 8.0  # requests per second, on average
    swing: float = 0.7  # relative amplitude of the arrival rate, 0 to 1
    period: float = 70.0  # of the arrival rate, in seconds
    prompt: int = 700  # median tokens
    answer: int = 260  # median tokens
    shared: float = 0.45  # mean share of a prompt in the prefix cache
    power_limit: float = 700.0  # watts


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request. Lengths are in tokens, moments in simulated seconds."""

    id: str
    arrived: float
    prompt: int
    cached: int
    answer: int
    origin: str
    priority: int
    start_time: float | None = None
    prefilled: float = 0.0
    generated: float = 0.0
    first_token: float | None = None
    num_preemptions: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that it uses while it runs."""
        tokens = self.cached + self.prefilled + self.generated
        return 0 if self.start_time is None else math.ceil(tokens / BLOCK)


@dataclass(slots=True)
class SimulatedHistogram:
    """Counts by bucket; `histogram` returns them as a reading has them."""

    count: float = 0.0
    sum: float = 0.0
    counts: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, seconds: float, times: float = 1.0) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.count += times
        self.sum += seconds * times

    def histogram(self) -> Histogram:
        bounds = [0.0, *BOUNDS, BOUNDS[-1]]
        return Histogram(
            self.count,
            self.sum,
            [(bounds[i], bounds[i + 1], n) for i, n in sorted(self.counts.items())],
        )


class Simulation:
    """State of the server at simulated second `time`. Counters count from its start."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self.profile = profile
        self.time = 0.0
        self.random = Random(seed)
        self.waiting: list[SimulatedRequest] = []
        self.running: list[SimulatedRequest] = []
        self.counters: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.histograms: defaultdict[str, SimulatedHistogram] = defaultdict(SimulatedHistogram)
        self.busy = 0.0  # GPU utilization, 0 to 1
        self._phase = self.random.uniform(0.0, math.tau)

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the KV cache in use."""
        return sum(one.num_blocks for one in self.running)

    def advance(self, seconds: float) -> None:
        """Simulate until `seconds`."""
        while self.time + STEP <= seconds:
            self.time += STEP
            self._arrive()
            self._admit()
            self._compute()

    def live(self) -> list[LiveRequest]:
        """Return the live requests as /tk/requests lists them."""
        return [self._describe(one, "running") for one in self.running] + [
            self._describe(one, "waiting") for one in self.waiting
        ]

    def abort(self, id: str) -> bool:
        """End a request; return False if there is no such request."""
        for requests in (self.running, self.waiting):
            for one in requests:
                if one.id == id:
                    requests.remove(one)
                    self.finished["abort"] += 1
                    return True
        return False

    def _arrive(self) -> None:
        profile = self.profile
        wave = 1.0 + profile.swing * math.sin(math.tau * self.time / profile.period + self._phase)
        expected = profile.arrivals * wave * STEP
        while len(self.waiting) < MAX_WAITING and self.random.random() < expected:
            expected -= 1.0
            prompt = max(8, int(self.random.lognormvariate(math.log(profile.prompt), 0.8)))
            cached = int(prompt * self.random.random() * 2 * profile.shared) // BLOCK * BLOCK
            self.waiting.append(
                SimulatedRequest(
                    id=f"chatcmpl-{self.random.getrandbits(48):012x}",
                    arrived=self.time,
                    prompt=prompt,
                    cached=min(cached, prompt - 1),
                    answer=max(2, int(self.random.lognormvariate(math.log(profile.answer), 0.7))),
                    origin=f"10.0.{self.random.randrange(4)}.{self.random.randrange(2, 30)}",
                    priority=self.random.choice((0, 0, 0, 0, 1)),
                )
            )

    def _admit(self) -> None:
        free = self.profile.num_blocks - self.num_used_blocks
        while self.waiting and len(self.running) < self.profile.max_num_seqs:
            one = self.waiting[0]
            needed = math.ceil((one.prompt + one.generated) / BLOCK)
            if needed > free:
                return
            free -= needed
            self.running.append(self.waiting.pop(0))
            one.start_time = self.time
            self.histograms["request_queue_time_seconds"].add(self.time - one.arrived + 0.002)
            self.counters["prefix_cache_queries_total"] += one.prompt
            self.counters["prefix_cache_hits_total"] += one.cached

    def _compute(self) -> None:
        budget = self.profile.prefill_speed * STEP
        spent = 0.0
        for one in self.running:
            left = one.prompt - one.cached - one.prefilled
            if left > 0 and spent < budget:
                share = min(left, budget - spent)
                one.prefilled += share
                spent += share
        load = spent / budget
        itl = (self.profile.itl + self.profile.slope * len(self.running)) * (1.0 + 1.5 * load)
        decoding = [one for one in self.running if one.cached + one.prefilled >= one.prompt]
        for one in decoding:
            if one.first_token is None:
                self._first_token(one)
            before = int(one.generated)
            one.generated = min(one.answer, one.generated + STEP / itl)
            new = int(one.generated) - before
            self.counters["generation_tokens_total"] += new
            self.histograms["inter_token_latency_seconds"].add(
                itl * self.random.uniform(0.85, 1.2), new
            )
        steps = STEP / itl
        for _ in range(3 if self.running else 0):
            self.histograms["iteration_num_requests"].add(len(self.running), steps / 3)
        self.histograms["iteration_tokens_total"].add(len(decoding) + spent / steps, steps)
        self.busy = 0.8 * self.busy + 0.2 * (
            min(1.0, 0.55 + load / 3 + len(self.running) / 300) if self.running else 0.0
        )
        for one in [one for one in decoding if one.generated >= one.answer]:
            self._finish(one)
        while self.num_used_blocks > self.profile.num_blocks:
            self._preempt(self.running[-1])

    def _first_token(self, one: SimulatedRequest) -> None:
        jitter = self.random.uniform(0.01, STEP)
        one.first_token = self.time
        self.histograms["time_to_first_token_seconds"].add(self.time - one.arrived + jitter)
        self.histograms["request_prefill_time_seconds"].add(
            self.time - (one.start_time or self.time) + jitter
        )
        self.counters["prompt_tokens_total"] += one.prompt

    def _finish(self, one: SimulatedRequest) -> None:
        self.running.remove(one)
        first_token = one.first_token if one.first_token is not None else self.time
        self.finished["stop" if self.random.random() < 0.8 else "length"] += 1
        self.histograms["e2e_request_latency_seconds"].add(self.time - one.arrived + 0.01)
        self.histograms["request_decode_time_seconds"].add(self.time - first_token)
        self.histograms["request_time_per_output_token_seconds"].add(
            (self.time - first_token) / one.answer
        )

    def _preempt(self, one: SimulatedRequest) -> None:
        """Free a request's blocks, which it computes again later."""
        self.running.remove(one)
        one.start_time, one.prefilled = None, 0.0
        one.num_preemptions += 1
        self.waiting.insert(0, one)
        self.counters["num_preemptions_total"] += 1

    def _describe(self, one: SimulatedRequest, state: str) -> LiveRequest:
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
