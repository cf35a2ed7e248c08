import itertools
import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_hyprank.ranking import best_gold_rank, gold_rank


@pytest.mark.parametrize("gold", range(16))
@pytest.mark.parametrize("value", [0.0, -3.5, 1e300])
def test_constant_scorer_gets_chance_wherever_the_gold_stands(gold, value):
    rank = gold_rank([value] * 16, gold)
    assert rank.hit(1) == 1 / 16
    assert rank.hit(5) == 5 / 16
    assert rank.reciprocal_rank == pytest.approx(sum(1 / r for r in range(1, 17)) / 16, abs=1e-15)
    assert rank.reciprocal_rank == pytest.approx(0.2113, abs=5e-5)
    assert rank.win_rate == 0.5


def by_enumeration(scores, gold):
    """Hit@1..n, reciprocal rank and win rate averaged over every way to break the ties."""
    outcomes = []
    for breaker in itertools.permutations(range(len(scores))):
        order = sorted(range(len(scores)), key=lambda i: (scores[i], breaker[i]))
        outcomes.append(order.index(gold) + 1)
    n = len(scores)
    return (
        [fmean(rank <= k for rank in outcomes) for k in range(1, n + 1)],
        fmean(1 / rank for rank in outcomes),
        fmean((n - rank) / (n - 1) for rank in outcomes),
    )


@given(st.lists(st.integers(0, 3).map(float), min_size=2, max_size=6), st.data())
def test_equals_the_average_over_all_tie_breakings(scores, data):
    gold = data.draw(st.integers(0, len(scores) - 1))
    hits, reciprocal_rank, win_rate = by_enumeration(scores, gold)
    rank = gold_rank(scores, gold)
    assert [rank.hit(k) for k in range(1, len(scores) + 1)] == pytest.approx(hits)
    assert rank.reciprocal_rank == pytest.approx(reciprocal_rank)
    assert rank.win_rate == pytest.approx(win_rate)


@given(st.lists(st.integers(0, 4).map(float), min_size=2, max_size=20), st.randoms(), st.data())
def test_does_not_depend_on_the_order_of_candidates(scores, random, data):
    gold = data.draw(st.integers(0, len(scores) - 1))
    order = list(range(len(scores)))
    random.shuffle(order)
    assert gold_rank([scores[i] for i in order], order.index(gold)) == gold_rank(scores, gold)


def test_a_tie_counts_half_in_the_win_rate():
    assert gold_rank([1.0] * 7 + [2.0, 2.0] + [3.0] * 7, 7).win_rate == 0.5


def test_gold_first_and_last():
    scores = [float(i) for i in range(16)]
    first, last = gold_rank(scores, 0), gold_rank(scores, 15)
    assert (first.hit(1), first.reciprocal_rank, first.win_rate) == (1, 1, 1)
    assert (last.hit(5), last.reciprocal_rank, last.win_rate) == (0, 1 / 16, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_rank_without_finite_scores(bad):
    with pytest.raises(ValueError, match="NaN or infinite"):
        gold_rank([1.0, bad, 2.0], 0)


@pytest.mark.parametrize(("scores", "gold"), [([1.0], 0), ([1.0, 2.0], 2), ([1.0, 2.0], -1)])
def test_refuses_what_is_no_ranking(scores, gold):
    with pytest.raises(ValueError, match="candidates"):
        gold_rank(scores, gold)


# --- several golds --------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3).map(float), min_size=2, max_size=6), st.data())
def test_several_golds_equal_the_average_over_all_tie_breakings(scores, data):
    n = len(scores)
    golds = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n - 1).map(sorted))
    firsts, wins = [], []
    for breaker in itertools.permutations(range(n)):
        order = sorted(range(n), key=lambda i: (scores[i], breaker[i]))
        firsts.append(min(order.index(gold) for gold in golds) + 1)
        negatives = set(range(n)) - set(golds)
        wins += [order.index(g) < order.index(other) for g in golds for other in negatives]
    rank = best_gold_rank(scores, golds)
    hits = [fmean(first <= k for first in firsts) for k in range(1, n + 1)]
    assert [rank.hit(k) for k in range(1, n + 1)] == pytest.approx(hits)
    assert rank.reciprocal_rank == pytest.approx(fmean(1 / first for first in firsts))
    assert rank.win_rate == pytest.approx(fmean(wins))


@given(st.lists(st.integers(0, 4).map(float), min_size=2, max_size=20), st.data())
def test_a_single_gold_of_several_is_a_gold(scores, data):
    gold = data.draw(st.integers(0, len(scores) - 1))
    one, several = gold_rank(scores, gold), best_gold_rank(scores, [gold])
    assert (several.better, several.tied) == (one.better, one.tied)
    assert several.win_rate == pytest.approx(one.win_rate)
    assert several.reciprocal_rank == pytest.approx(one.reciprocal_rank)
    for k in range(len(scores) + 2):
        assert several.hit(k) == pytest.approx(one.hit(k))


def test_the_first_of_a_thousand_with_many_golds():
    rank = best_gold_rank([0.0] * 1000, list(range(10)))
    assert rank.hit(1) == pytest.approx(0.01)
    assert rank.hit(991) == 1.0
    assert rank.win_rate == 0.5


@pytest.mark.parametrize(
    ("golds", "message"),
    [
        ([], "give each gold once"),
        ([1, 1], "give each gold once"),
        ([3], "gold index 3"),
        ([-1], "gold index -1"),
        ([0, 1, 2], "at least two candidates"),
    ],
)
def test_golds_that_leave_nothing_to_rank_are_refused(golds, message):
    with pytest.raises(ValueError, match=message):
        best_gold_rank([1.0, 2.0, 3.0], golds)


def test_a_score_that_is_no_number_is_refused_with_several_golds_too():
    with pytest.raises(ValueError, match="NaN"):
        best_gold_rank([1.0, math.nan, 3.0], [0, 2])
