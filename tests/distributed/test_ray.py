"""A model on a Ray cluster of two nodes with one CPU each. Its ranks are actors."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests import checkpoints
from tests.api.conftest import CONTEXT, Reference
from tests.server import INSIDE, Server, command, gone, until
from tests.serving.test_ranks import PROMPTS, TOKENS, ask
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.errors import ConfigError, WorkersLostError
from toolkit.executor.ray import cluster as ray_cluster

RAY = {"distributed_executor_backend": "ray", "num_threads": 1}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def folder(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.save(reference.model, tmp_path_factory.mktemp("models") / "tiny-llama")
    checkpoints.edit_json(folder / "config.json", max_position_embeddings=CONTEXT)
    return folder


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the hooks in the actors (`tests/inside`)."""
    return tmp_path_factory.mktemp("hooks")


@pytest.fixture(scope="module")
def cluster(hooks: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        # A token would be in the home folder, which differs between tests.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(INSIDE), prepend=os.pathsep)
        patch.setenv("TEST_HOOKS", str(hooks))
        node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
        head = {"include_dashboard": False, "no_monitor": True} | node
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**node)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def server(
    cluster: Cluster, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of two engines."""
    flags = ("--distributed-executor-backend", "ray", "--data-parallel-size", "2")
    served = Server(str(folder), *flags, cwd=tmp_path_factory.mktemp("cwd"))
    yield served
    served.stop()


def actors() -> list[psutil.Process]:
    """Return the cluster's actors. Its nodes are child processes."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if command(process)[:1] == ["ray::RankActor.run"]
    ]


def test_streams_of_two_engines_survive_a_killed_actor(
    server: Server, reference: Reference, hooks: Path
) -> None:
    """Tokens before and after equal those of one process. The other engine keeps running."""
    before = actors()
    assert len({rank.ppid() for rank in before}) == len(before) == 2, "each engine has its own node"
    assert server.http.get("/server_info").json()["models"][0]["device"]["world_size"] == 1

    def kill() -> None:
        before[0].kill()
        (hooks / "slow").unlink()

    (hooks / "slow").touch()
    answers = ask(server, kill)
    assert [a.text for a in answers] == reference.texts(PROMPTS, TOKENS)
    assert {a.error for a in answers} == {None}
    until(lambda: gone(before[0]))
    until(lambda: len(actors()) == 2)
    assert before[1] in actors()
    server.await_health()
    assert server.stderr.count("ended unexpectedly") == 1, "the cause is logged once"
    assert "Traceback" not in server.stderr
    assert server.popen.poll() is None


def test_too_many_devices_are_refused_with_those_of_the_cluster(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "ROOM_NOTICE", 0.2)
    monkeypatch.setattr(ray_cluster, "ROOM_TIMEOUT", 0.5)
    with pytest.raises(
        ConfigError,
        match=r"needs 4 CPUs, and the Ray cluster has 0 free of 2 \(.* has 1, .* has 1\)",
    ):
        LLM(str(folder), tensor_parallel_size=4, **RAY)
    assert len(actors()) == 2, "running ranks are not affected"


def test_a_killed_server_leaves_no_process(server: Server) -> None:
    everything = [*psutil.Process(server.pid).children(recursive=True), *actors()]
    assert len(everything) >= 4
    server.signal(signal.SIGKILL)
    until(lambda: all(gone(process) for process in everything))


def test_every_node_has_a_rank_and_none_outlives_another(
    cluster: Cluster, folder: Path, reference: Reference
) -> None:
    llm = LLM(str(folder), tensor_parallel_size=2, **RAY)
    ranks = actors()
    assert llm.info.world_size == len(ranks) == 2
    assert len({rank.ppid() for rank in ranks}) == 2, "each node starts its own processes"
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert tuple(result.outputs[0].token_ids) == reference.tokens(prompt, TOKENS)[:24]
    ranks[1].kill()
    with pytest.raises(WorkersLostError, match="ended unexpectedly"):
        llm.generate(PROMPTS, params, use_tqdm=False)
    llm.shutdown()
    until(lambda: all(gone(rank) for rank in ranks))


def test_stages_on_two_nodes_equal_one_process(cluster: Cluster, folder: Path) -> None:
    """The last stage sends tokens, log-probabilities and grammar-bound tokens; no rank remains."""
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2),
        SamplingParams(
            seed=3, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{6}")
        ),
        SamplingParams(temperature=0.9, seed=1, max_tokens=24, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (1, 30, 7)]
    found = []
    for settings in ({"num_threads": 1}, RAY | {"pipeline_parallel_size": 2}):
        llm = LLM(str(folder), num_gpu_blocks_override=200, **settings)
        found.append([result.outputs[0] for result in llm.generate(prompts, kinds, use_tqdm=False)])
        ranks = actors()
        assert (
            len(ranks) == llm.info.world_size if "pipeline_parallel_size" in settings else not ranks
        )
        llm.shutdown()
    single, staged = found
    assert [one.token_ids for one in staged] == [one.token_ids for one in single]
    for ours, expected in zip(staged[0].logprobs, single[0].logprobs, strict=True):
        assert {t: lp.logprob for t, lp in ours.items()} == pytest.approx(
            {t: lp.logprob for t, lp in expected.items()}, abs=1e-4
        )
    until(lambda: all(gone(rank) for rank in ranks))


def test_an_address_without_a_cluster_is_reported_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        ConfigError, match=f"RAY_ADDRESS is {address}, and no Ray cluster answers there"
    ):
        LLM(str(folder), **RAY)


def test_without_a_cluster_the_error_names_the_start_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", no_cluster)
    with pytest.raises(
        ConfigError, match=r"No Ray cluster runs here, .* ray start --head starts one"
    ):
        LLM(str(folder), **RAY)


def no_cluster(**options: object) -> None:
    """Raise Ray's error for no cluster. This machine may have one."""
    assert options["address"] == "auto"
    raise ConnectionError(
        "Could not find any running Ray instance. Please specify the one to connect to."
    )


def test_without_ray_the_error_names_the_install_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[ray\]' in tk's checkout"):
        LLM(str(folder), **RAY)
