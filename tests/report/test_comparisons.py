from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lm_eval_hyprank.report.comparisons import (
    agreement,
    best_of,
    compare,
    cross_fit,
    kendall_tau,
    kendall_w,
    sign_flip_p,
    tiers,
)
from lm_eval_hyprank.report.intervals import Settings, estimates
from tests.report.boards import candidate_rows, paper_rows, repeated_dois


def clustered_luck(rng: np.random.Generator, boards: int, doi: list[str]) -> np.ndarray:
    """Standard normal draws (boards, papers), correlated at 0.8 within a DOI."""
    cluster = pd.factorize(pd.Series(doi))[0]
    shared = rng.normal(size=(boards, cluster.max() + 1))[:, cluster]
    return np.sqrt(0.8) * shared + np.sqrt(0.2) * rng.normal(size=(boards, len(doi)))


# --- paired tests ---


def test_p_values_equal_scipys_exact_permutation_test():
    rng = np.random.default_rng(0)
    values = rng.random((3, 11))
    values[0] += 0.3
    table = compare(paper_rows(values))
    for row in table.itertuples():
        a, b = (values[int(name[1:])] for name in (row.a, row.b))
        exact = stats.permutation_test(
            (a, b), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples",
            n_resamples=np.inf, vectorized=True,
        )  # fmt: skip
        error = np.sqrt(exact.pvalue * (1 - exact.pvalue) / 10_000)
        assert row.p == pytest.approx(exact.pvalue, abs=4 * error + 1e-4)
    assert table["p"].min() < 0.02 < 0.04 < table["p"].max()


def test_effects_and_intervals_are_those_of_the_paired_differences():
    doi = repeated_dois(40)
    values = np.random.default_rng(1).random((3, len(doi))) + np.array([[0.0], [0.1], [0.05]])
    table = compare(paper_rows(values, doi))
    assert table["a"].tolist() == ["s0001", "s0002", "s0001"]
    for row in table.itertuples():
        difference = values[int(row.a[1:])] - values[int(row.b[1:])]
        alone = estimates(paper_rows([difference], doi)).iloc[0]
        assert row.difference == pytest.approx(difference.mean())
        assert row.difference >= 0
        assert [row.low, row.high] == pytest.approx([alone["low"], alone["high"]])
        assert (row.papers, row.clusters) == (len(doi), 40)


def test_the_detectable_effect_is_that_of_the_cluster_robust_standard_error():
    doi = repeated_dois(60)
    values = np.random.default_rng(2).random((2, len(doi)))
    row = compare(paper_rows(values, doi)).iloc[0]
    cluster = pd.factorize(pd.Series(doi))[0]
    fit = sm.OLS(values[0] - values[1], np.ones(len(doi))).fit(
        cov_type="cluster", cov_kwds={"groups": cluster}
    )
    power = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert row["mde"] == pytest.approx(power * fit.bse[0], rel=1e-6)


def test_a_paper_without_a_value_is_a_miss():
    """In tests, tiers and the best, as if the system had put the gold last there."""
    values = np.random.default_rng(3).random((4, 40))
    values[1, :7] = np.nan
    values[2, 30:] = np.nan
    doi = [f"10.1/{paper // 2}" for paper in range(40)]
    holes, filled = (paper_rows(each, doi) for each in (values, np.nan_to_num(values)))
    pd.testing.assert_frame_equal(compare(holes), compare(filled))
    assert compare(holes)["papers"].tolist() == [40] * 6
    assert tiers(holes, compare(holes)) == tiers(filled, compare(filled))
    assert best_of(holes) == best_of(filled)


@pytest.mark.parametrize("ranked", [0, 1, 2, 20])
def test_a_system_that_ranks_few_papers_decides_nothing(ranked):
    """Though its gold is first wherever it has a number, and it has the highest mean there."""
    chances = np.array([0.9, 0.85, 0.05])[:, None]
    hits = (np.random.default_rng(11).random((3, 40)) < chances).astype(float)
    few = np.full(40, np.nan)
    few[:ranked] = 1.0
    alone, beside = paper_rows(hits), paper_rows([*hits, few])
    before, after = (tiers(papers, compare(papers)) for papers in (alone, beside))
    assert before["s0000"] == before["s0001"] == after["s0000"] == after["s0001"] == 1
    assert before["s0002"] == 2 <= after["s0002"]
    assert ("s0003" in after) == (ranked > 0)
    assert after.get("s0003", 2) > 1
    one, other = best_of(alone), best_of(beside)
    assert (one.system, one.chosen, one.papers) == (other.system, other.chosen, other.papers)
    assert one.naive == pytest.approx(other.naive)
    assert one.corrected == pytest.approx(other.corrected)
    assert other.cells == one.cells + (ranked > 0)


def test_holm_by_its_definition():
    values = np.random.default_rng(4).random((4, 60)) + np.array([[0.3], [0.15], [0.1], [0.0]])
    table = compare(paper_rows(values)).sort_values("p")
    steps = table["p"].to_numpy() * np.arange(6, 0, -1)
    assert table["p_holm"].to_numpy() == pytest.approx(
        np.minimum(np.maximum.accumulate(steps), 1).tolist()
    )
    assert (table["p_holm"] < 0.05).any()


@pytest.mark.slow
def test_many_pairs_get_flips_enough_to_pass_holm():
    better = np.arange(60)[:, None] >= 59
    values = np.random.default_rng(5).random((60, 50)) * 0.1 + better
    table = compare(paper_rows(values))
    assert (table.loc[table["a"] == "s0059", "p_holm"] < 0.05).all()


def test_nothing_to_compare():
    assert compare(paper_rows([[0.1, 0.2]])).empty
    assert compare(paper_rows([[0.1, 0.2], [np.nan, np.nan]])).empty
    assert compare(paper_rows([[0.1, 0.2], [0.3, 0.1]], ["10.1/a", "10.1/A"])).empty
    equal = compare(paper_rows([[0.1, 0.2], [0.1, 0.2]])).iloc[0]
    assert (equal["p"], equal["difference"]) == (1, 0)
    assert np.isnan(equal["mde"])
    certain = compare(paper_rows([[0.0] * 50, [1.0] * 50])).iloc[0]
    assert certain["p"] == pytest.approx(1 / 10_001)  # never 0
    absent = paper_rows([[0.1, 0.2], [np.nan, np.nan], [0.3, 0.3]])
    assert compare(absent)[["a", "b"]].to_numpy().tolist() == [["s0002", "s0000"]]


def shuffled_pairs(rng: np.random.Generator, boards: int, doi: list[str], shift: float = 0.0):
    """Hit@1 of two systems that share half of their luck, one column a side and board."""
    common = clustered_luck(rng, boards, doi)
    sides = [
        np.sqrt(0.5) * common + np.sqrt(0.5) * clustered_luck(rng, boards, doi) for _ in range(2)
    ]
    hits = [
        (luck < stats.norm.ppf(0.33 + extra)).astype(float)
        for luck, extra in zip(sides, (shift, 0.0), strict=True)
    ]
    return np.concatenate(hits).T  # papers × (left boards, right boards)


@pytest.mark.slow
def test_the_size_of_the_test_is_five_percent_and_needs_the_clusters():
    rng = np.random.default_rng(6)
    boards, doi = 2000, repeated_dois(300)
    values = shuffled_pairs(rng, boards, doi)
    by_doi = pd.DataFrame(values).groupby(pd.factorize(pd.Series(doi))[0]).sum().to_numpy()
    left, right = np.arange(boards), boards + np.arange(boards)
    size = (sign_flip_p(by_doi, left, right, 2000, 0) < 0.05).mean()
    assert size == pytest.approx(0.05, abs=0.015)
    assert (sign_flip_p(values, left, right, 2000, 0) < 0.05).mean() > 0.065


@pytest.mark.slow
def test_the_detectable_effect_is_found_in_80_percent_of_studies():
    rng = np.random.default_rng(7)
    boards, doi, effect = 1000, repeated_dois(300), 0.0875
    values = shuffled_pairs(rng, boards, doi, effect)
    pairs = [paper_rows(values[:, [one, boards + one]].T, doi) for one in range(20)]
    assert np.mean([compare(pair)["mde"][0] for pair in pairs]) == pytest.approx(effect, rel=0.03)
    by_doi = pd.DataFrame(values).groupby(pd.factorize(pd.Series(doi))[0]).sum().to_numpy()
    p = sign_flip_p(by_doi, np.arange(boards), boards + np.arange(boards), 2000, 0)
    assert (p < 0.05).mean() == pytest.approx(0.8, abs=0.04)


# --- tiers ---


def told_apart(pairs: list[tuple[str, str]]) -> pd.DataFrame:
    return pd.DataFrame([(a, b, 0.01) for a, b in pairs], columns=["a", "b", "p_holm"])


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], [1, 1, 1, 1]),
        ([(0, 1), (0, 2), (0, 3)], [1, 2, 2, 2]),
        ([(0, 1)], [1, 2, 2, 2]),  # the third is not told apart from the opener of the second tier
        ([(0, 3)], [1, 1, 1, 2]),
        ([(1, 2), (1, 3), (2, 3)], [1, 1, 1, 1]),  # only the best of a tier counts
        ([(0, 2), (0, 3), (1, 3)], [1, 1, 2, 2]),
        ([(a, b) for a in range(4) for b in range(a + 1, 4)], [1, 2, 3, 4]),
    ],
)
def test_tiers_of_small_boards(pairs, expected):
    papers = paper_rows(np.array([0.9, 0.7, 0.5, 0.3])[:, None] * np.ones(5))
    found = tiers(papers, told_apart([(f"s{a:04d}", f"s{b:04d}") for a, b in pairs]))
    assert list(found.values()) == expected
    assert list(found) == [f"s{place:04d}" for place in range(4)]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_tiers_keep_their_promise(seed):
    rng = np.random.default_rng(seed)
    papers = paper_rows(rng.random((5, 25)) + rng.choice([0, 0.2, 0.5], size=(5, 1)))
    table = compare(papers)
    found = tiers(papers.sample(frac=1, random_state=seed), table)
    means = papers.groupby("system")["hit@1"].mean().sort_values(ascending=False)
    assert [found[name] for name in means.index] == sorted(found.values())
    p = {frozenset((row.a, row.b)): row.p_holm for row in table.itertuples()}
    openers = [
        next(n for n in means.index if found[n] == tier) for tier in sorted({*found.values()})
    ]
    for one, other in pairwise(openers):
        assert p[frozenset((one, other))] < 0.05
    for name in means.index:
        opener = openers[found[name] - 1]
        assert name == opener or p[frozenset((name, opener))] >= 0.05


def test_equal_systems_share_a_tier_and_stand_by_name():
    papers = paper_rows([[0.5, 1.0], [1.0, 0.5]])
    assert tiers(papers, compare(papers)) == {"s0000": 1, "s0001": 1}


# --- the best of many ---


def test_a_single_system_needs_no_correction():
    rows = paper_rows(np.random.default_rng(0).random((1, 30)))
    found = best_of(rows)
    assert found.corrected == pytest.approx(found.naive, abs=0.01)
    assert found.corrected["value"] == pytest.approx(found.naive["value"])
    assert (found.cells, found.chosen, found.papers) == (1, {"s0000": pytest.approx(1)}, 30)


def test_a_clear_winner_keeps_its_mean():
    values = np.random.default_rng(1).random((4, 50)) + np.array([[0], [3], [0], [0]])
    found = best_of(paper_rows(values))
    assert found.system == "s0001"
    assert found.corrected == pytest.approx(found.naive, abs=0.01)
    assert found.corrected["value"] == pytest.approx(values[1].mean())


def test_limits_stay_within_what_a_mean_can_be():
    found = best_of(paper_rows([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]))
    assert (found.corrected["low"], found.corrected["high"]) == (0, 1)


def rivals(rng: np.random.Generator, truth: np.ndarray, doi: list[str]) -> np.ndarray:
    """Hit@1 of systems with the given true rates and some common luck, papers × systems."""
    luck = np.sqrt(0.3) * clustered_luck(rng, 1, doi)
    luck = luck + np.sqrt(0.7) * clustered_luck(rng, len(truth), doi)
    return (luck < stats.norm.ppf(truth)[:, None]).T.astype(float)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.02])
def test_the_cross_fitted_best_is_unbiased_where_the_maximum_is_not(spread):
    """14 systems on 300 DOIs, 1,000 times; the target is the true mean of the one chosen."""
    rng = np.random.default_rng(8)
    doi = repeated_dois(300)
    cluster = pd.factorize(pd.Series(doi))[0]
    counts = np.bincount(cluster)[:, None] * np.ones((1, 14))
    truth = 0.33 + spread * np.linspace(-1, 1, 14)
    naive, corrected = [], []
    for _ in range(1000):
        hits = rivals(rng, truth, doi)
        sums = np.stack([np.bincount(cluster, column) for column in hits.T], axis=1)
        means = hits.mean(axis=0)
        fitted, _ = cross_fit(sums, counts, np.ones((1, 300)), folds=10, repeats=2, seed=0)
        naive.append(means.max() - truth[means.argmax()])
        corrected.append(fitted[0] - truth[means.argmax()])
    error = np.std(corrected) / np.sqrt(1000)
    assert abs(np.mean(corrected)) < 2 * error
    assert np.mean(naive) > 20 * error


@pytest.mark.slow
def test_the_corrected_interval_covers_the_chosen_systems_mean():
    rng = np.random.default_rng(9)
    doi = repeated_dois(60)
    truth = 0.33 + 0.05 * np.linspace(-1, 1, 8)
    covered, naive = [], []
    for _ in range(150):
        hits = rivals(rng, truth, doi)
        target = truth[hits.mean(axis=0).argmax()]
        found = best_of(paper_rows(hits.T, doi), settings=Settings(300), repeats=3)
        covered.append(found.corrected["low"] <= target <= found.corrected["high"])
        naive.append(found.naive["low"] <= target <= found.naive["high"])
    assert np.mean(covered) >= 0.95
    assert np.mean(naive) < 0.9


# --- agreement ---


def test_tau_equals_scipys_with_ties():
    scores = np.random.default_rng(0).integers(0, 5, size=(3, 20, 8)).astype(float)
    ours = kendall_tau(scores)
    for a, b, item in np.ndindex(3, 3, 20):
        theirs = stats.kendalltau(scores[a, item], scores[b, item]).statistic
        assert ours[a, b, item] == pytest.approx(theirs)
    assert np.isnan(kendall_tau(np.zeros((2, 1, 4)))).all()


def test_w_equals_friedmans_statistic_with_ties():
    """χ² = m (n − 1) W, with the same correction for ties."""
    scores = np.random.default_rng(1).integers(0, 6, size=(4, 15, 7)).astype(float)
    for item, w in enumerate(kendall_w(scores)):
        theirs = stats.friedmanchisquare(*scores[:, item].T).statistic
        assert w == pytest.approx(theirs / (4 * 6))
    same = np.repeat(scores[:1], 3, axis=0)
    assert kendall_w(same) == pytest.approx(np.ones(15))
    assert np.isnan(kendall_w(np.zeros((2, 1, 4)))).all()


def test_agreement_of_three_models():
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(3, 30, 16))
    scores[:, :6, 0] = -9.0  # all three put the gold first
    scores[1, 0, 1] = -9.0  # where one ties it with another
    rows = candidate_rows({f"m{model}|t|nll": scores[model] for model in range(3)})
    other = candidate_rows({"m0|t|raw": scores[0]})  # a single model: nothing to agree with
    (found,) = agreement(pd.concat([other, rows]))
    assert (found.task, found.scorer, found.models) == ("t", "nll", ("m0", "m1", "m2"))
    assert (found.papers, found.all_first) == (30, 5)
    first = scores.argmin(axis=2)
    same = (first[0] == first[2]).mean()
    assert found.top1.loc["m0", "m2"] == pytest.approx(same)
    tied = ((first[0] == first[1])[1:].sum() + 0.5) / 30
    assert found.top1.loc["m0", "m1"] == found.top1.loc["m1", "m0"] == pytest.approx(tied)
    tau = [stats.kendalltau(scores[0, paper], scores[2, paper]).statistic for paper in range(30)]
    assert found.tau.loc["m0", "m2"] == pytest.approx(np.mean(tau))
    assert found.w["value"] == pytest.approx(kendall_w(scores).mean())
    assert found.w["low"] < found.w["value"] < found.w["high"]


def test_models_agree_on_the_papers_all_of_them_rank():
    scores = np.random.default_rng(3).normal(size=(2, 10, 16))
    scores[1, 4, 7] = np.nan
    rows = candidate_rows({f"m{model}|t|nll": scores[model] for model in range(2)})
    assert agreement(rows)[0].papers == 9
    assert agreement(rows.assign(score=rows["score"].where(rows["model"] == "m0"))) == []
    assert agreement(rows.assign(score=np.nan)) == []


def assert_agree(one, other):
    """That two lists of agreements are the same."""
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        for name, value in vars(left).items():
            if isinstance(value, pd.DataFrame):
                pd.testing.assert_frame_equal(value, getattr(right, name))
            else:
                assert value == getattr(right, name), name


@pytest.mark.parametrize("ranked", [0, 1, 2, 15])
@pytest.mark.parametrize("place", [0, 3])
def test_a_model_that_ranks_few_papers_leaves_the_others_figures(ranked, place):
    scores = list(np.random.default_rng(4).normal(size=(3, 30, 16)))
    few = np.full((30, 16), np.nan)
    few[:ranked] = scores[0][:ranked]
    named = [(f"m{number}|t|nll", own) for number, own in enumerate(scores)]
    with_few = [*named[:place], ("few|t|nll", few), *named[place:]]
    assert_agree(agreement(candidate_rows(dict(named))), agreement(candidate_rows(dict(with_few))))
    few[:16] = scores[1][:16]  # one more than half
    (found,) = agreement(candidate_rows(dict(with_few)))
    assert "few" in found.models
    assert found.papers == 16


def test_models_that_rank_other_papers_never_leave_none():
    scores = np.random.default_rng(5).normal(size=(4, 9, 16))
    for number in range(3):
        scores[number + 1, 3 * number : 3 * number + 3] = np.nan
    rows = candidate_rows({f"m{model}|t|nll": scores[model] for model in range(4)})
    (found,) = agreement(rows)
    assert (found.models, found.papers) == (("m0", "m1"), 6)


def test_scorers_that_tie_all_candidates_have_no_correlation():
    rows = candidate_rows({f"m{model}|t|nll": np.zeros((4, 16)) for model in range(2)})
    (found,) = agreement(rows)
    assert (found.papers, found.w) == (4, {})
    assert np.isnan(found.tau.loc["m0", "m1"])


def test_rankings_of_different_candidates_are_refused():
    scores = np.random.default_rng(3).normal(size=(2, 4, 16))
    rows = candidate_rows({f"m{model}|t|nll": scores[model] for model in range(2)})
    wrong = (rows["model"] == "m1") & (rows["paper_id"] == "p00002")
    rows.loc[wrong & (rows["candidate_id"] == "fake_3"), "candidate_id"] = "fake_9"
    with pytest.raises(ValueError, match="'p00002': candidate 'fake_3'"):
        agreement(rows)
    twice = rows.assign(system=rows["system"] + rows["paper_id"])
    with pytest.raises(ValueError, match="more than one system"):
        agreement(twice)


def test_the_seed_fixes_comparisons_and_the_best():
    rows = paper_rows(np.random.default_rng(9).random((3, 40)))
    pd.testing.assert_frame_equal(compare(rows), compare(rows))
    assert best_of(rows) == best_of(rows)
    assert (compare(rows, settings=Settings(seed=1))["p"] != compare(rows)["p"]).any()
