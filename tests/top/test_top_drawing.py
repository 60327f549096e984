"""Drawings show their numbers and have exactly their size."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from toolkit.top.drawing.bands import NUM_BANDS, band_of, count_by_band, lower_bound
from toolkit.top.drawing.draw import (
    EIGHTHS,
    LABEL,
    axis_top,
    bar,
    chart,
    heatmap,
    sparkline,
    time_axis,
)
from toolkit.top.drawing.listing import Column, Listing
from toolkit.top.drawing.paint import (
    cut,
    cut_middle,
    fit,
    heading,
    plain,
    side_by_side,
    split_width,
    spread,
    width_of,
    wrap,
)
from toolkit.top.pages.overview import overview
from toolkit.top.view import View

points = st.lists(st.one_of(st.none(), st.floats(0, 1e6)), max_size=40)
lines = st.lists(st.tuples(st.text("ab 中文─é", max_size=12), st.just("")), max_size=5)


@settings(max_examples=100, deadline=None)
@given(points=points, width=st.integers(1, 30), height=st.integers(1, 9))
def test_chart_columns_are_as_high_as_their_values(points, width, height):
    drawn = chart(points, width, height, "gen")
    assert [width_of(line) for line in drawn] == [width] * height
    rows = plain([*drawn, [("|", "")]]).split("\n")[:-1]
    top = axis_top(max((p for p in points[-width:] if p is not None), default=0.0))
    shown = [None] * (width - len(points[-width:])) + points[-width:]
    for column, point in enumerate(shown):
        cells = [row[column] if column < len(row) else " " for row in rows]
        filled = sum(EIGHTHS.index(cell) for cell in cells)
        if point is None:
            assert filled == 0
        else:
            assert filled == pytest.approx(max(1, 8 * height * point / top), abs=0.51)
            assert cells == sorted(cells, key=EIGHTHS.index)  # no holes


def test_chart_scale_is_a_round_number_above_all_values():
    assert [axis_top(value) for value in (0, 1e-300, 0.07, 1, 1.01, 4.2, 5.1, 8.2, 730, 1234)] == [
        1.0, 1.0, 0.08, 1, 2, 5, 8, 10, 800, 2000
    ]  # fmt: skip


def test_sparkline_leaves_gaps_for_unknown_points():
    assert plain([sparkline([None, 0.0, 1.0, 2.0, 4.0], 6)]) == "  ▁▂▄▇"
    assert plain([sparkline([], 3)]) == ""


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.5, "━━━━━─────"), (None, "──────────"), (1.7, "━━━━━━━━━━"), (-1, "──────────")],
)
def test_bar_ends_at_its_share(share, text):
    assert plain([bar(share, 10)]) == text


def test_time_axis_labels_the_right_columns():
    ages = [float(age) for age in range(99, -1, -1)]  # one second per column
    text = plain([time_axis(ages, 100)])
    assert text.endswith("now")
    assert 99 - text.index("-30 s") == 30
    assert 99 - text.index("-1 min") == 60
    doubled = [2.0 * age for age in ages]
    assert 99 - plain([time_axis(doubled, 100)]).index("-2 min") == 60
    assert "min" not in plain([time_axis(ages[-20:], 100)])


@pytest.mark.parametrize("colors", [True, False])
@pytest.mark.parametrize("seconds", [0.0003, 0.02, 1.5, 300.0])
def test_heatmap_shows_a_time_at_its_height(colors, seconds):
    history = [count_by_band(()), count_by_band([(seconds, seconds, 5.0)])]
    drawn = heatmap(history, 30, 12, colors=colors)
    assert len(drawn) == 12
    assert all(width_of(line) == 30 for line in drawn)
    hot = [
        y
        for y, line in enumerate(drawn)
        if line[-1] != ("  ", "") and line[-1][1] not in ("", "heat0/0")
    ]
    if not colors:
        hot = [y for y, line in enumerate(drawn) if "█" in line[-1][0]]
    labels = {y: line[0][0].strip() for y, line in enumerate(drawn) if line[0][0].strip()}
    scale = {"ms": 1e-3, "s": 1.0}
    bounds = {y: float(text.split()[0]) * scale[text.split()[1]] for y, text in labels.items()}
    assert hot
    for y, bound in bounds.items():  # the label of a line is its shortest time
        if y < min(hot):
            assert bound > seconds * 0.99
        elif y >= max(hot):
            assert bound <= lower_bound(band_of(seconds) + 1) * 1.01


def test_heatmap_without_observations_says_so():
    assert "no observations yet" in plain(heatmap([[0.0] * NUM_BANDS] * 5, 60, 9, colors=True))
    assert "no observations yet" in plain(heatmap([], LABEL, 3, colors=True))


@settings(max_examples=200, deadline=None)
@given(line=lines, other=lines, width=st.integers(1, 40))
def test_lines_are_padded_or_cut_to_their_width(line, other, width):
    assert width_of(fit(line, width)) == width
    assert width_of(spread(line, fit(other, min(width, 5)), width + 6)) == width + 6
    assert cell_len(cut("".join(text for text, _ in line), width)) <= width
    left, right = split_width(width + 4, 2)
    rows = side_by_side(([line], left), ([other, line], right))
    assert [width_of(row) for row in rows] == [width + 4] * 2


def test_cut_middle_keeps_both_ends():
    assert cut_middle("127.0.0.1:8731", 9) == "127.…8731"
    assert cut_middle("10.0.0.1", 9) == "10.0.0.1 "
    assert cut_middle("127.0.0.1:8731", 1) == "…"


def test_wrap_breaks_between_words_and_cuts_the_last_line():
    assert wrap("the server does not answer", 11, 3) == ["the server", "does not", "answer"]
    assert wrap("the server does not answer", 11, 2) == ["the server", "does not a…"]
    assert wrap("", 5, 2) == [""]


def test_heading_drops_its_note_if_too_narrow():
    assert plain([heading("KV cache", 24, "now")]) == "─ KV cache ─────── now ─"
    assert plain([heading("KV cache", 14, "a long remark")]) == "─ KV cache ───"


def a_listing():
    columns = [
        Column("name", 6, str, str, left=True, descending=False, most=10),
        Column("size", 5, lambda row: str(len(row)), len, spare=1),
        Column("first", 5, lambda row: row[0], lambda row: row[0], spare=2, descending=False),
    ]
    return Listing(columns, str, str, sort="size")


def test_narrow_table_drops_columns_and_sorts_by_visible_ones():
    listing = a_listing()
    listing.show(["bb", "a", "ccc"])
    assert listing.rows == ["ccc", "bb", "a"]
    assert "first" in plain(listing.draw(18, 5))
    assert "first" not in plain(listing.draw(13, 5))
    listing.sort_next()
    assert listing.sort == "name"  # the third is hidden
    listing.draw(40, 5)
    listing.sort_next()
    listing.sort_next()
    assert listing.sort == "first"


def test_table_scrolls_with_its_cursor():
    listing = a_listing()
    listing.show([f"{index:03}" for index in range(100)])
    listing.draw(40, 11)
    for step, expected in (
        (1, "001"),
        (8, "009"),
        (1, "010"),
        (-3, "007"),
        (1000, "099"),
        (-1000, "000"),
    ):
        listing.move(step)
        text = plain(listing.draw(40, 11))
        assert listing.current == expected
        assert expected in text
        assert len(text.splitlines()) == 11
    listing.move_page(1)
    assert listing.current == "009"
    listing.draw(40, 11)
    listing.point_at(3)
    assert listing.current == "002"
    listing.point_at(0)  # the header
    assert listing.current == "002"


def test_panel_of_pictures_is_shown_for_models_that_see():
    def text(view: View) -> str:
        return "\n".join("".join(text for text, _ in line) for line in overview(view, 200, 30))

    seen = text(View(pictures=1234.0, picture_rate=8.25, picture_hit_rate=0.4))
    panel = r"Pictures.*\n.*per sec\. +8\.2 .*\n.*shared.* 40% .*\n.*in all +1234 "
    assert re.search(panel, seen)
    assert "Pictures" not in text(View(pictures=0.0))
    heard = text(View(audio_seconds=5400.0, audio_rate=61.5, picture_hit_rate=0.25, pictures=9.0))
    assert re.search(r"Sound.*\n.*speed +61\.5 x real time.*\n.*shared.* 25% ", heard)
    assert "Pictures" not in heard


def test_adapters_with_most_requests_are_shown():
    counts = {"idle": (0.0, 0.0), "sql": (3.0, 2.0), "one": (1.0, 0.0)}
    block = overview(View(adapters=counts), 200, 30)
    lines = ["".join(text for text, _ in line) for line in block]
    shown = [line for line in lines if re.search(r"\brun\b", line)]
    assert [re.findall(r"(\w+) +(\d+) run (\+\d+)?", line)[0] for line in shown] == [
        ("sql", "3", "+2"),
        ("one", "1", ""),
        ("idle", "0", ""),
    ]
    narrow = overview(View(adapters=counts, cpu_cores={"server": 0.5}), 100, 30)
    assert "Adapters" in "\n".join("".join(text for text, _ in line) for line in narrow)
    many = overview(View(adapters={f"a{i:02}": (0.0, 0.0) for i in range(9)}), 200, 30)
    assert "and 6 more in memory" in "\n".join("".join(text for text, _ in line) for line in many)
