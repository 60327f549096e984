"""Comparison of two results."""

from __future__ import annotations

import functools
import json

import pytest

from tests.bench.results import outcome
from toolkit.bench.report.compare import MetricChange, changes, different_settings, run_compare
from toolkit.bench.report.document import as_json
from toolkit.bench.run import to_json_text
from toolkit.config.load import CompareConfig
from toolkit.errors import ConfigError


@functools.cache
def json_text(**settings):
    return to_json_text(as_json(outcome(**settings)))


@pytest.fixture
def saved(tmp_path):
    def save(name, **settings):
        path = tmp_path / f"{name}.json"
        path.write_text(json_text(**settings))
        return str(path)

    return save


def compare(before, after, capsys, **settings):
    """Return (exit code, output)."""
    code = run_compare(CompareConfig(before=before, after=after, **settings))
    return code, capsys.readouterr().out


def by_name(**settings):
    before, after = (json.loads(json_text(**one)) for one in ({}, settings))
    return {change.name: change for change in changes(before, after)}


def test_runs_of_equal_speed_differ_only_by_chance(saved, capsys):
    pairs = [
        (saved(f"a{seed}", seed=seed), saved(f"b{seed}", seed=seed + 100)) for seed in range(5)
    ]
    assert [compare(a, b, capsys, threshold=0.0)[0] for a, b in pairs].count(1) <= 1
    assert {change.verdict for change in by_name(seed=7).values()} <= {
        "within noise",
        "unknown",
    }


def test_slower_first_token_is_the_only_regression(saved, capsys):
    code, out = compare(saved("a"), saved("b", ttft=0.13, seed=1), capsys)
    assert code == 1
    regressed = {
        line.split(",")[0].split("  ")[0] for line in out.splitlines() if "REGRESSION" in line
    }
    assert regressed >= {"TTFT mean", "TTFT p50"}
    assert not any(name.startswith(("TPOT", "ITL", "output", "requests")) for name in regressed)
    assert "+30." in out or "+29." in out


def test_change_below_the_threshold_is_no_regression(saved, capsys):
    a, b = saved("a"), saved("b", ttft=0.13, seed=1)
    assert compare(a, b, capsys, threshold=50.0)[0] == 0


def test_improvement_is_no_regression(saved, capsys):
    code, out = compare(saved("a"), saved("b", ttft=0.05, itl=0.005, seed=1), capsys)
    assert code == 0
    assert "better" in out
    assert "Nothing is worse by more than 5%" in out


def test_lower_throughput_is_worse():
    found = by_name(rate=10.0, seed=1)["output tok/s, steady"]
    assert (found.is_worse, found.is_significant, found.is_regression(5.0)) == (True, True, True)
    assert found.percent == pytest.approx(-50, abs=2)


def test_large_difference_of_few_values_is_not_significant():
    assert (
        MetricChange("x", 10.0, 20.0, error=9.0, higher_is_better=False).verdict == "within noise"
    )
    assert MetricChange("x", 10.0, 20.0, error=None, higher_is_better=False).verdict == "unknown"
    assert not MetricChange("x", 10.0, 20.0, error=None, higher_is_better=False).is_regression(5.0)


def test_change_of_unknown_significance_is_reported(saved, capsys):
    short = {"seconds": 0.9, "rate": 8.0}
    _, out = compare(saved("a", **short), saved("b", itl=0.05, **short), capsys)
    assert "unknown" in out
    assert "but possibly by chance. Use longer runs." in " ".join(out.split())
    _, out = compare(saved("a", **short), saved("a", **short), capsys)
    assert "possibly by chance" not in out


def test_goodput_is_compared_if_the_objectives_are_equal(saved):
    strict = by_name(ttft=0.13, goodput=("ttft:120",))
    assert "good requests/s" not in strict
    before, after = (json.loads(json_text(goodput=("ttft:105",), ttft=ttft)) for ttft in (0.1, 0.2))
    found = {change.name: change for change in changes(before, after)}["good requests/s"]
    assert found.is_worse
    assert (found.before > 5, found.after) == (True, 0.0)


def test_more_failures_are_a_regression(saved, capsys):
    code, out = compare(saved("a"), saved("b", fail_every=4), capsys)
    assert code == 1
    assert "150 of 600 requests failed; before, 0 of 600." in out


def test_different_settings_are_reported(saved, capsys):
    _, out = compare(saved("a"), saved("b", rate=10.0, random_input_len=64), capsys)
    assert "The loads differ: request_rate 20.0 → 10.0, random_input_len 128 → 64." in out
    same = [json.loads(json_text(seed=seed)) for seed in (1, 2)]
    assert different_settings(*same) == {}


def test_json_reports_the_same(saved, capsys):
    code, out = compare(saved("a"), saved("b", ttft=0.2), capsys, json=True)
    document = json.loads(out)
    assert code == 1
    assert "TTFT p50, ms" in document["regressions"]
    assert {"name", "before", "after", "percent", "verdict"} == set(document["changes"][0])


def test_invalid_result_is_an_error(saved, tmp_path):
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "old").write_text('{"schema": "tk-bench/1"}')
    late = json.loads(json_text())
    late["client"]["saturated"] = "it was late"
    (tmp_path / "late").write_text(json.dumps(late))
    for name, why in (
        ("missing", "No such file"),
        ("text", "not JSON"),
        ("old", "tk-bench/1"),
        ("late", "SATURATED"),
    ):
        with pytest.raises(ConfigError, match=why):
            run_compare(CompareConfig(before=saved("a"), after=str(tmp_path / name)))
    with pytest.raises(ConfigError, match="Two results"):
        CompareConfig(before="a.json")
