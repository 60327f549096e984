"""Start parameters of each of several engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit import LLM
from toolkit.config import EngineConfig
from toolkit.config.engine import MEMORY_VARIABLE
from toolkit.engine.cores import launch
from toolkit.engine.cores.launch import StartupPhases, plan_launches
from toolkit.errors import ConfigError, OutOfMemoryError
from toolkit.hardware.devices import Device
from toolkit.logs import LogStyle
from toolkit.sequence import Adapter


def environments(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> list[dict[str, str]]:
    monkeypatch.setattr(launch, "find_gpus", lambda: [object()] * num_gpus)
    config = EngineConfig.from_settings(settings)
    return [dict(one.environment) for one in plan_launches(config, Path("model"), LogStyle())]


def gpus(environments: list[dict[str, str]]) -> list[str]:
    assert all(MEMORY_VARIABLE in one for one in environments), "torch may have no driver for them"
    return [one["CUDA_VISIBLE_DEVICES"] for one in environments]


def test_each_engine_has_its_own_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(environments(8, monkeypatch, data_parallel_size=2)) == ["0", "1"]
    several = environments(
        8, monkeypatch, data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2
    )
    assert gpus(several) == ["0,1,2,3", "4,5,6,7"]


@pytest.mark.parametrize(
    ("visible", "seen", "expected"),
    [
        ("5,3", 2, ("5", "3")),
        ("GPU-8a, GPU-77", 2, ("GPU-8a", "GPU-77")),
        ("4,2,99,7", 2, ("4", "2")),  # CUDA stops at the first GPU that does not exist
        ("MIG-1,MIG-2", 0, ("MIG-1", "MIG-2")),
    ],
)
def test_gpus_are_chosen_from_the_visible_ones(monkeypatch, visible, seen, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus(environments(seen, monkeypatch, data_parallel_size=2)) == list(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data_parallel_size": 5},
            "needs 5 GPUs; this machine has 4. At most --data-parallel-size 4 fits",
        ),
        (
            {"data_parallel_size": 3, "tensor_parallel_size": 2},
            "At most --data-parallel-size 2 fits",
        ),
        ({"data_parallel_size": 2, "tensor_parallel_size": 8}, "Not even one such engine fits"),
    ],
)
def test_too_few_gpus_are_refused_with_what_fits(monkeypatch, settings, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=message):
        environments(4, monkeypatch, **settings)
    on_cpus = environments(4, monkeypatch, device="cpu", **settings)
    assert [list(one) for one in on_cpus] == [[MEMORY_VARIABLE]] * settings["data_parallel_size"]


def test_cpu_engines_share_the_free_memory_equally(monkeypatch):
    """The share is of the memory free at the server's start. A restarted engine gets the same."""
    monkeypatch.setattr(launch, "find_device", lambda kind: Device(kind, kind, 100, 61))
    assert environments(0, monkeypatch, data_parallel_size=3) == [{MEMORY_VARIABLE: "20"}] * 3


def test_an_engine_on_a_cpu_keeps_within_its_share(monkeypatch, checkpoint):
    """Its weights must fit, and the cache gets 0.4 of the rest."""
    folder, blocks = str(checkpoint("llama3-gqa")), {"max_num_seqs": 256, "max_model_len": 100}
    weights = LLM(folder, device="cpu", num_gpu_blocks_override=10).info.weight_bytes
    monkeypatch.setenv(MEMORY_VARIABLE, str(weights - 1))
    with pytest.raises(OutOfMemoryError, match="of cpu memory are free for each engine"):
        LLM(folder, device="cpu", **blocks)
    room = 2**20
    monkeypatch.setenv(MEMORY_VARIABLE, str(weights + room))
    info = LLM(folder, device="cpu", **blocks).info
    block_bytes = info.cache_bytes // info.num_blocks
    assert info.num_blocks == int(0.4 * room) // block_bytes


def test_a_single_engine_and_ray_need_no_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert environments(2, monkeypatch) == [{}]
    placed = {"data_parallel_size": 4, "distributed_executor_backend": "ray"}
    assert environments(2, monkeypatch, **placed) == [{}] * 4


def test_a_replacement_serves_adapters_that_operators_load():
    lora = {"lora_modules": ("sql=./sql",), "allow_runtime_lora": True}
    [first] = plan_launches(EngineConfig.from_settings(lora), Path("model"), LogStyle())
    adapter = Adapter("sql", "./sql", "key")
    info = SimpleNamespace(device="cpu", max_lora_rank=16, lora_embeddings=True, adapters=[adapter])
    replacement = first.for_replacement(info)
    assert replacement.config.lora.is_enabled
    assert replacement.config.lora.lora_embeddings
    assert replacement.adapters == (adapter,)


def test_a_phase_ends_once_all_engines_completed_it():
    reported = []
    phases = StartupPhases(2, lambda name, seconds: reported.append((name, seconds)))
    phases.add("weights", 1.0)
    phases.add("KV cache", 0.1)
    assert reported == []
    phases.add("weights", 2.0)
    assert reported == [("weights", 2.0)]
