import math
import pickle
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.filters import build_filter_ensemble

from lm_eval_hyprank import ContinuationScore
from lm_eval_hyprank.energy import token_scores
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.models.hf import _token_values
from lm_eval_hyprank.scores import (
    TOKEN_SCORES,
    SimilarityScore,
    TokenValues,
    free_energy,
    min_k,
    nll_first,
)
from tests import tiny

FINITE = st.floats(-1e6, 1e6)

SCORES = st.builds(
    ContinuationScore,
    is_greedy=st.booleans(),
    num_tokens=st.integers(1, 1000),
    num_bytes=st.integers(1, 1000),
    num_zlib_bytes=st.integers(1, 1000),
    nll_sum=FINITE,
    raw_sum=FINITE,
    logz_sum=FINITE,
    truncated=st.booleans(),
)


@given(SCORES)
def test_is_the_harness_pair(score):
    logprob, is_greedy = score
    assert (logprob, is_greedy) == (-score.nll_sum, score.is_greedy)
    assert isinstance(score, tuple)
    assert len(score) == 2


@given(SCORES)
def test_survives_pickling_whole(score):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(score, protocol))
        assert type(copy) is ContinuationScore
        assert copy == score
        assert vars(copy) == vars(score)


@given(SCORES)
def test_means_times_tokens_are_sums(score):
    for mean, total in (
        (score.nll, score.nll_sum),
        (score.raw, score.raw_sum),
        (score.logz, score.logz_sum),
    ):
        assert math.isclose(mean * score.num_tokens, total, rel_tol=1e-12, abs_tol=1e-9)


EXAMPLE = ContinuationScore(
    is_greedy=True,
    num_tokens=2,
    num_bytes=5,
    num_zlib_bytes=13,
    nll_sum=3.0,
    raw_sum=-1.0,
    logz_sum=4.0,
)


def test_survives_take_first():
    (request,) = tiny.requests([("context", " continuation")])
    request.resps = [EXAMPLE]
    build_filter_ensemble("none", [["take_first", None]]).apply([request])
    assert request.filtered_resps["none"] is EXAMPLE


def test_repr_names_every_sum():
    assert eval(repr(EXAMPLE)) == EXAMPLE


@given(SCORES)
def test_scores_by_length_are_sums_over_their_length(score):
    assert score.nll_byte == score.nll_sum / score.num_bytes
    assert score.nll_zlib == score.nll_sum / score.num_zlib_bytes
    expected = score.nll_sum / score.num_tokens / score.num_zlib_bytes
    assert math.isclose(score.zlib_ratio, expected, rel_tol=1e-12)


# ---- scores of token values


def values_of(logits, targets, **extras):
    """Token values from logits, by the package's own path."""
    scores = token_scores(
        torch.tensor(logits, dtype=torch.float32), torch.tensor(targets), extras=Extras(**extras)
    )
    return _token_values(targets, scores)


def nll_values(*nll):
    array = np.array(nll, dtype=np.float32)
    return TokenValues(np.arange(len(nll), dtype=np.int32), array, -array, 0 * array)


THREE = [[2.0, 1.0, 0.0], [0.0, 3.0, -1.0], [0.5, 0.5, 0.5], [4.0, -4.0, 0.0], [1.0, 1.5, -2.0]]
TARGETS = [1, 2, 0, 0, 2]


def test_min_k_plus_by_its_definition_on_three_tokens():
    """Probabilities, mean and standard deviation of log p written out, by Python alone."""
    standardised = []
    for row, target in zip(THREE, TARGETS, strict=True):
        total = sum(math.exp(z) for z in row)
        p = [math.exp(z) / total for z in row]
        mean = sum(q * math.log(q) for q in p)
        deviation = math.sqrt(sum(q * (math.log(q) - mean) ** 2 for q in p))
        uniform = max(p) - min(p) < 1e-12
        standardised.append(0.0 if uniform else (math.log(p[target]) - mean) / deviation)
    values = values_of(THREE, TARGETS, moments=True)
    for percent, count in ((100, 5), (40, 2), (59, 2), (60, 3), (1, 1)):
        expected = -sum(sorted(standardised)[:count]) / count
        found = TOKEN_SCORES["min_k_plus"].compute(values, percent=percent)
        assert found == pytest.approx(expected, abs=2e-6)


def test_min_k_plus_is_zero_for_a_uniform_prediction():
    values = values_of([[0.7] * 50], [3], moments=True)
    assert TOKEN_SCORES["min_k_plus"].compute(values) == 0.0


def test_min_k_plus_of_a_certain_prediction():
    values = values_of([[300.0, 0.0, 0.0]] * 2, [0, 1], moments=True)
    certain, impossible = (
        TokenValues(
            *[a[i : i + 1] for a in (values.token_ids, values.nll, values.raw, values.logz)],
            {n: a[i : i + 1] for n, a in values.extra.items()},
        )
        for i in (0, 1)
    )
    assert TOKEN_SCORES["min_k_plus"].compute(certain) == 0.0
    assert TOKEN_SCORES["min_k_plus"].compute(impossible) == math.inf


def test_min_k_is_the_mean_of_the_least_likely_tokens():
    values = nll_values(1, 9, 2, 8, 3, 7, 4, 6, 5, 0)
    assert min_k(values, percent=20) == (9 + 8) / 2
    assert min_k(values, percent=29) == (9 + 8) / 2
    assert min_k(values, percent=30) == (9 + 8 + 7) / 3
    assert min_k(values, percent=100) == 4.5
    assert min_k(values, percent=1) == 9.0
    assert min_k(nll_values(2.5)) == 2.5


def test_nll_first_takes_what_there_is():
    assert nll_first(nll_values(1, 2, 6), tokens=2) == 1.5
    assert nll_first(nll_values(1, 2, 6), tokens=50) == 3.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 10.0])
def test_free_energy_by_its_definition(temperature):
    values = values_of(THREE, TARGETS, temperatures=frozenset({temperature}))
    energies = [
        -temperature * math.log(sum(math.exp(z / temperature) for z in row)) for row in THREE
    ]
    assert free_energy(values, temperature) == pytest.approx(sum(energies) / 5, abs=1e-6)
    if temperature == 1.0:
        assert free_energy(values, 1) == pytest.approx(-values.logz.mean(), abs=1e-6)


def test_values_that_were_not_computed_are_named():
    with pytest.raises(ValueError, match=r"no values 'free_energy_t3.0'.*nll, raw, logz"):
        free_energy(values_of(THREE, TARGETS), temperature=3)


@pytest.mark.parametrize("score", TOKEN_SCORES)
def test_every_token_score_says_what_it_needs(score):
    parameters = {"temperature": 2} if score == "free_energy" else {}
    entry = TOKEN_SCORES[score]
    entry.check(parameters)
    wanted = entry.extras(**parameters)
    values = values_of(THREE, TARGETS, **vars(wanted))
    assert math.isfinite(entry.compute(values, **parameters))
    assert entry.compute.__doc__


@pytest.mark.parametrize(
    ("score", "parameters", "message"),
    [
        ("min_k", {"percent": 0}, "percent is 0; give a number above 0 and at most 100"),
        ("min_k", {"percent": 101}, "at most 100"),
        ("min_k", {"percent": "20%"}, "percent is '20%'; give a number"),
        ("min_k", {"percentage": 20}, "percentage"),
        ("nll_first", {"tokens": 2.5}, "tokens is 2.5; give a whole number"),
        ("nll_first", {"tokens": True}, "tokens is True"),
        ("free_energy", {}, "temperature"),
        ("free_energy", {"temperature": math.nan}, "temperature is nan"),
        ("free_energy", {"temperature": math.inf}, "temperature is inf"),
    ],
)
def test_impossible_parameters_are_refused(score, parameters, message):
    with pytest.raises((TypeError, ValueError), match=message):
        TOKEN_SCORES[score].check(parameters)


def test_token_values_survive_pickling_with_their_score():
    values = values_of(THREE, TARGETS, moments=True)
    score = ContinuationScore(
        is_greedy=True,
        num_tokens=5,
        num_bytes=5,
        num_zlib_bytes=len(zlib.compress(b"hello")),
        nll_sum=3.0,
        raw_sum=-1.0,
        logz_sum=4.0,
        tokens=values,
    )
    copy = pickle.loads(pickle.dumps(score)).tokens
    for name in ("token_ids", "nll", "raw", "logz"):
        assert np.array_equal(getattr(copy, name), getattr(values, name))
    assert copy.extra.keys() == {"logp_mean", "logp_var"}


def test_similarity_survives_pickling():
    score = SimilarityScore(cosine=0.5, num_tokens=3, num_bytes=9, truncated=True)
    again = pickle.loads(pickle.dumps(score))
    assert (type(again), again, again.__dict__) == (SimilarityScore, score, score.__dict__)
