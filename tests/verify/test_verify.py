"""`tk verify` accepts models that are computed right, and finds and names each planted fault."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints, hearing, pictured
from tests.weights.test_fp8_blocks import save_in_blocks
from toolkit import LLM
from toolkit.attention import GroupTable
from toolkit.attention import cpu as cpu_attention
from toolkit.config import EngineConfig
from toolkit.config.sources import CHECK_MEMORY
from toolkit.engine.front import pictures
from toolkit.kernels import cpu
from toolkit.kernels.cpu import linear
from toolkit.models import rotary
from toolkit.models.decoder import Decoder
from toolkit.models.tower import TowerModel
from toolkit.scheduler import request
from toolkit.scheduler.blocks.block_pool import BlockPool
from toolkit.verify import engines, transformers_model
from toolkit.verify.run import verify
from toolkit.weights.kinds.int8 import Int8Weight
from toolkit.weights.slots import StackedSlot

needs_kernels = pytest.mark.skipif(not cpu.available(), reason=f"the CPU kernels: {cpu.problem()}")
WITH_EXPERTS = ("granite-moe", "gpt-oss")
COMPARISONS = ["kernels", "graphs", "batching", "prefix_cache", "transformers"]


@pytest.fixture
def verdicts(tk_here: Callable[..., Any], checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """Return a function that verifies a checkpoint, and returns (exit code, what JSON reports)."""

    def run(name: str | None, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
        model = [] if name is None else [str(checkpoint(name))]
        done = tk_here("verify", *model, "--device", "cpu", "--json", *flags)
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        assert report["verdict"] == ("differs" if done.returncode else "ok")
        return done.returncode, {one["name"]: one for one in report["comparisons"]}

    return run


def differing(found: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, one in found.items() if one["verdict"] == "differs"]


# Models that are computed right


@needs_kernels
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (None, ()),
        ("llama3-gqa", ()),
        ("qwen3", ("--dtype", "bfloat16")),
        ("gemma2", ("--dtype", "bfloat16")),
        ("gemma4", ()),
        ("gpt2", ("--quantization", "int8")),
        ("granite-moe", ("--quantization", "int8")),
        ("gpt-oss", ("--quantization", "int4")),
        ("lfm2", ()),
    ],
)
def test_right_models_are_ok(verdicts, name, flags):
    code, found = verdicts(name, *flags)
    assert code == 0
    assert list(found) == COMPARISONS
    is_skipped = name in WITH_EXPERTS  # whose steps are not recorded
    assert {one["verdict"] for one in found.values()} == {"ok"} | (
        {"skipped"} if is_skipped else set()
    )
    assert (found["graphs"]["verdict"] == "skipped") == is_skipped
    if name in WITH_EXPERTS:
        reason = "no step was recorded: which experts compute depends on the tokens"
        assert found["graphs"]["reason"].startswith(reason)
    assert found["transformers"]["greedy_agreed"] >= 0.98 * found["transformers"]["positions"]


def wrong_mean_of_pixels(patch: pytest.MonkeyPatch) -> None:
    normalize = TowerModel.normalize_by

    def shifted(tower: TowerModel, factor: float, mean: Any, std: Any) -> None:
        normalize(tower, factor, [one + 0.3 for one in mean], std)

    patch.setattr(TowerModel, "normalize_by", shifted)


@needs_kernels
@pytest.mark.parametrize("plant", [None, wrong_mean_of_pixels])
def test_last_prompt_has_a_picture(tk_here, monkeypatch, tmp_path, plant):
    monkeypatch.setattr(pictures, "PicturePool", pictured.InlinePool)

    def load(config: EngineConfig) -> LLM:
        return LLM(config=config.with_settings(mm_cache_gib=0.001))  # each step checks its pages

    monkeypatch.setattr(engines, "LLM", load)
    if plant is not None:
        plant(monkeypatch)
    folder = pictured.save("gemma3", tmp_path)
    done = tk_here("verify", str(folder), "--device", "cpu", "--dtype", "float32", "--json")
    report = json.loads(done.stdout)
    assert (report["prompts"], report["has_picture"]) == (7, True)
    found = {one["name"]: one for one in report["comparisons"]}
    assert differing(found) == ([] if plant is None else ["transformers"])
    assert found["transformers"]["verdict"] != "skipped"
    if plant is not None:
        assert found["transformers"]["largest"]["prompt"] == 6


@needs_kernels
def test_fp8_checkpoint_in_float32_is_ok(tk_here, tmp_path):
    """A CPU multiplies with the dequantized weights, so nothing but float32 rounds."""
    model = checkpoints.make_reference("llama3-gqa")
    save_in_blocks(model, tmp_path)
    done = tk_here("verify", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--json")
    report = json.loads(done.stdout)
    found = {one["name"]: one for one in report["comparisons"]}
    assert differing(found) == []
    assert found["kernels"]["verdict"] == "ok"
    assert report["rounding"]["of"] == "bfloat16"


def without_transformers(patch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise transformers_model.UnsupportedError("no room")

    patch.setattr(transformers_model, "score", cannot)


@needs_kernels
def test_comparisons_that_cannot_be_made_are_skipped(verdicts, monkeypatch):
    without_transformers(monkeypatch)
    code, found = verdicts("gpt2", "--enforce-eager", "--no-enable-prefix-caching")
    assert code == 0
    assert found["graphs"]["reason"] == "--enforce-eager is set"
    assert found["prefix_cache"]["reason"] == "--no-enable-prefix-caching is set"
    assert found["transformers"]["reason"] == "no room"
    assert [one["verdict"] for one in found.values()] == [
        *("ok", "skipped", "ok", "skipped", "skipped")
    ]


@needs_kernels
@pytest.mark.parametrize(
    ("name", "flags", "reason"),
    [
        ("gpt2", ("--kv-cache-dtype", "fp8"), "no step was recorded: its layers compute with more"),
        ("gpt2", ("--model-impl", "transformers"), "no step was recorded: the model's own code"),
    ],
)
def test_graphs_are_skipped_where_no_step_is_recorded(verdicts, monkeypatch, name, flags, reason):
    without_transformers(monkeypatch)
    code, found = verdicts(name, *flags)
    assert code == 0
    assert found["graphs"]["verdict"] == "skipped"
    assert found["graphs"]["reason"].startswith(reason)


def test_models_that_cannot_be_verified_are_usage_errors(tk_here, checkpoint, tmp_path):
    import transformers

    encoder = transformers.BertConfig(architectures=["BertModel"])
    encoder.save_pretrained(tmp_path / "encoder")
    for words, reason in (
        ([str(checkpoint("gpt2")), "--load-format", "dummy"], "has nothing to verify"),
        ([str(tmp_path / "encoder")], "this model is an encoder"),
        ([str(hearing.save(tmp_path / "whisper"))], "this model transcribes sound"),
        ([str(tmp_path / "absent")], "absent"),
        (["--block-size", "0"], "--block-size must be at least 1"),
    ):
        done = tk_here("verify", *words, "--device", "cpu")
        assert done.returncode == 2
        assert reason in done.stderr


@needs_kernels
def test_table_says_what_differs_and_what_to_do(tk_here, checkpoint, monkeypatch):
    dropped_bias(monkeypatch)
    done = tk_here("verify", str(checkpoint("gpt2")), "--device", "cpu")
    assert done.returncode == 1
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert "differs" in rows["kernels"]
    assert all(" ok " in rows[name] for name in COMPARISONS[1:])
    assert done.stdout.splitlines()[-1].startswith("differs (")
    assert "rounding explains" in done.stderr
    assert "--attention-backend torch" in done.stderr


@needs_kernels
def test_one_model_at_a_time_is_in_memory(checkpoint, monkeypatch, frozen_heap):
    models: weakref.WeakSet[Decoder] = weakref.WeakSet()
    alive: list[int] = []
    initialize = Decoder.__init__

    def counted(model: Decoder, *given: Any, **settings: Any) -> None:
        models.add(model)
        initialize(model, *given, **settings)

    class Watched(LLM):
        def __init__(self, **given: Any) -> None:
            alive.append(len(models))
            super().__init__(**given)

    monkeypatch.setattr(Decoder, "__init__", counted)
    monkeypatch.setattr(engines, "LLM", Watched)
    without_transformers(monkeypatch)
    config = EngineConfig.from_settings({"model": str(checkpoint("gpt2")), "device": "cpu"})
    assert verify(config, lambda what: None).verdict == "ok"
    assert alive == [0, 0, 0, 0]
    assert len(models) == 0


# Planted faults


def wrong_rotary_base(patch: pytest.MonkeyPatch) -> None:
    def scaling(rope: Any) -> tuple[torch.Tensor, float]:
        return 1.0 / rope.wavelengths(1.5 * rope.base), 1.0

    patch.setitem(rotary.SCALINGS, "default", scaling)


def dropped_bias(patch: pytest.MonkeyPatch) -> None:
    packed = linear.PackedLinear

    def without_bias(weight: torch.Tensor, bias: object, scale: object, **end: Any) -> Any:
        return packed(weight, None, scale, **end)

    patch.setattr(linear, "PackedLinear", without_bias)


def block_that_is_reused_and_still_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_evict", lambda pool, block: None)


def block_found_after_other_tokens(patch: pytest.MonkeyPatch) -> None:
    hashed = request.hash_block
    patch.setattr(request, "hash_block", lambda parent, *rest: hashed(b"", *rest))


def stale_pointer(patch: pytest.MonkeyPatch) -> None:
    """Let layers read a copy of the cache slots, which a recorded step does not write again."""
    run_layers, copies = Decoder._run_layers, []

    def run(model: Decoder, x: torch.Tensor, batch: Any) -> torch.Tensor:
        copies.append([torch.from_numpy(one.slots.numpy().copy()) for one in batch.tables])
        tables = map(GroupTable, (one.blocks for one in batch.tables), copies[-1])
        return run_layers(model, x, dataclasses.replace(batch, tables=tuple(tables)))

    patch.setattr(Decoder, "_run_layers", run)


def wrong_attention_scale(patch: pytest.MonkeyPatch) -> None:
    layer = cpu_attention.Layer
    patch.setattr(
        cpu_attention, "Layer", lambda *args, scale, **rest: layer(*args, scale=1.2 * scale, **rest)
    )


def wrong_scale_in_kernels(patch: pytest.MonkeyPatch) -> None:
    packed = linear.PackedLinear

    def scaled(weight: torch.Tensor, bias: object, scale: torch.Tensor, **end: Any) -> Any:
        return packed(weight, bias, scale.roll(1), **end)

    patch.setattr(linear, "PackedLinear", scaled)


def wrong_scale_of_weights(patch: pytest.MonkeyPatch) -> None:
    quantize = Int8Weight.quantize

    def scaled(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = quantize(weight)
        return values, 1.01 * scales

    patch.setattr(Int8Weight, "quantize", staticmethod(scaled))


def experts_in_another_order(patch: pytest.MonkeyPatch) -> None:
    of = StackedSlot.of
    patch.setattr(
        StackedSlot, "of", lambda slot, stack: of(slot, (stack[1] - 1 - stack[0], stack[1]))
    )


INT8 = ("--quantization", "int8")
BFLOAT16 = ("--dtype", "bfloat16")


@needs_kernels
@pytest.mark.parametrize(
    ("plant", "name", "flags", "expected"),
    [
        (wrong_rotary_base, "llama3-gqa", (), "transformers"),
        (block_that_is_reused_and_still_found, "qwen3", BFLOAT16, "prefix_cache"),
        (block_found_after_other_tokens, "qwen3", (), "prefix_cache"),
        (stale_pointer, "llama3-gqa", BFLOAT16, "graphs"),
        (wrong_attention_scale, "qwen3", BFLOAT16, "kernels"),
        (wrong_scale_in_kernels, "llama3-gqa", INT8, "kernels"),
        (wrong_scale_of_weights, "gpt2", INT8, "transformers"),
        (experts_in_another_order, "granite-moe", (), "transformers"),
    ],
)
def test_planted_fault_is_found_and_named(verdicts, monkeypatch, plant, name, flags, expected):
    monkeypatch.delenv(CHECK_MEMORY)  # whose NaN would show some of the faults at once
    plant(monkeypatch)
    code, found = verdicts(name, *flags)
    assert code == 1
    assert differing(found) == [expected]
    one = found[expected]
    assert one["mean"] > one["mean_bound"] or one["max"] > one["max_bound"]
    assert one["reason"].startswith(f"{expected} differs")
