"""Comparisons of log-probabilities, by cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from toolkit.verify.compare import NUM_LIKELIEST, Bound, Difference, Place, Scored, compare


def scored(tokens: list[int], *chances: dict[int, float]) -> Scored:
    """Return a sequence with log-probabilities from position 1 on."""
    return Scored(tokens, dict(enumerate(chances, 1)))


def test_mean_maximum_place_and_greedy_agreement():
    one = scored([7, 7, 7], {1: -0.1, 2: -2.0}, {1: -1.0, 2: -0.5})
    other = scored([7, 7, 7], {1: -0.2, 2: -2.0}, {1: -0.6, 2: -0.7})
    found = compare([(one, one), (one, other)])
    assert found.max == pytest.approx(0.4)
    assert found.place == Place(1, 2, 1)
    assert found.mean == pytest.approx((0.1 + 0.4 + 0.2) / 8)
    assert (found.num_agreed, found.num_positions) == (3, 4)


def test_sequences_are_compared_up_to_where_they_diverge():
    one = scored([7, 1, 5], {1: -0.1}, {1: -9.0})
    other = scored([7, 2, 5], {1: -0.2}, {1: -1.0})
    found = compare([(one, other)])
    assert found.num_positions == 1
    assert found.max == pytest.approx(0.1)


def test_unlisted_token_is_at_most_as_likely_as_the_last_listed():
    listed = {token: -1.0 - token for token in range(NUM_LIKELIEST)}
    last = min(listed.values())
    new, next_token = 100, 101
    one = scored([7, 7], listed | {next_token: -50.0})
    likely = scored([7, 7], listed | {new: last + 3.0, next_token: -50.0})
    found = compare([(one, likely)])
    assert found.max == pytest.approx(3.0)
    assert found.place is not None
    assert found.place.token == new
    unlikely = scored([7, 7], listed | {new: last - 3.0, next_token: -50.0})
    assert compare([(one, unlikely)]).max == 0.0


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_no_bound_allows_what_is_not_finite(value):
    found = compare([(scored([7, 7], {1: -1.0}), scored([7, 7], {1: value}))])
    assert not Bound(1e9, 1e9).allows(found)


def test_bound_grows_with_the_measured_rounding():
    rounding = Difference()
    for value in (0.01, 0.03):
        rounding.add(value, Place(0, 0, 0))
    exceeding, allowed = Difference(), Difference()
    allowed.add(0.03, Place(0, 0, 0))
    exceeding.add(0.03, Place(0, 0, 0))
    exceeding.add(0.2, Place(0, 0, 0))
    assert Bound.of(rounding).allows(allowed)
    assert not Bound.of(rounding).allows(exceeding)
    assert not Bound.of(rounding, 2.0**-10).allows(allowed)
