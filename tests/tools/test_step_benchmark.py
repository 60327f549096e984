"""The benchmark of single steps, on a CPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from toolkit.demo import MODEL_DIR
from toolkit.scheduler.stats import EngineStats
from tools.bench import steps
from tools.bench.steps import SKIPPED, Span, StepTimes, StepWatch, measure, table

SMALL = {"device": "cpu", "num_threads": 1, "kv_cache_memory": 0.02}
KERNELS = [
    {"name": "product", "share": 0.75, "count": 8, "mean_us": 30.0},
    {"name": "norm", "share": 0.05, "count": 2, "mean_us": 8.0},
]


def test_mixed_and_decode_steps_have_times():
    [(number, kinds)] = measure(MODEL_DIR, [12], 16, 20, **SMALL)
    assert number == 12
    mixed, decode = kinds
    assert (mixed.name, mixed.tokens) == ("mixed", 20)
    assert 6 <= mixed.sampled <= 12
    assert (decode.name, decode.tokens, decode.sampled) == ("decode", 12, 12)
    for times in kinds:
        assert 0 < times.host_seconds <= times.seconds < 1
        assert times.profile is None  # only a GPU's kernels are profiled


def test_longer_contexts_read_more_bytes():
    shorter, longer = (
        next(measure(MODEL_DIR, [4], context, 64, **SMALL))[1][-1] for context in (16, 48)
    )
    assert shorter.operations < longer.operations
    assert shorter.bytes_read < longer.bytes_read


def test_short_prompts_have_no_mixed_steps():
    [(_, kinds)] = measure(MODEL_DIR, [2], 8, 64, **SMALL)
    assert [times.name for times in kinds] == ["decode"]


def test_requests_that_do_not_fit_are_not_run():
    runs = measure(MODEL_DIR, [4, 1], 16, 64, device="cpu", num_gpu_blocks_override=8)
    assert [(number, len(kinds)) for number, kinds in runs] == [(4, 0), (1, 1)]


@pytest.mark.parametrize("gap", [True, False])
def test_watch_needs_consecutive_steps(gap: bool):
    timer = SimpleNamespace(info=SimpleNamespace(device="cpu"), seconds=0.0)
    watch = StepWatch("decode", Span(3, 0), timer, lambda stats: stats.num_tokens == 2)
    decode = EngineStats(num_tokens=2, work=(10.0, 100.0, 1.0))
    sizes = [EngineStats(num_tokens=9), *[decode] * SKIPPED, decode, decode]
    for stats in [*sizes, *[EngineStats()] * gap, decode, decode]:
        watch.add(stats)
    times = watch.times(unread_bytes=30)
    assert (times is None) == gap
    if times is not None:
        assert (times.tokens, times.operations, times.bytes_read) == (2, 10, 70)


def test_table_has_the_kernels_of_one_step():
    profile = {"window_s": 320e-6, "gpu_busy": 0.8, "kernels": KERNELS}
    times = StepTimes("decode", 8, 8, 2e-4, 5e-5, 4e8, 5e5, profiled=2, profile=profile)
    first, window, _, product, norm = table(times, bandwidth=1e10).splitlines()
    assert "0.200 ms a step, host 0.050 ms; floor 0.050 ms (25%; 0.00 GB); 2.0 TFLOP/s" in first
    assert window == "profile: 0.160 ms a step, GPU busy 80.0% of it"
    assert product.split() == ["75.0%", "120.0", "4.0", "30.0", "product"]
    assert norm.split() == ["5.0%", "8.0", "1.0", "8.0", "norm"]


def test_command_prints_each_number_of_requests(monkeypatch, capsys):
    monkeypatch.setenv("TK_DEVICE", "cpu")
    flags = "--requests 2,3 --context 8 --max-num-batched-tokens 32"
    monkeypatch.setattr(sys, "argv", ["steps", str(MODEL_DIR), *flags.split()])
    steps.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "prompts" in line] == [
        "2 requests with prompts of 8 tokens",
        "3 requests with prompts of 8 tokens",
    ]
    assert sum(line.startswith("decode: ") for line in lines) == 2


def test_command_refuses_more_requests_than_tokens(monkeypatch, capsys):
    flags = ["--requests", "9", "--max-num-batched-tokens", "9"]
    monkeypatch.setattr(sys, "argv", ["steps", str(MODEL_DIR), *flags])
    with pytest.raises(SystemExit):
        steps.main()
    assert "must be above the number of requests" in capsys.readouterr().err
