"""What can be checked inside the published tables, with our own metrics."""

import json
from statistics import fmean

import pytest

from lm_eval_hyprank.metrics import process_results
from tests.conftest import ROOT

PUBLISHED = json.loads((ROOT / "analysis" / "published.json").read_text(encoding="utf-8"))
SCORERS = ("nll", "raw")


@pytest.mark.parametrize("scorer", SCORERS)
def test_the_pooled_row_is_the_mean_of_the_models(scorer):
    rows = dict(PUBLISHED["overall"][scorer])
    pooled = rows.pop("All models")
    assert len(rows) == 7
    for metric, cell in pooled.items():
        mean = fmean(row[metric]["value"] for row in rows.values())
        assert cell["value"] == pytest.approx(mean, abs=0.0011), metric


def test_every_value_lies_inside_its_interval():
    for rows in PUBLISHED["overall"].values():
        for row in rows.values():
            for cell in row.values():
                assert cell["low"] < cell["value"] < cell["high"]


@pytest.mark.parametrize("scorer", SCORERS)
def test_hits_grow_with_k_and_bound_the_reciprocal_rank(scorer):
    for row in PUBLISHED["overall"][scorer].values():
        hits = [row[f"hit@{k}"]["value"] for k in (1, 2, 3, 5)]
        assert hits == sorted(hits)
        least = hits[0] + (1 - hits[0]) / 16
        most = hits[0] + (hits[1] - hits[0]) / 2 + (hits[2] - hits[1]) / 3
        most += (hits[3] - hits[2]) / 4 + (1 - hits[3]) / 6
        assert least <= row["mrr"]["value"] <= most + 0.001


def test_the_judges_win_rate_follows_from_its_rank_histogram_and_the_tie_rule():
    histogram = dict(PUBLISHED["gpt5_rank_histogram"])
    unranked = histogram.pop("not ranked")
    ranked = [float(place) for place in range(16)]
    tied = [float(min(place, 5)) for place in range(16)]
    above = sum(
        share * process_results({"gold": int(rank) - 1}, ranked)["win_rate"]
        for rank, share in histogram.items()
    )
    terminal = above + unranked * process_results({"gold": 15}, ranked)["win_rate"]
    half = above + unranked * process_results({"gold": 15}, tied)["win_rate"]
    published = PUBLISHED["overall"]["prompted"]["GPT-5"]
    assert sum(histogram.values()) == pytest.approx(published["hit@5"]["value"], abs=1e-3)
    assert terminal == pytest.approx(PUBLISHED["win_rate"]["prompted"]["GPT-5"], abs=1e-3)
    assert half == pytest.approx(0.568, abs=1e-3)


@pytest.mark.parametrize("metric", ["hit@1", "hit@5"])
def test_disciplines_average_to_the_overall_value(metric):
    """To two places: the papers per discipline are not in the tables."""
    for scorer in SCORERS:
        mean = fmean(row[metric][scorer] for row in PUBLISHED["by_discipline"].values())
        overall = PUBLISHED["overall"][scorer]["All models"][metric]["value"]
        assert mean == pytest.approx(overall, abs=0.01)
