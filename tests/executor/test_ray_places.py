"""Ranks and engines on the machines of a Ray cluster."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.config.engine import ENGINE_VARIABLE, ParallelConfig
from toolkit.errors import ConfigError
from toolkit.executor.ray.actor import ActorPlace
from toolkit.executor.ray.cluster import Cluster
from toolkit.executor.ray.ranks import order, require_alike, visible_gpus

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def place(node: str, gpu: str = "", versions: str = "tk 1", has_model: bool = True) -> ActorPlace:
    return ActorPlace(node, (gpu,) if gpu else (), 4, versions, has_model)


@pytest.mark.parametrize(
    "found",
    [
        [("a", "0"), ("b", "0"), ("a", "1"), ("b", "1")],
        [("b", "7"), ("a", "2"), ("c", "0"), ("a", "0"), ("a", "5"), ("c", "3")],
        [("c", "1"), ("b", "0"), ("b", "4"), ("b", "2"), ("b", "3"), ("a", "6"), ("c", "0")],
    ],
)
def test_every_rank_has_its_own_gpu(found: list[tuple[str, str]]) -> None:
    """A worker takes visible device number `rank` modulo their count."""
    places = sorted((place(*one) for one in found), key=lambda one: order(one, "b"))
    taken = defaultdict(list)
    for rank, one in enumerate(places):
        seen = visible_gpus(one, places).split(",")
        taken[one.node].append(seen[rank % len(seen)])
    assert sorted((node, gpu) for node, gpus in taken.items() for gpu in gpus) == sorted(found)
    assert places[0].node == "b", "rank 0 is on the engine's machine"


def test_machines_without_the_model_are_reported() -> None:
    places = [place("a"), place("b", has_model=False), place("c", has_model=False)]
    with pytest.raises(ConfigError, match=r"no model in /models/x on 10\.0\.0\.2, 10\.0\.0\.3: "):
        require_alike(places, ADDRESSES, Path("/models/x"))


def test_different_versions_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1 has tk 1, 10\.0\.0\.2 has tk 2"):
        require_alike([place("a"), place("b", versions="tk 2")], ADDRESSES, Path("/models/x"))


def test_engines_are_spread_over_machines_that_can_hold_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(count: int) -> list[str | None]:
        found = []
        for engine in range(count):
            monkeypatch.setenv(ENGINE_VARIABLE, str(engine))
            parallel = ParallelConfig(tensor_parallel_size=4, data_parallel_size=count)
            found.append(cluster.own_node_for_engine("GPU", parallel))
        return found

    gpus = {"b": 8, "a": 4, "small": 2, "gone": 8, "none": 0}
    nodes = [
        {
            "NodeID": name,
            "Alive": name != "gone",
            "Resources": {"CPU": 9.0} | ({"GPU": n} if n else {}),
        }
        for name, n in gpus.items()
    ]
    cluster = Cluster.__new__(Cluster)
    cluster.ray = SimpleNamespace(nodes=lambda: nodes)
    assert chosen(1) == [None], "a single engine leaves the choice to Ray"
    assert sorted(chosen(2)) == ["a", "b"]
    assert sorted(chosen(4)) == ["a", "a", "b", "b"]
    nodes[:] = nodes[2:]
    assert chosen(2) == [None, None]
