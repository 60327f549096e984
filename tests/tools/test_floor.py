"""Lower bounds of the engine benchmarks, compared with cases worked out by hand."""

from __future__ import annotations

import sys

import pytest

from tests import checkpoints
from toolkit.attention import AttentionShape
from toolkit.bench.workloads import Workload
from tools.bench.floor import Machine, ModelSizes, load_sizes, main, minimum_seconds

SIZES = ModelSizes(
    layers=1000,
    head=500,
    attention=(
        AttentionShape(num_heads=2, num_kv_heads=1, head_size=3, scale=1.0),
        AttentionShape(num_heads=1, num_kv_heads=1, head_size=2, scale=1.0),
    ),
)
"""Per token: queries of 6 and 2 numbers, and 12 and 8 bytes of keys and values."""


def test_prompt_takes_its_arithmetic():
    """3 tokens: 2 · 1000 · 3 for the layers, 2 · 500 for one token's logits, and
    4 · 8 · (1 + 2 + 3) for attention.
    """
    work = Workload("prefill", [[1, 2, 3]], [1])
    assert minimum_seconds(SIZES, work, Machine(bandwidth=1e6, rate=1e3)) == pytest.approx(7.192)


def test_prompt_reads_at_least_the_weights():
    work = Workload("prefill", [[1]], [1])
    assert minimum_seconds(SIZES, work, Machine(bandwidth=1e3, rate=1e9)) == pytest.approx(3.0)


def test_decode_reads_weights_and_kv_cache():
    """Two steps after the prompts: contexts of 2 + 1 and 3 + 1 tokens, then only of 3 + 2."""
    work = Workload("latency", [[1] * 2, [1] * 3], [2, 3])
    machine = Machine(bandwidth=1e3, rate=1e12)
    assert minimum_seconds(SIZES, work, machine) == pytest.approx(
        3.0 + (3.0 + 0.02 * 7) + (3.0 + 0.02 * 5)
    )


def test_steps_of_many_requests_are_bound_by_arithmetic():
    """A step for prompts of one token, and one for a second token, which attends to two."""
    work = Workload("latency", [[1]] * 100, [2] * 100)
    expected = 2 * 1500 * 100 + 4 * 8 * 100 + 2 * 1500 * 100 + 4 * 8 * 2 * 100
    assert minimum_seconds(SIZES, work, Machine(bandwidth=1e15, rate=1e3)) == pytest.approx(
        expected / 1e3
    )


@pytest.mark.parametrize(("option", "in_prompt"), [("sliding_window", 9), ("chunk", 7)])
def test_windows_and_chunks_limit_the_keys(option, in_prompt):
    """With a window of 2, the prompt of 5 tokens reads 1 + 2 + 2 + 2 + 2 keys, the next token 2;
    with a chunk of 2, 1 + 2 + 1 + 2 + 1 and 2."""
    shape = AttentionShape(5, 1, 2, 1.0, **{option: 2})
    sizes = ModelSizes(layers=0, head=0, attention=(shape,) * 3)
    work = Workload("latency", [[1] * 5], [2])
    assert minimum_seconds(sizes, work, Machine(bandwidth=1e15, rate=1.0)) == pytest.approx(
        3 * 4 * 10 * (in_prompt + 2)
    )
    assert minimum_seconds(sizes, work, Machine(bandwidth=1.0, rate=1e15)) == pytest.approx(
        3 * 8 * 2
    )


@pytest.mark.parametrize("name", ["gpt2", "llama3-gqa", "qwen3", "mistral-window"])
def test_sizes_match_the_model(checkpoint, name):
    sizes, context, vocab_size = load_sizes(checkpoint(name))
    model = checkpoints.make_reference(name)
    config = model.config
    parts = {part: number.numel() for part, number in model.named_parameters()}
    layers = sum(count for part, count in parts.items() if ".h." in part or ".layers." in part)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (sizes.layers, vocab_size, context) == (
        layers,
        config.vocab_size,
        config.max_position_embeddings,
    )
    assert sizes.head == config.vocab_size * config.hidden_size
    window = config.sliding_window if name == "mistral-window" else 0
    for shape in sizes.attention:
        found = shape.num_heads, shape.num_kv_heads, shape.head_size, shape.sliding_window
        assert found == (config.num_attention_heads, heads, size, window)
    assert len(sizes.attention) == config.num_hidden_layers


def test_command_prints_all_five(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["floor", str(checkpoint("gpt2")), "--bandwidth", "1"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "offline",
        "latency",
        "latency",
        "latency",
        "prefill",
    ]
    assert all("tokens/s" in line for line in lines)
