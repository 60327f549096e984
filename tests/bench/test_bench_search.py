"""The search for the highest rate, and several runs in a row."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.bench.test_bench_cli import tk
from toolkit.bench.search import find_max_rate
from toolkit.bench.sweep import config_at, points
from toolkit.config.load import SweepConfig
from toolkit.errors import ConfigError


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

    async def test_the_command_reports_every_run(self, server, tmp_path):
        server.refuse_every = 1
        code, out, err = await tk(
            *("--url", server.url, "--find-max-rps", "--goodput", "ttft:1000", "--rps", "40"),
            *("--duration", "0.05", "--json", "--result-dir", str(tmp_path)),
        )
        assert len(list(tmp_path.glob("*.html"))) == len(json.loads(out)["runs"]) > 5
        assert code == 1
        assert json.loads(out)["max_requests_per_s"] == 0.0
        assert "40.00 requests/s:   0.00% good" in err
        assert "fails" in err


class TestSweep:
    def test_values_are_combined_and_take_their_flags_types(self):
        found = points(SweepConfig(vary=("rps=1,2.5", "max-concurrency=8,16", "endpoint=chat")))
        assert len(found) == 4
        assert found[1] == {"request_rate": 1.0, "max_concurrency": 16, "endpoint": "chat"}

    def test_without_a_word_it_goes_through_concurrencies(self):
        assert [point["max_concurrency"] for point in points(SweepConfig())] == [1, 2, 4, 8, 16, 32, 64]

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

    async def test_a_line_and_a_file_for_each(self, server, tmp_path):
        code, out, err = await tk(
            *("sweep", "--url", server.url, "--vary", "max-concurrency=1,2", "random-output-len=3,5"),
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
        assert {path.name for path in tmp_path.glob("*.json")} == {f"run-{n}.json" for n in range(1, 5)}
        assert "4/4: max_concurrency=2, random_output_len=5" in err
