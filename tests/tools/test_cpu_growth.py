"""Limits of a CPU's decode speed, and their table and plot."""

from __future__ import annotations

from xml.etree import ElementTree

from tools.bench.cpu_growth import MachineLimits, Measurement, plot, table

LIMITS = MachineLimits(
    bandwidth=20e9, rate=200e9, weight_bytes=500_000_000, kv_bytes=73_728, flops=250_000_000
)


def test_limit_is_weights_then_arithmetic_then_kv_cache() -> None:
    assert LIMITS.tokens_per_second(1, 0) == 40.0  # 0.5 GB at 20 GB/s
    assert LIMITS.tokens_per_second(64, 0) == 800.0  # 200 / 0.25 GFLOP
    long = LIMITS.tokens_per_second(64, 1000)
    assert round(long, 1) == round(64 / ((5e8 + 64 * 1000 * 73_728) / 20e9), 1) < 800


def test_table_and_plot_have_every_point() -> None:
    points = [
        Measurement(batch, context, 10.0 * batch, 40.0 * batch)
        for batch in (1, 8)
        for context in (128, 512)
    ]
    lines = table(points).splitlines()
    assert lines[0] == "| batch | context 128 | context 512 |"
    assert lines[-1] == "| 8 | 80 (25%) | 80 (25%) |"
    svg = ElementTree.fromstring(plot(points))
    assert len(svg.findall(".//{*}polyline")) == 4
    assert "context 512" in "".join(svg.itertext())
