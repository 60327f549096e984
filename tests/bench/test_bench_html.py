"""The HTML report: one well-formed file with the result's numbers."""

from __future__ import annotations

import dataclasses
import html.parser
import re

import numpy as np
import pytest

from tests.bench.results import outcome
from toolkit.bench.report.html import html_report
from toolkit.bench.report.plots import Axis, Chart, label

VOID = {"meta", "circle", "rect", "line", "polyline", "polygon", "br"}


class BalancedParser(html.parser.HTMLParser):
    """Fails at an unbalanced tag, and collects text, charts and addresses."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.charts, self.addresses = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag == "svg":
            self.charts.append(dict(attributes)["aria-label"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_data(self, data):
        self.text.append(data)


def test_report_is_self_contained_and_has_every_plot():
    page = html_report(outcome(goodput=("ttft:200",), metadata=("gpu=<H200>",)))
    found = BalancedParser(page)
    assert found.addresses == []
    assert "http" not in re.sub(r"http://127\.0\.0\.1:8000", "", page)
    assert found.charts == [
        "Throughput", "Requests in flight", "Arrivals and ends", "Each request",
        "Time to first token (TTFT)", "End to end (E2E)", "Between tokens", "Gaps between tokens",
    ]  # fmt: skip
    text = " ".join(found.text)
    assert "org/model" in text
    assert "<H200>" in text


def test_figures_equal_the_result():
    one = outcome()
    text = " ".join(BalancedParser(html_report(one)).text)
    assert f"{one.result.latencies.ttft.at(50) * 1e3:.1f}" in text
    assert f"{one.result.per_second(one.result.output_tokens):,.0f}" in text


def test_failures_are_drawn_and_escaped():
    page = html_report(outcome(fail_every=5))
    assert "120 x HTTP 503: &lt;full&gt;" in page
    assert 'class="dots bad"' in page


def test_saturated_client_report_omits_the_server():
    one = outcome()
    late = dataclasses.replace(one, result=dataclasses.replace(one.result, saturated="it was late"))
    found = BalancedParser(html_report(late))
    assert found.charts == ["Requests in flight", "Arrivals and ends"]
    assert "CLIENT SATURATED" in " ".join(found.text)


@pytest.mark.parametrize("settings", [{"tokens": 2}, {"seconds": 0.06}, {"fail_every": 1}])
def test_unusual_results_have_reports(settings):
    BalancedParser(html_report(outcome(**settings)))


def test_points_are_at_the_positions_of_their_values():
    chart = Chart("t", Axis.linear("x", 0.0, 10.0), Axis.logarithmic("y", 1.0, 100.0))
    (line,) = re.findall(r'points="([^"]+)"', chart.line("l", "s0", [0, 5, 10], [1, 10, 100]).svg())
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in line.split())
    assert (x1, y1) == pytest.approx(((x0 + x2) / 2, (y0 + y2) / 2), abs=0.1)
    assert x0 < x2
    assert y0 > y2  # y grows downwards in SVG


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.0, 7312.0), (0.0, 0.037), (0.0, 0.0), (3.0, 9.0)]
)
def test_linear_ticks_are_a_few_round_numbers(low, high):
    axis = Axis.linear("x", low, high)
    values = [value for value, _ in axis.ticks]
    assert 3 <= len(values) <= 7
    assert all(axis.low <= value <= axis.high for value in values)
    assert np.ptp(np.diff(values)) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("low", "high"), [(0.0, 5.0), (3.0, 4.0), (7e-4, 9e5), (2.0, 2.0)])
def test_logarithmic_axes_enclose_the_values(low, high):
    axis = Axis.logarithmic("x", low, high)
    assert axis.low <= max(low, high * 1e-6)
    assert axis.high >= high
    assert 2 <= len(axis.ticks) <= 16


def test_labels_are_short():
    assert [label(v) for v in (0, 0.0123456, 12.345, 1234.5)] == ["0", "0.0123", "12.3", "1,234"]
