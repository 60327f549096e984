from __future__ import annotations

import html
import re

import pytest

from toolkit.config.clients import TopConfig
from toolkit.errors import ConfigError
from toolkit.top import words
from toolkit.top.app import TopApp, bar, right_aligned
from toolkit.top.history import History
from toolkit.top.plain import snapshot
from toolkit.top.run import look_once
from toolkit.top.scrape import parse
from toolkit.top.source import Identity, Source

URL = "http://127.0.0.1:8000"


def app_of(transport, interval=0.1):
    return TopApp(Source(URL, None, transport), interval=interval, window=30.0)


def shown(app):
    """The text on the screen."""
    pieces = re.findall(r"<text [^>]*>(.*?)</text>", app.export_screenshot(), re.S)
    return html.unescape("\n".join(pieces)).replace("\xa0", " ")


async def until(app, pilot, pattern):
    """Waits until the screen shows it, for at most ten seconds."""
    for _ in range(200):
        if re.search(pattern, shown(app)):
            return
        await pilot.pause(0.05)
    pytest.fail(f"{pattern!r} never came; the screen has:\n{shown(app)}")


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_the_screen_shows_what_the_server_says(metrics, serve, size):
    app = app_of(serve([metrics(10), metrics(30)]))
    async with app.run_test(size=size) as pilot:
        await until(app, pilot, r"p99")
        await until(app, pilot, r"TTFT\s+5\.00 ms\s+9\.00 ms\s+9\.90 ms\s+6\.00 ms\s+20")
        text = shown(app)
        assert "demo-model" in text
        assert "version 9.8.7" in text
        assert re.search(r"running\s+12\b", text)
        assert re.search(r"waiting\s+3\b", text)
        assert re.search(r"reasons\s+stop 30, length 2", text)
        assert re.search(r"used\s+█+░+ 43\.2%", text)
        assert re.search(r"prefix hits\s+25\.0%", text)
        assert re.search(r"preemptions\s+7", text)
        assert re.search(r"generation", text)
        assert re.search(r"\d tok/s", text)
        await until(app, pilot, r"Quit")


async def test_a_server_that_is_not_there_is_shown_and_tried_again(metrics, serve):
    readings = [None]
    app = app_of(serve(readings))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(app, pilot, r"No server answers at")
        readings[:] = [metrics(10)]
        await until(app, pilot, r"running\s+12")
        assert "No server" not in shown(app)
        readings[:] = [None]
        await until(app, pilot, r"No server answers at")
        assert re.search(r"running\s+12", shown(app))  # the last numbers stay


async def test_p_pauses_and_q_quits(metrics, serve):
    app = app_of(serve([metrics(10), metrics(20)]))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(app, pilot, r"TTFT\s+5\.00 ms")
        await pilot.press("p")
        await until(app, pilot, r"Paused")
        readings = len(app.history.prompt_rates)
        await pilot.pause(0.5)
        assert len(app.history.prompt_rates) <= readings + 1  # one may have been under way
        await pilot.press("q")
    assert app.return_code == 0


def test_the_snapshot_is_plain_text(metrics):
    history = History(30.0)
    history.add(parse(metrics(10), time=0.0))
    history.add(parse(metrics(12), time=1.0))
    text = snapshot(URL, Identity("demo-model", "9.8.7"), history.view(since_start=True))
    assert "\x1b" not in text
    assert "generation  1,000 tok/s" in text
    assert "kv cache    43.2%" in text
    assert re.search(r"TTFT\s+5\.00 ms\s+9\.00 ms\s+9\.90 ms\s+6\.00 ms\s+12\n", text)
    assert re.search(r"ITL(\s+-){4}\s+0\n", text)


async def test_a_snapshot_of_no_server_is_one_readable_error(unused_tcp_port):
    with pytest.raises(ConfigError, match="interval"):
        TopConfig(interval=0.0)
    with pytest.raises(Exception, match=f"No server answers at http://127.0.0.1:{unused_tcp_port}"):
        await look_once(TopConfig(url=f"127.0.0.1:{unused_tcp_port}", interval=0.1))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0000004, "0.00 ms"), (0.00512, "5.12 ms"), (0.0512, "51.2 ms"), (0.512, "512 ms"),
     (5.123, "5.12 s"), (512.3, "512 s")],
)  # fmt: skip
def test_times_have_three_digits(value, text):
    assert words.seconds(value) == text


def test_bars_and_lines_have_the_width_they_are_given():
    assert bar(0.5, 10) == "█████░░░░░"
    assert bar(None, 4) == "░░░░"
    assert bar(1.7, 4) == "████"
    assert right_aligned((1.0, 2.0), 5) == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert right_aligned((1.0, 2.0, 3.0), 3) == [0.0, 2.0, 3.0]
    assert right_aligned((1.0,), 0) == []
