"""Two models behind one server, in one process and with API workers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from tests import checkpoints
from tests.server import hook_environment
from toolkit.api.http.server import ServedModel, Server
from toolkit.config import EngineConfig, ServerConfig
from toolkit.engine.messages import RequestInfo, RequestList
from toolkit.errors import ConfigError, EngineDeadError, ServerUnavailableError
from toolkit.metrics import Metrics
from toolkit.sequence import Adapter
from toolkit.serving.front import LoadedModel, ModelSetup, SingleProcess
from toolkit.serving.stats_log import set_info_metrics
from toolkit.serving.supervisor import Supervisor

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.asyncio(loop_scope="module")]

MODELS = {"first": "gpt2", "second": "llama3-gqa"}  # names in the API, and architectures
PROMPT = [5, 17, 200, 31, 8]
NUM_TOKENS = 12


class Started:
    """A server of both models. The queue of "second" has one place."""

    def __init__(
        self, front: Any, models: list[LoadedModel], http: httpx.AsyncClient, hooks: Path
    ) -> None:
        self.front, self.models, self.http, self.hooks = front, models, http, hooks

    async def complete(self, model: str | None, **more: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        named = {} if model is None else {"model": model}
        asked = {"return_token_ids": True} | body | named | more
        return await self.http.post("/v1/completions", json=asked)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2])
async def started(
    checkpoint: Callable[[str], Path],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Started]:
    settings = {
        "num_threads": 1,
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 4,
        "device": "cpu",
    }
    setups = [
        ModelSetup(
            EngineConfig.from_settings({"model": str(checkpoint(folder)), **settings}),
            (name, f"{name}-too"),
            max_queue=1 if name == "second" else None,
        )
        for name, folder in MODELS.items()
    ]
    config = ServerConfig(api_workers=request.param, served_model_name=("first",))
    hooks = tmp_path_factory.mktemp("hooks")
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patch:
        for variable, value in hook_environment(hooks).items():
            patch.setenv(variable, value)
        front = (SingleProcess if request.param == 1 else Supervisor)(setups, config)
        try:
            models = await front.start(listener, lambda *_: None)
            set_info_metrics(front, models)
            host, port = listener.getsockname()
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=100) as http:
                yield Started(front, models, http, hooks)
            await front.shut_down("The test is over.")
        finally:
            await front.close()


def expected(name: str) -> list[int]:
    reference = checkpoints.make_reference(MODELS[name])
    return checkpoints.greedy(reference, PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("name", MODELS)
async def test_each_name_has_its_model(started: Started, name: str):
    for asked in (name, f"{name}-too"):
        answer = (await started.complete(asked)).json()
        assert answer["model"] == name
        assert answer["choices"][0]["token_ids"] == expected(name)


async def test_a_request_must_name_one_of_several_models(started: Started):
    missing = await started.complete(None)
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "model"
    served = "'first', 'first-too', 'second', 'second-too'"
    assert missing.json()["error"]["message"] == f"model is missing. Served: {served}."
    unknown = await started.complete("third")
    assert unknown.status_code == 404
    assert f"Served: {served}." in unknown.json()["error"]["message"]


async def test_lists_and_settings_have_both_models(started: Started):
    cards = (await started.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["first", "first-too", "second", "second-too"]
    infos = (await started.http.get("/server_info")).json()["models"]
    lengths = [info["device"]["max_model_len"] for info in infos]
    assert [info["model"] for info in infos] == [*MODELS]
    assert lengths == [model.info.max_model_len for model in started.models]
    assert (await started.http.get("/health")).status_code == 200
    assert (await started.http.get("/readyz")).status_code == 200
    for name in MODELS:
        told = (await started.http.get("/tokenizer_info", params={"model": name})).json()
        assert told["model_max_length"] == lengths[[*MODELS].index(name)]


async def test_metrics_are_those_of_each_model(started: Started):
    before = await counts(started)
    for name, times in (("first", 1), ("second", 2)):
        for _ in range(times):
            await started.complete(name)
    after = await counts(started)
    assert {name: after[name] - before[name] for name in MODELS} == {
        "first": NUM_TOKENS,
        "second": 2 * NUM_TOKENS,
    }


async def counts(started: Started) -> dict[str, float]:
    """Return the generated tokens of each model."""
    text = (await started.http.get("/metrics")).text
    found = dict.fromkeys(MODELS, 0.0)
    for line in text.splitlines():
        for name in MODELS:
            labels = f'{{engine="0",model_name="{name}"}}'
            if line.startswith(f"tk:generation_tokens_total{labels}"):
                found[name] = float(line.split()[-1])
    return found


async def test_a_limit_of_one_model_leaves_the_other_free(started: Started):
    many = {"n": 100, "temperature": 1, "max_tokens": 1, "return_token_ids": False}
    first, second = await asyncio.gather(*(started.complete(one, **many) for one in MODELS))
    assert first.status_code == 200
    assert second.status_code == 429
    assert "of at most 1, so 100 more answers" in second.json()["error"]["message"]


async def test_a_core_that_dies_is_that_of_one_model(started: Started):
    (started.hooks / "slow").touch()
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    streams = {}
    for name in MODELS:
        asked = body | {"model": name, "stream": True, "return_token_ids": True}
        streams[name] = asyncio.create_task(started.http.post("/v1/completions", json=asked))
    listed: list[dict[str, Any]] = []
    while len(listed) < 2:
        listed = (await started.http.get("/tk/requests")).json()["requests"]
    assert {one["model"] for one in listed} == {*MODELS}
    pools = getattr(started.front, "_models", None) or started.front._engines
    cores = [getattr(one, "_pool", None) or one.cores for one in pools]
    psutil.Process(cores[0].cores[0].link.pid).kill()
    (started.hooks / "slow").unlink()
    answers = {name: await stream for name, stream in streams.items()}
    for name, answer in answers.items():
        assert answer.status_code == 200
        assert "[DONE]" in answer.text, name
    assert (await started.complete("first")).json()["choices"][0]["token_ids"] == expected("first")
    text = (await started.http.get("/metrics")).text
    restarts = [line for line in text.splitlines() if line.startswith("tk:engine_restarts_total")]
    assert sorted(float(line.split()[-1]) for line in restarts) == [0.0, 1.0]


def model(name: str, **engine: Any) -> ServedModel:
    """Return a model whose engine is a stand-in."""
    adapters = SimpleNamespace(find=lambda _: None)
    config = SimpleNamespace(model=SimpleNamespace(model=name))
    parts = {"metrics": Metrics("tk", name), "adapters": adapters, "config": config} | engine
    return ServedModel(SimpleNamespace(**parts), (name,))


async def test_an_adapter_is_found_next_to_its_own_model() -> None:
    own = Adapter("mine", "folder", "1")
    found = SimpleNamespace(find=lambda name: own if name == "mine" else None)
    server = Server(ServerConfig(), [model("a"), model("b", adapters=found)])
    target = server.find("mine")
    assert (target.model.name, target.adapter, target.name) == ("b", own, "mine")


@pytest.mark.parametrize("num_requests", [0, 1])
async def test_requests_of_one_model_are_listed_while_another_restarts(num_requests: int) -> None:
    live = RequestInfo("x", "running", 1.0, 1, 0, 1, 1.0, 1, 0, 0, "")

    async def restarting() -> RequestList:
        raise ServerUnavailableError("The engine died and is being restarted.")

    async def running() -> RequestList:
        return RequestList(0, [live] * num_requests, 0.5)

    server = Server(
        ServerConfig(), [model("a", live_requests=restarting), model("b", live_requests=running)]
    )
    if not num_requests:
        with pytest.raises(ServerUnavailableError):
            await server.live_requests()
        return
    found = await server.live_requests()
    assert ([one.model for one in found.requests], found.kv_cache_usage) == (["b"], 0.5)


async def test_a_server_ends_when_one_of_its_models_is_lost() -> None:
    setups = [ModelSetup(EngineConfig(), (name,)) for name in MODELS]
    front = SingleProcess(setups, ServerConfig())
    waiting = asyncio.create_task(front._wait_for_deaths())
    await asyncio.sleep(0)
    assert (front.failure, front.failed.is_set()) == (None, False)
    lost = front._engines[1]
    lost.fatal_error = EngineDeadError("It was restarted 3 times in a row.")
    lost.died.set()
    await asyncio.wait_for(waiting, 10)
    assert front.failed.is_set()
    assert front.failure is lost.fatal_error


async def test_two_models_have_different_names() -> None:
    engine: Any = SimpleNamespace(metrics=Metrics("tk", "a"))
    with pytest.raises(ConfigError, match="Two models are called 'a'"):
        Server(ServerConfig(), [ServedModel(engine, ("a",)), ServedModel(engine, ("b", "a"))])
