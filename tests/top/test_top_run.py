"""The command without a screen: snapshots, recordings, errors."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import httpx
import pytest

from toolkit.config.clients import TopConfig
from toolkit.errors import ConfigError, ToolkitError
from toolkit.top import background, wording
from toolkit.top.background import is_light
from toolkit.top.plain import as_json, snapshot
from toolkit.top.readings.recording import RecordingWriter, recorded_sources
from toolkit.top.readings.source import HTTPSource
from toolkit.top.run import open_sources, run, take_readings
from toolkit.top.state import State

URL = "http://127.0.0.1:8000"


def state_over(*servers, interval=0.1, api_key=None, admin_key=None):
    sources = [
        HTTPSource(f"{URL}{index or ''}", api_key, admin_key, one.transport)
        for index, one in enumerate(servers)
    ]
    return State(sources, interval=interval, window=30.0)


async def test_snapshot_is_plain_text_of_100_columns(metrics, canned):
    state = state_over(canned([metrics(10), metrics(12)]))
    await take_readings(state, None)
    text = snapshot(state)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("demo-model  version 9.8.7  http://127.0.0.1:8000  up ")
    assert re.search(r"generation  [\d,.]+ tok/s\n", text)
    assert "kv cache    43.2%\n" in text
    assert "finished    stop 12, length 2\n" in text
    assert re.search(r"TTFT\s+5\.00 ms\s+9\.00 ms\s+9\.90 ms\s+6\.00 ms\s+12\n", text)
    assert re.search(r"ITL(\s+-){4}\s+0\n", text)
    assert re.search(r"why slow    fine: \d+ running, \d+ waiting\n", text)
    assert "--max-num" not in text  # the page has no sizes of steps


async def test_snapshot_has_the_acceptance_of_drafts(metrics, canned):
    counts = {"num_drafts": 50, "num_draft_tokens": 100, "num_accepted_tokens": 60}
    page = "".join(
        f"# TYPE tk:spec_decode_{name}_total counter\ntk:spec_decode_{name}_total {count}\n"
        for name, count in counts.items()
    )
    page += "# TYPE tk:spec_decode_num_accepted_tokens_per_pos_total counter\n"
    for position, count in (("1", 20), ("0", 40)):
        labels = f'position="{position}"'
        page += f"tk:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {count}\n"
    state = state_over(canned([metrics(10) + page, metrics(12) + page]))
    await take_readings(state, None)
    assert "drafts      60%: 80 40\n" in snapshot(state)
    assert json.loads(as_json(state))["servers"][0]["acceptance_by_position"] == [0.8, 0.4]


async def test_snapshot_has_pictures(metrics, canned):
    def page(queries: int, hits: int) -> str:
        counts = {"queries": queries, "hits": hits}
        return "".join(
            f"# TYPE tk:mm_cache_{name}_total counter\ntk:mm_cache_{name}_total {count}\n"
            for name, count in counts.items()
        )

    state = state_over(canned([metrics(10) + page(2, 0), metrics(12) + page(10, 2)]))
    await take_readings(state, None)
    assert re.search(r"pictures    10, [\d.,]+ per second, 20.0% shared\n", snapshot(state))
    assert "pictures" not in snapshot(state_over(canned([metrics(10)])))


async def test_snapshot_has_sound(metrics, canned):
    pages = [
        f"# TYPE tk:audio_seconds_total counter\ntk:audio_seconds_total {seconds}\n"
        for seconds in (30, 90)
    ]
    state = state_over(canned([metrics(10) + pages[0], metrics(12) + pages[1]]))
    await take_readings(state, None)
    assert re.search(r"sound       90 s, [\d.,]+ times real time\n", snapshot(state))


async def test_json_has_numbers_in_base_units(metrics, canned):
    state = state_over(canned([metrics(10), metrics(12)]), canned([None]))
    await take_readings(state, None)
    content = json.loads(as_json(state))
    up, down = content["servers"]
    assert content["schema"] == 1
    assert (up["up"], up["url"], up["model"], up["error"]) == (True, URL, "demo-model", None)
    assert up["latencies"]["TTFT"] == pytest.approx(
        {"p50": 0.005, "p90": 0.009, "p99": 0.0099, "mean": 0.006, "count": 12}
    )
    assert up["kv_usage"] == pytest.approx(0.432)
    assert up["gpu_power"] is None
    assert [one["id"] for one in up["requests"]] == ["cmpl-old", "cmpl-new"]
    assert up["why_slow"]["kind"]
    assert down["up"] is False
    assert "No server answers" in down["error"]
    assert content["total"]["running"] == 12


async def test_snapshot_without_a_server_is_one_error(unused_tcp_port):
    url = f"127.0.0.1:{unused_tcp_port}"
    with pytest.raises(ToolkitError, match=f"No server answers at http://{url}"):
        await take_readings(
            State(open_sources(TopConfig(url=(url,))), interval=0.1, window=30.0), None
        )


async def test_snapshot_of_a_recording_is_of_its_end(metrics, canned, tmp_path):
    path = str(tmp_path / "seen.jsonl")
    seen = state_over(canned([metrics(10), metrics(12)]), canned([metrics(5), metrics(6)]))
    await take_readings(seen, RecordingWriter(path, [source.url for source in seen.sources]))
    with open(path, "a") as file:
        file.write('{"url": "http://127.0.0.1:8000", "time"')  # cut off: the disk was full
    again = State(recorded_sources(path), interval=0.1, window=30.0)
    await take_readings(again, None)
    assert snapshot(again) == snapshot(seen)
    assert again.servers[0].requests == seen.servers[0].requests
    assert again.servers[0].settings == seen.servers[0].settings


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a recording of tk top"),
        (b"root:x:0:0\n", "not a recording of tk top"),
        (
            b'{"format": "tk-top", "version": 99, "urls": []}\n',
            "version 99; this tk reads version 1",
        ),
        (None, "cannot read"),
    ],
)
def test_file_that_is_not_a_recording_is_one_error(content, problem, tmp_path):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ToolkitError, match=problem):
        run(TopConfig(replay=str(path), once=True))


def test_recording_that_cannot_be_written_is_one_error(tmp_path):
    with pytest.raises(ToolkitError, match="cannot write"):
        run(TopConfig(record=str(tmp_path / "no" / "such" / "folder"), demo=True, once=True))


def test_demo_needs_no_server(capsys):
    assert run(TopConfig(demo=True, json=True, interval=0.1)) == 0
    content = json.loads(capsys.readouterr().out)
    assert [server["up"] for server in content["servers"]] == [True, True, True]
    assert content["servers"][2]["requests"] is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"interval": 0.0}, "interval"),
        ({"url": ("ftp://a",)}, "--url"),
        ({"replay": "a", "demo": True}, "--demo"),
        ({"replay": "a", "record": "b"}, "--record"),
        ({"theme": "pink"}, "dark"),
    ],
)
def test_invalid_settings_are_errors(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        TopConfig(**settings)


def test_duplicate_urls_are_removed():
    assert TopConfig(url=("a:1", "http://a:1/v1/", "b")).url == ("http://a:1", "http://b")


async def test_admin_key_is_preferred_over_the_api_key(metrics, canned):
    for keys, sent in (
        (("user", None), "user"),
        (("user", "boss"), "boss"),
        ((None, "boss"), "boss"),
    ):
        server = canned([metrics(1)], key=sent)
        reading = await HTTPSource(URL, *keys, server.transport).read(requests=True)
        assert [one.id for one in reading.requests] == ["cmpl-old", "cmpl-new"]


async def test_id_is_escaped_in_the_request_that_ends_it():
    paths = []

    def answer(request):
        paths.append(request.url.raw_path)
        return httpx.Response(200, json={})

    await HTTPSource(URL, transport=httpx.MockTransport(answer)).abort("a/../b?c")
    assert paths == [b"/tk/requests/a%2F..%2Fb%3Fc"]


async def test_server_info_is_read_again_after_a_reconnect(metrics, canned):
    server = canned([metrics(1), None, metrics(1)])
    source = HTTPSource(URL, transport=server.transport)
    readings = [await source.read(requests=False) for _ in range(4)]
    assert [bool(one.error) for one in readings] == [False, True, False, False]
    assert [one.settings is not None for one in readings] == [True, False, True, False]
    assert server.requested.count("GET /server_info") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0000004, "0.00 ms"), (0.00512, "5.12 ms"), (0.0512, "51.2 ms"),
     (0.512, "512 ms"), (0.9996, "1.00 s"), (5.123, "5.12 s"), (9.996, "10.0 s"), (512.3, "512 s")],
)  # fmt: skip
def test_times_have_three_digits(value, text):
    assert wording.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (7.54, "7.5"), (9.96, "10"), (812.4, "812"), (9999, "9999"),
     (12_345, "12.3k"), (999_499, "999k"), (999_500, "1.0M"), (4.5e6, "4.5M"), (7.2e9, "7.2G")],
)  # fmt: skip
def test_counts_fit_five_columns(value, text):
    assert wording.short(value) == text


def test_usage_error_does_not_import_textual():
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-c",
        "from toolkit.cli import main; main()",
        "top",
    ]
    done = subprocess.run(
        [*command, "--replay", "/no/such/file"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2
    imported = re.findall(r"\|\s+([\w.]+)$", done.stderr, re.M)
    assert not {"textual", "torch", "transformers"} & set(imported)
    assert (
        done.stderr.splitlines()[-1]
        == "tk: --replay cannot read /no/such/file: No such file or directory."
    )


@pytest.mark.parametrize(
    ("answer", "variable", "light"),
    [
        (b"\x1b]11;rgb:ffff/ffff/f0f0\x1b\\\x1b[?62c", "", True),
        (b"\x1b]11;rgb:00/2b/36\x07\x1b[?1;2c", "0;15", False),
        (b"\x1b[?62c", "0;15", True),
        (b"", "15;0", False),
        (b"", "", False),
    ],
)
def test_background_is_read_from_the_terminal(answer, variable, light, monkeypatch):
    import os
    import pty
    import threading

    monkeypatch.setenv("COLORFGBG", variable)
    monkeypatch.setattr(background, "TIMEOUT", 60.0 if answer else 0.1)
    ours, theirs = pty.openpty()

    class Stream:
        def fileno(self):
            return theirs

    monkeypatch.setattr(sys, "stdin", Stream())
    monkeypatch.setattr(sys, "stdout", Stream())
    asked = []

    def terminal():
        asked.append(os.read(ours, 64))
        os.write(ours, answer)

    thread = threading.Thread(target=terminal)
    thread.start()
    assert is_light() is light
    thread.join()
    assert asked == [b"\x1b]11;?\x1b\\\x1b[c"]
    os.close(ours)
    os.close(theirs)


def test_readings_are_an_interval_apart(metrics, canned):
    state = state_over(canned([metrics(10), metrics(20)]), interval=0.3)
    asyncio.run(take_readings(state, None))
    server = state.servers[0]
    assert server.last.time - server.first.time >= 0.29
