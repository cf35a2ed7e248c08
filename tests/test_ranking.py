import itertools
import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_hyprank.ranking import gold_rank


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
