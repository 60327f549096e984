"""A model served by a Ray cluster of two nodes, with one CPU each: its ranks are actors, one on each."""

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
from tests.server import INSIDE, Server, gone, until
from tests.serving.test_ranks import PROMPTS, TOKENS, ask
from toolkit import LLM, SamplingParams, StructuredOutputsParams
from toolkit.errors import ConfigError
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
def in_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What holds back the actors' steps (`tests/api/inside`)."""
    return tmp_path_factory.mktemp("in-hand")


@pytest.fixture(scope="module")
def cluster(in_hand: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Its token would be in a home folder, and tests have several.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(INSIDE), prepend=os.pathsep)
        patch.setenv("IN_HAND", str(in_hand))
        node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False} | node)
        cluster.add_node(**node)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def server(
    cluster: Cluster, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    served = Server(
        str(folder),
        "--distributed-executor-backend",
        "ray",
        "--tensor-parallel-size",
        "2",
        cwd=tmp_path_factory.mktemp("cwd"),
    )
    yield served
    served.stop()


def actors() -> list[psutil.Process]:
    """Of the cluster, whose nodes are processes of this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] == ["ray::RankActor.run"]:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_every_node_has_a_rank(server: Server) -> None:
    assert server.http.get("/server_info").json()["device"]["world_size"] == 2
    assert len({rank.ppid() for rank in actors()}) == 2, "each node starts its own processes"
    assert server.http.get("/health").status_code == 200


def test_streams_outlive_an_actor(server: Server, reference: Reference, in_hand: Path) -> None:
    """Before and after, the tokens are those of one process."""
    before = actors()

    def harm() -> None:
        before[1].kill()
        (in_hand / "slow").unlink()

    (in_hand / "slow").touch()
    answers = ask(server, harm)
    assert [a.text for a in answers] == [reference.text(p, TOKENS) for p in PROMPTS]
    assert {a.error for a in answers} == {None}
    assert server.stderr.count("ended without a word") == 1, "the cause is told once"
    assert "Traceback" not in server.stderr
    until(lambda: all(gone(rank) for rank in before))
    assert len(actors()) == 2
    assert server.popen.poll() is None


def test_more_devices_than_the_cluster_has_are_refused_with_what_it_has(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "SOON", 0.2)
    monkeypatch.setattr(ray_cluster, "PATIENCE", 0.5)
    with pytest.raises(
        ConfigError,
        match=r"needs 4 CPUs, and the Ray cluster has 0 free of 2 \(.* has 1, .* has 1\)",
    ):
        LLM(str(folder), tensor_parallel_size=4, **RAY)
    assert len(actors()) == 2, "what runs there goes on"


def test_nothing_is_left_of_a_server_that_is_killed(server: Server) -> None:
    everything = [*psutil.Process(server.pid).children(recursive=True), *actors()]
    assert len(everything) >= 3
    server.signal(signal.SIGKILL)
    until(lambda: all(gone(process) for process in everything))


def test_engines_on_two_nodes_answer_as_one_process_does_and_outlive_an_actor(
    cluster: Cluster, folder: Path, reference: Reference, in_hand: Path, tmp_path: Path
) -> None:
    served = Server(
        str(folder),
        "--distributed-executor-backend",
        "ray",
        "--data-parallel-size",
        "2",
        cwd=tmp_path,
    )
    try:
        before = actors()
        assert len({rank.ppid() for rank in before}) == len(before) == 2, (
            "each engine is on a node of its own"
        )

        def harm() -> None:
            before[0].kill()
            (in_hand / "slow").unlink()

        (in_hand / "slow").touch()
        answers = ask(served, harm)
        assert [a.text for a in answers] == [reference.text(p, TOKENS) for p in PROMPTS]
        assert {a.error for a in answers} == {None}
        until(lambda: len(actors()) == 2)
        assert before[1] in actors(), "the other engine goes on"
        assert served.http.get("/health").status_code == 200
        everything = [*psutil.Process(served.pid).children(recursive=True), *actors()]
    finally:
        served.stop()
    until(lambda: all(gone(process) for process in everything))


def test_stages_on_two_nodes_give_what_one_process_gives(cluster: Cluster, folder: Path) -> None:
    """The last stage tells tokens, log-probabilities and what follows a grammar; nothing is left of the ranks at the end."""
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
    alone, staged = found
    assert [one.token_ids for one in staged] == [one.token_ids for one in alone]
    for mine, theirs in zip(staged[0].logprobs, alone[0].logprobs, strict=True):
        assert {t: lp.logprob for t, lp in mine.items()} == pytest.approx(
            {t: lp.logprob for t, lp in theirs.items()}, abs=1e-4
        )
    until(lambda: all(gone(rank) for rank in ranks))


def test_an_address_without_a_cluster_is_said_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        ConfigError, match=f"RAY_ADDRESS is {address}, and no Ray cluster answers there"
    ):
        LLM(str(folder), **RAY)


def test_where_there_is_no_cluster_it_is_said_how_to_start_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", refused)
    with pytest.raises(
        ConfigError, match=r"No Ray cluster runs here, .* ray start --head starts one"
    ):
        LLM(str(folder), **RAY)


def refused(**options: object) -> None:
    """What Ray says where it finds nothing; this machine may have a cluster of somebody's."""
    assert options["address"] == "auto"
    raise ConnectionError(
        "Could not find any running Ray instance. Please specify the one to connect to."
    )


def test_without_ray_it_is_said_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'tk-llm\[ray\]'"):
        LLM(str(folder), **RAY)
