import logging
import math

import numpy as np
import pytest
from lm_eval.api.registry import get_filter
from lm_eval.filters import build_filter_ensemble

from lm_eval_hyprank import ContinuationScore
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.filters import CandidateScore, EmbeddingScore, chance
from lm_eval_hyprank.scores import SimilarityScore, TokenValues
from tests import tiny


def score(nll_sum: float, raw_sum: float = 0.0, *, tokens: int = 4, size: int = 9, values=None):
    return ContinuationScore(
        is_greedy=False,
        num_tokens=tokens,
        num_bytes=size,
        num_zlib_bytes=size + 8,
        nll_sum=nll_sum,
        raw_sum=raw_sum,
        logz_sum=nll_sum - raw_sum,
        tokens=values,
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


def test_a_score_of_token_values_takes_its_parameters():
    array = np.array([1, 5, 3, 2], dtype=np.float32)
    values = TokenValues(np.arange(4, dtype=np.int32), array, -array, 0 * array)
    scorer = CandidateScore(score="min_k", percent=50)
    assert scorer.apply([[score(11.0, values=values)]], [{}]) == [4.0]
    assert CandidateScore(score="min_k", percent=50, higher_is_better=True).apply(
        [[score(11.0, values=values)]], [{}]
    ) == [-4.0]


def test_a_scorer_says_what_it_needs_of_the_tokens():
    assert CandidateScore(score="nll_byte").extras is None
    assert CandidateScore(score="min_k").extras == Extras()
    assert CandidateScore(score="min_k_plus").extras == Extras(moments=True)
    assert CandidateScore(score="raw_precap").extras == Extras(precap=True)
    free = CandidateScore(score="free_energy", temperature=2)
    assert free.extras == Extras(temperatures=frozenset({2.0}))


def test_token_values_that_are_not_there_are_told_of():
    with pytest.raises(TypeError, match=r"min_k is made of the values of single tokens"):
        CandidateScore(score="min_k").apply([[score(1.0)]], [{}])


def test_a_candidate_without_a_score_has_none_made_of_tokens_either():
    (found,) = CandidateScore(score="min_k").apply([[score(math.nan)]], [{}])
    assert math.isnan(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "nll", "percent": 20}, "nll has no parameter percent"),
        ({"score": "min_k", "tokens": 20}, "min_k: .*tokens"),
        ({"score": "min_k", "percent": -1}, "min_k: percent is -1"),
        ({"score": "free_energy"}, "free_energy: .*temperature"),
    ],
)
def test_parameters_are_looked_at_before_anything_is_scored(options, message):
    with pytest.raises(ValueError, match=message):
        CandidateScore(**options)


def test_chance_ties_all_candidates_and_leaves_out_what_has_no_score():
    found = chance([[score(1.0)], [score(2.0)], [score(math.nan)]], [{}] * 3)
    assert found[:2] == [0.0, 0.0]
    assert math.isnan(found[2])


def test_an_unknown_score_of_embeddings_is_refused_with_the_choice():
    with pytest.raises(ValueError, match="choose one of cosine, num_tokens, num_bytes"):
        EmbeddingScore("nll")


def test_an_item_without_a_direction_is_invalid():
    responses = [
        [SimilarityScore(cosine=c, num_tokens=1, num_bytes=4, truncated=False)]
        for c in (0.5, float("nan"))
    ]
    docs = [{"paper_id": "a"}, {"paper_id": "b"}]
    assert EmbeddingScore("cosine", higher_is_better=True).apply(responses, docs)[0] == -0.5
    assert np.isnan(EmbeddingScore("num_bytes").apply(responses, docs)[1])
