"""What a step gave, on its way to those who asked: columns, clients, deltas that pile up, whole answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests import checkpoints
from toolkit import LLM, SamplingParams
from toolkit.config import EngineConfig
from toolkit.engine.core import EngineCore
from toolkit.engine.messages import Abort, EngineOutput, EngineOutputs, EngineRequest
from toolkit.engine.output_processor import Collected, OutputProcessor
from toolkit.engine.outputs import Delta
from toolkit.sequence import SequenceSpec
from toolkit.text.tokenizer import Tokenizer
from tools.bench.loop import RandomTokens

LETTERS = checkpoints.make_tokenizer()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("letters")
    LETTERS.save_pretrained(folder)
    return Tokenizer(folder)


def request_of(
    number: int = 0, *, client: int = 0, whole: bool = False, **params: object
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
            is_final_only=whole,
        ),
    )


def make_core() -> EngineCore:
    return EngineCore(EngineConfig.from_settings({"max_num_seqs": 8}), RandomTokens(8))


def tokens_in(message: EngineOutputs) -> dict[int, list[int]]:
    """Everything that a message tells, by number."""
    numbers = np.frombuffer(message.numbers, np.int64).tolist()
    tokens = np.frombuffer(message.token_ids, np.int32).tolist()
    told = {number: [token] for number, token in zip(numbers, tokens, strict=True)}
    for output in message.outputs:
        told.setdefault(output.number, []).extend(output.token_ids)
    return told


def run(core: EngineCore) -> dict[int, dict[int, list[int]]]:
    """All tokens by client and number."""
    told: dict[int, dict[int, list[int]]] = {}
    while core.has_work:
        for client, message in core.step().items():
            for number, tokens in tokens_in(message).items():
                told.setdefault(client, {}).setdefault(number, []).extend(tokens)
    return told


class TestClients:
    def test_each_is_told_of_its_own_sequences_though_they_have_the_same_numbers(self):
        core = make_core()
        for request in (
            request_of(0),
            request_of(0, client=3, max_tokens=9),
            request_of(1, client=3, n=2),
        ):
            core.add(request)
        requests = dict(core.scheduler._requests)
        told = run(core)
        assert {(client, number) for client in told for number in told[client]} == {
            (0, 0),
            (3, 0),
            (3, 1),
            (3, 2),
        }
        for request in requests.values():
            assert told[request.client][request.number] == request.output_token_ids
        assert [len(tokens) for tokens in told[3].values()] == [9, 12, 12]

    def test_an_abort_ends_the_sequence_of_the_client_that_asked(self):
        core = make_core()
        for client in (0, 1):
            core.add(request_of(7, client=client))
        core.step()
        core.abort(Abort([7, 8], client=1))
        assert len(run(core)[0][7]) == 12 - 1
        assert core.scheduler.pool.usage == 0.0

    def test_one_that_leaves_takes_its_sequences_with_it_and_no_others(self):
        core = make_core()
        for request in (
            request_of(0),
            request_of(0, client=3, n=2),
            request_of(2, client=3),
            request_of(5),
        ):
            core.add(request)
        core.step()
        core.leave(3)
        told = run(core)
        assert told.keys() == {0}
        assert [len(tokens) for tokens in told[0].values()] == [12 - 1] * 2
        assert core.scheduler.pool.usage == 0.0

    def test_the_first_has_the_counts_and_all_are_told_who_began(self):
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


class TestWholeAnswers:
    def test_nothing_is_told_before_the_end(self):
        core = make_core()
        core.add(request_of(0, whole=True, max_tokens=30))
        core.add(request_of(1, max_tokens=40))
        (request,) = (r for r in core.scheduler._requests.values() if r.spec.is_final_only)
        messages = []
        while core.has_work:
            messages.append(core.step()[0])
        with_whole = [message for message in messages if 0 in tokens_in(message)]
        assert len(with_whole) == 1
        assert tokens_in(with_whole[0])[0] == request.output_token_ids
        assert sum(1 in tokens_in(message) for message in messages) == 40

    def test_they_are_what_a_stream_gives(self, checkpoint: Callable[[str], Path]):
        llm = LLM(str(checkpoint("llama3-gqa")), device="cpu", max_num_seqs=8)
        params = SamplingParams(max_tokens=25, seed=4, n=2, prompt_logprobs=1)
        (whole,) = llm.generate("The sea", params)
        streamed = Collected.of(llm._outputs.add(request_of(n=2), None))
        llm._outputs.remove("0-0")
        for delta in llm.stream("The sea", params):
            streamed.add(delta)
        assert whole.outputs == streamed.output.outputs
        assert whole.prompt_logprobs == streamed.output.prompt_logprobs


def columns(tokens: dict[int, int]) -> EngineOutputs:
    """A step in which these sequences got a token each, as it comes from the socket."""
    message = EngineOutputs(
        numbers=np.array(list(tokens), np.int64).tobytes(),
        token_ids=np.array(list(tokens.values()), np.int32).tobytes(),
    )
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=EngineOutputs)


class TestDeltas:
    def test_what_piles_up_comes_as_one_and_nothing_is_lost(self, tokenizer):
        """Three requests of two sequences each, read now and then, against what was put in."""
        rng = random.Random(1)
        outputs = OutputProcessor(tokenizer)
        states = [outputs.add(request_of(i, n=2, detokenize=i != 2), None) for i in range(3)]
        put: dict[int, list[int]] = {n: [] for n in range(6)}
        got: dict[int, list[Delta]] = {n: [] for n in range(6)}
        text = {n: LETTERS.encode("naïve ☃ 日本語 text " * 3)[n:] for n in range(6)}
        for step in range(40):
            some = [n for n in range(6) if rng.random() < 0.7 and text[n]]
            tokens = {n: text[n].pop(0) for n in some}
            for n, token in tokens.items():
                put[n].append(token)
            outputs.process(columns(tokens), float(step))
            for i, state in enumerate(states):
                while rng.random() < 0.3 and (delta := state.take()) is not None:
                    got[2 * i + delta.index].append(delta)
        for i, state in enumerate(states):
            while (delta := state.take()) is not None:
                got[2 * i + delta.index].append(delta)
        for n in range(6):
            assert [token for delta in got[n] for token in delta.token_ids] == put[n]
            expected = LETTERS.decode(put[n]).rstrip("\ufffd") if n < 4 else ""
            assert "".join(delta.text for delta in got[n]) == expected
            assert len(got[n]) < len(put[n])

    def test_who_waits_is_woken_once_for_all_that_piles_up(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        state = outputs.add(request_of(), None)
        calls: list[int] = []
        state.wake = lambda: calls.append(1)
        for step in range(5):
            outputs.process(columns({0: 65 + step}), float(step))
        assert len(calls) == 1
        assert len(state.take().token_ids) == 5
        assert state.take() is None
        outputs.process(columns({0: 65}), 9.0)
        assert len(calls) == 2

    def test_a_stop_string_in_the_columns_ends_the_sequence_and_the_core_is_told(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        state = outputs.add(request_of(stop=["bc"]), None)
        ended = [
            outputs.process(columns({0: LETTERS.encode(letter)[0]}), 0.0).ended for letter in "abcd"
        ]
        delta = state.take()
        assert ended == [[], [], [0], []]
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "bc")
        assert len(delta.token_ids) == 3
        assert not outputs.requests

    def test_gaps_are_counted_from_the_last_token_of_each(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        outputs.add(request_of(n=3), None)
        first = outputs.process(EngineOutputs([EngineOutput(n, [70]) for n in range(3)]), 1.0)
        assert [sequence.number for sequence in first.begun] == [0, 1, 2]
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

    def test_tokens_of_those_that_were_removed_are_dropped(self, tokenizer):
        outputs = OutputProcessor(tokenizer)
        state = outputs.add(request_of(), None)
        outputs.remove(state.id)
        done = outputs.process(columns({0: 70}), 1.0)
        assert (state.take(), done.gaps) == (None, {})
