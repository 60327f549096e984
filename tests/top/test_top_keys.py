"""The dashboard with keys and mouse, over canned servers and the demo."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.top.screens import demo_app, screen_text
from toolkit.top.app import TopApp
from toolkit.top.dialogs import Dialog, RequestDialog
from toolkit.top.readings.demo import demo_sources
from toolkit.top.readings.recording import RecordingWriter, recorded_sources
from toolkit.top.readings.source import HTTPSource
from toolkit.top.state import State

URL = "http://127.0.0.1:8000"


def app_over(*servers, interval=0.1, keys=(None, None), recorder=None):
    sources = [
        HTTPSource(f"{URL}{index or ''}", *keys, one.transport) for index, one in enumerate(servers)
    ]
    return TopApp(State(sources, interval=interval, window=30.0), recorder=recorder)


async def until(app, pilot, pattern):
    """Wait until the screen matches, for at most twenty seconds."""
    for _ in range(1000):
        if re.search(pattern, screen_text(app)):
            return
        await pilot.pause(0.02)
    pytest.fail(f"{pattern!r} did not appear. The screen:\n{screen_text(app)}")


async def test_overview_shows_the_metrics(metrics, canned):
    app = app_over(canned([metrics(10), metrics(30)]))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(app, pilot, r"TTFT\s+5\.00 ms\s+9\.00 ms\s+9\.90 ms\s+6\.00 ms\s+20")
        text = screen_text(app)
        for expected in (
            r"demo-model  127\.0\.0\.1:8000  version 9\.8\.7",
            r"running\s+12\b",
            r"waiting\s+3\b",
            r"used\s+━+─+\s+43%",
            r"hits\s+━+─+\s+25%",
            r"preempted\s+7",
            "Generation",
            "why slow",
        ):
            assert re.search(expected, text), expected


async def test_server_that_goes_away_is_stale_until_it_is_back(metrics, canned):
    server = canned([None])
    app = app_over(server)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(app, pilot, r"no answer.*No server answers at")
        server.readings[:] = [metrics(10)]
        await until(app, pilot, r"running\s+12")
        assert "No server" not in screen_text(app)
        server.readings[:] = [None]
        await until(app, pilot, r"stale, \d+ s old")
        assert re.search(r"running\s+12", screen_text(app))  # the last numbers stay
        server.readings[:] = [metrics(1, running=4.0)]  # a new server: its counters are lower
        await until(app, pilot, r"running\s+4\b")
        assert not re.search(r"-\d+ tok/s", screen_text(app))


async def test_pause_stops_reading_and_q_quits(metrics, canned):
    server = canned([metrics(10)])
    app = app_over(server)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(app, pilot, r"running\s+12")
        await pilot.press("p")
        await until(app, pilot, "paused")
        for _ in range(20):  # a request may be in flight
            before = len(server.requested)
            await pilot.pause(0.3)
            if len(server.requested) == before:
                break
        assert len(server.requested) == before
        await pilot.press("p")
        await until(app, pilot, r"● every 0\.1 s")
        await pilot.press("q")
    assert app.return_code == 0


async def test_plus_and_minus_change_the_interval(metrics, canned):
    app = app_over(canned([metrics(10)]), interval=1.0)
    async with app.run_test(size=(80, 24)) as pilot:
        for key, expected in (
            ("plus", "every 2 s"),
            ("minus", "every 1 s"),
            ("minus", "every 0.5 s"),
        ):
            await pilot.press(key)
            await until(app, pilot, expected)


async def test_live_requests_are_read_only_while_shown(metrics, canned):
    server = canned([metrics(10)])
    app = app_over(server)
    async with app.run_test(size=(200, 60)) as pilot:
        await until(app, pilot, r"running\s+12")
        assert "GET /tk/requests" not in server.requested
        await pilot.press("2")
        await until(
            app, pilot, r"old\s+9\.00 s running\s+100\s+80\s+40\s+20\.5\s+9\s+1\s+0\s+10\.0\.0\.1"
        )
        assert re.search(
            r"new\s+500 ms waiting\s+12\s+0\s+0\s+0\s+0\s+0\s+3\s+10\.0\.0\.2", screen_text(app)
        )


async def test_rows_are_sorted_reversed_and_filtered(metrics, canned):
    app = app_over(canned([metrics(10)]))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await until(app, pilot, r"(?s)age▼.*old.*new")
        await pilot.press("r")
        await until(app, pilot, r"(?s)age▲.*new.*old")
        await pilot.press("s")  # by state
        await until(app, pilot, r"(?s)state▲.*old.*new")
        await pilot.press("slash", *"wait")
        await until(app, pilot, r"/wait\s+1 of 2")
        assert "old" not in screen_text(app)
        await pilot.press("enter")
        await until(app, pilot, "Enter Open")
        assert "old" not in screen_text(app)
        await pilot.press("q")  # not typed into the filter
        assert app.return_code == 0


async def test_escape_clears_the_filter(metrics, canned):
    app = app_over(canned([metrics(10)]))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2", "slash", *"xyz")
        await until(app, pilot, "No row matches the filter 'xyz'")
        await pilot.press("escape")
        await until(app, pilot, "old")


async def test_cursor_stays_on_its_request_when_others_come(metrics, canned):
    server = canned([metrics(10)])
    app = app_over(server)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await until(app, pilot, "old")
        await pilot.press("j")
        assert app.page.listing.current.request.id == "cmpl-new"
        server.live.insert(0, dict(server.live[0], id="cmpl-oldest", age=99.0))
        await until(app, pilot, "oldest")
        assert app.page.listing.current.request.id == "cmpl-new"
        await pilot.press("g", "k")
        assert app.page.listing.current.request.id == "cmpl-oldest"
        await pilot.press("G", "down")
        assert app.page.listing.current.request.id == "cmpl-new"


async def test_request_dialog_is_updated_until_it_is_closed(metrics, canned):
    server = canned([metrics(10)])
    app = app_over(server)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await until(app, pilot, "old")
        await pilot.press("enter")
        await until(app, pilot, r"(?s)id\s+cmpl-old.*from cache\s+━+─+\s+80%.*output\s+40 tokens")
        server.live[0] |= {"num_output_tokens": 60, "age": 10.0}
        await until(app, pilot, r"output\s+60 tokens")
        assert app.screen._speeds == [20.0]
        del server.live[0]
        await until(app, pilot, "This request has ended")
        await pilot.press("escape")
        assert not isinstance(app.screen, RequestDialog)


async def test_request_is_ended_only_after_confirmation(metrics, canned):
    server = canned([metrics(10)])
    app = app_over(server)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await pilot.press("2")
        await until(app, pilot, "old")
        await pilot.press("x")
        await until(app, pilot, r"End this request\?")
        await pilot.press("escape")
        await pilot.pause(0.2)
        assert not any(one.startswith("DELETE") for one in server.requested)
        await pilot.press("x", "enter")
        await until(app, pilot, "Ended cmpl-old")
        assert "DELETE /tk/requests/cmpl-old" in server.requested
        assert [one["id"] for one in server.live] == ["cmpl-new"]


async def test_error_of_ending_a_request_is_shown(metrics, canned):
    server = canned([metrics(10)])
    app = app_over(server)
    async with app.run_test(size=(120, 30), notifications=True) as pilot:
        await pilot.press("2")
        await until(app, pilot, "old")
        await pilot.press("x")
        del server.live[0]
        await pilot.press("enter")
        await until(app, pilot, "There is no live request")


async def test_vllm_server_is_shown_without_operator_pages(vllm_text, canned):
    app = app_over(canned([vllm_text], is_tk=False))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(app, pilot, r"running\s+1")
        await until(app, pilot, r"used.*<1%")  # one block of 1024
        await pilot.press("2")
        await until(app, pilot, "only tk servers have /tk/requests")
        await until(app, pilot, r"finished\s.*since the start: length 47\d")
        assert "Open" not in screen_text(app)  # there is no row to open
        await pilot.press("x", "enter", "j", "s", "5")
        await until(app, pilot, "reports only the settings in its metrics")
        await until(app, pilot, r"effective_attention_block_size\s+metrics")
        assert not re.search(r"●\s+(block_size|gpu_memory)|_block_size_resolved", screen_text(app))


async def test_operator_pages_need_the_admin_key(metrics, canned):
    app = app_over(canned([metrics(10)], key="boss"), keys=("user", None))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await until(app, pilot, "set --admin-key")
    app = app_over(canned([metrics(10)], key="boss"), keys=("user", "boss"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await until(app, pilot, "old")
        await pilot.press("5")
        await until(app, pilot, r"●\s+max_num_seqs\s+scheduler\s+99")


async def test_several_servers_are_shown_together_or_one_alone(metrics, canned):
    app = app_over(canned([metrics(10)]), canned([metrics(10, running=30.0)]), canned([None]))
    async with app.run_test(size=(120, 30)) as pilot:
        await until(app, pilot, r"running\s+42")
        await until(app, pilot, "3 servers, 2 answer")
        await pilot.press("4")
        await until(app, pilot, r"127\.0\.0\.1:80002\s+no answer")
        await pilot.press("j", "enter")
        await until(app, pilot, r"running\s+30")
        await until(app, pilot, r"demo-model  127\.0\.0\.1:80001")
        await pilot.press("escape")
        await until(app, pilot, r"running\s+42")


async def test_pages_change_by_number_by_tab_and_by_click():
    app = demo_app()
    async with app.run_test(size=(80, 24)) as pilot:
        for number in range(1, 6):
            await pilot.press(str(number))
            assert app.page is app.pages[number - 1]
        await pilot.press("tab")
        assert app.page is app.pages[0]
        await pilot.press("shift+tab")
        assert app.page is app.pages[4]
        await pilot.click("#tabs", offset=(30, 0))
        assert app.page is app.pages[2]
        await pilot.press("2")
        await until(app, pilot, "only tk servers have")
        await pilot.click("#body", offset=(5, 4))  # third row, below a note and the header
        assert app.page.listing.cursor == 2
        await pilot.press("3")
        first = app.page.first
        await pilot.press("l")
        assert app.page.first == first + 1
        await pilot.press("h", "h")
        assert app.page.first == 5


async def test_help_theme_and_command_palette():
    app = demo_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("question_mark")
        await until(app, pilot, r"Ctrl-P\s+All commands by name")
        await pilot.press("escape")
        assert not isinstance(app.screen, Dialog)
        ground = app.screen.styles.background
        await pilot.press("t")
        await pilot.pause(0.1)
        assert app.theme == "tk-light"
        assert app.screen.styles.background != ground
        await pilot.press("ctrl+p")
        await until(app, pilot, "Search for commands")
        await pilot.press(*"servers", "enter")
        await until(app, pilot, r"borealis\s+up")


async def test_recording_can_be_replayed(metrics, canned, tmp_path):
    path = str(tmp_path / "seen.jsonl")
    app = app_over(canned([metrics(10), None, metrics(30)]), recorder=RecordingWriter(path, [URL]))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(app, pilot, r"● rec")
        await until(app, pilot, r"TTFT\s+5\.00 ms")
    again = TopApp(State(recorded_sources(path), interval=0.1, window=30.0))
    async with again.run_test(size=(80, 24), notifications=True) as pilot:
        await until(again, pilot, "end of the recording")
        assert re.search(
            r"TTFT\s+5\.00 ms\s+9\.00 ms\s+9\.90 ms\s+6\.00 ms\s+20", screen_text(again)
        )
        await pilot.press("2")
        await until(again, pilot, "old")
        await pilot.press("x", "enter")
        await until(again, pilot, "This is a recording")


async def test_sorting_by_a_server_survives_focus_on_another():
    app = demo_app()
    async with app.run_test(size=(200, 30)) as pilot:
        await pilot.press("5", *"ssss")
        assert app.page.listing.sort == "borealis"
        await pilot.press("4", "g", "enter", "5")
        await until(app, pilot, "setting +section +atlas")
        await pilot.press("s")
        assert app.page.listing.sort == "setting"


def test_paused_numbers_are_not_stale():
    now = [1000.0]
    state = State(demo_sources(lambda: now[0]), interval=1.0, window=30.0)
    for source, server in zip(state.sources, state.servers, strict=True):
        server.add(asyncio.run(source.read(requests=False)))
    assert not state.all_stale
    now[0] += 10.0
    assert state.all_stale
    state.is_paused = True
    assert not state.all_stale
