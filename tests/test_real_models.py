"""The hook against plain forward passes on two small real models and real text."""

import itertools
import random

import pytest
from lm_eval.models.huggingface import HFLM

from lm_eval_hyprank.models.hf import EnergyHFLM
from lm_eval_hyprank.models.tokens import encode
from lm_eval_hyprank.tasks import continuations, demo, researchbench
from tests import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def lm(request):
    folder = request.getfixturevalue(request.param)
    return EnergyHFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=16)


@pytest.fixture(scope="module")
def pairs(researchbench_dir):
    """A real paper with six of its candidates, shortest and longest among them."""
    papers = researchbench(dataset_path=str(researchbench_dir))["test"]
    paper = min(papers, key=lambda paper: len(paper["context"]))
    texts = sorted(continuations(paper), key=len)
    return [(paper["context"], text) for text in [*texts[:4], texts[8], texts[-1]]]


@pytest.fixture(scope="module")
def scores(lm, pairs):
    return lm.loglikelihood(tiny.requests(pairs), disable_tqdm=True)


def close(found, expected):
    assert found.num_tokens == expected.num_tokens
    assert found.is_greedy == expected.is_greedy
    for name in ("nll_sum", "raw_sum", "logz_sum"):
        difference = abs(getattr(found, name) - getattr(expected, name))
        assert difference <= 2e-6 * found.num_tokens, (name, difference / found.num_tokens)


def test_the_prefix_is_shared(lm, scores):
    assert lm._hyprank_engine.reuse.name == "shared"


def test_equals_a_plain_forward_pass_with_sums_in_float64(lm, pairs, scores):
    for score, row in zip(scores, encode(lm, pairs), strict=True):
        nll, raw, logz, greedy = tiny.plain_sums(lm.model, row.prefix, row.continuation)
        tolerance = 2e-6 * score.num_tokens
        assert score.num_tokens == len(row.continuation)
        assert abs(score.nll_sum - nll) <= tolerance
        assert abs(score.raw_sum - raw) <= tolerance
        assert abs(score.logz_sum - logz) <= tolerance
        assert abs(score.raw - (score.nll - score.logz)) <= 2e-6
        assert score.is_greedy == greedy


def test_equals_stock_within_the_error_of_stock(lm, pairs, scores):
    """Stock sums a float32 log-softmax: the exact side of the difference is ours."""
    stock = HFLM.loglikelihood(lm, tiny.requests(pairs[:4]), disable_tqdm=True)
    rows = encode(lm, pairs[:4])
    stock_error = our_error = 0.0
    for ours, (logprob, is_greedy), row in zip(scores[:4], stock, rows, strict=True):
        assert abs(ours[0] - logprob) <= 5e-5 * ours.num_tokens
        assert ours.is_greedy == is_greedy
        exact = -tiny.plain_sums(lm.model, row.prefix, row.continuation)[0]
        stock_error += abs(logprob - exact)
        our_error += abs(ours[0] - exact)
    assert our_error < stock_error


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_size_does_not_matter(lm, pairs, scores, batch_size):
    engine = lm._hyprank_engine
    before, engine.batching.max_sequences = engine.batching.max_sequences, batch_size
    try:
        found = lm.loglikelihood(tiny.requests(pairs), disable_tqdm=True)
    finally:
        engine.batching.max_sequences = before
    for one, other in zip(found, scores, strict=True):
        close(one, other)


def test_request_order_does_not_matter(lm, pairs, scores):
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    found = lm.loglikelihood(tiny.requests([pairs[i] for i in order]), disable_tqdm=True)
    for index, score in zip(order, found, strict=True):
        close(score, scores[index])


def test_two_papers_beside_each_other_do_not_mix(lm, pairs, scores):
    paper = demo()["test"][0]
    others = [(paper["context"], text) for text in continuations(paper)][:4]
    mixed = [pair for both in zip(others, pairs, strict=False) for pair in both]
    found = dict(zip(mixed, lm.loglikelihood(tiny.requests(mixed), disable_tqdm=True), strict=True))
    for pair, score in zip(pairs[:4], scores, strict=False):
        close(found[pair], score)


def test_bos_is_what_the_model_was_trained_with(lm, pairs):
    (row,) = encode(lm, pairs[:1])
    bos = lm.tokenizer.bos_token_id
    if lm.model.config.model_type.startswith("gemma"):
        assert row.prefix[0] == bos
        assert row.prefix.count(bos) == 1
        text = "The capital of France is Paris, and the capital of Italy is Rome."
        ids = tuple(lm.tokenizer(text, add_special_tokens=False)["input_ids"])
        with_bos = tiny.plain_sums(lm.model, (bos, *ids[:2]), ids[2:])[0]
        without = tiny.plain_sums(lm.model, ids[:2], ids[2:])[0]
        assert with_bos < without - len(ids) * 0.5
    else:
        assert row.prefix[0] != bos


NOISE = {"nll": 0.03, "raw": 0.1}
"""Nats by which the mean scores of two right bfloat16 implementations may differ."""


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_half_precision_ranks_as_float32_does(request, model, pairs):
    folder = request.getfixturevalue(model)
    half = EnergyHFLM(pretrained=str(folder), device="cpu", dtype="bfloat16", batch_size=16)
    found = half.loglikelihood(tiny.requests(pairs), disable_tqdm=True)
    assert half._hyprank_engine.reuse.name == "shared"
    same_weights = EnergyHFLM(pretrained=half.model.float(), tokenizer=half.tokenizer)
    exact = same_weights.loglikelihood(tiny.requests(pairs), disable_tqdm=True)
    for score, noise in NOISE.items():
        rough, fine = ([getattr(one, score) for one in scores] for scores in (found, exact))
        assert len(set(rough)) == len(set(fine)) == len(pairs), "no ties that float32 has not"
        for left, right in itertools.combinations(range(len(pairs)), 2):
            if abs(fine[left] - fine[right]) > noise:
                assert (rough[left] < rough[right]) == (fine[left] < fine[right])
