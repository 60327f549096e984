"""Diagnosis: bottleneck, evidence and advice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolkit.config.engine import PARTS
from toolkit.config.fields import options
from toolkit.config.server import ServerConfig
from toolkit.top import diagnosis
from toolkit.top.diagnosis import diagnose, setting, worst
from toolkit.top.readings.arithmetic import Latency
from toolkit.top.readings.reading import Reading
from toolkit.top.readings.server import Server
from toolkit.top.view import View

SETTINGS = {
    "engine": {
        "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": None},
        "cache": {"enable_prefix_caching": True},
        "lora": {"max_loras": 2},
    },
    "server": {"api_workers": 1},
    "device": {"device": "cuda:0", "max_num_batched_tokens": 8192},
}
BUSY = {
    "span": 30.0,
    "running": 64.0,
    "waiting": 0.0,
    "mean_generation_rate": 900.0,
    "mean_prompt_rate": 100.0,
    "kv_usage": 0.5,
}


def a_server(settings=SETTINGS, labels=(("scheduling_policy", "fcfs"),)):
    server = Server("http://a:1", 30.0)
    server.add(Reading("http://a:1", 1.0, 1.0, labels=dict(labels), settings=settings))
    return server


def itl(p50, p99):
    return {"ITL": Latency(p50, p50, p99, p50, 100), "queue": Latency(0.4, 1, 2, 1, 100)}


@pytest.mark.parametrize(
    ("numbers", "kind", "evidence", "flag"),
    [
        ({"running": 0.0}, "idle", "no requests", ""),
        ({"running": 5.0, "batch_size": 4.0}, "client", "5 of 64 slots used", "send more"),
        ({"running": 60.0}, "fine", "60 running", ""),
        ({"waiting": 9.0, "latencies": itl(0.01, 0.02)},
         "queue", "9 waiting for 400 ms, 64 running", "--max-num-seqs (64 now)"),
        ({"waiting": 9.0, "kv_usage": 0.99, "running": 20.0},
         "KV cache", "99% used, 9 waiting", "--gpu-memory-utilization"),
        ({"recent_preemptions": 3.0}, "KV cache", "3 preempted in 30 s", "--kv-cache-dtype fp8"),
        ({"mean_prompt_rate": 9000.0, "latencies": itl(0.01, 0.2), "largest_steps": 8000.0},
         "prefill", "prompts are 91% of the computed tokens",
         "lower --max-num-batched-tokens (8192 now)"),
        ({"mean_prompt_rate": 9000.0, "prefix_hit_rate": 0.99, "latencies": itl(0.01, 0.2)},
         "fine", "64 running", ""),
        ({"mean_prompt_rate": 9000.0, "latencies": itl(0.01, 0.2), "largest_steps": 7.5},
         "fine", "64 running", ""),
        ({"mean_prompt_rate": 9000.0, "latencies": itl(0.01, 0.2)}, "fine", "64 running", ""),
        ({"mean_prompt_rate": 9000.0, "latencies": itl(0.01, 0.2), "largest_steps": 8000.0,
          "running": 0.0}, "idle", "no requests", ""),
        ({"mean_prompt_rate": 9000.0, "waiting": 4.0, "running": 10.0, "largest_steps": 8192.0},
         "prefill", "91%", "raise --max-num-batched-tokens"),
        ({"running": 9.0, "waiting": 3.0, "adapters": {"a": (6, 1), "b": (3, 0), "c": (0, 2)}},
         "adapters", "2 waiting for an adapter, 2 adapters are in use", "--max-loras (2 now)"),
        ({"running": 9.0, "waiting": 3.0, "adapters": {"a": (6, 1), "c": (0, 2)}},
         "fine", "9 running, 3 waiting", ""),
        ({"gpu_power": 690.0, "gpu_power_limit": 700.0},
         "power", "690 W, its limit is 700 W", "--quantization fp8"),
        ({"cpu_cores": {"server": 0.97}}, "front end", "97% of a core", "--api-workers 2"),
        ({"rejected": {"queue": 12.0, "key": 3.0}},
         "queue", "12 refused in 30 s: the queue is full", "raise --max-queue"),
        ({"rejected": {"key": 3.0}}, "queue", "3 refused", "raise --max-requests-per-key"),
        ({"rejected": {"rate": 3.0}}, "queue", "3 refused", "raise --requests-per-minute"),
        ({"rejected": {"other": 3.0}}, "queue", "3 refused in 30 s: other", ""),
        # What the window still has does not matter once the load has ended.
        ({"running": 0.0, "recent_preemptions": 9.0, "kv_usage": 0.99}, "idle", "no requests", ""),
        ({"running": 0.0, "gpu_power": 700.0, "gpu_power_limit": 700.0}, "idle", "no requests", ""),
        ({"running": 0.0, "cpu_cores": {"server": 0.97}}, "idle", "no requests", ""),
        # Just below each limit:
        ({"kv_usage": 0.94, "waiting": 9.0, "running": 20.0}, "fine", "20 running", ""),
        ({"kv_usage": 1.0}, "fine", "64 running", ""),
        ({"cpu_cores": {"server": 0.89}}, "fine", "64 running", ""),
        ({"gpu_power": 660.0, "gpu_power_limit": 700.0}, "fine", "64 running", ""),
        ({"running": 9.0, "waiting": 3.0, "adapters": {"a": (6, 1), "b": (3, 4)}},
         "fine", "9 running, 3 waiting", ""),
        ({"mean_prompt_rate": 800.0, "latencies": itl(0.01, 0.2), "largest_steps": 8000.0},
         "fine", "64 running", ""),
    ],
)  # fmt: skip
def test_bottleneck_has_its_evidence_and_its_flag(numbers, kind, evidence, flag):
    found = diagnose(a_server(), View(**(BUSY | numbers)))
    assert found.kind == kind
    assert evidence in found.text
    assert flag in found.advice
    assert (found.level == 2) == (kind not in ("idle", "client", "fine"))
    assert bool(found.advice) == bool(flag)


def test_advice_on_a_cpu_is_the_flag_of_its_memory():
    server = a_server(SETTINGS | {"device": {"device": "cpu"}})
    assert (
        "--kv-cache-memory" in diagnose(server, View(**(BUSY | {"recent_preemptions": 3.0}))).advice
    )


@pytest.mark.parametrize(
    ("labels", "advice"),
    [
        (
            {"gpu_memory_utilization": "0.92"},
            "raise --gpu-memory-utilization, or --kv-cache-dtype fp8",
        ),
        (
            {"gpu_memory_utilization": "0.92", "kv_cache_memory_bytes": "1073741824"},
            "raise --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE (1.00 GiB now)",
        ),
    ],
)
def test_advice_for_vllm_prefers_the_cache_size_in_bytes(labels, advice):
    """With a size in bytes, which is usual on a CPU, vLLM ignores the share of memory."""
    server = a_server(None, tuple(labels.items()))
    assert diagnose(server, View(**(BUSY | {"recent_preemptions": 3.0}))).advice == advice


def test_advice_for_a_cache_of_given_size_is_its_flag():
    settings = SETTINGS | {"engine": {"cache": {"kv_cache_memory": 2.0}}}
    found = diagnose(a_server(settings), View(**(BUSY | {"recent_preemptions": 3.0})))
    assert found.advice == "raise --kv-cache-memory, or --kv-cache-dtype fp8"


def test_advice_for_prompts_is_the_prefix_cache_if_it_is_off():
    settings = {"engine": {"cache": {"enable_prefix_caching": False}}}
    numbers = BUSY | {"mean_prompt_rate": 9000.0, "latencies": itl(0.01, 0.2)}
    advice = diagnose(a_server(settings), View(**numbers)).advice
    assert advice == "--enable-prefix-caching, if prompts begin alike"


def test_no_advice_is_what_the_server_does_already():
    settings = SETTINGS | {"engine": {"cache": {"kv_cache_dtype": "fp8"}, "model": {}}}
    settings["engine"]["model"]["quantization"] = "fp8"
    server = a_server(settings)
    cache = diagnose(server, View(**(BUSY | {"recent_preemptions": 3.0})))
    assert cache.advice == "raise --gpu-memory-utilization"
    power = diagnose(server, View(**(BUSY | {"gpu_power": 700.0, "gpu_power_limit": 700.0})))
    assert power.advice == "a higher limit (nvidia-smi -pl)"


def test_a_limit_that_is_not_known_is_no_advice():
    server = a_server({"engine": {}}, ())
    assert diagnose(server, View(**(BUSY | {"waiting": 9.0}))).advice == ""


def test_advice_for_vllm_has_its_flags():
    server = a_server(None, (("cache_dtype", "auto"),))
    assert (
        diagnose(server, View(**(BUSY | {"cpu_cores": {"server": 0.97}}))).advice
        == "--api-server-count 2"
    )


def test_diagnosis_without_numbers_is_unknown():
    assert diagnose(Server("http://a:1", 30.0)).kind == "unknown"


def test_worst_of_several_servers_has_its_name():
    servers = [a_server(), a_server()]
    assert worst(servers).kind == "unknown"
    servers[1].add(
        Reading(
            "http://b", 2.0, 2.0, numbers={"num_requests_running": 3.0, "num_requests_waiting": 0.0}
        )
    )
    found = worst(servers)
    assert found.text.startswith("a:1: 3 of 64 slots used")


def test_setting_prefers_the_value_in_use_on_the_device():
    assert setting(a_server(), "max_num_batched_tokens") == 8192
    assert setting(a_server(None), "scheduling_policy") == "fcfs"
    assert setting(a_server(), "no_such_setting") is None


def test_every_advised_flag_exists():
    known = {row.flag for config in (*PARTS.values(), ServerConfig) for row in options(config)}
    advised = set(re.findall(r"--[a-z-]+[a-z]", Path(diagnosis.__file__).read_text()))
    assert advised - known == {"--api-server-count", "--kv-cache-memory-bytes"}  # vLLM's
