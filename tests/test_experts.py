from __future__ import annotations

import math
from itertools import combinations
from statistics import fmean

import krippendorff
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lm_eval.api.registry import get_aggregation
from scipy import stats
from sklearn.metrics import ndcg_score

from lm_eval_hyprank.experts import alpha, consensus, process_results

RANKS = st.integers(1, 4).map(lambda rank: -float(rank))
CEILING = {"expert_kendall_tau", "kendall_w", "krippendorff_alpha"}


def tau_b(one: list[float], other: list[float]) -> float | None:
    """Kendall's tau-b by its definition over pairs."""
    pairs = list(combinations(range(len(one)), 2))
    signs = [(np.sign(one[i] - one[j]), np.sign(other[i] - other[j])) for i, j in pairs]
    untied = [sum(s[k] != 0 for s in signs) for k in (0, 1)]
    if 0 in untied:
        return None
    return sum(a * b for a, b in signs) / math.sqrt(untied[0] * untied[1])


@given(
    st.integers(2, 8).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 3).map(float), min_size=n, max_size=n),
            st.lists(st.lists(st.none() | RANKS, min_size=n, max_size=n), min_size=1, max_size=3),
        )
    )
)
def test_agreement_with_experts_is_that_of_scipy_over_what_they_judged(drawn) -> None:
    scores, judgements = drawn
    taus, rhos, tops = [], [], []
    for judgement in judgements:
        judged = [i for i, value in enumerate(judgement) if value is not None]
        model = [-scores[i] for i in judged]
        values = [judgement[i] for i in judged]
        if len(set(values)) < 2:
            continue
        tied = [v for m, v in zip(model, values, strict=True) if m == max(model)]
        tops.append(tied.count(max(values)) / len(tied))
        if len(set(model)) > 1:
            taus.append(tau_b(model, values))
            rhos.append(stats.spearmanr(model, values).statistic)
    found = process_results({"judgements": judgements}, scores)
    for name, expected in (("kendall_tau", taus), ("spearman", rhos), ("top1", tops)):
        assert (name in found) is bool(expected)
        if expected:
            assert found[name] == pytest.approx(fmean(expected))
    assert found["invalid"] == 0


def test_perfect_and_reversed_rankings() -> None:
    doc = {"judgements": [[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0]]}
    found = process_results(doc, [0.1, 0.2, 0.3, 0.4])
    names = ("kendall_tau", "spearman", "top1", "ndcg@5", "expert_kendall_tau", "kendall_w")
    assert {name: found[name] for name in names} == pytest.approx(dict.fromkeys(names, 1.0))
    found = process_results(doc, [0.4, 0.3, 0.2, 0.1])
    assert (found["kendall_tau"], found["spearman"], found["top1"]) == pytest.approx((-1, -1, 0))
    assert found["kendall_w"] == pytest.approx(1.0)


def test_a_judgement_that_orders_nothing_is_left_out_not_counted_as_zero() -> None:
    level = [-2.0, -2.0, -2.0]
    found = process_results({"judgements": [level, [-1.0, -2.0, -3.0]]}, [1.0, 2.0, 3.0])
    assert found["kendall_tau"] == found["spearman"] == found["top1"] == 1.0
    assert "expert_kendall_tau" not in found
    found = process_results({"judgements": [level, level]}, [1.0, 2.0, 3.0])
    assert found == {"krippendorff_alpha": [level, level], "invalid": 0.0}


def test_a_scorer_that_says_nothing_has_no_correlation_and_chance_at_the_top() -> None:
    found = process_results({"judgements": [[-1.0, -2.0, None, -3.0]]}, [5.0] * 4)
    assert found.keys() == {"top1", "ndcg@5", "ndcg@10", "invalid"}
    assert found["top1"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_item_with_a_score_that_is_no_number_is_only_counted(bad: float) -> None:
    assert process_results({"judgements": [[-1.0, -2.0]]}, [1.0, bad]) == {"invalid": 1.0}


def test_graded_relevance_gives_ndcg_of_its_own_gains() -> None:
    gains, scores = [3.0, 0.0, None, 2.0, 0.0, 1.0, 0.0], [0.3, 0.1, 0.0, 0.2, 0.9, 0.9, 0.5]
    found = process_results({"judgements": [gains]}, scores)
    kept = [i for i, gain in enumerate(gains) if gain is not None]
    for k in (5, 10):
        expected = ndcg_score([[gains[i] for i in kept]], [[-scores[i] for i in kept]], k=k)
        assert found[f"ndcg@{k}"] == pytest.approx(expected)
    # By hand, at 5: 0, 2/log2(3), 3/log2(4), 0, and half of the tied 1 at place 5.
    best = 3 + 2 / math.log2(3) + 1 / 2
    by_hand = 2 / math.log2(3) + 3 / 2 + 0.5 / math.log2(6)
    assert found["ndcg@5"] == pytest.approx(by_hand / best)
    assert not CEILING & found.keys()


@pytest.mark.parametrize("gains", [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
def test_gains_that_are_all_alike_have_no_ndcg(gains: list[float]) -> None:
    assert process_results({"judgements": [gains]}, [1.0, 2.0, 3.0]) == {"invalid": 0.0}


def test_consensus_is_bordas_share_of_candidates_beaten() -> None:
    judgements = [[-1.0, -2.0, -3.0, None], [-2.0, -1.0, -2.0, None], [None, None, None, -1.0]]
    assert consensus(judgements) == [(1 + 0.25) / 2, (0.5 + 1) / 2, (0 + 0.25) / 2, None]
    assert consensus([[3.0, None, 0.0]]) == [3.0, None, 0.0]


@given(
    st.integers(3, 6).flatmap(
        lambda n: st.lists(st.lists(RANKS, min_size=n, max_size=n), min_size=2, max_size=4)
    )
)
def test_kendall_w_follows_from_the_mean_correlation_of_the_experts(judgements) -> None:
    """W = (1 + (m - 1) r) / m with r the mean Spearman correlation, where there are no ties."""
    m, n = len(judgements), len(judgements[0])
    found = process_results({"judgements": judgements}, list(range(n)))
    if all(len(set(judgement)) == n for judgement in judgements):
        rhos = [stats.spearmanr(a, b).statistic for a, b in combinations(judgements, 2)]
        assert found["kendall_w"] == pytest.approx((1 + (m - 1) * fmean(rhos)) / m)
    assume(any(len(set(judgement)) > 1 for judgement in judgements))
    assert -1e-9 <= found["kendall_w"] <= 1 + 1e-9


def test_kendall_w_of_ties_by_hand() -> None:
    """Corrected for ties: 12 S / (m^2 (n^3 - n) - m T)."""
    judgements = [[-1.0, -2.0, -2.0, -4.0], [-1.0, -1.0, -3.0, -4.0], [-2.0, -1.0, -3.0, -4.0]]
    ranks = np.array([stats.rankdata([-v for v in judgement]) for judgement in judgements])
    m, n = ranks.shape
    sums = ranks.sum(axis=0)
    spread = ((sums - sums.mean()) ** 2).sum()
    ties = 2 * (2**3 - 2)
    expected = 12 * spread / (m**2 * (n**3 - n) - m * ties)
    assert process_results({"judgements": judgements}, [1, 2, 3, 4])["kendall_w"] == pytest.approx(
        expected
    )


@pytest.mark.parametrize(
    "judgements",
    [
        [[-1.0, -2.0, -3.0]],
        [[-1.0, -2.0], [-1.0, -2.0]],
        [[-1.0, -2.0, None], [-1.0, -2.0, -3.0]],
    ],
)
def test_kendall_w_needs_complete_rankings_of_three(judgements: list[list[float | None]]) -> None:
    n = len(judgements[0])
    assert "kendall_w" not in process_results({"judgements": judgements}, list(range(n)))


def test_alpha_is_over_the_candidates_of_all_items() -> None:
    assert get_aggregation("krippendorff_alpha") is alpha
    docs = [
        {"judgements": [[-1.0, -2.0, -3.0], [-1.0, -3.0, -2.0]]},
        {"judgements": [[-1.0, -2.0], [-1.0, None]]},
        {"judgements": [[-2.0, -2.0], [-2.0, -2.0]]},
        {"judgements": [[-2.0, None], [None, -2.0]]},  # nothing to compare
    ]
    items = [process_results(doc, range(len(doc["judgements"][0]))) for doc in docs]
    given = [item["krippendorff_alpha"] for item in items if "krippendorff_alpha" in item]
    assert len(given) == 3
    data = np.array([[-1, -2, -3, -1, -2, -2, -2], [-1, -3, -2, -1, np.nan, -2, -2]])
    expected = krippendorff.alpha(data, level_of_measurement="ordinal")
    assert alpha(given) == pytest.approx(expected)
    assert alpha([[[-1.0, -2.0], [-1.0, -2.0]]]) == pytest.approx(1.0)
    assert math.isnan(alpha([[[-1.0, -1.0], [-1.0, None]]]))
