"""The engine's process dies, and no answer is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import string
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.api.conftest import Reference
from tests.server import WAIT, Client, Server, gone, put_under_load, until

ENDLESS = 8000
PROMPTS = [f"Tale number {i}: " for i in range(30)]
TOKENS = 96


@pytest.fixture(scope="module")
def server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine three tests kill. Its steps verify drafts."""
    flags = ("--enable-prefix-caching", "--logits-processors", "plugged:Unseen")
    flags += ("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}')
    served = Server(str(model), *flags, cwd=tmp_path_factory.mktemp("recovery"), TEST_STEPS="equal")
    yield served
    served.stop()


class Answer:
    """Text, tokens and end of a stream, as its client receives them."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.tokens: list[str] = []
        self.error: str | None = None

    def add(self, line: str) -> None:
        event = json.loads(line.removeprefix("data: "))
        self.error = event.get("error", {}).get("message", self.error)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.tokens += (choice["logprobs"] or {}).get("tokens", [])


async def read(server: Server, body: dict[str, Any], answer: Answer) -> None:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=WAIT) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer.add(line)


async def ask(server: Server, bodies: list[dict[str, Any]], *, kill: bool) -> list[Answer]:
    """Stream all answers. `kill`: kill the engine when each has started."""
    return await streamed(server, bodies, server.cores[0].kill if kill else None)


async def streamed(
    server: Server, bodies: list[dict[str, Any]], harm: Callable[[], object] | None
) -> list[Answer]:
    """Stream all answers, and call `harm` when each has started and none has ended."""
    answers = [Answer() for _ in bodies]
    with server.slowly() if harm else contextlib.nullcontext():
        tasks = [
            asyncio.create_task(read(server, b, a)) for b, a in zip(bodies, answers, strict=True)
        ]
        if harm:
            async with asyncio.timeout(WAIT):
                while not all(answer.text for answer in answers):
                    await asyncio.sleep(0.001)
            assert not any(answer.finish_reason for answer in answers), "an answer ended too early"
            harm()
    await asyncio.gather(*tasks)
    return answers


def check_streams(
    server: Server, reference: Reference, harm: Callable[[], object] | None = None
) -> None:
    """Kill the engine while many streams run, for the first time."""
    bodies = [
        {"prompt": p, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} for p in PROMPTS
    ]
    answers = asyncio.run(streamed(server, bodies, harm or server.cores[0].kill))
    assert [a.text for a in answers] == reference.texts(PROMPTS, TOKENS)
    assert {(a.finish_reason, a.usage["completion_tokens"], a.error) for a in answers} == {
        ("length", TOKENS, None)
    }
    assert server.stderr.count("SIGKILL") == 1, "the cause is logged once"
    assert "Traceback" not in server.stderr


def num_complete(server: Server) -> float:
    return server.metric("tk:request_success_total", finished_reason="length")


def test_all_answers_survive_the_death_of_the_engine(server: Server, reference: Reference) -> None:
    """One answer is not streamed, and the request for another arrives while no engine runs."""
    clients: list[Client] = []

    def kill() -> None:
        clients.append(Client(server, 300, stream=False))
        until(lambda: server.metric("tk:num_requests_running") == len(PROMPTS) + 1)
        with server.holding("toolkit.engine.cores.core_process"):
            server.core.kill()
            until(lambda: "SIGKILL" in server.stderr)
            clients.append(Client(server, 5))
            until(lambda: clients[1].status == 200)

    check_streams(server, reference, kill)
    for client, num_tokens in zip(clients, (300, 5), strict=True):
        client.finish()
        assert (client.status, client.num_tokens, client.broken) == (200, num_tokens, None)
    until(lambda: num_complete(server) == len(PROMPTS) + 2)
    until(server.is_idle)
    assert server.metric("tk:generation_tokens_total") == len(PROMPTS) * TOKENS + 300 + 5


def test_request_options_hold_after_the_engine_s_death(server: Server) -> None:
    """Equal requests give the same answers with a death and without."""
    common = {"prompt": "Once more", "max_tokens": 120, "ignore_eos": True}
    bodies = [
        common | {"seed": 7, "temperature": 1.0},
        common | {"seed": 2**63 - 1, "temperature": 0.8, "top_p": 0.9},
        common | {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        common | {"seed": 3, "frequency_penalty": 0.7, "logprobs": 2},
        common | {"seed": 4, "min_tokens": 100, "stop": list(string.ascii_letters)},
        common
        | {"seed": 6, "structured_outputs": {"regex": "([a-f]{3}-){30}"}, "ignore_eos": False},
        common | {"seed": 5, "logit_bias": {"65": 3.0}, "stop": ["an end that does not come"]},
        common | {"seed": 8, "vllm_xargs": {"unseen": True}, "logprobs": 0},
    ]
    without = asyncio.run(ask(server, bodies, kill=False))
    with_death = asyncio.run(ask(server, bodies, kill=True))
    for one, other in zip(without, with_death, strict=True):
        assert (one.text, one.finish_reason, one.tokens) == (
            other.text,
            other.finish_reason,
            other.tokens,
        )
        assert one.usage["completion_tokens"] == other.usage["completion_tokens"]
    assert without[4].finish_reason == "stop"
    letters = [character for character in without[7].text if character.isascii()]
    assert len(letters) == len(set(letters)), "the processor ran"


def test_drafts_follow_the_engine_s_death(server: Server) -> None:
    """One stream, in which about a third of the drafts are right."""
    accepted = "tk:spec_decode_num_accepted_tokens_total"
    body = {"prompt": "Once more", "max_tokens": 120, "ignore_eos": True}
    body |= {"seed": 9, "allowed_token_ids": [65, 66]}
    (without,) = asyncio.run(ask(server, [body], kill=False))
    before = server.metric(accepted)
    (with_death,) = asyncio.run(ask(server, [body], kill=True))
    assert with_death.text == without.text
    until(lambda: server.metric(accepted) > before + 20)


def test_an_engine_that_keeps_dying_ends_the_server_with_the_cause(
    start: Callable[..., Server], model: Any, reference: Reference
) -> None:
    """An open request survives two deaths. The fourth death in a row ends the server."""
    server = start("--api-workers", "2", model=model)
    with server.slowly():
        clients = put_under_load(server, ENDLESS)
    check_streams(server, reference)
    until(lambda: num_complete(server) == len(PROMPTS))
    with server.slowly():
        for death in range(1, 4):
            until(lambda n=death: server.stderr.count("runs again") == n)
            [core] = server.cores
            if death == 3:
                clients += put_under_load(server, ENDLESS)
            core.kill()
            until(lambda c=core: gone(c))
        for client in clients:
            client.finish()
            assert client.broken is None
            assert client.num_tokens is None
    assert [c.status for c in clients] == [500, 200, 200, 200, 503, 200, 200, 200]
    assert all("died 3 times" in c.error for c in clients[:4])
    assert all("SIGKILL" in c.error for c in clients[4:])
    assert server.wait() not in (0, None)
    assert "SIGKILL" in server.stderr.splitlines()[-1]
    assert "Traceback" not in server.stderr
