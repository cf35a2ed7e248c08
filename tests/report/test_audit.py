from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.discrete.conditional_models import ConditionalLogit

from lm_eval_hyprank.ranking import gold_rank
from lm_eval_hyprank.report.audit import (
    conditional_logit,
    energy_audit,
    energy_parts,
    length_baselines,
    length_correlation,
    length_matched,
    row_spearman,
)
from lm_eval_hyprank.report.intervals import estimates, paper_metrics
from tests.report.boards import candidate_rows, repeated_dois

PAPERS = 300


def metric(table: pd.DataFrame, name: str, **keys: str) -> pd.Series:
    for key, value in {"metric": name, **keys}.items():
        table = table[table[key] == value]
    assert len(table) == 1
    return table.iloc[0]


@pytest.fixture(scope="module")
def length_only() -> pd.DataFrame:
    """The gold is always the shortest; a token costs about the same whatever it says."""
    rng = np.random.default_rng(0)
    gold = rng.integers(60, 100, size=(PAPERS, 1))
    near = np.ceil(gold * rng.uniform(1.02, 1.3, size=(PAPERS, 3))).astype(int)
    far = np.ceil(gold * rng.uniform(1.5, 5, size=(PAPERS, 12))).astype(int)
    tokens = np.concatenate([gold, near, far], axis=1)
    per_token = 3 + rng.normal(size=tokens.shape) * 0.01
    noise = rng.normal(size=tokens.shape)
    systems = {"m|t|nll_sum": per_token * tokens, "m|t|nll": noise, "m|t|prefers_long": -tokens}
    return candidate_rows(systems, tokens=tokens)


def test_a_length_only_scorer_looks_perfect_until_lengths_are_matched(length_only):
    papers = paper_metrics(length_only)
    assert metric(estimates(papers), "hit@1", system="m|t|nll_sum")["value"] > 0.85

    baselines = length_baselines(length_only)
    assert metric(baselines, "hit@1", order="shortest")["value"] == 1
    assert metric(baselines, "hit@5", order="longest")["value"] == 0

    follows = length_correlation(length_only).set_index("system")
    assert follows.loc["m|t|nll_sum", "value"] > 0.95
    assert follows.loc["m|t|nll", "low"] < 0 < follows.loc["m|t|nll", "high"]
    assert follows.loc["m|t|prefers_long", "value"] == pytest.approx(-1)

    matched = length_matched(length_only)
    honest = metric(matched, "hit@1", system="m|t|nll")
    assert honest["papers"] == PAPERS
    assert honest["chance"] == pytest.approx(1 / 4)
    assert honest["value"] == pytest.approx(honest["chance"], abs=0.07)
    assert metric(matched, "hit@5", system="m|t|nll")["value"] == 1  # of four: chance as well
    assert metric(matched, "hit@5", system="m|t|nll")["chance"] == 1


def test_a_score_that_is_length_and_luck_falls_to_chance_when_matched():
    """The gold is the shortest of all but only by a hair among the matched."""
    rng = np.random.default_rng(1)
    gold = rng.integers(400, 600, size=(PAPERS, 1))
    tokens = np.concatenate(
        [gold, gold + rng.integers(1, 4, size=(PAPERS, 4)), 3 * gold + np.arange(11)], axis=1
    )
    scores = 3 * tokens + rng.normal(size=tokens.shape) * 60  # the luck of about 20 tokens
    rows = candidate_rows({"m|t|nll_sum": scores}, tokens=tokens)
    assert metric(length_baselines(rows), "hit@1", order="shortest")["value"] == 1
    assert metric(estimates(paper_metrics(rows)), "hit@5")["value"] == 1
    matched = metric(length_matched(rows), "hit@1")
    assert matched["chance"] == pytest.approx(1 / 5)
    assert matched["value"] == pytest.approx(1 / 5, abs=0.07)


def test_the_conditional_logit_finds_nothing_in_a_score_beyond_length():
    """A score that is log length plus noise looks good alone and adds nothing to length."""
    rng = np.random.default_rng(2)
    log_length = rng.normal(5, 0.5, size=(PAPERS, 16))
    log_length[:, 0] -= 0.8
    tokens = np.exp(log_length)
    scores = log_length + rng.normal(size=log_length.shape) * 0.5
    row = conditional_logit(candidate_rows({"m|t|nll": scores}, tokens=tokens)).iloc[0]
    assert row["reason"] == ""
    assert row["score_alone"] > 0.6
    assert row["score_low"] < 0 < row["score_high"]
    assert row["log_length_high"] < -0.8


# --- correlation ---


def test_row_spearman_equals_scipys_with_ties():
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 6, size=(2, 40, 9)).astype(float)
    expected = [stats.spearmanr(a, b).statistic for a, b in zip(one, other, strict=True)]
    assert row_spearman(one, other) == pytest.approx(expected)


def test_papers_without_a_correlation_are_counted():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(6, 16))
    tokens = rng.integers(10, 90, size=(6, 16)).astype(float)
    scores[1] = 4.0
    tokens[2] = 30
    scores[3, 5] = np.inf
    rows = candidate_rows({"m|t|nll": scores, "m|t|judge": scores}, tokens=tokens)
    rows.loc[rows["scorer"] == "judge", "num_tokens"] = np.nan
    (row,) = length_correlation(rows).to_dict("records")
    assert (row["system"], row["papers"], row["left_out"]) == ("m|t|nll", 3, 3)
    mean = np.mean([stats.spearmanr(scores[i], tokens[i]).statistic for i in (0, 4, 5)])
    assert row["value"] == pytest.approx(mean)
    assert len(length_correlation(rows, "num_bytes")) == 2


# --- matched lengths ---


def test_matching_by_hand():
    tokens = np.full((5, 16), 1000)
    tokens[:, 0] = 100
    tokens[0, 1:5] = [75, 133, 74, 134]  # both ends of the window belong to it
    tokens[1, 1] = 100
    tokens[3, 3] = 110
    tokens[4, 1:3] = 100
    scores = np.zeros((5, 16)) + np.arange(16)  # the gold, first, has the lowest
    scores[0, 2] = -1.0
    scores[1, 5:] = -5.0  # better, but not of the gold's length
    scores[3, 3] = np.nan
    scores[4, 1] = 0.0  # a tie
    rows = candidate_rows({"m|t|nll": scores}, tokens=tokens)
    table = length_matched(rows)
    first = metric(table, "hit@1")
    assert (first["papers"], first["left_out"], first["invalid"]) == (3, 1, 1)
    assert first["value"] == pytest.approx((0 + 1 + 1 / 2) / 3)
    assert first["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 3) / 3)
    assert metric(table, "win_rate")["value"] == pytest.approx((1 / 2 + 1 + 3 / 4) / 3)
    assert metric(table, "win_rate")["chance"] == pytest.approx(1 / 2)


def test_matching_at_random_agrees_with_a_plain_loop():
    rng = np.random.default_rng(3)
    tokens = rng.integers(20, 120, size=(60, 16))
    scores = rng.normal(size=(60, 16))
    gold = 7
    rows = candidate_rows({"m|t|nll": scores}, tokens=tokens)
    labels = rows["candidate_id"].unique().tolist()
    rows["is_gold"] = rows["candidate_id"] == labels[gold]
    expected = []
    for score, length in zip(scores, tokens, strict=True):
        kept = [i for i in range(16) if i == gold or 0.75 <= length[i] / length[gold] <= 1.33]
        if len(kept) > 1:
            expected.append(gold_rank(score[kept], kept.index(gold)).hit(1))
    first = metric(length_matched(rows), "hit@1")
    assert first["value"] == pytest.approx(np.mean(expected))
    assert (first["papers"], first["left_out"]) == (len(expected), 60 - len(expected))


def test_no_matched_paper_no_row():
    tokens = np.tile([10] + [100] * 15, (4, 1))
    rows = candidate_rows({"m|t|nll": np.random.default_rng(0).normal(size=(4, 16))}, tokens=tokens)
    assert length_matched(rows).empty


def test_baselines_are_the_models_own_lengths_and_ties_are_fair():
    tokens = np.tile([10, 10] + [90] * 14, (3, 1))
    one = candidate_rows({"a|t|nll": np.ones((3, 16)), "a|t|raw": np.ones((3, 16))}, tokens=tokens)
    two = candidate_rows({"b|t|nll": np.ones((3, 16))}, tokens=tokens[:, ::-1])
    table = length_baselines(pd.concat([one, two]))
    assert metric(table, "hit@1", model="a", order="shortest")["value"] == pytest.approx(1 / 2)
    assert metric(table, "hit@1", model="b", order="longest")["value"] == pytest.approx(1 / 14)
    assert metric(table, "hit@1", model="a", order="shortest")["papers"] == 3


# --- conditional logit ---


def choices(seed: int, papers: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Scores and tokens whose gold is drawn from a conditional logit; the gold stands first."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(papers, 16))
    tokens = np.exp(rng.normal(5, 0.7, size=(papers, 16)))
    appeal = -0.8 * scores - 0.6 * np.log(tokens) / 0.7 + rng.gumbel(size=scores.shape)
    for paper, best in enumerate(appeal.argmax(axis=1)):
        for array in (scores, tokens):
            array[paper, [0, best]] = array[paper, [best, 0]]
    return scores, tokens


def test_coefficients_equal_those_of_statsmodels():
    scores, tokens = choices(0)
    row = conditional_logit(candidate_rows({"m|t|nll": scores}, tokens=tokens)).iloc[0]
    x = np.stack([-scores, np.log(tokens)], axis=2)
    x /= (x - x.mean(axis=1, keepdims=True)).reshape(-1, 2).std(axis=0)
    gold = (np.arange(scores.size) % 16 == 0).astype(int)
    groups = np.repeat(np.arange(len(scores)), 16)
    joint = ConditionalLogit(gold, x.reshape(-1, 2), groups=groups).fit(disp=False)
    assert [row["score"], row["log_length"]] == pytest.approx(joint.params.tolist(), abs=1e-3)
    alone = ConditionalLogit(gold, x[..., :1].reshape(-1, 1), groups=groups).fit(disp=False)
    assert row["score_alone"] == pytest.approx(alone.params[0], abs=1e-3)
    # Robust and model-based errors estimate the same where the model is true.
    half = (row["score_high"] - row["score_low"]) / 2 / 1.96
    assert half == pytest.approx(joint.bse[0], rel=0.25)


def test_repeated_papers_do_not_narrow_the_logits_interval():
    scores, tokens = choices(1)
    once = conditional_logit(candidate_rows({"m|t|nll": scores}, tokens=tokens)).iloc[0]
    again = candidate_rows(
        {"m|t|nll": np.repeat(scores, 2, axis=0)},
        tokens=np.repeat(tokens, 2, axis=0),
        doi=[f"10.1/{paper // 2}" for paper in range(240)],
    )
    together, alone = (conditional_logit(rows).iloc[0] for rows in (again, again.assign(doi=None)))

    def width(row: pd.Series) -> float:
        return row["score_high"] - row["score_low"]

    assert width(together) == pytest.approx(width(once), rel=1e-3)
    assert width(alone) == pytest.approx(width(once) / np.sqrt(2), rel=0.02)


@pytest.mark.slow
def test_the_logits_intervals_cover_the_truth():
    """The truth is 0.8 and −0.6 per standard deviation, which is 1 and 0.7 in the draws."""
    doi = [f"10.1/{paper}" for paper in range(120)]
    covered = []
    for seed in range(200):
        scores, tokens = choices(seed)
        row = conditional_logit(candidate_rows({"m|t|nll": scores}, tokens=tokens, doi=doi)).iloc[0]
        covered.append(
            (
                row["score_low"] <= 0.8 <= row["score_high"],
                row["log_length_low"] <= -0.6 <= row["log_length_high"],
            )
        )
    assert np.mean(covered, axis=0) == pytest.approx([0.95, 0.95], abs=0.04)


def test_no_fit_is_a_reason_and_not_a_number(length_only):
    found = conditional_logit(length_only).set_index("system")
    for system in ("m|t|nll_sum", "m|t|nll"):
        assert found.loc[system, "reason"].startswith("separated")
        assert found.loc[system, ["score", "score_low", "log_length_high"]].isna().all()
    assert np.isfinite(found.loc["m|t|nll", "score_alone"])

    scores, tokens = choices(2, papers=30)
    broken = scores.copy()
    broken[:, 3] = np.nan
    rows = candidate_rows(
        {
            "m|t|shortest": np.log(tokens),
            "m|t|constant": np.ones_like(scores),
            "m|t|broken": broken,
            "m|t|half": np.where(np.arange(30)[:, None] < 15, broken, scores),
        },
        tokens=tokens,
    )
    found = conditional_logit(rows).set_index("system")
    assert found.loc["m|t|shortest", "reason"].startswith("collinear")
    assert found.loc["m|t|constant", "reason"] == "score never differs in a paper"
    assert found.loc["m|t|broken", "reason"] == "no paper with finite scores and lengths"
    assert (found.loc["m|t|half", "reason"], found.loc["m|t|half", "papers"]) == ("", 15)
    one = conditional_logit(rows.assign(doi="10.1/a")).set_index("system")
    assert one.loc["m|t|half", "reason"].startswith("a single DOI")
    level = conditional_logit(rows.assign(num_tokens=7)).set_index("system")
    assert level.loc["m|t|half", "reason"] == "length never differs in a paper"


@pytest.mark.parametrize("sign", [1, -1])
def test_separation_is_seen_in_either_direction(sign):
    """Also where only both together separate."""
    rng = np.random.default_rng(4)
    log_length = rng.normal(size=(40, 16))
    scores = rng.normal(size=(40, 16))
    both = log_length + scores
    log_length[:, 0] += both.min(axis=1) - both[:, 0] - 0.01
    rows = candidate_rows({"m|t|nll": sign * scores}, tokens=np.exp(sign * log_length))
    row = conditional_logit(rows).iloc[0]
    assert row["reason"].startswith("separated")
    assert np.isfinite(row["score_alone"])


# --- energy ---


def energies(nll: np.ndarray, logz: np.ndarray, doi: list[str] | None = None) -> pd.DataFrame:
    """``logz`` is the mean log-partition itself."""
    return candidate_rows({"m|t|nll": nll, "m|t|raw": nll - logz}, doi=doi)


def test_the_parts_of_raw_by_hand():
    rng = np.random.default_rng(0)
    nll, logz = rng.normal(size=(2, 50, 16)) * np.array([1.0, 2.0])[:, None, None]
    rows = energies(nll, logz)
    row = energy_audit(rows).iloc[0]
    raw = nll - logz
    for part, values in (("nll", nll), ("logz", -logz)):
        rho = [stats.spearmanr(raw[paper], values[paper]).statistic for paper in range(50)]
        assert row[f"rank_{part}"] == pytest.approx(np.mean(rho))
        covariance = sum(np.cov(raw[paper], values[paper])[0, 1] for paper in range(50))
        variance = sum(np.var(raw[paper], ddof=1) for paper in range(50))
        assert row[f"share_{part}"] == pytest.approx(covariance / variance)
        assert row[f"share_{part}_low"] < row[f"share_{part}"] < row[f"share_{part}_high"]
    assert row["share_nll"] + row["share_logz"] == pytest.approx(1)
    assert row["share_logz"] == pytest.approx(0.8, abs=0.05)  # 2² of 1² + 2²

    parts = energy_parts(rows)
    for part, scores in (("raw", raw), ("nll", nll), ("logz", -logz)):
        alone = metric(estimates(paper_metrics(candidate_rows({"m|t|x": scores}))), "mrr")
        assert metric(parts, "mrr", part=part)["value"] == pytest.approx(alone["value"])


def test_a_constant_part_explains_nothing():
    nll = np.random.default_rng(1).normal(size=(20, 16))
    row = energy_audit(energies(nll, np.full_like(nll, 12.0))).iloc[0]
    assert row["share_nll"] == pytest.approx(1)
    assert row["rank_nll"] == pytest.approx(1)
    assert row["share_logz"] == pytest.approx(0, abs=1e-9)


def test_shares_are_resampled_by_doi():
    rng = np.random.default_rng(2)
    nll, logz = rng.normal(size=(2, 30, 16))
    twice = [np.repeat(array, 2, axis=0) for array in (nll, logz)]
    doi = [f"10.1/{paper // 2:02d}" for paper in range(60)]
    once, together, alone = (
        energy_audit(rows).iloc[0]
        for rows in (energies(nll, logz), energies(*twice, doi), energies(*twice))
    )
    width = [row["share_nll_high"] - row["share_nll_low"] for row in (once, together, alone)]
    assert width[1] == pytest.approx(width[0], rel=0.1)
    assert width[2] < 0.85 * width[0]


def test_the_energy_audit_wants_both_scorers_and_finite_scores():
    rng = np.random.default_rng(3)
    nll, logz = rng.normal(size=(2, 10, 16))
    nll[4, 2] = np.nan
    rows = energies(nll, logz, repeated_dois(10)[:10])
    assert energy_audit(rows)["papers"].tolist() == [9]
    assert metric(energy_parts(rows), "hit@1", part="logz")["papers"] == 9
    assert energy_audit(rows[rows["scorer"] == "raw"]).empty
    assert energy_parts(rows[rows["scorer"] == "raw"]).empty
    assert energy_audit(rows.assign(score=np.nan)).empty
