import math

import numpy as np
import pytest
from lm_eval.api.registry import (
    get_aggregation,
    get_metric,
    get_metric_aggregation,
    is_higher_better,
)

from lm_eval_hyprank.metrics import HIT_KS, process_results

SIX = {"hit@1", "hit@2", "hit@3", "hit@5", "mrr", "win_rate"}


def test_every_item_gets_the_six_metrics_and_its_ties():
    scores = [3.0, 1.0, 2.0, 2.0] + [5.0] * 12
    assert process_results({"gold": 2}, scores) == {
        "hit@1": 0.0,
        "hit@2": 0.5,
        "hit@3": 1.0,
        "hit@5": 1.0,
        "mrr": pytest.approx((1 / 2 + 1 / 3) / 2),
        "win_rate": pytest.approx(13.5 / 15),
        "tie_rate": 1.0,
        "invalid": 0.0,
    }


@pytest.mark.parametrize("gold", range(16))
def test_constant_scorer_is_at_chance(gold):
    metrics = process_results({"gold": gold}, [7.0] * 16)
    harmonic = sum(1 / r for r in range(1, 17))
    assert metrics["hit@1"] == 1 / 16
    assert metrics["hit@5"] == 5 / 16
    assert metrics["mrr"] == pytest.approx(harmonic / 16, abs=1e-15)
    assert metrics["win_rate"] == 0.5


def test_scores_in_data_order_with_the_gold_first_are_not_mistaken_for_a_win():
    rng = np.random.default_rng(0)
    hits = [process_results({"gold": 0}, list(rng.random(16)))["hit@1"] for _ in range(2000)]
    assert np.mean(hits) == pytest.approx(1 / 16, abs=0.02)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 9])
def test_an_item_that_cannot_be_ranked_has_no_metrics(bad, where):
    scores = [float(i) for i in range(16)]
    scores[where] = bad
    assert process_results({"gold": 0}, scores) == {"invalid": 1.0}


@pytest.mark.parametrize("n", [2, 3, 17])
def test_the_number_of_candidates_is_the_items_own(n):
    metrics = process_results({"gold": n - 1}, [float(i) for i in range(n)])
    assert metrics["mrr"] == 1 / n
    assert metrics["win_rate"] == 0


def test_aggregations_over_ranks():
    ranks = [1, 2, 3, 5, 16]
    expected = {1: 1, 2: 2, 3: 3, 5: 4}
    for k in HIT_KS:
        assert get_aggregation(f"hit@{k}")(ranks) == expected[k] / 5
    assert get_aggregation("mrr")(ranks) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 5 + 1 / 16) / 5)


@pytest.mark.parametrize("ranks", [[0, 1], [1, math.nan], [math.inf], [-1], []])
def test_aggregations_refuse_what_is_no_rank(ranks):
    for name in ("hit@1", "hit@5", "mrr"):
        with pytest.raises(ValueError, match="rank"):
            get_aggregation(name)(ranks)


def test_metrics_are_registered_with_direction_and_aggregation():
    for name in SIX:
        assert get_metric(name)([1, 2]) == [1, 2]
        assert is_higher_better(name) is True
    for name in SIX - {"win_rate"}:
        assert get_metric_aggregation(name) is get_aggregation(name)
    assert get_metric_aggregation("win_rate") is get_aggregation("mean")


def test_published_rank_histogram_of_gpt5():
    """Ranks 1 to 5 as published (arXiv 2608.17270, section V-D), the rest not ranked."""
    shares = [0.166, 0.066, 0.048, 0.057, 0.080]
    papers = 1000
    terminal: list[float] = []
    half: list[float] = []
    hits: list[float] = []
    for rank, share in enumerate(shares, start=1):
        scores = [float(i) for i in range(16)]
        metrics = process_results({"gold": rank - 1}, scores)
        terminal += [metrics["win_rate"]] * round(share * papers)
        hits += [metrics["hit@5"]] * round(share * papers)
    half += terminal
    unranked = papers - len(terminal)
    # The gold among eleven unranked candidates: last of all, or tied with the other ten.
    last = process_results({"gold": 15}, [float(i) for i in range(16)])
    tied = process_results({"gold": 15}, [0.0, 1.0, 2.0, 3.0, 4.0] + [5.0] * 11)
    terminal += [last["win_rate"]] * unranked
    half += [tied["win_rate"]] * unranked
    hits += [last["hit@5"]] * unranked
    assert np.mean(hits) == pytest.approx(0.417, abs=5e-4)
    assert np.mean(terminal) == pytest.approx(0.374, abs=1e-3)
    assert np.mean(half) == pytest.approx(0.568, abs=1e-3)


def test_of_several_golds_the_best_ranked_counts():
    metrics = process_results({"gold": [0, 3]}, [5.0, 1.0, 2.0, 1.0])
    assert metrics["hit@1"] == pytest.approx(0.5)
    assert metrics["mrr"] == pytest.approx(0.75)
    # (last gold: 0 of 2) + (first gold: a tie and a win of 2)
    assert metrics["win_rate"] == pytest.approx(1.5 / 4)
    assert metrics["tie_rate"] == 1.0


def test_ties_are_counted_where_they_touch_the_gold():
    assert process_results({"gold": 1}, [float(score) for score in range(16)])["tie_rate"] == 0.0
    assert process_results({"gold": 1}, [0.0, 1.0, 2.0, 2.0])["tie_rate"] == 0.0
    assert process_results({"gold": 1}, [0.0, 1.0, 2.0, 1.0])["tie_rate"] == 1.0
