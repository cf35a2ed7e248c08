import logging
import math

import pytest
from lm_eval.api.registry import get_filter
from lm_eval.filters import build_filter_ensemble

from lm_eval_hyprank import ContinuationScore
from lm_eval_hyprank.filters import CandidateScore
from tests import tiny


def score(nll_sum: float, raw_sum: float = 0.0, *, tokens: int = 4, size: int = 9):
    return ContinuationScore(
        is_greedy=False,
        num_tokens=tokens,
        num_bytes=size,
        nll_sum=nll_sum,
        raw_sum=raw_sum,
        logz_sum=nll_sum - raw_sum,
    )


def test_controls_are_invalid_where_the_models_scores_are():
    found = CandidateScore(score="num_bytes").apply([[score(math.nan)], [score(1.0)]], [{}, {}])
    assert math.isnan(found[0])
    assert found[1] == 9.0


@pytest.mark.parametrize("name", CandidateScore.SCORES)
def test_takes_the_named_score(name):
    responses = [score(6.0, -14.0), score(1.0, -3.0, tokens=1, size=2)]
    found = CandidateScore(score=name).apply([[r] for r in responses], [{}, {}])
    assert found == [float(getattr(r, name)) for r in responses]


def test_higher_is_better_turns_the_sign_so_that_lower_is_better():
    found = CandidateScore(score="logz", higher_is_better=True).apply([[score(6.0, -14.0)]], [{}])
    assert found == [-5.0]


def test_is_one_entry_of_a_filter_list():
    assert get_filter("candidate_score") is CandidateScore
    (request,) = tiny.requests([("context", " continuation")])
    request.resps = [score(6.0)]
    build_filter_ensemble("nll", [["candidate_score", {"score": "nll"}]]).apply([request])
    assert request.filtered_resps["nll"] == 1.5


def test_unknown_score_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"'nil'.*nll_sum"):
        CandidateScore(score="nil")


def test_plain_pair_is_refused_with_the_item_and_the_remedy():
    with pytest.raises(TypeError, match=r"Physics/1.*--model hf.*--use_cache"):
        CandidateScore(score="nll").apply([[(-3.0, False)]], [{"paper_id": "Physics/1"}])


def test_items_without_a_finite_score_are_named_and_counted(caplog):
    docs = [{"paper_id": name} for name in ("a", "a", "b", "c", "c")]
    values = [1.0, math.nan, 2.0, math.inf, math.nan]
    with caplog.at_level(logging.WARNING):
        found = CandidateScore(score="nll_sum").apply([[score(v)] for v in values], docs)
    assert found[:1] == [1.0]
    assert math.isnan(found[1])
    (record,) = caplog.records
    message = record.getMessage()
    assert "2 item(s)" in message
    assert "a (1 candidates), c (2 candidates)" in message
    assert "b" not in message.split(":")[-1]
