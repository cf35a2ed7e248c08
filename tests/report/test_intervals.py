from __future__ import annotations

import ir_measures
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import RR, Success
from scipy import stats

from lm_eval_hyprank.metrics import process_results
from lm_eval_hyprank.report.intervals import (
    METRICS,
    Settings,
    _bca_levels,
    cell,
    cluster_ids,
    estimates,
    gold_beats,
    paper_metrics,
    rank_histogram,
    resample_weights,
)
from tests.report.boards import LABELS, candidate_rows, paper_rows, repeated_dois


def random_scores(papers: int, seed: int = 0, size: int = 16) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=(papers, size))
    scores[:, 0] -= 1
    return scores


def only(table: pd.DataFrame, **keys: object) -> pd.Series:
    for name, value in keys.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


# --- values a paper ---


def test_metrics_equal_those_of_ir_measures():
    rows = candidate_rows({"m|t|nll": random_scores(80)})
    qrels = pd.DataFrame(
        {
            "query_id": rows["paper_id"],
            "doc_id": rows["candidate_id"],
            "relevance": rows["is_gold"].astype(int),
        }
    )
    run = pd.DataFrame(
        {"query_id": rows["paper_id"], "doc_id": rows["candidate_id"], "score": -rows["score"]}
    )
    measures = {"mrr": RR, **{f"hit@{k}": Success @ k for k in (1, 2, 3, 5)}}
    theirs = ir_measures.calc_aggregate(measures.values(), qrels, run)
    ours = estimates(paper_metrics(rows))
    for name, measure in measures.items():
        assert only(ours, metric=name)["value"] == pytest.approx(theirs[measure], abs=1e-9)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=16), st.data())
def test_metrics_of_a_paper_are_those_of_the_harness_task(scores, data):
    gold = data.draw(st.integers(0, len(scores) - 1))
    rows = candidate_rows({"m|t|nll": [scores]})
    rows["is_gold"] = [at == gold for at in range(len(scores))]
    expected = process_results({"gold": gold}, scores)
    row = paper_metrics(rows).iloc[0]
    assert {name: row[name] for name in METRICS} == {name: expected[name] for name in METRICS}


def test_a_judges_unranked_gold_under_both_conventions():
    points = np.array([5, 4, 3, 2, 1, *[0] * 11])
    ranked, unranked, unreadable = -points, -np.roll(points, 1), np.full(16, np.nan)
    rows = candidate_rows({"m|t|judge": [ranked, unranked, unreadable]}, kind="judge")
    first, second, third = paper_metrics(rows).to_dict("records")
    assert (first["win_rate"], first["win_rate_terminal"], first["hit@1"]) == (1, 1, 1)
    assert second["win_rate"] == pytest.approx(5 / 15)  # half of the ten ties
    assert (second["win_rate_terminal"], second["hit@5"]) == (0, 0)
    assert np.isnan([first["mrr"], second["mrr"]]).all()
    assert np.isnan([third["win_rate_terminal"], third["win_rate"], third["hit@1"]]).all()
    # Several orders taken together may tie two candidates that both are ranked.
    tied = paper_metrics(rows.assign(score=rows["score"].clip(lower=-3), kind="judge_psc"))
    assert tied["win_rate_terminal"].tolist()[:1] == tied["win_rate"].tolist()[:1] == [14 / 15]
    assert paper_metrics(rows.assign(kind="energy"))["win_rate_terminal"].isna().all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 7])
def test_a_paper_without_all_scores_is_counted_and_not_ranked(bad, at):
    scores = random_scores(6)
    scores[2, at] = bad
    papers = paper_metrics(candidate_rows({"m|t|nll": scores}))
    assert papers["valid"].tolist() == [True, True, False, True, True, True]
    assert papers.loc[2, [*METRICS, "better", "tied", "candidates"]].isna().all()
    row = only(estimates(papers), metric="hit@5")
    assert (row["papers"], row["invalid"], row["clusters"]) == (5, 1, 5)
    assert row["value"] == papers["hit@5"].drop(2).mean()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows.assign(is_gold=False), "0 gold"),
        (lambda rows: rows.assign(is_gold=rows["candidate_id"].isin(["gold", "fake_1"])), "2 gold"),
        (lambda rows: rows[rows["is_gold"]], "1 candidates"),
        (lambda rows: rows.replace({"candidate_id": {"fake_2": "fake_1"}}), "'fake_1' occurs more"),
    ],
)
def test_malformed_papers_are_refused_by_name(change, says):
    rows = candidate_rows({"good|t|nll": random_scores(2), "bad|t|nll": random_scores(3)})
    wrong = (rows["system"] == "bad|t|nll") & (rows["paper_id"] == "p00001")
    with pytest.raises(ValueError, match=says) as error:
        paper_metrics(pd.concat([rows[~wrong], change(rows[wrong])]))
    assert "system 'bad|t|nll', paper 'p00001'" in str(error.value)


def test_the_order_of_rows_changes_nothing():
    systems = {f"m{seed}|t|nll": random_scores(30, seed) for seed in range(3)}
    rows = candidate_rows(systems, doi=[f"10.1/{paper // 2}" for paper in range(30)])
    tables = []
    for order in (rows, rows.sample(frac=1, random_state=1)):
        table = estimates(paper_metrics(order)).sort_values(["system", "metric"])
        tables.append(table.reset_index(drop=True))
    pd.testing.assert_frame_equal(*tables)


def test_papers_of_different_size_are_ranked_together():
    wide = candidate_rows({"m|t|nll": random_scores(5)})
    narrow = candidate_rows({"m|t|nll": random_scores(5, size=4)})
    narrow["paper_id"] += "n"
    papers = paper_metrics(pd.concat([wide, narrow]))
    assert sorted(papers["candidates"]) == [4] * 5 + [16] * 5
    assert only(estimates(papers), metric="hit@1")["papers"] == 10


def test_no_rows_make_no_table():
    rows = candidate_rows({"m|t|nll": random_scores(2)}).iloc[:0]
    assert estimates(paper_metrics(rows)).empty
    assert rank_histogram(paper_metrics(rows)).empty
    assert gold_beats(rows).empty


# --- clusters ---


def test_one_doi_in_any_spelling_is_one_cluster():
    doi = pd.Series(
        ["10.1/AbC", "10.1/abc", " https://doi.org/10.1/ABC", "doi:10.1/abc", "DOI: 10.1/abc",
         "http://dx.doi.org/10.1/abc", "", None, np.nan, "  ", "10.1/abd"]
    )  # fmt: skip
    paper = pd.Series([f"p{number}" for number in range(len(doi))])
    ids = cluster_ids(doi, paper)
    assert ids[:6].nunique() == 1
    assert ids[6:].nunique() == 5


def test_the_bootstrap_is_the_plain_one_over_whole_clusters():
    """Against resamples put together one by one."""
    doi = repeated_dois(20)
    values = np.random.default_rng(3).random((1, len(doi)))
    row = only(estimates(paper_rows(values, doi), settings=Settings(resamples=300)))
    clusters = [
        values[0][[i for i, own in enumerate(doi) if own == one]] for one in sorted(set(doi))
    ]
    means = []
    for counts in resample_weights(20, 300, 0).astype(int):
        drawn = [clusters[at] for at, count in enumerate(counts) for _ in range(count)]
        means.append(np.concatenate(drawn).mean())
    assert row["value"] == pytest.approx(values.mean())
    assert [row["low"], row["high"]] == pytest.approx(np.percentile(means, [2.5, 97.5]).tolist())
    assert row["clusters"] == 20


def test_resamples_draw_every_cluster_equally_often():
    weights = resample_weights(50, 2000, 1)
    assert (weights.sum(axis=1) == 50).all()
    assert weights.mean(axis=0) == pytest.approx(np.ones(50), abs=0.15)
    assert weights.var() == pytest.approx(49 / 50, abs=0.05)


@pytest.mark.parametrize(("interval", "method"), [("percentile", "percentile"), ("bca", "BCa")])
@pytest.mark.parametrize("data", ["skewed", "hits"])
def test_unclustered_intervals_equal_scipys(interval, method, data):
    rng = np.random.default_rng(5)
    # Of hits many resamples have exactly the mean.
    values = rng.exponential(size=60) ** 2 if data == "skewed" else np.arange(60) % 10 // 9 * 1.0
    ours = only(estimates(paper_rows([values]), settings=Settings(20_000, 1, interval)))
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method=method, rng=rng
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours["low"] == pytest.approx(theirs.low, abs=0.03 * width)
    assert ours["high"] == pytest.approx(theirs.high, abs=0.03 * width)


def test_bca_differs_from_percentile_on_skewed_data():
    """Otherwise the test above could not tell them apart."""
    skewed = paper_rows([np.random.default_rng(5).exponential(size=60) ** 2])
    plain, bca = (only(estimates(skewed, settings=Settings(20_000, 1, way)))
                  for way in ("percentile", "bca"))  # fmt: skip
    assert bca["high"] - plain["high"] > 0.06 * (plain["high"] - plain["low"])


def test_bca_of_few_values_looks_at_the_resamples_that_have_one():
    """Symmetric values: no bias, however many resamples draw none of them."""
    values = np.full(40, np.nan)
    values[[3, 20]] = 0.0, 1.0
    found = only(estimates(paper_rows([values]), settings=Settings(4000, 0, "bca")))
    plain = only(estimates(paper_rows([values]), settings=Settings(4000, 0)))
    assert (found["low"], found["high"]) == (plain["low"], plain["high"]) == (0.0, 1.0)
    replicates = np.array([[0.0], [0.5], [1.0], [np.nan], [np.nan]])
    left_out = np.array([[1.0], [0.0]])
    levels = _bca_levels(np.array([0.5]), replicates, left_out, np.array([0.025, 0.975]))
    assert levels[:, 0] == pytest.approx([0.025, 0.975])


@pytest.mark.parametrize("interval", ["percentile", "bca"])
def test_repeating_every_paper_narrows_only_an_unclustered_interval(interval):
    values = np.random.default_rng(0).random(80)
    twice = np.repeat(values, 2)
    chosen = Settings(4000, 0, interval)
    once, alone, together = (
        only(estimates(rows, settings=chosen))
        for rows in (
            paper_rows([values]),
            paper_rows([twice]),
            paper_rows([twice], [f"10.1/{number // 2:03d}" for number in range(160)]),
        )
    )

    def width(row: pd.Series) -> float:
        return row["high"] - row["low"]

    assert width(together) == pytest.approx(width(once), rel=0.08)
    assert width(alone) == pytest.approx(width(once) / np.sqrt(2), rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["percentile", "bca"])
def test_intervals_cover_the_truth_in_95_percent_of_leaderboards(interval):
    """1,000 leaderboards of 300 DOIs (400 papers); papers of a DOI share most of their luck."""
    rng = np.random.default_rng(11)
    doi = repeated_dois(300)
    cluster = pd.factorize(pd.Series(doi))[0]
    luck = 0.9 * rng.normal(size=(1000, 300))[:, cluster]
    luck += np.sqrt(1 - 0.81) * rng.normal(size=(1000, len(doi)))
    chosen = Settings(interval=interval)
    for values, truth in (
        (luck < stats.norm.ppf(0.33), 0.33),  # Hit@1
        (stats.norm.cdf(luck) ** 3, 0.25),  # skewed as reciprocal ranks are
    ):
        table = estimates(paper_rows(values, doi), settings=chosen)
        assert 0.93 <= ((table["low"] <= truth) & (truth <= table["high"])).mean() <= 0.97
        alone = estimates(paper_rows(values), settings=chosen)
        assert ((alone["low"] <= truth) & (truth <= alone["high"])).mean() < 0.93


def test_pooled_rows_draw_a_papers_models_together():
    values = np.random.default_rng(2).random((3, 40))
    pooled = estimates(paper_rows(values).assign(scorer="nll"), by=("scorer",))
    averaged = estimates(paper_rows([values.mean(axis=0)]))
    assert cell(pooled.iloc[0]) == pytest.approx(cell(averaged.iloc[0]))
    assert (pooled["papers"][0], pooled["rows"][0]) == (40, 120)
    single = estimates(paper_rows(values[:1]))
    assert pooled["high"][0] - pooled["low"][0] < single["high"][0] - single["low"][0]


def test_a_discipline_is_resampled_within_itself():
    rows = paper_rows(np.random.default_rng(4).random((2, 30)))
    rows["discipline"] = np.where(rows["paper_id"] < "p00010", "Law", "Math")
    both = estimates(rows, by=("discipline", "system"))
    alone = estimates(rows[rows["discipline"] == "Law"], by=("discipline", "system"))
    pd.testing.assert_frame_equal(both[both["discipline"] == "Law"].reset_index(drop=True), alone)
    assert both["papers"].tolist() == [10, 20, 10, 20]


def test_the_seed_fixes_every_number():
    rows = paper_rows(np.random.default_rng(2).random((2, 40)))
    pd.testing.assert_frame_equal(estimates(rows), estimates(rows))
    other = estimates(rows, settings=Settings(seed=1))
    assert (other["low"] != estimates(rows)["low"]).all()


@pytest.mark.parametrize("interval", ["percentile", "bca"])
def test_what_has_no_interval_has_no_invented_one(interval):
    chosen = Settings(interval=interval)

    def table(values: list[float], doi: list[str] | None = None) -> pd.DataFrame:
        return estimates(paper_rows([values], doi), settings=chosen)

    constant = table([1.0, 1.0, 1.0]).iloc[0]
    assert cell(constant) == {"value": 1, "low": 1, "high": 1}
    assert constant["degenerate"]
    assert cell(table([0.3]).iloc[0]) == {"value": 0.3}
    assert cell(table([0.2, 0.4], ["10.1/a", "10.1/A"]).iloc[0]) == {"value": pytest.approx(0.3)}
    assert cell(table([0.3, np.nan]).iloc[0]) == {"value": 0.3}
    assert table([np.nan, np.nan]).empty
    spread = table([0.0, 1.0, np.nan, 1.0]).iloc[0]
    assert set(cell(spread)) == {"value", "low", "high"}
    assert not spread["degenerate"]


# --- distributions ---


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 5), min_size=16, max_size=16), min_size=1, max_size=5))
def test_the_rank_histogram_adds_up_to_hit_at_k(scores):
    papers = paper_metrics(candidate_rows({"m|t|nll": scores}))
    shares = rank_histogram(papers).loc["m|t|nll"]
    assert shares.sum() == pytest.approx(1)
    for k in (1, 2, 3, 5):
        assert shares[:k].sum() == pytest.approx(papers[f"hit@{k}"].mean())


def test_the_pairwise_table_counts_pairs():
    scores = random_scores(25)
    scores[3, 4] = scores[3, 0]
    scores[5, 2] = np.nan
    rows = candidate_rows({"m|t|nll": scores})
    table = gold_beats(rows)
    ranked = np.delete(scores, 5, axis=0)
    wins = (ranked[:, 1:] > ranked[:, :1]) + (ranked[:, 1:] == ranked[:, :1]) / 2
    fake = [label.startswith("fake") for label in LABELS[1:]]
    assert only(table, against="fake")["value"] == pytest.approx(wins[:, fake].mean())
    assert only(table, against="model")["value"] == pytest.approx(wins[:, 5:].mean())
    everything = only(table, against="all")
    assert (everything["papers"], everything["rows"], everything["invalid"]) == (24, 360, 15)
    overall = only(estimates(paper_metrics(rows)), metric="win_rate")
    assert cell(everything) == pytest.approx(cell(overall))
