"""The checks of the published tables: that each can fail, and what they found."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from analysis import consistency
from lm_eval_hyprank.ranking import GoldRank

PUBLISHED = consistency.load()


@pytest.fixture
def changed() -> dict:
    return copy.deepcopy(PUBLISHED)


def test_published_intervals_are_those_of_independent_papers():
    ratios = list(consistency.binomial_ratios(PUBLISHED).values())
    assert len(ratios) == 60
    assert 0.93 < min(ratios) < np.mean(ratios) < max(ratios) < 1.05


def test_every_value_lies_inside_its_interval():
    for rows in PUBLISHED["overall"].values():
        for row in rows.values():
            for cell in row.values():
                assert cell["low"] < cell["value"] < cell["high"]


def test_pooled_rows_are_means(changed):
    assert max(map(abs, consistency.pooled_deviations(PUBLISHED).values())) < 0.0006
    changed["overall"]["raw"]["Phi-4"]["mrr"]["value"] += 0.01
    assert max(map(abs, consistency.pooled_deviations(changed).values())) > 0.001


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.9])
def test_the_correlation_behind_a_pooled_width(correlation, changed):
    rows = {str(model): {"hit@1": {"low": 0.0, "high": 0.05}} for model in range(7)}
    width = 0.05 * np.sqrt((1 + 6 * correlation) / 7)
    changed["overall"]["nll"] = rows | {"All models": {"hit@1": {"low": 0.0, "high": width}}}
    found = consistency.pooled_correlation(changed, "nll", "hit@1")
    assert found == pytest.approx(correlation)


def test_every_win_rate_is_possible(changed):
    for scorer in consistency.SCORERS:
        for model, value in PUBLISHED["win_rate"][scorer].items():
            bounds = consistency.win_rate_bounds(PUBLISHED, scorer, model)
            assert bounds.holds(value)
            assert not bounds.holds(1 - value) or abs(value - 0.5) < 0.1
    changed["overall"]["nll"]["Phi-4"]["mrr"]["value"] = 0.9
    with pytest.raises(ValueError, match="no distribution"):
        consistency.win_rate_bounds(changed, "nll", "Phi-4")


def test_the_bounds_hold_the_win_rate_of_real_ranks(changed):
    rng = np.random.default_rng(0)
    for _ in range(20):
        ranks = rng.choice(np.arange(1, 17), size=400, p=rng.dirichlet(np.ones(16)))
        row = {f"hit@{k}": {"value": float((ranks <= k).mean())} for k in (1, 2, 3, 5)}
        changed["overall"]["nll"]["Phi-4"] = row | {"mrr": {"value": float((1 / ranks).mean())}}
        bounds = consistency.win_rate_bounds(changed, "nll", "Phi-4")
        assert bounds.holds(float(((16 - ranks) / 15).mean()))
        assert bounds.high - bounds.low < 0.4


def test_the_judges_win_rate_under_both_conventions():
    rates = consistency.judge_win_rates(PUBLISHED)
    assert rates["terminal"] == pytest.approx(PUBLISHED["win_rate"]["prompted"]["GPT-5"], abs=1e-3)
    assert rates["half"] == pytest.approx(0.568, abs=1e-3)
    ranked = [share for rank, share in PUBLISHED["gpt5_rank_histogram"].items() if rank.isdigit()]
    found = PUBLISHED["overall"]["prompted"]["GPT-5"]["hit@5"]["value"]
    assert sum(ranked) == pytest.approx(found, abs=1e-3)


def test_what_a_random_judge_gets():
    """Ranked golds at their rank, all others last."""
    rates = [GoldRank(rank, 0, 16).win_rate if rank < 5 else 0.0 for rank in range(16)]
    assert consistency.random_judge_win_rate(PUBLISHED) == pytest.approx(np.mean(rates))


def test_the_disciplines_sizes_fit_the_judges_shares(changed):
    counts = consistency.discipline_counts(PUBLISHED)
    assert [key for key, count in counts.items() if not count.fits] == [("Law", "hit@1")]
    assert sum(count.hits for (_, metric), count in counts.items() if metric == "hit@5") == 552
    assert sum(count.hits for (_, metric), count in counts.items() if metric == "hit@1") == 220
    assert sum(consistency.PAPERS.values()) == PUBLISHED["papers"]
    changed["by_discipline"]["Math"]["hit@5"]["GPT-5"] += 0.003
    assert not consistency.discipline_counts(changed)["Math", "hit@5"].fits


@pytest.mark.parametrize("scorer", ["nll", "raw"])
@pytest.mark.parametrize("metric", ["hit@1", "hit@5"])
def test_weighted_disciplines_give_the_overall_row(scorer, metric):
    value = consistency.weighted_disciplines(PUBLISHED, scorer, metric)
    overall = PUBLISHED["overall"][scorer]["All models"][metric]["value"]
    assert value == pytest.approx(overall, abs=0.001)


def test_two_scorers_that_are_not_comparable():
    overall = PUBLISHED["overall"]
    for model in ("Gemma 4 12B", "Phi-4"):
        z = consistency.difference_z(overall["raw"][model]["hit@1"], overall["nll"][model]["hit@1"])
        assert z < -4
    assert consistency.win_rate_z(PUBLISHED, 0.458) < -3


def test_selection_bias_of_close_and_of_distant_rivals(changed):
    assert consistency.selection_bias(PUBLISHED) < 0.001
    for scorer in consistency.SCORERS:
        for row in changed["overall"][scorer].values():
            row["hit@1"] = {"value": 0.33, "low": 0.33 - 1.96, "high": 0.33 + 1.96}
    # The expected maximum of 14 standard normal variables.
    assert consistency.selection_bias(changed) == pytest.approx(1.703, abs=0.02)


def test_the_report_names_what_it_checked():
    text = consistency.report(PUBLISHED)
    for phrase in ("14 of 14 inside", "220 and 552 hits", "0.568", "| Phi-4 | 0.327 | 0.246 |"):
        assert phrase in text
    assert "nan" not in text.lower().split()
