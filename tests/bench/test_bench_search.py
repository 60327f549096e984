"""The search for the highest rate, and sweeps."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from tests.bench.results import outcome
from toolkit.bench import search, sweep
from toolkit.bench.report.summary import Summary
from toolkit.bench.search import find_max_rate, meets_objectives
from toolkit.bench.sweep import config_at, run_sweep, sweep_points
from toolkit.client.wire import ServerError
from toolkit.config.load import BenchConfig, SweepConfig
from toolkit.errors import ConfigError


@pytest.fixture
def measured(monkeypatch):
    """The configs of the runs so far. `measured.answer` returns the outcome of a config."""

    class Measured(list):
        answer = staticmethod(
            lambda config: outcome(rate=config.request_rate, goodput=config.goodput)
        )

    configs = Measured()

    async def measure(config):
        configs.append(config)
        return configs.answer(config)

    monkeypatch.setattr(search, "measure", measure)
    monkeypatch.setattr(sweep, "measure", measure)
    return configs


def searched(capsys, **settings):
    """Run the search. Return (exit code, JSON, stderr)."""
    settings = {"goodput": ("ttft:1000",), "json": True, "request_rate": 40.0} | settings
    code = search.run_search(BenchConfig(find_max_rps=True, **settings))
    out, err = capsys.readouterr()
    return code, json.loads(out), err


class TestSearch:
    @pytest.mark.parametrize("limit", [0.02, 0.3, 1.0, 7.3, 50.0, 1234.5])
    @pytest.mark.parametrize("first", [1.0, 40.0])
    def test_finds_a_limit_within_5_percent_from_any_start(self, limit, first):
        tried = []

        async def passes(rate):
            tried.append(rate)
            return rate <= limit

        found = asyncio.run(find_max_rate(passes, first))
        assert limit / 1.05 <= found <= limit
        assert len(tried) <= 24
        assert len(set(tried)) == len(tried)

    def test_finds_nothing_if_no_rate_passes(self):
        async def never(rate):
            return False

        assert asyncio.run(find_max_rate(never, 1.0)) == 0.0

    def test_ends_even_if_every_rate_passes(self):
        async def always(rate):
            return True

        assert asyncio.run(find_max_rate(always, 1.0)) >= 100_000.0

    def test_command_reports_every_run(self, measured, tmp_path, capsys):
        measured.answer = lambda config: outcome(
            rate=config.request_rate, seconds=2.0, ttft=0.1 if config.request_rate <= 7 else 2.0,
            goodput=config.goodput, result_dir=config.result_dir,
        )  # fmt: skip
        code, document, err = searched(capsys, result_dir=str(tmp_path))
        assert len(list(tmp_path.glob("*.html"))) == len(document["runs"]) > 5
        assert code == 0
        assert 7 / 1.05 <= document["max_requests_per_s"] <= 7
        assert "40.00 requests/s:   0.00% good" in err
        assert "output tok/s, failed" in err
        assert {config.duration for config in measured} == {20.0}

    def test_no_run_repeats_the_prompts_of_another(self, measured, capsys):
        measured.answer = lambda config: outcome(
            rate=config.request_rate,
            seconds=2.0,
            ttft=2.0 * (config.request_rate > 7),
            goodput=config.goodput,
        )
        searched(capsys, seed=5)
        assert [config.seed for config in measured] == list(range(5, 5 + len(measured)))

    def test_stops_if_every_request_is_refused(self, server_in_thread, tk):
        server_in_thread.refuse_every = 1
        code, out, _ = tk(
            *(
                "--url",
                server_in_thread.url,
                "--find-max-rps",
                "--goodput",
                "ttft:1000",
                "--rps",
                "40",
            ),
            *("--num-prompts", "3"),
        )
        assert code == 1
        assert len(server_in_thread.bodies) == 3
        assert "Every request failed at 40.00 requests/s: HTTP 503: The queue is full." in out

    def test_stops_if_a_run_has_no_arrivals(self, measured, capsys):
        measured.answer = lambda config: outcome(rate=0.02, seconds=0.0, goodput=config.goodput)
        code, document, _ = searched(capsys, request_rate=0.02)
        assert (code, len(measured)) == (1, 1)
        assert "No request arrived at 0.02 requests/s in 20 s" in document["ended_early"]

    @pytest.mark.parametrize(
        ("ttft", "lag", "delay", "sent_rate", "verdict"),
        [
            (0.1, 0.05, 0.0, 20.0, True),  # good in spite of the client's delay
            (0.1, 0.05, 0.0, 12.0, None),  # the client did not send at the configured rate
            (1.2, 0.5, 0.0, 20.0, None),  # might be good without the late sends
            (1.2, 0.0, 0.5, 20.0, None),  # might be good without the late reads
            (9.0, 0.5, 0.5, 20.0, False),  # bad even without them
        ],
    )
    def test_late_client_leaves_the_verdict_open_only_if_it_matters(
        self, ttft, lag, delay, sent_rate, verdict
    ):
        run = outcome(ttft=ttft, goodput=("ttft:1000",))
        late = dataclasses.replace(
            run.result,
            saturated="it was late",
            loop_delay=Summary.each([delay] * 40),
            sent_rate=sent_rate,
        )
        records = [dataclasses.replace(one, started=one.scheduled + lag) for one in run.records]
        assert meets_objectives(dataclasses.replace(run, result=late, records=records)) is verdict
        assert meets_objectives(run) is (ttft < 1.0)

    def test_stops_if_the_client_is_saturated(self, measured, capsys):
        def answer(config):
            run = outcome(rate=config.request_rate, goodput=config.goodput)
            if len(measured) < 3:
                return run
            late = dataclasses.replace(run.result, saturated="it was late", sent_rate=1.0)
            return dataclasses.replace(run, result=late)

        measured.answer = answer
        code, document, _ = searched(capsys, request_rate=2.0)
        assert (code, document["max_requests_per_s"]) == (1, 4.0)
        assert document["ended_early"].startswith(
            "CLIENT SATURATED at 8.00 requests/s: it was late (send from"
        )

    @pytest.mark.parametrize(
        ("error", "expected"), [(ServerError("Gone."), 1), (KeyboardInterrupt(), 130)]
    )
    def test_early_end_keeps_the_results(self, measured, capsys, error, expected):
        def answer(config):
            if len(measured) > 2:
                raise error
            return outcome(rate=config.request_rate, seconds=2.0, goodput=config.goodput)

        measured.answer = answer
        code, document, _ = searched(capsys, request_rate=2.0)
        assert code == expected
        assert document["max_requests_per_s"] == 4.0
        assert len(document["runs"]) == 2
        assert document["ended_early"] in ("Gone", "Interrupted")


class TestSweep:
    def test_values_are_combined_and_typed(self):
        found = sweep_points(
            SweepConfig(vary=("rps=1,2.5", "max-concurrency=8,16", "endpoint=chat"))
        )
        assert len(found) == 4
        assert found[1] == {"request_rate": 1.0, "max_concurrency": 16, "endpoint": "chat"}

    def test_concurrency_is_varied_by_default(self):
        values = [point["max_concurrency"] for point in sweep_points(SweepConfig())]
        assert values == [1, 2, 4, 8, 16, 32, 64]

    def test_settings_are_checked_together_with_the_varied_ones(self):
        config = SweepConfig(vary=("rps=2,4",), duration=5.0)
        assert [config_at(config, point).request_rate for point in sweep_points(config)] == [
            2.0,
            4.0,
        ]
        with pytest.raises(ConfigError, match="--duration needs"):
            config_at(config, {})

    def test_rejects_find_max_rps(self):
        with pytest.raises(ConfigError, match="does not search"):
            sweep_points(SweepConfig(find_max_rps=True, goodput=("ttft:1",)))

    @pytest.mark.parametrize("vary", ["rsp=1", "rps", "rps=fast", "num-prompts=1.5"])
    def test_invalid_vary_is_rejected(self, vary):
        with pytest.raises(ConfigError):
            sweep_points(SweepConfig(vary=(vary,)))

    def test_other_settings_are_kept(self):
        config = SweepConfig(vary=("rps=4",), num_prompts=7, ignore_eos=False)
        point = config_at(config, sweep_points(config)[0])
        assert (point.request_rate, point.num_prompts, point.ignore_eos) == (4.0, 7, False)

    def test_seeds_differ_between_runs_unless_varied(self):
        config = SweepConfig(vary=("rps=1,2,4",), seed=9)
        seeds = [
            config_at(config, point, number).seed
            for number, point in enumerate(sweep_points(config))
        ]
        assert seeds == [9, 10, 11]
        assert config_at(config, {"seed": 3}, 2).seed == 3
        assert config_at(SweepConfig(), {}, 2).seed is None

    def test_earlier_results_survive_the_death_of_the_server(self, measured, capsys):
        def answer(config):
            if len(measured) > 2:
                raise ServerError("Gone.")
            return outcome(rate=config.request_rate)

        measured.answer = answer
        with pytest.raises(ServerError, match="Gone"):
            run_sweep(SweepConfig(vary=("rps=2,4,8",)))
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["2", "4"]

    def test_table_has_percentiles_good_share_and_errors(self, measured, capsys):
        measured.answer = lambda config: outcome(
            rate=config.request_rate,
            fail_every=4,
            metric_percentiles="90,95",
            goodput=("ttft:1000",),
        )
        run_sweep(SweepConfig(vary=("rps=2,4",)))
        head, *rows = capsys.readouterr().out.splitlines()[1:]
        assert " ".join(head.split()) == "rate req/s out tok/s TTFT p90 p95 ITL p90 p95 failed good"
        assert [row.split()[-2:] for row in rows[:2]] == [["15", "75.0%"], ["30", "75.0%"]]
        assert rows[2:] == ["HTTP 503: <full>"]

    def test_each_run_has_a_line_and_files(self, server_in_thread, tk, tmp_path):
        code, out, err = tk(
            *(
                "sweep",
                "--url",
                server_in_thread.url,
                "--vary",
                "max-concurrency=1,2",
                "random-output-len=3,5",
            ),
            *("--num-prompts", "4", "--result-dir", str(tmp_path), "--result-filename", "run"),
        )
        assert code in (0, 1), err  # 1: a busy machine's client was late
        rows = [line.split() for line in out.splitlines()]
        assert [row[:3] for row in rows[:3]] == [
            ["random"],
            ["max", "output"],
            ["concurrency", "len", "req/s"],
        ]
        assert [row[:2] for row in rows[3:7]] == [["1", "3"], ["1", "5"], ["2", "3"], ["2", "5"]]
        assert {path.name for path in tmp_path.glob("*.json")} == {
            f"run-{n}.json" for n in range(1, 5)
        }
        assert "4/4: max_concurrency=2, random_output_len=5" in err
