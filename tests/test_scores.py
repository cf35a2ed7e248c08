import math
import pickle

from hypothesis import given
from hypothesis import strategies as st
from lm_eval.filters import build_filter_ensemble

from lm_eval_hyprank import ContinuationScore
from tests import tiny

FINITE = st.floats(-1e6, 1e6)

SCORES = st.builds(
    ContinuationScore,
    is_greedy=st.booleans(),
    num_tokens=st.integers(1, 1000),
    num_bytes=st.integers(1, 1000),
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


def test_survives_take_first():
    (request,) = tiny.requests([("context", " continuation")])
    score = ContinuationScore(
        is_greedy=False, num_tokens=2, num_bytes=5, nll_sum=3.0, raw_sum=-1.0, logz_sum=4.0
    )
    request.resps = [score]
    build_filter_ensemble("none", [["take_first", None]]).apply([request])
    assert request.filtered_resps["none"] is score


def test_repr_names_every_sum():
    score = ContinuationScore(
        is_greedy=True, num_tokens=2, num_bytes=5, nll_sum=3.0, raw_sum=-1.0, logz_sum=4.0
    )
    assert eval(repr(score)) == score
