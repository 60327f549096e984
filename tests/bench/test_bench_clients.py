"""Several client processes, and the HTTP that they speak."""

from __future__ import annotations

import asyncio
import os
from array import array

import orjson
import pytest

from tests.bench.test_bench_run import interrupt
from toolkit.bench.load.answer_stream import Answer, Counts
from toolkit.bench.load.http_client import Http
from toolkit.bench.load.processes import ClientProcesses
from toolkit.bench.load.record import RequestRecord
from toolkit.bench.load.share import number_of_clients
from toolkit.bench.run import measure, settle
from toolkit.client.wire import RequestFailedError
from toolkit.config.load import BenchConfig


def config(server, **settings):
    return BenchConfig(
        **{"url": server.url, "random_input_len": 8, "random_output_len": 4} | settings
    )


class TestProcesses:
    async def test_together_they_send_what_one_would(self, server):
        await measure(config(server, request_rate=200.0, num_prompts=21, seed=0))
        alone, server.bodies = server.bodies, []
        outcome = await measure(
            config(server, request_rate=200.0, num_prompts=21, clients=3, seed=0)
        )
        result = outcome.result
        assert sorted(record.number for record in outcome.records) == list(range(21))
        assert sorted(b["prompt"] for b in server.bodies) == sorted(b["prompt"] for b in alone)
        assert (result.num_clients, result.num_succeeded, result.output_tokens) == (3, 21, 84)
        assert result.latencies.itl.count == 21 * 3

    async def test_they_share_the_places(self, server):
        server.delay = 0.1
        outcome = await measure(config(server, max_concurrency=5, num_prompts=20, clients=2))
        result = outcome.result
        assert sorted(record.number for record in outcome.records) == list(range(20))
        assert result.num_succeeded == 20
        assert result.max_in_flight <= 5

    async def test_they_begin_together(self, server):
        """None of four waits for another's answer."""
        server.hold = 8
        async with asyncio.timeout(60):
            result = (await measure(config(server, num_prompts=8, clients=4))).result
        assert result.max_in_flight == 8

    async def test_ctrl_c_ends_them_all_and_still_reports(self, server):
        server.hold = 7  # so that none of six is answered
        running = measure(config(server, num_prompts=6, clients=2))
        outcome, _ = await asyncio.gather(running, interrupt(server, 6))
        assert outcome.interrupted
        assert outcome.result.num_unfinished == 6

    async def test_a_terminals_ctrl_c_reaches_none_of_them(self, server):
        """The first process hears it and tells them, also those that are still importing what they need."""
        async with ClientProcesses.started(settle(config(server))[0], "fake", 2) as processes:
            groups = {os.getpgid(process.pid) for process in processes._processes}
        assert os.getpgrp() not in groups

    @pytest.mark.parametrize(
        ("settings", "cores", "expected"),
        [
            ({"request_rate": 50.0}, 16, 1),
            ({"request_rate": 400.0, "num_prompts": 5000}, 16, 4),
            ({"max_concurrency": 256, "num_prompts": 2000}, 16, 4),
            ({"max_concurrency": 256, "num_prompts": 2000}, 2, 1),
            ({"max_concurrency": 32, "num_prompts": 2000}, 64, 1),
            ({"max_concurrency": 2, "clients": 8}, 2, 2),
            ({"num_prompts": 3, "clients": 8}, 2, 3),
        ],
    )
    def test_there_are_as_many_as_the_load_needs_and_the_cores_allow(
        self, settings, cores, expected
    ):
        assert number_of_clients(*settle(BenchConfig(**settings)), cores) == expected


class TestHttp:
    """Against a server that writes what the test says."""

    @pytest.mark.parametrize("size", [1, 7, 10_000])
    async def test_a_body_is_the_same_however_it_is_cut(self, size):
        answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert await exchange(pieces) == (200, b"", b"hello, world")

    async def test_a_refusals_body_is_no_part_of_the_stream(self):
        answer = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"
        assert await exchange([answer]) == (503, b"busy", b"")

    async def test_a_body_without_a_length_ends_with_the_connection(self):
        assert await exchange([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"]) == (
            200,
            b"",
            b"hello",
        )

    @pytest.mark.parametrize(
        ("pieces", "cause"),
        [
            ([], "connection closed by the server"),
            ([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello"], "answer broken off"),
            (
                [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel"],
                "answer broken off",
            ),
            ([b"no HTTP at all\r\n\r\n"], "unreadable answer"),
        ],
    )
    async def test_an_answer_without_its_end_is_an_error(self, pieces, cause):
        with pytest.raises(RequestFailedError) as caught:
            await exchange(pieces)
        assert caught.value.cause == cause

    async def test_connections_are_used_again(self):
        connections = []

        async def serve(reader, writer):
            connections.append(writer)
            while await reader.read(4096):  # a whole request: they are short
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            writer.close()

        async with listening(serve) as url, Http(url, None) as http:
            for _ in range(3):
                assert await http.get("/x", timeout=60.0) == (200, b"ok")
        assert len(connections) == 1

    async def test_nobody_there(self, unused_tcp_port):
        async with Http(f"http://127.0.0.1:{unused_tcp_port}", None) as http:
            with pytest.raises(RequestFailedError) as caught:
                await http.get("/", timeout=60.0)
        assert caught.value.cause == "cannot connect"


class TestCounting:
    """The events that are not parsed count as those that are."""

    TEXTS = ("a", " b", "", '"', "\\", "\n", "é", '","x":"', "a\\", "text", "m", "日本")

    @pytest.mark.parametrize("kind", ["completions", "chat"])
    @pytest.mark.parametrize("dumps", ["compact", "spaced"])
    def test_every_event_counts_one_token_where_it_has_text(self, kind, dumps):
        texts = [text for _ in range(3) for text in self.TEXTS]
        record = feed([event(kind, text, dumps) for text in texts])
        assert record.output_tokens == sum(map(bool, texts))
        assert len(record.gaps) == record.output_tokens - 1
        assert not record.sizes_known  # nobody has said so

    def test_an_event_that_says_more_is_parsed(self):
        usual = [event("completions", text, "compact") for text in ("a", "b")]
        last = orjson.dumps({"choices": [{"index": 0, "text": "c", "finish_reason": "stop"}]})
        assert feed([*usual, last]).output_tokens == 3

    def test_an_error_in_the_stream_is_not_passed_over(self):
        usual = [event("completions", text, "compact") for text in ("a", "b")]
        with pytest.raises(RequestFailedError, match="it broke"):
            feed([*usual, orjson.dumps({"error": {"message": "it broke"}})])

    def test_a_stream_without_an_end_is_broken_off(self):
        with pytest.raises(RequestFailedError) as caught:
            feed([event("completions", "a", "compact")], done=False)
        assert caught.value.cause == "answer broken off"

    def test_running_usage_counts_the_tokens_of_each_piece(self):
        def piece(tokens):
            usage = {"prompt_tokens": 1, "completion_tokens": tokens}
            return orjson.dumps({"choices": [{"index": 0, "text": "x"}], "usage": usage})

        record = feed([piece(2), piece(5), piece(6)])
        assert (record.output_tokens, record.sizes_known) == (6, True)
        assert (record.gaps, record.sizes) == (array("d", [1.0, 1.0]), array("q", [3, 1]))

    @pytest.mark.parametrize(
        "counts", [{"prompt_tokens": None, "completion_tokens": None}, {"other": 1}]
    )
    def test_a_count_that_is_not_there_is_none(self, counts):
        pieces = [event("completions", text, "compact") for text in ("a", "b")]
        record = feed([*pieces, orjson.dumps({"choices": [], "usage": counts})])
        assert (record.output_tokens, record.prompt_tokens, record.sizes_known) == (2, 0, False)

    def test_a_count_that_is_no_number_is_an_error(self):
        counts = {"prompt_tokens": "3", "completion_tokens": "4"}
        with pytest.raises(RequestFailedError, match="unreadable event"):
            feed([orjson.dumps({"choices": [], "usage": counts})])

    def test_a_running_count_that_goes_back_brings_no_tokens(self):
        def piece(tokens):
            counts = {"prompt_tokens": 1, "completion_tokens": tokens}
            return orjson.dumps({"choices": [{"index": 0, "text": "x"}], "usage": counts})

        assert feed([piece(2), piece(1), piece(3)]).token_gaps().min() >= 0

    def test_so_do_token_ids(self):
        pieces = [
            {"choices": [{"index": 0, "text": "x", "token_ids": ids}]}
            for ids in ([1, 2], [], [3], [4, 5])
        ]
        record = feed([orjson.dumps(piece) for piece in pieces])
        assert (record.output_tokens, record.sizes_known) == (5, True)
        assert (record.gaps, record.sizes) == (array("d", [2.0, 1.0]), array("q", [1, 2]))

    @pytest.mark.parametrize("kind", ["completions", "chat"])
    def test_a_token_without_text_is_one_where_the_servers_count_says_so(self, kind):
        """Half a character, or what may become a stop string: the event comes, its text later."""
        texts = ("", "a", "", "b")
        record = feed([*(event(kind, text, "compact") for text in texts), usage(4)])
        assert (record.output_tokens, record.sizes_known) == (4, True)
        assert (record.first_token, record.gaps) == (0.0, array("d", [1.0, 1.0, 1.0]))

    @pytest.mark.parametrize("tokens", [3, 4])
    def test_so_is_an_end_without_text_or_it_is_only_an_end(self, tokens):
        end = orjson.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        record = feed(
            [
                *(event("completions", text, "compact") for text in ("a", "", "b")),
                end,
                usage(tokens),
            ]
        )
        assert (record.sizes_known, len(record.gaps)) == (True, tokens - 1)
        assert record.last_token == tokens - 1.0

    def test_who_speaks_is_no_token(self):
        role = orjson.dumps(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        )
        record = feed(
            [role, event("chat", "a", "compact"), event("chat", "b", "compact"), usage(2)]
        )
        assert (record.first_token, record.sizes_known) == (1.0, True)

    def test_where_the_count_says_something_else_only_text_counts(self):
        texts = ("", "a", "", "bcd")
        record = feed([*(event("completions", text, "compact") for text in texts), usage(9)])
        assert (record.output_tokens, record.sizes_known, record.first_token) == (9, False, 1.0)
        assert record.gaps == array("d", [2.0])

    def test_tokens_without_any_text_come_when_their_events_do(self):
        """Special tokens alone, several to an event as of a server that is behind: they have times nevertheless."""
        record = feed([*(event("completions", "", "compact") for _ in range(3)), usage(6)])
        assert (record.output_tokens, record.sizes_known, record.first_token) == (6, False, 0.0)
        assert (record.tpot, record.token_gaps().tolist()) == (2.0 / 5, [0.5, 0.5])

    def test_no_tokens_have_no_times(self):
        record = feed([event("completions", "", "compact"), usage(0)])
        assert (record.output_tokens, record.first_token) == (0, None)


def usage(tokens):
    return orjson.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})


def event(kind, text, dumps):
    part = (
        {"index": 0, "text": text}
        if kind == "completions"
        else {"index": 0, "delta": {"content": text}}
    )
    made = orjson.dumps(
        {"id": "x", "model": "m", "choices": [part | {"finish_reason": None}], "usage": None}
    )
    return (
        made
        if dumps == "compact"
        else made.replace(b'":', b'": ')
        if b'x":"' not in text.encode()
        else made
    )


def feed(events, *, done=True):
    """The record of an answer that read one event each second."""
    answer = Answer(RequestRecord(0, scheduled=0.0), 0.0, Counts())
    for second, data in enumerate([*events, *[b"[DONE]"] * done]):
        answer.feed(b"data: " + data + b"\n\n", float(second))
    answer.finish()
    answer.settle()
    return answer.record


def listening(serve):
    """A server on a free port: `async with listening(serve) as url`."""

    class Listening:
        async def __aenter__(self):
            self.server = await asyncio.start_server(serve, "127.0.0.1", 0)
            return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

        async def __aexit__(self, *error):
            self.server.close()

    return Listening()


async def exchange(pieces):
    """(status, body of a refusal, streamed body) of an answer that comes in these pieces, and then the end."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    streamed = []
    async with listening(serve) as url, Http(url, None) as http:
        status, body = await http.post("/x", b"{}", lambda data, now: streamed.append(data))
    return status, body, b"".join(streamed)
