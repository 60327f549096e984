"""Estimates match the worker's numbers, and the published sizes of well-known models."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pynvml
import pytest
import torch

from tests import checkpoints, pictured
from tests.lora.conftest import Adapter
from tests.models.decoders import make_decoder
from toolkit.cache_group import ONE_GROUP, CacheGroup
from toolkit.config import EngineConfig
from toolkit.demo import MODEL_DIR
from toolkit.distributed import SINGLE, Group, Stage, parallel
from toolkit.errors import CheckpointError, ConfigError, OutOfMemoryError
from toolkit.hardware import devices
from toolkit.hardware.devices import Device, find_device
from toolkit.inventory.checkpoint import Checkpoint, read_folder
from toolkit.inventory.dry_run import dry_run
from toolkit.inventory.estimate import _stages as stages_of
from toolkit.inventory.estimate import estimate
from toolkit.inventory.step_memory import CUDA_RUNTIME, GRAPH_LAYER_BYTES
from toolkit.kernels import cpu
from toolkit.lora.adapters import Adapters
from toolkit.models.build import build_model, load_config
from toolkit.models.memory import Memory, MemoryLayout, Part, RowMemory, TokenMemory
from toolkit.worker.worker import Worker
from tools.bench.models import CONFIGS

GIB = 2**30
QUANTIZED = Path(__file__).parents[1] / "weights" / "quantized"
H200 = Device("cuda", "NVIDIA H200", 140 * GIB, 140 * GIB)
CPU = Device("cpu", "cpu", 16 * GIB, 16 * GIB)
PADDED = 1.25
"""Packing for a CPU adds rows of padding, a large part of models as small as these."""
KINDS = (
    "gpt2", "gpt2-untied-inverse-scale", "llama3-gqa", "llama-mqa-tied", "llama-biases-head-dim",
    "mistral-window", "qwen2-tied-some-windows", "qwen3", "granite-moe-shared", "llama4",
)  # fmt: skip


def settings(**more: object) -> EngineConfig:
    return EngineConfig.from_settings({"device": "cpu", "max_num_seqs": 3, "num_threads": 1} | more)


def run(folder: Path, config: EngineConfig):
    """Return the info of a worker on this machine."""
    return Worker(config, folder).start(lambda phase, seconds: None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in checkpoints.ARCHITECTURES])
@pytest.mark.parametrize(
    "more", [{}, {"dtype": "bfloat16", "max_model_len": 96}], ids=["default", "bfloat16"]
)
def test_estimate_matches_the_worker(checkpoint: Callable[[str], Path], kind: str, more: dict):
    config = settings(**more)
    result = estimate(read_folder(checkpoint(kind), kind), config, find_device("cpu"))
    info = run(checkpoint(kind), config)
    assert (result.num_parameters, result.dtype) == (info.num_parameters, info.dtype)
    assert result.weights <= info.weight_bytes < PADDED * result.weights
    assert (result.num_blocks, result.cache, result.max_model_len) == (
        info.num_blocks,
        info.cache_bytes,
        info.max_model_len,
    )
    assert result.cache / result.num_tokens == info.token_bytes
    assert result.layout.groups == info.groups


@pytest.mark.parametrize(
    ("name", "number", "parts"),
    [("qwen3-vl", 0, 3), ("qwen3-vl", 2, 3), ("llava", 1, 1), ("idefics3", 1, 1)],
)
def test_estimate_counts_the_tower(tmp_path, name, number, parts):
    """parts: a row's, for the embedding and layers."""
    folder = pictured.save(name, tmp_path / "seeing")
    config = settings(limit_mm_per_prompt=f"image={number}", mm_cache_gib=0.001, dtype="float32")
    config = config.with_settings(max_model_len=100)
    result = estimate(read_folder(folder, "seeing"), config, find_device("cpu"))
    info = run(folder, config)
    assert (info.sight is not None) == (result.tower > 0) == (number > 0)
    assert result.weights <= info.weight_bytes < PADDED * result.weights
    assert result.num_blocks == info.num_blocks
    if info.sight is not None:
        assert result.num_parameters == info.num_parameters
        assert result.pictures == info.sight.num_pages * 64 * 4 * 32 * parts


WINDOWS = {
    "gemma-3-1b": (26, 1, 256, 512, 6, 32768, 5.0),
    "gemma-3-4b": (34, 4, 256, 1024, 6, 8192, 3.5),
    "gpt-oss-20b": (24, 8, 64, 128, 2, 8192, 1.8),
    "gemma-3-27b": (62, 16, 128, 1024, 6, 32768, 5.0),
}
"""Layers, KV heads and their size, window, every how many layers see all, length, and how many
times as many requests fit as with layers that keep all tokens."""


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_make_room_for_requests(name):
    count, heads, size, window, every, length, times = WINDOWS[name]
    layers = [
        TokenMemory.of_keys(heads, size, window if (index + 1) % every else 0)
        for index in range(count)
    ]
    plain = MemoryLayout.of(layers, 16, 2, 2)
    layout = plain.with_groups(length, 8192)
    before = plain.block_bytes * (length // 16)
    assert before / (layout.page_bytes * layout.pages_in_decode(length)) >= times
    assert max(map(layout.padding, range(len(layout.groups)))) < 0.09
    # Views of layers do not overlap, and blocks begin at whole tokens.
    token = 2 * heads * size
    for memory, places in zip(layout.of_tokens, layout.places(), strict=True):
        group = layout.groups[layout.group_of(memory)]
        assert layout.page_bytes % (group.blocks_per_page * token) == 0
        assert max(places) + 16 * token <= layout.page_bytes // group.blocks_per_page
    starts = {g: [] for g in range(len(layout.groups))}
    for memory, places in zip(layout.of_tokens, layout.places(), strict=True):
        starts[layout.group_of(memory)] += places
    assert all(np.diff(sorted(own)).min() == 16 * token for own in starts.values())


def test_layers_of_one_reach_or_next_to_states_are_one_group():
    full, window = TokenMemory.of_keys(2, 8), TokenMemory.of_keys(2, 8, 20)
    row = RowMemory((Part(2, 8),))

    def groups(*layers: Memory, length: int = 100, drafter: Sequence[Memory] = ()):
        return MemoryLayout.of(layers, 4, 2, 2, drafter=drafter).with_groups(length, 8).groups

    assert groups(full, full) == groups(full, window, length=20) == ONE_GROUP
    assert groups(full, window, row) == ONE_GROUP
    assert groups(window, window) == (CacheGroup(window=20),)
    assert groups(window, drafter=[full]) == ONE_GROUP  # the drafter's layers keep all tokens
    assert groups(window, full, drafter=[full]) == (CacheGroup(), CacheGroup(window=20))
    assert groups(window, full, full, full, full) == (
        CacheGroup(blocks_per_page=1),
        CacheGroup(window=20, blocks_per_page=4),
    )


@pytest.mark.parametrize("kind", ["mistral-window", "qwen2-tied-some-windows", "qwen3"])
def test_dry_run_shows_what_windows_free(checkpoint, capsys, kind):
    config = settings(model=str(checkpoint(kind)), max_model_len=160, kv_cache_memory=0.005)
    dry_run(config, as_json=True)
    report = json.loads(capsys.readouterr().out)
    windows = [group["window"] for group in report["groups"]]
    assert windows == {"qwen3": [0], "mistral-window": [9]}.get(kind, [0, 11])
    assert report["sequence_bytes"] <= report["sequence_peak_bytes"]
    dry_run(config, as_json=False)
    shown = capsys.readouterr().out
    lines = [line.removeprefix("  windows ").strip() for line in shown.splitlines()]
    assert ("in sequences of 160" in shown) == (kind != "qwen3")
    assert [line for line in lines if "in pages of" in line] == {
        "qwen3": [],
        "mistral-window": ["2 layers keep windows of 9 tokens, in pages of 16 tokens"],
    }.get(
        kind,
        [
            "1 layer keeps all tokens, in pages of 32 tokens",
            "2 layers keep windows of 11 tokens, in pages of 16 tokens",
        ],
    )


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("gptq-4bit-g128", {}, "int4 (GPTQ)"),
        ("ct-int8-w8a8", {}, "int8 (compressed-tensors)"),
        ("fp8-block", {"dtype": "float32"}, "float32"),
        (None, {"quantization": "int4"}, "int4"),
    ],
)
def test_the_type_of_quantized_weights_is_named(
    name: str | None, more: dict[str, object], expected: str, capsys: pytest.CaptureFixture[str]
):
    config = settings(**more, model=None if name is None else str(QUANTIZED / name))
    assert dry_run(config, as_json=False) == 0
    assert f"parameters in {expected}\n" in capsys.readouterr().out
    assert run(Path(config.model.model or MODEL_DIR), config).weight_type == expected


@pytest.mark.skipif(not cpu.available(), reason="needs the CPU kernels")
def test_int8_weights_take_a_quarter_including_the_head():
    config = settings(quantization="int8")
    result = estimate(read_folder(Path(MODEL_DIR), "demo"), config, find_device("cpu"))
    info = run(Path(MODEL_DIR), config)
    assert result.weights <= info.weight_bytes < 1.02 * result.weights
    unquantized = estimate(read_folder(Path(MODEL_DIR), "demo"), settings(), find_device("cpu"))
    assert 3.5 < unquantized.weights / result.weights < 4.0


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("name", "ends"), [("attention", False), ("ends", True), ("tied", True)])
def test_slots_of_adapters_on_a_gpu_are_counted(
    checkpoint, tmp_path, name: str, ends: bool, stages: int
):
    one, split = Adapter(name, tmp_path), {"pipeline_parallel_size": stages}
    folder = checkpoint(one.base)
    adapters = {"lora_modules": [f"{name}={one.folder}"], "max_loras": 3, "max_lora_rank": 20}
    with parallel(SINGLE, Stage(0, stages)):  # the last has as many slots
        model = build_model(
            load_config(folder),
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            max_model_len=64,
        )
    kernels = SimpleNamespace(rank_block=16)
    added = Adapters(model, model, 20, 3, torch.bfloat16, kernels, ends=ends)
    read = read_folder(folder, "model")
    with_slots, without = (
        estimate(read, settings(**split, **more), H200) for more in (adapters, {})
    )
    slots = sum(weight.nbytes for weight in added._weights)
    # A is counted once for GPT-2's fused q, k and v, which have three.
    error = 0.1 if name == "tied" else 0.02
    assert with_slots.weights - without.weights == pytest.approx(slots, rel=error)


@pytest.mark.parametrize(
    "more",
    [
        {"block_size": 4},
        {"num_gpu_blocks_override": 60},
        {"num_gpu_blocks_override": 3},
        {"kv_cache_memory": 0.005},
        {"kv_cache_dtype": "fp8"},
        {"max_num_seqs": 1, "max_model_len": 50},
    ],
    ids=str,
)
def test_cache_settings_match_the_worker(more: dict):
    config = settings(**more)
    result = estimate(read_folder(Path(MODEL_DIR), "demo"), config, find_device("cpu"))
    info = run(Path(MODEL_DIR), config)
    assert (result.num_blocks, result.cache, result.max_model_len) == (
        info.num_blocks,
        info.cache_bytes,
        info.max_model_len,
    )


def test_estimate_gives_the_workers_advice_when_nothing_fits():
    config = settings(kv_cache_memory=0.001)
    result = estimate(read_folder(Path(MODEL_DIR), "demo"), config, find_device("cpu"))
    with pytest.raises(OutOfMemoryError, match=f"--max-model-len {result.largest_context} or less"):
        run(Path(MODEL_DIR), config)
    assert not result.fits
    assert f"--max-model-len {result.largest_context} or less" in result.problem


@pytest.mark.parametrize(
    ("more", "advice", "changed"),
    [
        (
            {"kv_cache_memory": 0.0001},
            "Raise --kv-cache-memory to 0.004.",
            {"kv_cache_memory": 0.004},
        ),
        (
            {"num_gpu_blocks_override": 2, "max_model_len": 100},
            "Use --max-model-len 32 or less, or raise --num-gpu-blocks-override to 7.",
            {"num_gpu_blocks_override": 7},
        ),
    ],
    ids=["no block", "two blocks"],
)
def test_a_cache_that_is_too_small_says_what_to_change(capsys, more, advice, changed):
    with pytest.raises(OutOfMemoryError) as raised:
        run(Path(MODEL_DIR), settings(**more))
    assert dry_run(settings(**more), as_json=False) == 1
    printed = capsys.readouterr()
    assert printed.err == f"{raised.value.message}\n"
    assert printed.err.endswith(f" {advice}\n")
    assert " 0 tokens" not in printed.out + printed.err
    assert dry_run(settings(**more | changed), as_json=False) == 0


def test_models_through_transformers_are_estimated_from_their_files(tmp_path: Path):
    checkpoints.save(make_decoder("hunyuan_v1_moe"), tmp_path)
    found, config = read_folder(tmp_path, "hunyuan_v1_moe"), settings(max_model_len=100)
    result, info = estimate(found, config, find_device("cpu")), run(tmp_path, config)
    assert found.implementation == "transformers"
    assert (result.num_parameters, result.weights) == (info.num_parameters, info.weight_bytes)
    assert (result.num_blocks, result.cache) == (info.num_blocks, info.cache_bytes)


def test_expert_parallelism_needs_experts(checkpoint: Callable[[str], Path]):
    config = settings(enable_expert_parallel=True, tensor_parallel_size=2)
    estimate(read_folder(checkpoint("qwen3-moe"), "qwen3-moe"), config, CPU)
    with pytest.raises(ConfigError, match="--enable-expert-parallel: qwen3 has no experts"):
        estimate(read_folder(checkpoint("qwen3"), "qwen3"), config, CPU)


@pytest.mark.parametrize(
    ("kind", "layers", "experts", "chosen", "size"),
    [("qwen3-moe", 2, 24, 4, 16), ("granite-moe", 2, 6, 3, 32)],
)
def test_active_parameters_are_those_of_one_token(
    checkpoint: Callable[[str], Path], kind: str, layers: int, experts: int, chosen: int, size: int
):
    """Experts are tensors of their own, or stacked. `layers`: those with experts."""
    found = read_folder(checkpoint(kind), kind)
    per_expert = 3 * size * 64
    stored = sum(one.size for one in found.parameters if one.kind == "expert")
    assert stored == layers * experts * per_expert
    assert found.num_active == found.num_parameters - layers * (experts - chosen) * per_expert
    assert read_folder(checkpoint("qwen3"), "qwen3").num_active is None


@pytest.mark.parametrize("kind", ["gpt2", "llama3-gqa", "qwen3", "qwen3-moe", "granite-moe"])
def test_tensor_parallel_estimate_is_per_rank(checkpoint: Callable[[str], Path], kind: str):
    folder = checkpoint(kind)
    result = estimate(read_folder(folder, kind), settings(tensor_parallel_size=2), CPU)
    with parallel(Group(0, 2)):
        sketch = build_model(
            load_config(folder),
            device=torch.device("meta"),
            dtype=torch.float32,
            max_model_len=1,
        )
    ranks = sum(parameter.nbytes for parameter in sketch.parameters())
    assert result.weights == pytest.approx(ranks, rel=0.02)  # norms and some biases are on both
    unsharded = estimate(read_folder(folder, kind), settings(), CPU)
    assert result.block_bytes == unsharded.block_bytes // 2
    assert result.device.free == CPU.free // 2


@pytest.mark.parametrize(
    "kind",
    ["gpt2", "gpt2-untied-inverse-scale", "llama3-gqa", "qwen2-tied-some-windows", "glm4-moe"],
)
def test_pipeline_parallel_estimate_is_for_the_tightest_stage(
    checkpoint: Callable[[str], Path], kind: str
):
    folder = checkpoint(kind)
    result = estimate(
        read_folder(folder, kind), settings(pipeline_parallel_size=2, max_num_seqs=10**6), CPU
    )
    stages = []
    for index in range(2):
        with parallel(SINGLE, Stage(index, 2)):
            sketch = build_model(
                load_config(folder),
                device=torch.device("meta"),
                dtype=torch.float32,
                max_model_len=1,
            )
        weights = sum(p.nbytes for p in sketch.parameters())
        stages.append((weights, MemoryLayout.of(sketch.memory, 16, 4, 4).block_bytes))
    assert (result.weights, result.block_bytes) in stages
    num_blocks = [(result.device.free - weights) // block for weights, block in stages]
    assert num_blocks[stages.index((result.weights, result.block_bytes))] == min(num_blocks)


@pytest.mark.parametrize("kind", ["bert", "roberta", "cross-encoder"])
def test_encoder_has_weights_and_no_cache(tmp_path: Path, kind: str):
    folder = encoder(tmp_path, kind)
    result = estimate(read_folder(folder, kind), settings(), find_device("cpu"))
    info = run(folder, settings())
    assert (result.num_parameters, result.max_model_len) == (
        info.num_parameters,
        info.max_model_len,
    )
    assert result.weights <= info.weight_bytes < PADDED * result.weights
    assert result.fits
    assert not result.has_cache


def encoder(folder: Path, kind: str) -> Path:
    """Write a small encoder with Transformers."""

    import transformers

    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 99,
    }
    if kind == "roberta":
        config = transformers.RobertaConfig(**size, max_position_embeddings=66, type_vocab_size=1)
        model: transformers.PreTrainedModel = transformers.RobertaModel(config)
    elif kind == "cross-encoder":
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(**size, max_position_embeddings=64, num_labels=1)
        )
    else:
        model = transformers.BertModel(transformers.BertConfig(**size, max_position_embeddings=64))
    model.save_pretrained(folder)
    return folder


def shape_of(name: str, folder: Path) -> Checkpoint:
    """Write a checkpoint of a well-known model's shape: headers, in a sparse file of full size."""

    import transformers

    raw = CONFIGS[name]
    config = transformers.AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    header, end = {}, 0
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and raw["tie_word_embeddings"]:
            continue
        header[key] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [end, end + 2 * tensor.numel()],
        }
        end += 2 * tensor.numel()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    written = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + end)
    return read_folder(folder, name)


class TestWellKnownModels:
    """Parameters as published; cache bytes by hand: 2 x layers x KV heads x head size x bytes."""

    @pytest.mark.parametrize(
        ("name", "parameters", "token_bytes", "context"),
        [
            ("gpt2", 124_439_808, 2 * 12 * 12 * 64 * 2, 1024),
            ("qwen3-0.6b", 596_049_920, 2 * 28 * 8 * 128 * 2, 40960),
            ("llama-3.1-8b", 8_030_261_248, 2 * 32 * 8 * 128 * 2, 131072),
        ],
    )
    def test_parameters_and_cache_on_a_gpu(self, tmp_path, name, parameters, token_bytes, context):
        result = estimate(shape_of(name, tmp_path / name), EngineConfig(), H200)
        assert result.num_parameters == parameters
        assert (result.dtype, result.weights) == ("bfloat16", 2 * parameters)
        assert result.block_bytes == 16 * token_bytes
        assert result.max_model_len == result.largest_context == context
        left = 0.9 * 140 * GIB - 2 * parameters
        assert 0.9 * left < result.cache < left - CUDA_RUNTIME

    def test_layers_that_share_memory_keep_nothing(self, tmp_path):
        """Twenty of 35 layers. The others have heads of 256, and three of them of 512."""
        result = estimate(shape_of("gemma-4-e2b", tmp_path / "e2b"), EngineConfig(), H200)
        assert result.num_parameters == 4_628_569_379
        kept = sum(map(result.layout.layer_bytes, result.layout.of_tokens))
        assert kept == 16 * 2 * (12 * 256 + 3 * 512) * 2

    def test_fp8_halves_the_linear_layers(self, tmp_path):
        model = shape_of("llama-3.1-8b", tmp_path / "llama")
        result = estimate(model, EngineConfig.from_settings({"quantization": "fp8"}), H200)
        tables = 2 * 128256 * 4096  # embedding and head
        norms = (2 * 32 + 1) * 4096
        scales = 4 * 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)  # fp32, one for each row
        assert result.weights == (8_030_261_248 - tables - norms) + 2 * (tables + norms) + scales

    def test_integers_are_in_16_bits_too_if_that_takes_little(self, tmp_path):
        """The eighth of the room for a cache of an 80 GB GPU is less than Llama's layers take."""
        model = shape_of("llama-3.1-8b", tmp_path / "llama")
        layers = 2 * (8_030_261_248 - 2 * 128256 * 4096 - (2 * 32 + 1) * 4096)
        for memory, expanded in ((140, layers), (80, 0)):
            gpu = Device("cuda", "", memory * GIB, memory * GIB)
            result = estimate(model, EngineConfig.from_settings({"quantization": "int4"}), gpu)
            assert result.expanded == expanded
            left = 0.9 * memory * GIB - result.weights - result.step - expanded
            assert left - result.block_bytes <= result.cache <= left
        for given in ({"kv_cache_memory": 50}, {"num_gpu_blocks_override": 9000}):
            config = EngineConfig.from_settings(given | {"quantization": "int4"})
            assert estimate(model, config, H200).expanded == 0

    def test_states_of_requests_count_before_integers_in_16_bits(self, tmp_path):
        model = shape_of("qwen3.5-9b", tmp_path / "qwen")
        settings = {"quantization": "int4", "state_cache_gib": 1}
        assert estimate(model, EngineConfig.from_settings(settings), H200).expanded > 0
        settings["state_cache_gib"] = 80  # leaves room for fewer than four requests
        result = estimate(model, EngineConfig.from_settings(settings), H200)
        assert (result.expanded, result.fits) == (0, True)

    def test_the_largest_context_is_that_without_integers_in_16_bits(self, tmp_path):
        folder = tmp_path / "llama"
        shape_of("llama-3.1-8b", folder)
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 2**21}))
        model = read_folder(folder, "llama")
        short = EngineConfig.from_settings({"quantization": "int4", "max_model_len": 2**15})
        found = estimate(model, short, H200)
        assert found.expanded > 0
        longest = short.with_settings(max_model_len=found.largest_context)
        result = estimate(model, longest, H200)
        assert (result.expanded, result.fits) == (0, True)
        assert result.largest_context == pytest.approx(found.largest_context, rel=1e-3)

    def test_stages_keep_the_inputs_of_layers_in_16_bits(self, tmp_path):
        """Each has all of the product that makes them."""
        model = shape_of("gemma-4-e4b", tmp_path / "gemma")
        config = EngineConfig.from_settings({"quantization": "int4"})
        split = config.with_settings(pipeline_parallel_size=2)
        whole = sum(one.expanded for one in stages_of(model, config, "bfloat16", H200))
        both = sum(one.expanded for one in stages_of(model, split, "bfloat16", H200))
        assert both - whole == 2 * 2560 * 256 * 42

    @pytest.mark.parametrize("parts", ["tensor", "pipeline"])
    def test_ranks_keep_their_part_of_integers_in_16_bits(self, tmp_path, parts):
        model = shape_of("llama-3.1-8b", tmp_path / "llama")
        split = {f"{parts}_parallel_size": 2, "quantization": "int4"}
        result = estimate(model, EngineConfig.from_settings(split), H200)
        layer = 2 * (8_030_261_248 - 2 * 128256 * 4096 - (2 * 32 + 1) * 4096) // 32
        left = 0.9 * 140 * GIB - result.weights - result.step - result.expanded
        assert left - result.block_bytes <= result.cache <= left
        # The stage without the head has more layers.
        assert result.expanded == layer * (16 if parts == "tensor" else 21)
        # An 80 GB GPU has room for half of the layers, but not for 21: then no stage keeps any.
        small = Device("cuda", "", 80 * GIB, 80 * GIB)
        result = estimate(model, EngineConfig.from_settings(split), small)
        assert result.expanded == (layer * 16 if parts == "tensor" else 0)

    def test_slots_of_adapters_do_not_move_layers_to_other_stages(self, tmp_path):
        model, split = shape_of("qwen3-0.6b", tmp_path / "qwen"), {"pipeline_parallel_size": 2}
        plain, adapted = (
            estimate(model, settings(**split, **more), H200) for more in ({}, {"enable_lora": True})
        )
        assert adapted.block_bytes == plain.block_bytes

    def test_gpu_memory_of_other_programs_is_subtracted(self, tmp_path):
        model = shape_of("qwen3-0.6b", tmp_path / "qwen")
        alone = estimate(model, EngineConfig(), H200)
        shared = estimate(model, EngineConfig(), Device("cuda", "", 140 * GIB, 100 * GIB))
        assert alone.cache - shared.cache == pytest.approx(40 * GIB, rel=1e-3)

    @pytest.mark.parametrize(("kernels", "dtype"), [(True, "bfloat16"), (False, "float32")])
    def test_bfloat16_checkpoint_stays_bfloat16_with_cpu_kernels(
        self, tmp_path, monkeypatch, kernels, dtype
    ):
        monkeypatch.setattr(cpu, "available", lambda: kernels)
        model = shape_of("qwen3-0.6b", tmp_path / "qwen")
        result = estimate(model, settings(), CPU)
        assert (result.dtype, result.weights) == (dtype, (2 if kernels else 4) * 596_049_920)

    def test_model_too_large_gets_advice(self, tmp_path):
        model = shape_of("llama-3.1-8b", tmp_path / "llama")
        on_cpu = estimate(model, settings(dtype="float32"), CPU)
        assert not on_cpu.fits
        assert on_cpu.largest_context == 0
        assert "29.92 GiB in float32" in on_cpu.problem  # 8,030,261,248 x 4 bytes
        assert "--dtype bfloat16" in on_cpu.problem
        small = estimate(model, EngineConfig(), Device("cuda", "", 24 * GIB, 24 * GIB))
        assert not small.fits
        assert 0 < small.largest_context < 131072
        assert f"--max-model-len {small.largest_context}" in small.problem
        longest = EngineConfig.from_settings({"max_model_len": small.largest_context})
        assert estimate(model, longest, Device("cuda", "", 24 * GIB, 24 * GIB)).fits

    def test_the_largest_context_fits_with_its_tables_of_tokens(self, tmp_path):
        model = shape_of("qwen3-0.6b", tmp_path / "qwen")
        gpu = Device("cuda", "", 9 * GIB, 9 * GIB)
        more = {"max_num_seqs": 2000, "speculative_config": {"method": "ngram"}}
        short = EngineConfig.from_settings(more | {"max_model_len": 1000})
        largest = estimate(model, short, gpu).largest_context
        assert 1000 < largest < 40960
        longest = EngineConfig.from_settings(more | {"max_model_len": largest})
        assert estimate(model, longest, gpu).fits

    def test_cuda_graphs_are_counted(self, tmp_path):
        model = shape_of("qwen3-0.6b", tmp_path / "qwen")
        eager = EngineConfig.from_settings({"enforce_eager": True})
        graphs = estimate(model, EngineConfig(), H200).step - estimate(model, eager, H200).step
        activations = 8192 * (4 * 1024 + 2 * 3072) * 2
        assert graphs == activations + 56 * 28 * GRAPH_LAYER_BYTES


class TestDevices:
    GPUS = tuple(
        Device("cuda", f"GPU {number}", 80 * GIB, free * GIB)
        for number, free in enumerate((79, 40, 60))
    )

    def test_fullest_of_the_used_gpus_is_chosen(self, monkeypatch):
        monkeypatch.setattr(devices, "find_gpus", lambda: list(self.GPUS))
        assert find_device().name == "GPU 0"
        assert find_device("cuda", 3).name == "GPU 1"
        assert find_device("cpu").kind == "cpu"

    def test_more_gpus_than_present_is_an_error(self, monkeypatch):
        monkeypatch.setattr(devices, "find_gpus", lambda: list(self.GPUS))
        with pytest.raises(ConfigError, match=r"need 4 GPUs, and this machine has 3\. Lower"):
            find_device("auto", 4)
        monkeypatch.setattr(devices, "find_gpus", list)
        with pytest.raises(ConfigError, match="--device cuda"):
            find_device("cuda")

    @pytest.mark.parametrize(
        ("visible", "names"),
        [
            (None, "012"),
            ("2,0", "20"),
            ("1", "1"),
            ("", ""),
            ("-1", ""),
            ("0,9,1", "0"),
            ("UUID-of-2", "2"),
        ],
    )
    def test_cuda_visible_devices_selects_gpus(self, monkeypatch, visible, names):
        """https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables"""
        nvml = SimpleNamespace(
            nvmlDeviceGetCount=lambda: 3,
            nvmlDeviceGetHandleByIndex=str,
            nvmlDeviceGetUUID=lambda handle: f"UUID-of-{handle}",
        )
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert "".join(devices._visible(nvml)) == names

    @pytest.mark.parametrize(
        ("reserved", "total"), [(2 * GIB, 78 * GIB), (None, 80 * GIB)], ids=["new", "old driver"]
    )
    def test_memory_reserved_by_the_driver_is_excluded(self, monkeypatch, reserved, total):
        def memory(handle, version=None):
            if version is not None and reserved is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return SimpleNamespace(total=80 * GIB, free=70 * GIB, reserved=reserved)

        monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", str)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "NVIDIA X")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert devices.find_gpus() == [Device("cuda", "NVIDIA X", total, 70 * GIB)]


class TestErrors:
    def test_context_longer_than_the_models_is_refused(self):
        model = read_folder(Path(MODEL_DIR), "demo")
        with pytest.raises(
            ConfigError,
            match=r"--max-model-len is 513, .* supports at most 512 tokens\. Give that or less",
        ):
            estimate(model, settings(max_model_len=513), CPU)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"architectures": ["MysteryForVision"]}, "does not support MysteryForVision"),
            ({"quantization_config": {"quant_method": "hqq"}}, r"quantized by hqq, and tk reads"),
            ({"n_embd": "wide"}, "n_embd"),
        ],
    )
    def test_unsupported_model_is_refused(self, tmp_path, change, says):
        raw = json.loads((Path(MODEL_DIR) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        (tmp_path / "model.safetensors").write_bytes(
            (Path(MODEL_DIR) / "model.safetensors").read_bytes()
        )
        with pytest.raises(CheckpointError, match=says):
            estimate(read_folder(tmp_path, "changed"), settings(), CPU)

    def test_truncated_and_missing_files_are_refused(self, tmp_path):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes((Path(MODEL_DIR) / name).read_bytes())
        content = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(content[:-1])
        with pytest.raises(
            CheckpointError, match=f"cut short: it has {len(content) - 1} bytes of {len(content)}"
        ):
            read_folder(tmp_path, "cut")
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 files.*model-2\.safetensors"):
            read_folder(tmp_path, "missing")
