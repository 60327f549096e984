"""Client processes, their HTTP client, and the counting of tokens."""

from __future__ import annotations

import asyncio
import os
from array import array

import orjson
import pytest

from tests.bench.test_bench_run import interrupt
from toolkit.bench.load.answer_stream import LiveCounts, StreamTimer
from toolkit.bench.load.http_client import HTTPClient
from toolkit.bench.load.processes import ClientProcesses
from toolkit.bench.load.record import RequestRecord
from toolkit.bench.load.share import LoadJob, choose_num_clients
from toolkit.bench.run import measure, resolve_config
from toolkit.client.wire import RequestFailedError
from toolkit.config.load import BenchConfig


def config(server, **settings):
    return BenchConfig(
        **{"url": server.url, "random_input_len": 8, "random_output_len": 4} | settings
    )


class TestProcesses:
    async def test_several_send_the_same_requests_as_one(self, server):
        await measure(config(server, request_rate=200.0, num_prompts=21, seed=0))
        alone, server.bodies = server.bodies, []
        outcome = await measure(
            config(server, request_rate=200.0, num_prompts=21, clients=2, seed=0)
        )
        result = outcome.result
        assert sorted(record.number for record in outcome.records) == list(range(21))
        assert sorted(b["prompt"] for b in server.bodies) == sorted(b["prompt"] for b in alone)
        assert (result.num_clients, result.num_succeeded, result.output_tokens) == (2, 21, 84)
        assert result.latencies.itl.count == 21 * 3

    async def test_they_share_max_concurrency(self, server):
        server.delay = 0.1
        outcome = await measure(config(server, max_concurrency=5, num_prompts=20, clients=2))
        result = outcome.result
        assert sorted(record.number for record in outcome.records) == list(range(20))
        assert result.num_succeeded == 20
        assert result.max_in_flight <= 5

    async def test_they_start_together(self, server):
        """No client waits for another's answer."""
        server.hold = 8
        async with asyncio.timeout(60):
            result = (await measure(config(server, num_prompts=8, clients=2))).result
        assert result.max_in_flight == 8

    @pytest.mark.parametrize(
        ("clients", "metrics", "asks"),
        [
            (1, "vllm:spec_decode_num_draft_tokens_total 7\n", True),
            (1, 'tk:config_info{speculative_config="ngram"} 1\n', True),
            (1, 'tk:spec_decode_num_draft_tokens_total 0\ntk:config_info{model="m"} 1\n', False),
            (2, "vllm:spec_decode_num_draft_tokens_total 7\n", True),
        ],
    )
    async def test_events_of_a_server_with_drafts_shall_count_tokens(
        self, server, clients, metrics, asks
    ):
        server.metrics_pages = [metrics] * 2
        server.tokens_per_chunk, server.running_usage = 2, asks
        outcome = await measure(config(server, num_prompts=2, clients=clients, num_warmups=0))
        expected = {"include_usage": True} | ({"continuous_usage_stats": True} if asks else {})
        assert [body["stream_options"] for body in server.bodies] == [expected] * 2
        assert outcome.result.has_token_counts == asks

    async def test_ctrl_c_stops_all_and_still_reports(self, server):
        server.hold = 7  # so that none of six is answered
        running = measure(config(server, num_prompts=6, clients=2))
        outcome, _ = await asyncio.gather(running, interrupt(server, 6))
        assert outcome.interrupted
        assert outcome.result.num_unfinished == 6

    async def test_terminal_ctrl_c_does_not_reach_them(self, server):
        """Only the parent gets the signal and stops them, even while they still import modules."""
        async with ClientProcesses.started(
            LoadJob(resolve_config(config(server))[0], "fake"), 2
        ) as processes:
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
    def test_number_follows_the_load_and_the_cores(self, settings, cores, expected):
        assert choose_num_clients(*resolve_config(BenchConfig(**settings)), cores) == expected


class TestHTTPClient:
    @pytest.mark.parametrize("size", [1, 7, 10_000])
    async def test_body_does_not_depend_on_the_size_of_reads(self, size):
        answer = (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"
        )
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert await exchange(pieces) == (200, b"", b"hello, world")

    async def test_error_body_is_not_streamed(self):
        answer = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"
        assert await exchange([answer]) == (503, b"busy", b"")

    async def test_body_without_length_ends_with_the_connection(self):
        assert await exchange([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"]) == (
            200,
            b"",
            b"hello",
        )

    @pytest.mark.parametrize(
        ("pieces", "cause"),
        [
            ([], "connection closed by the server"),
            ([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello"], "incomplete answer"),
            (
                [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel"],
                "incomplete answer",
            ),
            ([b"no HTTP at all\r\n\r\n"], "malformed response"),
        ],
    )
    async def test_incomplete_response_is_an_error(self, pieces, cause):
        with pytest.raises(RequestFailedError) as caught:
            await exchange(pieces)
        assert caught.value.cause == cause

    async def test_connections_are_reused(self):
        connections = []

        async def serve(reader, writer):
            connections.append(writer)
            while await reader.read(4096):  # a complete request: they are short
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            writer.close()

        async with listening(serve) as url, HTTPClient(url, None) as http:
            for _ in range(3):
                assert await http.get("/x", timeout=60.0) == (200, b"ok")
        assert len(connections) == 1

    async def test_refused_connection_is_an_error(self, unused_tcp_port):
        async with HTTPClient(f"http://127.0.0.1:{unused_tcp_port}", None) as http:
            with pytest.raises(RequestFailedError) as caught:
                await http.get("/", timeout=60.0)
        assert caught.value.cause == "cannot connect"


class TestCounting:
    """Events that are not parsed count like those that are."""

    TEXTS = ("a", " b", "", '"', "\\", "\n", "é", '","x":"', "a\\", "text", "m", "日本")

    @pytest.mark.parametrize("kind", ["completions", "chat"])
    @pytest.mark.parametrize("dumps", ["compact", "spaced"])
    def test_event_with_text_counts_as_one_token(self, kind, dumps):
        texts = [text for _ in range(3) for text in self.TEXTS]
        record = feed([event(kind, text, dumps) for text in texts])
        assert record.output_tokens == sum(map(bool, texts))
        assert len(record.chunk_gaps) == record.output_tokens - 1
        assert not record.has_token_counts  # the server reported none

    def test_event_with_other_fields_is_parsed(self):
        plain = [event("completions", text, "compact") for text in ("a", "b")]
        last = orjson.dumps({"choices": [{"index": 0, "text": "c", "finish_reason": "stop"}]})
        assert feed([*plain, last]).output_tokens == 3

    def test_error_in_the_stream_is_raised(self):
        plain = [event("completions", text, "compact") for text in ("a", "b")]
        with pytest.raises(RequestFailedError, match="it broke"):
            feed([*plain, orjson.dumps({"error": {"message": "it broke"}})])

    def test_stream_without_an_end_is_incomplete(self):
        with pytest.raises(RequestFailedError) as caught:
            feed([event("completions", "a", "compact")], done=False)
        assert caught.value.cause == "incomplete answer"

    def test_running_usage_counts_the_tokens_of_each_chunk(self):
        def piece(tokens):
            usage = {"prompt_tokens": 1, "completion_tokens": tokens}
            return orjson.dumps({"choices": [{"index": 0, "text": "x"}], "usage": usage})

        record = feed([piece(2), piece(5), piece(6)])
        assert (record.output_tokens, record.has_token_counts) == (6, True)
        assert (record.chunk_gaps, record.chunk_tokens) == (
            array("d", [1.0, 1.0]),
            array("q", [3, 1]),
        )

    @pytest.mark.parametrize(
        "counts", [{"prompt_tokens": None, "completion_tokens": None}, {"other": 1}]
    )
    def test_missing_usage_counts_are_ignored(self, counts):
        pieces = [event("completions", text, "compact") for text in ("a", "b")]
        record = feed([*pieces, orjson.dumps({"choices": [], "usage": counts})])
        assert (record.output_tokens, record.prompt_tokens, record.has_token_counts) == (
            2,
            0,
            False,
        )

    def test_usage_count_must_be_a_number(self):
        counts = {"prompt_tokens": "3", "completion_tokens": "4"}
        with pytest.raises(RequestFailedError, match="malformed event"):
            feed([orjson.dumps({"choices": [], "usage": counts})])

    def test_decreasing_running_count_adds_no_tokens(self):
        def piece(tokens):
            counts = {"prompt_tokens": 1, "completion_tokens": tokens}
            return orjson.dumps({"choices": [{"index": 0, "text": "x"}], "usage": counts})

        assert feed([piece(2), piece(1), piece(3)]).token_gaps().min() >= 0

    def test_token_ids_count_the_tokens_of_each_chunk(self):
        pieces = [
            {"choices": [{"index": 0, "text": "x", "token_ids": ids}]}
            for ids in ([1, 2], [], [3], [4, 5])
        ]
        record = feed([orjson.dumps(piece) for piece in pieces])
        assert (record.output_tokens, record.has_token_counts) == (5, True)
        assert (record.chunk_gaps, record.chunk_tokens) == (
            array("d", [2.0, 1.0]),
            array("q", [1, 2]),
        )

    @pytest.mark.parametrize("kind", ["completions", "chat"])
    def test_event_without_text_is_a_token_if_the_usage_agrees(self, kind):
        """The text of half a character, or of a possible stop string, follows in a later event."""
        texts = ("", "a", "", "b")
        record = feed([*(event(kind, text, "compact") for text in texts), usage(4)])
        assert (record.output_tokens, record.has_token_counts) == (4, True)
        assert (record.first_token, record.chunk_gaps) == (0.0, array("d", [1.0, 1.0, 1.0]))

    @pytest.mark.parametrize("tokens", [3, 4])
    def test_last_event_without_text_is_a_token_if_the_usage_agrees(self, tokens):
        end = orjson.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        record = feed(
            [
                *(event("completions", text, "compact") for text in ("a", "", "b")),
                end,
                usage(tokens),
            ]
        )
        assert (record.has_token_counts, len(record.chunk_gaps)) == (True, tokens - 1)
        assert record.last_token == tokens - 1.0

    def test_role_is_not_a_token(self):
        role = orjson.dumps(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        )
        record = feed(
            [role, event("chat", "a", "compact"), event("chat", "b", "compact"), usage(2)]
        )
        assert (record.first_token, record.has_token_counts) == (1.0, True)

    def test_only_text_counts_if_the_usage_disagrees(self):
        texts = ("", "a", "", "bcd")
        record = feed([*(event("completions", text, "compact") for text in texts), usage(9)])
        assert (record.output_tokens, record.has_token_counts, record.first_token) == (
            9,
            False,
            1.0,
        )
        assert record.chunk_gaps == array("d", [2.0])

    def test_tokens_without_any_text_have_the_times_of_their_events(self):
        """An answer of special tokens alone, several per event."""
        record = feed([*(event("completions", "", "compact") for _ in range(3)), usage(6)])
        assert (record.output_tokens, record.has_token_counts, record.first_token) == (
            6,
            False,
            0.0,
        )
        assert (record.tpot, record.token_gaps().tolist()) == (2.0 / 5, [0.5, 0.5])

    def test_answer_without_tokens_has_no_times(self):
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
    data = orjson.dumps(
        {"id": "x", "model": "m", "choices": [part | {"finish_reason": None}], "usage": None}
    )
    if dumps == "compact" or b'x":"' in text.encode():
        return data
    return data.replace(b'":', b'": ')


def feed(events, *, done=True):
    """Return the record of an answer that read one event each second."""
    timer = StreamTimer(RequestRecord(0, scheduled=0.0), 0.0, LiveCounts())
    for second, data in enumerate([*events, *[b"[DONE]"] * done]):
        timer.feed(b"data: " + data + b"\n\n", float(second))
    timer.check_complete()
    timer.write_record()
    return timer.record


def listening(serve):
    """Serve on a free port: `async with listening(serve) as url`."""

    class Listening:
        async def __aenter__(self):
            self.server = await asyncio.start_server(serve, "127.0.0.1", 0)
            return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

        async def __aexit__(self, *error):
            self.server.close()

    return Listening()


async def exchange(pieces):
    """Receive a response in these pieces. Return (status, error body, streamed body)."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    streamed = []
    async with listening(serve) as url, HTTPClient(url, None) as http:
        status, body = await http.post("/x", b"{}", lambda data, now: streamed.append(data))
    return status, body, b"".join(streamed)
