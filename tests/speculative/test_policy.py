"""The choice of how many drafts a step verifies."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from toolkit.config import Speculation
from toolkit.errors import ConfigError
from toolkit.scheduler.speculation import AcceptanceRates, StepCosts, StepTimes

PAYS = StepCosts.pays_to_draft
USEFUL = StepCosts.useful  # before the folder's fixture replaces it
FLAT = [(1, 1.0), (8, 1.0), (64, 1.0)]
STEEP = [(1, 1.0), (2, 1.9), (4, 3.7), (64, 60.0)]


def useful(costs: StepCosts, drafts: list[int], rates: list[float], num_tokens: int) -> list[int]:
    return USEFUL(costs, np.array(drafts, np.int32), np.array(rates), num_tokens).tolist()


def speed(costs: StepCosts, drafts: tuple[int, ...], rates: list[float]) -> float:
    """Return the expected tokens per second of a step of requests that decode."""
    gained = sum(rate**n for count, rate in zip(drafts, rates, strict=True)
                 for n in range(1, count + 1))  # fmt: skip
    seconds = costs.at(np.array([len(drafts) + sum(drafts)], np.float64))[0]
    return (len(drafts) + gained) / seconds


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_faster(seed: int):
    rng = np.random.default_rng(seed)
    seconds = np.cumsum(rng.random(6) * [1, 0.2, 0.1, 0.3, 1, 2]) + 0.5
    times = list(zip([1, 2, 3, 5, 8, 12], seconds.tolist(), strict=True))
    costs = StepCosts(StepTimes(times))
    offered, rates = [3, 2, 4], rng.random(3).tolist()
    chosen = useful(costs, offered, rates, 3)
    best = max(speed(costs, one, rates) for one in product(range(4), range(3), range(5)))
    assert speed(costs, tuple(chosen), rates) == pytest.approx(best)


def test_steps_of_one_price_verify_all():
    assert useful(StepCosts(StepTimes(FLAT)), [3, 0, 5], [0.1, 0.9, 0.01], 3) == [3, 0, 5]
    assert useful(StepCosts(StepTimes()), [3, 0, 5], [0.1, 0.9, 0.01], 3) == [3, 0, 5]
    assert useful(StepCosts(StepTimes(FLAT)), [3, 2], [0.0, 0.0], 2) == [0, 0]
    assert useful(StepCosts(StepTimes(STEEP)), [3, 2], [0.8, 0.3], 2) == [0, 0]
    assert useful(StepCosts(StepTimes(FLAT)), [], [], 0) == []


def test_a_step_that_was_delayed_when_measured_changes_little():
    delayed = StepCosts(StepTimes([(1, 1.0), (2, 9.0), (4, 1.1), (8, 1.2)]))
    assert useful(delayed, [4], [0.7], 1) == [4]


def test_padded_steps_verify_all_or_nothing():
    plain, padded = [(1, 1.0), (8, 1.2), (64, 2.0)], [(1, 1.1), (8, 2.0), (64, 6.0)]
    costs = StepCosts(StepTimes(plain, padded))
    assert useful(costs, [4], [0.8], 1) == [4]
    assert useful(costs, [4], [0.05], 1) == [0]
    assert useful(costs, [4] * 8, [0.8] * 8, 8) == [4] * 8
    assert useful(costs, [4] + [0] * 7, [0.8] * 8, 8) == [0] * 8  # one gains, all wait
    assert useful(costs, [4] * 64, [0.5] * 64, 64) == [0] * 64
    assert useful(costs, [4] * 64, [0.9] * 64, 64) == [4] * 64


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("seconds", [0.0, 0.2, 1.5])
def test_drafting_must_gain_more_than_it_takes(monkeypatch, rate: float, seconds: float):
    """For one request and three drafts, in a step whose time does not depend on its tokens."""
    costs = StepCosts(StepTimes(FLAT, drafting=[(1, seconds), (8, 2 * seconds)]))
    gained = rate + rate**2 + rate**3
    monkeypatch.setattr(StepCosts, "useful", USEFUL)
    pays = PAYS(costs, np.array([3], np.int32), np.array([rate]))
    assert pays == ((1 + gained) / (1 + seconds) > 1)


def test_rates_follow_each_request():
    rates = AcceptanceRates(3)
    rows = np.arange(3)
    before = rates.of(rows)
    assert (before == before[0]).all()
    for _ in range(30):
        rates.learn(rows, np.array([3, 3, 0], np.int32), np.array([3, 0, 0], np.int32))
    good, bad, unknown = rates.of(rows)
    assert good > 0.9
    assert bad < 0.2
    assert bad < unknown < good
    rates.reset(0)
    assert rates.of(rows)[0] == pytest.approx(unknown, abs=0.05)
    for _ in range(600):  # without drafts, what was known fades
        rates.learn(rows, np.zeros(3, np.int32), np.zeros(3, np.int32))
    assert rates.of(rows)[1] > 0.4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "method is missing; it is one of ngram, draft_model, eagle, eagle3."),
        ({"method": "ngrm"}, "unknown method 'ngrm'; known: .* Did you mean ngram\\?"),
        ({"method": "ngram", "tokens": 3}, "unknown field 'tokens'; known: method, "),
        ({"method": "ngram", "num_speculative_tokens": 17}, "must be 1 to 16; got 17."),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be 1 to 16; got 0."),
        ({"method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min must be at least 1"),
        ({"method": "ngram", "model": "gpt2"}, "the method ngram has no model."),
        ({"method": "eagle3"}, "the method eagle3 needs a model."),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "num_speculative_tokens"),
    ],
    ids=str,
)
def test_wrong_settings_are_one_error(given: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        Speculation.parse(given)


@pytest.mark.parametrize(
    ("given", "method", "model"),
    [
        ({"model": "org/Small"}, "draft_model", "org/Small"),
        ({"model": "org/EAGLE3-Llama"}, "eagle3", "org/EAGLE3-Llama"),
        ({"model": "org/EAGLE-Llama"}, "eagle", "org/EAGLE-Llama"),
        ({"model": "[ngram]"}, "ngram", None),
        ({"method": "deepseek_mtp"}, "mtp", None),
    ],
    ids=str,
)
def test_method_is_that_of_the_models_name(given, method: str, model: str | None):
    found = Speculation.parse(given)
    assert (found.method, found.model) == (method, model)


def test_a_slow_drafter_that_is_always_wrong_is_seldom_asked(monkeypatch):
    """Drafts that take no time of their own are tried again after fewer steps."""
    monkeypatch.setattr(StepCosts, "useful", USEFUL)
    counts, plain, most = [], [(1, 1.0), (9, 1.1)], np.array([3], np.int32)
    for drafting in ([(1, 0.5)], []):
        times = StepTimes(plain, drafting=drafting)
        costs, rates, row = StepCosts(times), AcceptanceRates(1, times.idle_fading), np.array([0])
        counts.append(0)
        for _ in range(2000):
            is_asked = PAYS(costs, most, rates.of(row))
            rates.learn(row, most * is_asked, np.array([0]))
            counts[-1] += is_asked
    slow, free = counts
    assert slow < 12 < 5 * slow < free
