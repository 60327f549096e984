"""The search for the highest rate, and several runs in a row."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from tests.bench.results import outcome
from tests.bench.test_bench_cli import tk
from toolkit.bench import search, sweep
from toolkit.bench.report.summary import Summary
from toolkit.bench.search import find_max_rate, judge
from toolkit.bench.sweep import config_at, points, run_sweep
from toolkit.client.wire import ServerError
from toolkit.config.load import BenchConfig, SweepConfig
from toolkit.errors import ConfigError


@pytest.fixture
def measured(monkeypatch):
    """The configs that runs were made with; `measured.answer` says what comes of one."""

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
    """(exit code, the JSON, what was said on the way)"""
    settings = {"goodput": ("ttft:1000",), "json": True, "request_rate": 40.0} | settings
    code = search.run_search(BenchConfig(find_max_rps=True, **settings))
    out, err = capsys.readouterr()
    return code, json.loads(out), err


class TestSearch:
    @pytest.mark.parametrize("limit", [0.02, 0.3, 1.0, 7.3, 50.0, 1234.5])
    @pytest.mark.parametrize("first", [1.0, 40.0])
    def test_it_finds_a_limit_within_five_per_cent_from_wherever_it_begins(self, limit, first):
        tried = []

        async def holds(rate):
            tried.append(rate)
            return rate <= limit

        found = asyncio.run(find_max_rate(holds, first))
        assert limit / 1.05 <= found <= limit
        assert len(tried) <= 24
        assert len(set(tried)) == len(tried)

    def test_nothing_that_holds_is_nothing_found(self):
        async def never(rate):
            return False

        assert asyncio.run(find_max_rate(never, 1.0)) == 0.0

    def test_a_server_without_a_limit_ends_the_search_too(self):
        async def always(rate):
            return True

        assert asyncio.run(find_max_rate(always, 1.0)) >= 100_000.0

    def test_the_command_reports_every_run(self, measured, tmp_path, capsys):
        measured.answer = lambda config: outcome(
            rate=config.request_rate, seconds=2.0, ttft=0.1 if config.request_rate <= 7 else 2.0,
            goodput=config.goodput, result_dir=config.result_dir,
        )  # fmt: skip
        code, document, err = searched(capsys, result_dir=str(tmp_path))
        assert len(list(tmp_path.glob("*.html"))) == len(document["runs"]) > 5
        assert code == 0
        assert 7 / 1.05 <= document["max_requests_per_s"] <= 7
        assert "40.00 requests/s:   0.00% good" in err
        assert "fails" in err
        assert {config.duration for config in measured} == {20.0}

    def test_no_run_asks_what_an_earlier_one_has_asked(self, measured, capsys):
        measured.answer = lambda config: outcome(
            rate=config.request_rate,
            seconds=2.0,
            ttft=2.0 * (config.request_rate > 7),
            goodput=config.goodput,
        )
        searched(capsys, seed=5)
        assert [config.seed for config in measured] == list(range(5, 5 + len(measured)))

    async def test_a_server_that_refuses_everything_ends_it_and_says_why(self, server):
        server.refuse_every = 1
        code, out, _ = await tk(
            *("--url", server.url, "--find-max-rps", "--goodput", "ttft:1000", "--rps", "40"),
            *("--num-prompts", "3"),
        )
        assert code == 1
        assert len(server.bodies) == 3
        assert "Every request failed at 40.00 requests/s: HTTP 503: The queue is full." in out

    def test_a_run_in_which_nothing_arrives_says_nothing_of_the_server(self, measured, capsys):
        measured.answer = lambda config: outcome(rate=0.02, seconds=0.0, goodput=config.goodput)
        code, document, _ = searched(capsys, request_rate=0.02)
        assert (code, len(measured)) == (1, 1)
        assert "none came in 20 s" in document["ended_early"]

    @pytest.mark.parametrize(
        ("ttft", "lag", "delay", "sent_rate", "verdict"),
        [
            (
                0.1,
                0.05,
                0.0,
                20.0,
                True,
            ),  # the client's lateness is in the times, and they are good
            (0.1, 0.05, 0.0, 12.0, None),  # it never sent what was asked for
            (1.2, 0.5, 0.0, 20.0, None),  # without its lateness they might be good
            (1.2, 0.0, 0.5, 20.0, None),  # the same, where it reads late
            (9.0, 0.5, 0.5, 20.0, False),  # not even then
        ],
    )
    def test_a_late_client_ends_it_only_where_it_may_be_its_fault(
        self, ttft, lag, delay, sent_rate, verdict
    ):
        run = outcome(ttft=ttft, goodput=("ttft:1000",))
        late = dataclasses.replace(
            run.result,
            saturated="it was late",
            loop_delay=Summary.each([delay] * 40),
            sent_rate=sent_rate,
        )
        records = [dataclasses.replace(one, woken=one.scheduled + lag) for one in run.records]
        assert judge(dataclasses.replace(run, result=late, records=records)) is verdict
        assert judge(run) is (ttft < 1.0)

    def test_a_client_that_cannot_tell_says_so(self, measured, capsys):
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
    def test_what_ends_it_early_loses_nothing(self, measured, capsys, error, expected):
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
    def test_values_are_combined_and_take_their_flags_types(self):
        found = points(SweepConfig(vary=("rps=1,2.5", "max-concurrency=8,16", "endpoint=chat")))
        assert len(found) == 4
        assert found[1] == {"request_rate": 1.0, "max_concurrency": 16, "endpoint": "chat"}

    def test_without_a_word_it_goes_through_concurrencies(self):
        assert [point["max_concurrency"] for point in points(SweepConfig())] == [
            1,
            2,
            4,
            8,
            16,
            32,
            64,
        ]

    def test_settings_have_to_go_together_only_with_those_that_vary(self):
        config = SweepConfig(vary=("rps=2,4",), duration=5.0)
        assert [config_at(config, point).request_rate for point in points(config)] == [2.0, 4.0]
        with pytest.raises(ConfigError, match="--duration needs"):
            config_at(config, {})

    def test_it_does_not_search(self):
        with pytest.raises(ConfigError, match="does not search"):
            points(SweepConfig(find_max_rps=True, goodput=("ttft:1",)))

    @pytest.mark.parametrize("vary", ["rsp=1", "rps", "rps=fast", "num-prompts=1.5"])
    def test_what_cannot_be_varied_is_refused(self, vary):
        with pytest.raises(ConfigError):
            points(SweepConfig(vary=(vary,)))

    def test_other_settings_are_those_of_the_line(self):
        config = SweepConfig(vary=("rps=4",), num_prompts=7, ignore_eos=False)
        made = config_at(config, points(config)[0])
        assert (made.request_rate, made.num_prompts, made.ignore_eos) == (4.0, 7, False)

    def test_no_run_asks_what_an_earlier_one_has_asked_unless_it_is_told_to(self):
        config = SweepConfig(vary=("rps=1,2,4",), seed=9)
        seeds = [
            config_at(config, point, number).seed for number, point in enumerate(points(config))
        ]
        assert seeds == [9, 10, 11]
        assert config_at(config, {"seed": 3}, 2).seed == 3
        assert config_at(SweepConfig(), {}, 2).seed is None

    def test_a_server_that_dies_takes_no_earlier_result_with_it(self, measured, capsys):
        def answer(config):
            if len(measured) > 2:
                raise ServerError("Gone.")
            return outcome(rate=config.request_rate)

        measured.answer = answer
        with pytest.raises(ServerError, match="Gone"):
            run_sweep(SweepConfig(vary=("rps=2,4,8",)))
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["2", "4"]

    def test_the_table_names_its_percentiles_the_good_share_and_the_errors(self, measured, capsys):
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

    async def test_a_line_and_a_file_for_each(self, server, tmp_path):
        code, out, err = await tk(
            *(
                "sweep",
                "--url",
                server.url,
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
