"""Results of a step on their way to the clients: columns, deltas, complete answers."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests import checkpoints
from toolkit import LLM, SamplingParams
from toolkit.config import EngineConfig
from toolkit.engine.core import EngineCore
from toolkit.engine.front.output_processor import OutputCollector, OutputProcessor
from toolkit.engine.messages import (
    Abort,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    LogprobRecords,
)
from toolkit.engine.outputs import Delta, Logprob, LogprobList, pack_record
from toolkit.executor import Pending
from toolkit.scheduler import SchedulerOutput
from toolkit.sequence import SequenceSpec
from toolkit.text.tokenizer import Tokenizer
from tools.bench.loop import RandomTokens

letters = functools.cache(checkpoints.make_tokenizer)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("letters")
    letters().save_pretrained(folder)
    return Tokenizer(folder)


def request_of(
    number: int = 0, *, client: int = 0, is_final_only: bool = False, **params: object
) -> EngineRequest:
    settings = SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | params)
    return EngineRequest(
        id=f"{client}-{number}",
        client=client,
        number=number,
        spec=SequenceSpec(
            prompt_token_ids=[5, 6, 7],
            params=settings,
            max_tokens=settings.max_tokens,
            eos_token_ids=[0],
            is_final_only=is_final_only,
        ),
    )


def make_core() -> EngineCore:
    return EngineCore(EngineConfig.from_settings({"max_num_seqs": 8}), RandomTokens(8))


def tokens_in(message: EngineOutputs) -> dict[int, list[int]]:
    """Return all tokens of a message by sequence number."""
    numbers = np.frombuffer(message.numbers, np.int64).tolist()
    tokens = np.frombuffer(message.token_ids, np.int32).tolist()
    tokens_of = {number: [token] for number, token in zip(numbers, tokens, strict=True)}
    for output in message.outputs:
        tokens_of.setdefault(output.number, []).extend(output.token_ids)
    return tokens_of


def run(core: EngineCore) -> dict[int, dict[int, list[int]]]:
    """Return all tokens by client and number."""
    tokens_of: dict[int, dict[int, list[int]]] = {}
    while core.has_work:
        for client, message in core.step().items():
            for number, tokens in tokens_in(message).items():
                tokens_of.setdefault(client, {}).setdefault(number, []).extend(tokens)
    return tokens_of


class TestClients:
    def test_clients_with_equal_numbers_get_their_own_sequences(self):
        core = make_core()
        for request in (
            request_of(0),
            request_of(0, client=3, max_tokens=9),
            request_of(1, client=3, n=2),
        ):
            core.add(request)
        requests = list(core.scheduler.requests)
        tokens_of = run(core)
        assert {(client, number) for client in tokens_of for number in tokens_of[client]} == {
            (0, 0),
            (3, 0),
            (3, 1),
            (3, 2),
        }
        for request in requests:
            assert tokens_of[request.client][request.number] == request.output_token_ids
        assert [len(tokens) for tokens in tokens_of[3].values()] == [9, 12, 12]

    def test_an_abort_ends_only_the_clients_own_sequence(self):
        core = make_core()
        for client in (0, 1):
            core.add(request_of(7, client=client))
        core.step()
        core.abort(Abort([7, 8], client=1))
        assert len(run(core)[0][7]) == 12 - 1
        assert core.scheduler.pool.usage == 0.0

    def test_a_client_that_exits_ends_only_its_sequences(self):
        core = make_core()
        for request in (
            request_of(0),
            request_of(0, client=3, n=2),
            request_of(2, client=3),
            request_of(5),
        ):
            core.add(request)
        core.step()
        core.remove_client(3)
        tokens_of = run(core)
        assert tokens_of.keys() == {0}
        assert [len(tokens) for tokens in tokens_of[0].values()] == [12 - 1] * 2
        assert core.scheduler.pool.usage == 0.0

    def test_statistics_go_to_the_first_and_starts_to_each_client(self):
        core = make_core()
        core.add(request_of(0, client=1))
        core.add(request_of(4, client=0))
        messages = core.step()
        assert messages[0].stats.num_running == 2
        assert messages[1].stats is None
        assert {client: message.scheduled for client, message in messages.items()} == {
            0: [4],
            1: [0],
        }


class TestFinalOnly:
    def test_nothing_is_sent_before_the_end(self):
        core = make_core()
        core.add(request_of(0, is_final_only=True, max_tokens=30))
        core.add(request_of(1, max_tokens=40))
        (request,) = (r for r in core.scheduler.requests if r.spec.is_final_only)
        messages = []
        while core.has_work:
            messages.append(core.step()[0])
        final_messages = [message for message in messages if 0 in tokens_in(message)]
        assert len(final_messages) == 1
        assert tokens_in(final_messages[0])[0] == request.output_token_ids
        assert sum(1 in tokens_in(message) for message in messages) == 40

    def test_the_output_equals_the_merged_stream(self, checkpoint: Callable[[str], Path]):
        llm = LLM(str(checkpoint("llama3-gqa")), device="cpu", max_num_seqs=8)
        params = SamplingParams(max_tokens=25, seed=4, n=2, prompt_logprobs=1)
        (output,) = llm.generate("The sea", params)
        streamed = OutputCollector.of(llm._outputs.add(request_of(n=2), None))
        llm._outputs.remove("0-0")
        for delta in llm.stream("The sea", params):
            streamed.add(delta)
        assert output.outputs == streamed.output.outputs
        assert output.prompt_logprobs == streamed.output.prompt_logprobs


def columns(tokens: dict[int, int]) -> EngineOutputs:
    """Return a step that gave each of these sequences one token, encoded and decoded."""
    message = EngineOutputs(
        numbers=np.array(list(tokens), np.int64).tobytes(),
        token_ids=np.array(list(tokens.values()), np.int32).tobytes(),
    )
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=EngineOutputs)


class TestDeltas:
    def test_unread_output_is_merged_and_complete(self, tokenizer):
        """Three requests of two sequences each, read at random times."""
        rng = random.Random(1)
        outputs = OutputProcessor(tokenizer)
        states = [outputs.add(request_of(i, n=2, detokenize=i != 2), None) for i in range(3)]
        sent: dict[int, list[int]] = {n: [] for n in range(6)}
        received: dict[int, list[Delta]] = {n: [] for n in range(6)}
        text = {n: letters().encode("naïve ☃ 日本語 text " * 3)[n:] for n in range(6)}
        for step in range(40):
            some = [n for n in range(6) if rng.random() < 0.7 and text[n]]
            tokens = {n: text[n].pop(0) for n in some}
            for n, token in tokens.items():
                sent[n].append(token)
            outputs.process(columns(tokens), float(step))
            for i, state in enumerate(states):
                while rng.random() < 0.3 and (delta := state.next_delta()) is not None:
                    received[2 * i + delta.index].append(delta)
        for i, state in enumerate(states):
            while (delta := state.next_delta()) is not None:
                received[2 * i + delta.index].append(delta)
        for n in range(6):
            assert [token for delta in received[n] for token in delta.token_ids] == sent[n]
            expected = letters().decode(sent[n]).rstrip("\ufffd") if n < 4 else ""
            assert "".join(delta.text for delta in received[n]) == expected
            assert len(received[n]) < len(sent[n])

    def test_the_reader_is_woken_once_for_merged_output(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        state = outputs.add(request_of(), None)
        calls: list[int] = []
        state.wake = lambda: calls.append(1)
        for step in range(5):
            outputs.process(columns({0: 65 + step}), float(step))
        assert len(calls) == 1
        assert len(state.next_delta().token_ids) == 5
        assert state.next_delta() is None
        outputs.process(columns({0: 65}), 9.0)
        assert len(calls) == 2

    def test_a_stop_string_in_columns_ends_the_sequence(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        state = outputs.add(request_of(stop=["bc"]), None)
        ended = [
            outputs.process(columns({0: letters().encode(letter)[0]}), 0.0).stopped
            for letter in "abcd"
        ]
        delta = state.next_delta()
        assert ended == [[], [], [0], []]
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "bc")
        assert len(delta.token_ids) == 3
        assert not outputs.requests

    def test_gaps_are_counted_from_each_sequences_last_token(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        outputs.add(request_of(n=3), None)
        first = outputs.process(EngineOutputs([EngineOutput(n, [70]) for n in range(3)]), 1.0)
        assert [sequence.number for sequence in first.started] == [0, 1, 2]
        assert first.gaps == {}
        assert outputs.process(columns({0: 70, 1: 70}), 2.0).gaps == {1.0: 2}
        last = outputs.process(
            EngineOutputs(
                [EngineOutput(2, [70], finish_reason="length")],
                numbers=columns({0: 70}).numbers,
                token_ids=columns({0: 70}).token_ids,
            ),
            5.0,
        )
        assert last.gaps == {1.0: 1, 2.0: 1}
        assert [(sequence.number, reason) for sequence, reason in last.finished] == [(2, "length")]

    def test_tokens_of_removed_requests_are_dropped(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        state = outputs.add(request_of(), None)
        outputs.remove(state.id)
        changes = outputs.process(columns({0: 70}), 1.0)
        assert (state.next_delta(), changes.gaps) == (None, {})


class Numbered(RandomTokens):
    """After a token t, t + 1, t + 2, … are the likeliest. Log-probabilities are -t, -t - 1, …"""

    def execute(self, step: SchedulerOutput) -> Pending:
        pending = super().execute(step)
        output = pending.result()
        if output.logprobs is not None:
            count = output.logprobs.shape[1] // 2
            tokens = output.token_ids[:, None] + np.arange(count, dtype=np.int32)
            output.logprobs[:, 0] = 1
            output.logprobs[:, 1::2] = tokens
            output.logprobs[:, 2::2] = (-tokens.astype(np.float32)).view(np.int32)
        return pending


def numbered(token: int, k: int) -> dict[int, Logprob]:
    """Return what `Numbered` reports for a token, without texts."""
    return {token + i: Logprob(-float(token + i), i or 1, "") for i in range(1 + k)}


class TestLogprobs:
    def test_each_sequence_of_a_step_gets_as_many_as_it_wants(self):
        """Two clients, and sequences that want 0, 1, 5, 20 and none, of different lengths."""
        core = EngineCore(EngineConfig.from_settings({"max_num_seqs": 8}), Numbered(8))
        wanted = {0: (5, None, 0), 3: (20, None, 1, 5)}
        outputs = {client: OutputProcessor(None) for client in wanted}
        collected: dict[tuple[int, int], OutputCollector] = {}
        states = []
        for client, counts in wanted.items():
            for i, k in enumerate(counts):
                request = request_of(i, client=client, logprobs=k, max_tokens=6 + 3 * i)
                state = outputs[client].add(request, None)
                collected[client, i] = OutputCollector.of(state)
                states.append((client, i, state))
                core.add(request)
        sizes = Counter()
        while core.has_work:
            for client, message in core.step().items():
                if message.logprobs is not None:
                    sizes[message.logprobs.size] += 1
                    num_records = len(message.logprobs.split())
                    assert num_records * 8 == len(message.numbers)
                outputs[client].process(message, 0.0)
            for client, i, state in states:
                while (delta := state.next_delta()) is not None:
                    collected[client, i].add(delta)
        for (client, i), collector in collected.items():
            (output,) = collector.output.outputs
            k = wanted[client][i]
            assert len(output.token_ids) == 6 + 3 * i
            if k is None:
                assert output.logprobs is None
            else:
                assert output.logprobs == [numbered(token, k) for token in output.token_ids]
                assert output.cumulative_logprob == -float(sum(output.token_ids))
        assert len(sizes) > 1  # fewer once the sequence that wants 20 has ended

    def test_unread_ones_are_merged(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        state = outputs.add(request_of(n=2, logprobs=1), None)
        other = outputs.add(request_of(2), None)
        tokens = letters().encode("several words")
        seen: list[Delta] = []
        for step, token in enumerate(tokens):
            message = columns({0: token, 1: token + 1, 2: token})
            data = b"".join(
                pack_record(1, [(t, -0.1 * step), (t + 1, -1.0), (t + 2, -2.0)])
                for t in (token, token + 1, token)
            )
            message.logprobs = LogprobRecords(len(data) // 3, data)
            outputs.process(message, float(step))
            if step % 4 == 3:
                seen += [state.next_delta(), state.next_delta()]
        seen += [state.next_delta(), state.next_delta()]
        for index in range(2):
            found = [p for delta in seen if delta.index == index for p in delta.logprobs]
            assert [list(position) for position in found] == [
                [token + index, token + index + 1] for token in tokens
            ]
            first = next(iter(found[3].values()))
            assert first.logprob == float(np.float32(-0.1 * 3))
            assert first.decoded_token == tokenizer.token_names[tokens[3] + index]
        assert max(len(delta.logprobs) for delta in seen) == 4
        assert other.next_delta().logprobs is None

    def test_a_stop_string_ends_them(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        state = outputs.add(request_of(stop=["b"], logprobs=0), None)
        for letter in "ab":
            (token,) = letters().encode(letter)
            message = columns({0: token})
            message.logprobs = LogprobRecords(12, pack_record(1, [(token, -1.0)]))
            outputs.process(message, 0.0)
        delta = state.next_delta()
        assert (delta.text, delta.finish_reason) == ("a", "stop")
        assert [list(position) for position in delta.logprobs] == [[t] for t in delta.token_ids]

    def test_the_sum_does_not_depend_on_how_deltas_were_merged(self, tokenizer):
        values = np.random.default_rng(3).standard_normal(50).astype(np.float32).tolist()
        records = [pack_record(2, [(70, value), (71, 0.5)]) for value in values]
        expected = 0.0
        for value in values:
            expected += value
        for length in (1, 7, 50):
            collector = OutputCollector.of(OutputProcessor(None).add(request_of(), None))
            for at in range(0, 50, length):
                data = b"".join(records[at : at + length])
                collector.add(Delta(0, "", [], LogprobList(None, 20, data)))
            assert collector.output.outputs[0].cumulative_logprob == expected

    @pytest.mark.parametrize("starts_prompt", [False, True])
    def test_a_lazy_list_behaves_like_a_list(self, tokenizer, starts_prompt):
        records = [pack_record(1 + i % 2, [(65 + i, -0.5), (65, -0.25)]) for i in range(5)]
        lazy = LogprobList(tokenizer, 20, b"".join(records), starts_prompt=starts_prompt)
        text = tokenizer.token_names.__getitem__
        plain = [None] if starts_prompt else []
        plain.append({65: Logprob(-0.5, 1, text(65))})
        for i in range(1, 5):
            chosen, other = Logprob(-0.5, 1 + i % 2, text(65 + i)), Logprob(-0.25, 1, text(65))
            plain.append({65 + i: chosen, 65: other})
        assert lazy == plain
        assert plain == lazy
        assert lazy != plain[1:]
        assert (len(lazy), list(lazy), repr(lazy)) == (len(plain), plain, repr(plain))
        assert [lazy[i] for i in range(-len(plain), len(plain))] == plain * 2
        assert (lazy[1:3], lazy[::-2], lazy[9:]) == (plain[1:3], plain[::-2], [])
        assert (plain[2] in lazy, lazy.index(plain[2])) == (True, 2)
        assert [*reversed(lazy)] == plain[::-1]
        for index in (len(plain), -len(plain) - 1):
            with pytest.raises(IndexError):
                lazy[index]
        assert type(pickle.loads(pickle.dumps(lazy))) is list
        assert copy.deepcopy(lazy) == plain
        assert not LogprobList(tokenizer)
        assert LogprobList(tokenizer) == []
