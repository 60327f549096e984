"""Several client processes, and the HTTP that they speak."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array

import orjson
import pytest

from toolkit.bench.client import Counts, _Answer
from toolkit.bench.http import Http
from toolkit.bench.record import RequestRecord
from toolkit.bench.run import measure
from toolkit.bench.share import number_of_clients
from toolkit.bench.wire import RequestFailedError
from toolkit.config.clients import BenchConfig


def config(server, **settings):
    return BenchConfig(**{"url": server.url, "random_input_len": 8, "random_output_len": 4} | settings)


class TestProcesses:
    async def test_together_they_send_what_one_would(self, server):
        await measure(config(server, request_rate=200.0, num_prompts=21))
        alone, server.bodies = server.bodies, []
        result = (await measure(config(server, request_rate=200.0, num_prompts=21, clients=3))).result
        assert sorted(b["prompt"] for b in server.bodies) == sorted(b["prompt"] for b in alone)
        assert (result.num_clients, result.num_succeeded, result.output_tokens) == (3, 21, 84)
        assert result.itl.count == 21 * 3

    async def test_they_share_the_places(self, server):
        server.delay = 0.1
        result = (await measure(config(server, max_concurrency=5, num_prompts=20, clients=2))).result
        assert result.num_succeeded == 20
        assert result.max_in_flight <= 5

    async def test_they_begin_together(self, server):
        server.delay = 0.5
        result = (await measure(config(server, num_prompts=8, clients=4))).result
        assert result.max_in_flight == 8
        assert result.send_lag.max < 0.4

    async def test_ctrl_c_ends_them_all_and_still_reports(self, server):
        server.delay = 30.0
        asyncio.get_running_loop().call_later(4.0, os.kill, os.getpid(), signal.SIGINT)
        outcome = await measure(config(server, num_prompts=6, clients=2))
        assert outcome.interrupted
        assert outcome.result.num_unfinished == 6

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
    def test_there_are_as_many_as_the_load_needs_and_the_cores_allow(self, settings, cores, expected):
        assert number_of_clients(BenchConfig(**settings), cores) == expected


class TestHttp:
    """Against a server that writes what the test says."""

    @pytest.mark.parametrize("size", [1, 7, 10_000])
    async def test_a_body_is_the_same_however_it_is_cut(self, size):
        answer = (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"
        )
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert await exchange(pieces) == (200, b"", b"hello, world")

    async def test_a_refusals_body_is_no_part_of_the_stream(self):
        answer = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"
        assert await exchange([answer]) == (503, b"busy", b"")

    async def test_a_body_without_a_length_ends_with_the_connection(self):
        assert await exchange([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"]) == (200, b"", b"hello")

    @pytest.mark.parametrize(
        ("pieces", "cause"),
        [
            ([], "connection closed by the server"),
            ([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello"], "answer broken off"),
            ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel"], "answer broken off"),
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
                assert await http.get("/x", timeout=5.0) == (200, b"ok")
        assert len(connections) == 1

    async def test_nobody_there(self, unused_tcp_port):
        async with Http(f"http://127.0.0.1:{unused_tcp_port}", None) as http:
            with pytest.raises(RequestFailedError) as caught:
                await http.get("/", timeout=5.0)
        assert caught.value.cause == "cannot connect"


class TestCounting:
    """The events that are not parsed count as those that are."""

    TEXTS = ("a", " b", "", '"', "\\", "\n", "é", '","x":"', "a\\", "text", "m", "日本")

    @pytest.mark.parametrize("kind", ["completions", "chat"])
    @pytest.mark.parametrize("dumps", ["compact", "spaced"])
    def test_every_event_counts_one_token_where_it_has_text(self, kind, dumps):
        texts = [text for _ in range(3) for text in self.TEXTS]
        answer = feed([event(kind, text, dumps) for text in texts])
        assert answer.counted == sum(map(bool, texts))
        assert len(answer.record.gaps) == answer.counted - 1

    def test_an_event_that_says_more_is_parsed(self):
        usual = [event("completions", text, "compact") for text in ("a", "b")]
        last = orjson.dumps({"choices": [{"index": 0, "text": "c", "finish_reason": "stop"}]})
        answer = feed([*usual, last])
        assert (answer.counted, answer.complete) == (3, True)

    def test_an_error_in_the_stream_is_not_passed_over(self):
        usual = [event("completions", text, "compact") for text in ("a", "b")]
        with pytest.raises(RequestFailedError, match="it broke"):
            feed([*usual, orjson.dumps({"error": {"message": "it broke"}})])

    def test_running_usage_counts_the_tokens_of_each_piece(self):
        def piece(tokens):
            usage = {"prompt_tokens": 1, "completion_tokens": tokens}
            return orjson.dumps({"choices": [{"index": 0, "text": "x"}], "usage": usage})

        answer = feed([piece(2), piece(5), piece(6)])
        assert answer.counted == 6
        assert answer.record.gaps == array("d", [1 / 3, 1 / 3, 1 / 3, 1.0])


def event(kind, text, dumps):
    part = {"index": 0, "text": text} if kind == "completions" else {"index": 0, "delta": {"content": text}}
    made = orjson.dumps({"id": "x", "model": "m", "choices": [part | {"finish_reason": None}], "usage": None})
    return (
        made if dumps == "compact" else made.replace(b'":', b'": ') if b'x":"' not in text.encode() else made
    )


def feed(events):
    """An answer that read one event each second."""
    answer = _Answer(RequestRecord(scheduled=0.0), 0.0, Counts())
    for second, data in enumerate(events):
        answer.feed(b"data: " + data + b"\n\n", float(second))
    return answer


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
