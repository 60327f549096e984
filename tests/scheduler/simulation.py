"""Simulated device without numbers, and a loop that drives it.

A slot of the KV cache holds an id of the token prefix that it was computed from, and of the group
of layers: two slots are equal exactly if all tokens up to them are. Each step's tokens are checked
against all earlier positions of their row that their group reads. A block that is shared wrongly,
stale, freed, or swapped to the wrong place is detected at the first token that would read it. Two
layers have slots of different shapes. A row may also have a state, the id of all tokens that it has
read: steps read it in one slot and write it in one; it is swapped with the row's blocks. Features
are ids, too: a prompt's token of one reads it in the pages that an earlier step has loaded. If a
group has a feature, all tokens read it in slots with its digest and the number of the slot.
"""

from __future__ import annotations

import random
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple
from unittest import mock

import numpy as np

from toolkit.cache_group import ONE_GROUP, CacheGroup, first_columns
from toolkit.sampling.params import SamplingParams
from toolkit.scheduler import (
    FinishReason,
    ModelOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
    StepResults,
    rows,
)
from toolkit.scheduler.blocks.block_tables import held_pages
from toolkit.scheduler.output import Encode, PlaceAdapter
from toolkit.scheduler.request import HOLE
from toolkit.sequence import Adapter, Feature, SequenceSpec

VOCAB = 11
EOS, STOP_TOKEN = 0, 1
GARBAGE = -1
NO_DRAFT = -1
MAX_MODEL_LEN = 40


def next_token(tokens: tuple[int, ...], seed: int, adapter: str = "") -> int:
    """Return the next token: any function that depends on all of `tokens`."""
    return zlib.crc32(f"{seed}:{adapter}:{tokens}".encode()) % VOCAB


def adapter_of(request: Request) -> str:
    return "" if request.spec.adapter is None else request.spec.adapter.key


def expected_answer(request: Request) -> tuple[list[int], FinishReason, int | None]:
    """Return (tokens, reason, stop token) of a request run alone, by the documented rules."""
    tokens: list[int] = []
    while True:
        tokens.append(
            next_token((*request.prompt_token_ids, *tokens), request.seed, adapter_of(request))
        )
        if len(tokens) >= request.params.min_tokens:
            if tokens[-1] in (request.params.stop_token_ids or []):
                return tokens, FinishReason.STOP, tokens[-1]
            if tokens[-1] == EOS and not request.params.ignore_eos:
                return tokens, FinishReason.STOP, None
        if (
            len(tokens) == request.spec.max_tokens
            or len(request.prompt_token_ids) + len(tokens) == MAX_MODEL_LEN
        ):
            return tokens, FinishReason.LENGTH, None


@dataclass
class Row:
    tokens: list[int]
    blocks: list[list[int]]  # pages by group
    seed: int
    adapter: int  # slot
    features: tuple[Feature, ...] = ()
    drafts: list[int] = field(default_factory=list)


class State(NamedTuple):
    """A state that has some of a sequence's tokens, and the drafts that follow them."""

    length: int
    prefix: int
    drafts: list[int]  # prefixes


NO_STATE = State(0, GARBAGE, [])


def plan_grain(block_size: int) -> int:
    """Return a grain of two blocks: short prompts then have several boundaries."""
    return 2 * block_size


class Device:
    """Executes steps like a worker. Raises AssertionError where a worker would compute garbage."""

    def __init__(self, plan: Plan) -> None:
        self.block_size, self.max_loras = plan.block_size, plan.max_loras
        self.groups = plan.groups
        self.feature_group = next((g for g, one in enumerate(self.groups) if one.feature), None)
        self.page_tokens = [plan.block_size * group.blocks_per_page for group in plan.groups]
        self.columns = first_columns(plan.groups, plan.block_size, MAX_MODEL_LEN)
        self.most_drafts = plan.most_drafts
        self.samples_elsewhere = plan.num_stages > 1
        """A first stage: it knows only tokens that the step brings."""
        self.layers, self.host_layers = (
            [
                np.full((count, max(self.page_tokens), *shape), GARBAGE, np.int64)
                for shape in ((1,), (2, 3))
            ]
            for count in (plan.num_blocks, plan.num_host_blocks)
        )
        self.states: dict[int, State] | None = {} if plan.num_state_slots else None
        self.host_states: dict[int, State] = {}
        self.rows: dict[int, Row] = {}
        self.adapters = {0: ""}  # keys by slot
        self.pages: dict[int, tuple[bytes, int]] = {}  # digest, and the number among its pages
        self.places: dict[bytes, list[int]] = {}  # pages by digest
        self.num_feature_pages, self.rows_per_page = plan.num_feature_pages, plan.rows_per_page
        self.prefix_ids: dict[tuple[int | str, tuple[int, bytes | None]], int] = {}
        self.is_broken = False
        """A step failed, unknown to the loop yet. Later steps compute garbage, which is dropped."""

    def execute(self, step: SchedulerOutput, *, fails: bool = False) -> ModelOutput:
        self.is_broken |= fails
        encoded = set[bytes]()
        clips = []
        for load in step.loads:
            if isinstance(load, PlaceAdapter):
                assert 1 <= load.slot <= self.max_loras
                self.adapters[load.slot] = load.key
                continue
            if self.feature_group is not None:
                clips.append(load)
                continue
            encoded.add(load.digest)
            self.places[load.digest] = load.pages
            for number, page in enumerate(load.pages):
                assert 0 <= page < self.num_feature_pages
                self.pages[page] = (b"", -1) if self.is_broken else (load.digest, number)
        for cache, host in zip(self.layers, self.host_layers, strict=True):
            for block, host_block in step.swap_out:
                host[host_block] = cache[block]
            for host_block, block in step.swap_in:
                cache[block] = host[host_block]
        for load in clips:
            self._write_feature(load)
        if self.states is not None:
            for slot, host_slot in step.state_swap_out:
                self.host_states[host_slot] = self.states.get(slot, NO_STATE)
            for host_slot, slot in step.state_swap_in:
                self.states[slot] = self.host_states.get(host_slot, NO_STATE)
        for new in step.new_rows:
            self.rows[new.row] = Row(
                list(new.token_ids),
                [list(table) for table in new.blocks],
                new.seed,
                new.adapter,
                new.spec.features,
            )
        for number, column, page in step.new_blocks.tolist():
            g = bisect_right(self.columns, column) - 1
            table = self.rows[number].blocks[g]
            assert column - self.columns[g] == len(table), "new blocks follow the row's others"
            table.append(page)
        num_drafts = step.num_drafts if len(step.num_drafts) else np.zeros_like(step.num_tokens)
        for number, position, token in step.known_tokens.tolist():
            row = self.rows[number]
            assert position <= len(row.tokens), "the tokens before it are known"
            row.tokens[position:] = [token]
        if self.samples_elsewhere:
            for number, count in zip(step.rows.tolist(), num_drafts.tolist(), strict=True):
                row = self.rows[number]
                end = len(row.tokens) - count
                row.tokens, row.drafts = row.tokens[:end], row.tokens[end:]
        work, written, num_written = [], dict[int, State](), 0
        for number, count, computed, samples, drafts in zip(
            step.rows.tolist(),
            step.num_tokens.tolist(),
            step.num_computed.tolist(),
            step.samples.tolist(),
            num_drafts.tolist(),
            strict=True,
        ):
            row = self.rows[number]
            # What the host assumed to be accepted, and was not, is computed again.
            start = len(row.tokens) + drafts - count if samples else computed
            assert start <= computed, "the host's numbers are upper bounds"
            assert samples or not drafts
            missing = drafts - len(row.drafts)
            tokens = row.tokens + row.drafts[:drafts] + [NO_DRAFT] * missing
            assert start + count <= len(tokens), "only known tokens and drafts can be computed"
            prefixes = self._prefixes(row, tokens)
            work.append((row, start, start + count, samples, drafts, prefixes))
            if not self.is_broken:
                self._read_features(row, start, start + count, encoded)
            if self.states is not None and not self.is_broken:
                at, read = len(work) - 1, int(step.state_reads[len(work) - 1])
                all_written = [*step.state_writes.tolist(), *step.state_keeps[:, 0].tolist()]
                assert all_written.count(read) <= (step.state_writes[at] == read), (
                    "a step reads a slot that another request of the step writes"
                )
                begin = 0
                if start:
                    begin, prefix, pending = self.states.get(read, NO_STATE)
                    assert prefix == prefixes[begin - 1], (
                        "a row continues another request's state, or an old one"
                    )
                    accepted = prefixes[begin:start]
                    assert pending[: len(accepted)] == accepted, (
                        "a row continues another request's drafts"
                    )
                end = start + count - drafts
                slot, kept = step.state_keeps[at].tolist()
                if slot >= 0:
                    assert slot not in written, "a slot is written twice"
                    assert kept % plan_grain(self.block_size) == 0
                    is_passed = begin < kept <= end
                    old = self.states.get(slot, NO_STATE)
                    written[slot] = State(kept, prefixes[kept - 1], []) if is_passed else old
                    num_written += 1
                assert step.state_writes[at] not in written, "a slot is written twice"
                written[int(step.state_writes[at])] = State(
                    end, prefixes[end - 1], prefixes[end : start + count]
                )
                num_written += 1
        if self.states is not None:
            assert self.is_broken or len(written) == num_written
            broken = dict.fromkeys(written, NO_STATE)
            self.states |= broken if self.is_broken else written
        # A layer first writes all keys of a step, then reads.
        for row, start, end, _, _, prefixes in work:
            for position in range(start, end):
                self._write(row, position, GARBAGE if self.is_broken else prefixes[position])
        sampled, counts, offered = [], [], []
        for row, start, end, samples, drafts, prefixes in work:
            if not self.is_broken:
                self._check_read(row, start, end, prefixes)
            if samples:
                assert end == len(row.tokens) + drafts, "the next token comes after all the others"
                new = self._sample(row, drafts)
                for position in range(len(row.tokens) + len(new) - 1, end):
                    self._write(row, position, GARBAGE)  # a wrong draft's keys
                sampled += new
                counts.append(len(new))
                offered.append(self._draft(row, new))
                if not self.samples_elsewhere:
                    row.tokens += new
                    row.drafts = [token for token in offered[-1] if token >= 0]
        return ModelOutput(
            step.step,
            np.array(sampled, np.int32),
            counts=np.array(counts, np.int32) if self.most_drafts else None,
            drafts=np.array(offered, np.int32).reshape(-1, self.most_drafts)
            if self.most_drafts
            else None,
        )

    def _read_features(self, row: Row, start: int, end: int, encoded: set[bytes]) -> None:
        for feature in row.features:
            number = 0
            for first, length in feature.runs:
                if feature.both_ways:
                    assert not first < end < first + length, "a run is cut"
                for position in range(first, first + length):
                    if start <= position < end:
                        assert feature.digest not in encoded, "its encoder runs in the same step"
                        page = self.places[feature.digest][number // self.rows_per_page]
                        right = feature.digest, number // self.rows_per_page
                        assert self.pages[page] == right, "its pages have another feature"
                    number += 1

    def _check_read(self, row: Row, start: int, end: int, prefixes: list[int]) -> None:
        """Check all tokens that those at positions from start to `end` read."""
        for g, (group, tokens) in enumerate(zip(self.groups, self.page_tokens, strict=True)):
            if group.feature:
                self._check_feature(row)
                continue
            for position in range(group.first_key(start), end):
                page = row.blocks[g][position // tokens]
                assert page != HOLE, "a row reads a page that it has freed"
                right = self._mark(g, prefixes[position])
                assert all(
                    (layer[page, position % tokens] == right).all() for layer in self.layers
                ), "a row reads another request's cache, or a stale one"

    def _mark(self, g: int, prefix: int) -> int:
        """Return what a slot of a group has."""
        return prefix * len(self.groups) + g

    def _write_feature(self, load: Encode) -> None:
        """Write a feature's slots into pages of the pool."""
        g = self.feature_group
        assert g is not None
        tokens, count = self.page_tokens[g], self.groups[g].feature
        assert len(load.pages) == -(-count // tokens), "a feature has all of its pages"
        for number in range(count):
            mark = GARBAGE if self.is_broken else self._feature_mark(load.digest, number)
            for layer in self.layers:
                layer[load.pages[number // tokens], number % tokens] = mark

    def _check_feature(self, row: Row) -> None:
        """Check all of the feature that a row's tokens read."""
        g = self.feature_group
        assert g is not None
        [feature], tokens = row.features, self.page_tokens[g]
        for number in range(self.groups[g].feature):
            page, right = (
                row.blocks[g][number // tokens],
                self._feature_mark(feature.digest, number),
            )
            assert all((layer[page, number % tokens] == right).all() for layer in self.layers), (
                "a row reads another request's feature, or one that is not computed"
            )

    def _feature_mark(self, digest: bytes, number: int) -> int:
        """Return what a slot of a feature has."""
        name = self.prefix_ids.setdefault(("feature", (number, digest)), len(self.prefix_ids) + 1)
        return self._mark(self.feature_group or 0, name)

    def _write(self, row: Row, position: int, prefix: int) -> None:
        for g, tokens in enumerate(self.page_tokens):
            if g == self.feature_group:
                continue
            page = row.blocks[g][position // tokens]
            assert page != HOLE, "a row writes to a page that it has freed"
            for layer in self.layers:
                layer[page, position % tokens] = self._mark(g, prefix)

    def _sample(self, row: Row, num_drafts: int) -> list[int]:
        """Return the new tokens: while a draft is right, one more."""
        tokens, new = list(row.tokens), list[int]()
        for nth in range(num_drafts + 1):
            new.append(next_token(tuple(tokens), row.seed, self.adapters[row.adapter]))
            tokens.append(new[-1])
            if new[-1:] != row.drafts[nth : nth + 1]:
                break
        return new

    def _draft(self, row: Row, new: list[int]) -> list[int]:
        """Return drafts, mostly right ones, padded with NO_DRAFT."""
        tokens, drafts = row.tokens + new, list[int]()
        chance = random.Random(zlib.crc32(f"{row.seed}:{tokens}:drafts".encode()))
        for _ in range(chance.randint(0, self.most_drafts)):
            right = next_token((*tokens, *drafts), row.seed, self.adapters[row.adapter])
            drafts.append(right if chance.random() < 0.7 else chance.randrange(VOCAB))
        return drafts + [NO_DRAFT] * (self.most_drafts - len(drafts))

    def _prefixes(self, row: Row, tokens: list[int]) -> list[int]:
        """Return the id of the token prefix at each position, which depends on the adapter."""
        clips = [one.digest.hex() for one in row.features if not one.runs]
        names, name = [], "\0".join([self.adapters[row.adapter], *clips])
        seen = {
            position: feature.digest
            for feature in row.features
            for first, length in feature.runs
            for position in range(first, first + length)
        }
        for position, token in enumerate(tokens):
            key = (name, (token, seen.get(position)))
            name = self.prefix_ids.setdefault(key, len(self.prefix_ids) + 1)
            names.append(name)
        return names


@dataclass
class Plan:
    """Script of a run: arrivals, aborts and failing steps."""

    groups: Sequence[CacheGroup] = ONE_GROUP
    block_size: int = 4
    num_blocks: int = 20
    num_host_blocks: int = 0
    max_num_seqs: int = 4
    budget: int = 16
    policy: str = "fcfs"
    caching: bool = True
    depth: int = 1
    num_stages: int = 1
    max_loras: int = 1
    num_feature_pages: int = 4
    rows_per_page: int = 2
    most_encoded: int = 4
    bytes_delay: int = 0  # turns from a request for a feature's bytes to their arrival
    most_drafts: int = 0
    num_state_slots: int = 0
    num_host_slots: int = 0  # with states
    schedules_singly: bool = False
    """Schedule each running request in Python, as when blocks are scarce."""
    arrivals: list[tuple[int, list[Request]]] = field(default_factory=list)
    """(turn of the loop, requests)."""
    aborts: list[tuple[int, str]] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)  # turns at which the prefix cache is emptied
    failures: dict[int, str] = field(default_factory=dict)  # by step number: "error" or "memory"
    failing_requests: dict[str, int] = field(default_factory=dict)
    """Steps that sample one of these requests fail once it has this many output tokens."""

    @property
    def requests(self) -> list[Request]:
        return [request for _, group in self.arrivals for request in group]

    def _repr_pretty_(self, printer, cycle) -> None:
        """Print the plan in hypothesis' reports."""
        settings = {name: value for name, value in vars(self).items() if name != "arrivals"}
        lines = [
            f"turn {turn}: {r.id} {r.prompt_token_ids} {r.params} "
            f"priority {r.spec.priority} salt {r.cache_salt!r}"
            for turn, group in self.arrivals
            for r in group
        ]
        printer.text("\n".join([str(settings), *lines]))


class Bytes:
    """Bytes of features: they come when they are asked for, and go when a step has used them."""

    def __init__(self, delay: int) -> None:
        self.turn, self._delay = 0, delay
        self._arrivals: dict[bytes, int] = {}  # turns, by digest

    @property
    def are_coming(self) -> bool:
        """True if some were asked for, and are not here."""
        return any(turn > self.turn for turn in self._arrivals.values())

    def has(self, request: Request, feature: Feature) -> bool:
        return self._arrivals.setdefault(feature.digest, self.turn + self._delay) <= self.turn

    def drop(self, step: SchedulerOutput) -> None:
        for load in step.loads:
            if isinstance(load, Encode):
                self._arrivals.pop(load.digest, None)


@dataclass
class Outcome:
    scheduler: Scheduler
    trace: list[tuple] = field(default_factory=list)
    first_token: dict[str, int] = field(default_factory=dict)
    """Turn at which each request's first token was known."""
    reported: dict[int, list[int]] = field(default_factory=dict)
    """Tokens reported by `update`, by number."""
    num_batched: int = 0  # steps that reported only single tokens
    num_preemptions: int = 0
    num_swaps: int = 0

    def add(self, results: StepResults) -> None:
        plain = zip(results.numbers.tolist(), results.token_ids.tolist(), strict=True)
        for number, token in plain:
            self.reported.setdefault(number, []).append(token)
        newest = {one.request.number: one for one in results.others if one.token_id is not None}
        for one in results.others:
            if one.token_id is not None:
                assert one.is_newest == (one is newest[one.request.number])
            if one.request.spec.is_final_only:
                assert one.request.is_finished
                self.reported[one.request.number] = one.request.output_token_ids
            elif one.token_id is not None:
                self.reported.setdefault(one.request.number, []).append(one.token_id)
        self.num_batched += bool(len(results.numbers) and not results.others)


def make_scheduler(plan: Plan) -> Scheduler:
    """Create the scheduler. Its rows keep few tokens, so that they are flushed several times."""
    with mock.patch.object(rows, "LEAST_TAIL", 32 if plan.most_drafts else 16):
        scheduler = Scheduler(
            groups=plan.groups,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.budget,
            max_model_len=MAX_MODEL_LEN,
            policy=plan.policy,
            num_host_blocks=plan.num_host_blocks,
            enable_prefix_caching=plan.caching,
            num_state_slots=plan.num_state_slots,
            num_host_slots=plan.num_host_slots,
            state_grain=plan_grain(plan.block_size),
            num_stages=plan.num_stages,
            max_loras=plan.max_loras,
            num_feature_pages=plan.num_feature_pages,
            rows_per_page=plan.rows_per_page,
            most_encoded=plan.most_encoded,
            most_drafts=plan.most_drafts,
        )
    if plan.schedules_singly:
        scheduler.planner.schedule_batch = lambda step, allotted: False
    return scheduler


def run(plan: Plan) -> Outcome:
    """Run a plan to its end like the engine's loop. Checks all invariants at every step."""
    scheduler = make_scheduler(plan)
    device, outcome, contents = Device(plan), Outcome(scheduler), Bytes(plan.bytes_delay)
    scheduler.needs.has_bytes = contents.has
    steps: deque[tuple[SchedulerOutput, ModelOutput | str]] = deque()
    requests = plan.requests
    for number, request in enumerate(requests):
        request.number = number
    given = [len(request.output_token_ids) for request in requests]
    without_token = list(requests)
    arrivals = sorted(plan.arrivals, key=lambda arrival: arrival[0])
    work = sum(r.num_prompt_tokens + r.spec.max_tokens for r in requests)
    events = sorted(turn for turn, _ in plan.arrivals + plan.aborts)
    limit = 100 + 40 * work + max(events, default=0)
    turn = -1
    while arrivals or scheduler.num_unfinished or steps:
        turn += 1
        contents.turn = turn
        assert turn < limit, f"not finished after {turn} turns: {list(scheduler.requests)}"
        while arrivals and arrivals[0][0] <= turn:
            for request in arrivals.pop(0)[1]:
                scheduler.add(request)
        for when, name in plan.aborts:
            if when == turn:
                scheduler.abort(name)
        if turn in plan.resets:
            scheduler.reset_prefix_cache()
        while len(steps) < plan.depth:
            budget = scheduler.max_num_batched_tokens
            step = scheduler.schedule()
            if step is None:
                break
            check_step(scheduler, step, budget)
            outcome.num_swaps += len(step.swap_in)
            by_row = {request.row: request for request in scheduler.running}
            scheduled = [by_row[row] for row in step.rows.tolist()]
            failure = plan.failures.get(step.step)
            for request, samples in zip(scheduled, step.samples.tolist(), strict=True):
                known = request.num_known_tokens - request.num_prompt_tokens
                assert request.num_tokens <= request.length_limit(MAX_MODEL_LEN)
                if plan.num_stages > 1:
                    assert samples == bool(request.num_in_flight), "it had no token in flight"
                if samples and known >= plan.failing_requests.get(request.id, MAX_MODEL_LEN):
                    failure = failure or "error"
            output = device.execute(step, fails=failure is not None)
            steps.append((step, failure or output))
            outcome.trace.append(
                (
                    step.rows.tolist(),
                    step.num_tokens.tolist(),
                    step.num_computed.tolist(),
                    step.swap_out,
                    step.swap_in,
                    step.state_swap_out,
                    step.state_swap_in,
                    output.token_ids.tolist(),
                )
            )
        check_ownership(scheduler)
        if not steps:
            assert arrivals or not scheduler.num_unfinished or contents.are_coming, (
                "a request waits while nothing runs"
            )
            if not scheduler.num_unfinished:
                turn = next((event for event in events if event > turn), turn + 1) - 1
            continue
        step, result = steps.popleft()
        if isinstance(result, str):
            steps.clear()
            device.is_broken = False
            device.rows.clear()
            scheduler.recover(step, out_of_memory=result == "memory")
        else:
            contents.drop(step)
            outcome.add(scheduler.update(step, result))
            for request in list(without_token):
                if request.num_known_tokens > request.num_prompt_tokens:
                    outcome.first_token[request.id] = turn
                    without_token.remove(request)
        check_ownership(scheduler)
        outcome.num_preemptions += scheduler.take_stats().num_preemptions
    check_all_is_free(scheduler, plan)
    for request in requests:
        if not request.spec.is_final_only or request.finish_reason in (
            FinishReason.STOP,
            FinishReason.LENGTH,
        ):
            new = request.output_token_ids[given[request.number] :]
            assert outcome.reported.get(request.number, []) == new
    return outcome


def check_step(scheduler: Scheduler, step: SchedulerOutput, budget: int) -> None:
    scheduled = step.rows.tolist()
    assert step.total_tokens <= budget
    assert len(set(scheduled)) == len(scheduled)
    assert (step.num_tokens > 0).all()
    assert len(scheduled) <= len(scheduler.running) <= scheduler.max_num_seqs
    running = [request.row for request in scheduler.running]
    assert len(set(running)) == len(running)
    assert set(scheduled) <= set(running)
    for copies in (step.swap_out, step.swap_in, step.state_swap_out, step.state_swap_in):
        assert len({target for _, target in copies}) == len(copies), (
            "each block and each slot is a copy target once"
        )


def check_ownership(scheduler: Scheduler) -> None:
    """Check that reference counts match the block tables, and unreferenced blocks are free once."""
    scheduler.check()
    pool = scheduler.pool
    num_holders = [0] * pool.num_blocks
    for block in chain(*(held_pages(request.blocks) for request in scheduler.running)):
        num_holders[block] += 1
    assert num_holders == list(map(pool.num_references, range(pool.num_blocks)))
    assert pool.num_free == num_holders.count(0)
    for request in scheduler.running:
        assert request.status is RequestStatus.RUNNING
        pages = held_pages(request.blocks)
        assert len(set(pages)) == len(pages)
    on_host = [page for request in scheduler.requests for page in held_pages(request.host_blocks)]
    assert len(set(on_host)) == len(on_host)
    assert len(on_host) + scheduler.host_pool.num_free == scheduler.host_pool.num_blocks
    taken = [request.row for request in scheduler.running]
    assert sorted(taken + scheduler.rows.free) == list(range(len(taken) + len(scheduler.rows.free)))
    for request in scheduler.requests:
        if request not in scheduler.running:
            assert not request.blocks
            assert request.row == -1


def check_all_is_free(scheduler: Scheduler, plan: Plan) -> None:
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert scheduler.host_pool.num_free == scheduler.host_pool.num_blocks
    assert not scheduler.running
    with_adapter = [one.spec.adapter for one in plan.requests if one.spec.adapter]
    assert not any(map(scheduler.needs.num_running, with_adapter))
    assert scheduler.num_waiting == scheduler.num_steps_in_flight == 0
    assert scheduler.schedule() is None
    if scheduler.states is not None:
        scheduler.reset_prefix_cache()
        assert scheduler.states.problem([]) is None
        assert len(scheduler.states._free) == plan.num_state_slots
        assert len(scheduler.states._free_on_host) == plan.num_host_slots


def make_request(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 6,
    seed: int = 0,
    priority: int = 0,
    salt: str = "",
    adapter: str = "",
    features: Sequence[Feature] = (),
    cacheable: bool = True,
    leader: Request | None = None,
    is_final_only: bool = False,
    eos_token_ids: Sequence[int] = (EOS,),
    **params: object,
) -> Request:
    spec = SequenceSpec(
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        eos_token_ids=list(eos_token_ids),
        priority=priority,
        cache_salt=salt,
        is_final_only=is_final_only,
        adapter=Adapter(adapter, "", "1") if adapter else None,
        features=tuple(features),
    )
    return Request(
        id=name,
        spec=spec,
        seed=seed,
        cache_salt=spec.cache_key,
        cacheable=cacheable,
        leader=leader,
    )
