import math
import random
import zlib

import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import normalizers
from transformers import (
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from lm_eval_hyprank import ContinuationScore
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.models.hf import EnergyHFLM, check_supported, engine_of, score_requests
from lm_eval_hyprank.models.tokens import encode
from lm_eval_hyprank.prefix import Row
from tests import tiny

CONTEXT = "Background: the sea is salt.\nResearch Question: why is the sea salt?\nHypothesis:"
CANDIDATES = [
    " rivers carry salt.",
    " rivers carry gold.",
    " the brown fox, x_1 + y^2 = {z}, jumps over 3.14159 lazy dogs",
    " r",
    " rivers carry salt.",
    " αβγ 海水 – naïve",
]
PAIRS = [(CONTEXT, candidate) for candidate in CANDIDATES] + [
    ("Research Question: why?\nHypothesis:", " salt."),
    ("A", " B"),
]


def hflm(cls=EnergyHFLM, *, model=None, tokenizer=None, batch_size=16, **options):
    return cls(
        pretrained=model or tiny.llama(),
        tokenizer=tokenizer or tiny.tokenizer(),
        batch_size=batch_size,
        **options,
    )


@pytest.fixture(scope="module")
def lm():
    return hflm()


def close(found, expected, tolerance=2e-6):
    """Whether sums agree to a tolerance per token, counts and flags exactly."""
    assert (found.num_tokens, found.num_bytes) == (expected.num_tokens, expected.num_bytes)
    assert (found.is_greedy, found.truncated) == (expected.is_greedy, expected.truncated)
    for name in ("nll_sum", "raw_sum", "logz_sum"):
        difference = abs(getattr(found, name) - getattr(expected, name))
        assert difference <= tolerance * found.num_tokens, (name, difference)


def test_equals_a_plain_forward_pass_in_float64(lm):
    found = lm.loglikelihood(tiny.requests(PAIRS))
    assert len(found) == len(PAIRS)
    for score, row in zip(found, encode(lm, PAIRS), strict=True):
        assert isinstance(score, ContinuationScore)
        nll, raw, logz, greedy = tiny.plain_sums(lm.model, row.prefix, row.continuation)
        assert score.num_tokens == len(row.continuation)
        assert score.nll_sum == pytest.approx(nll, abs=2e-6 * score.num_tokens)
        assert score.raw_sum == pytest.approx(raw, abs=2e-6 * score.num_tokens)
        assert score.logz_sum == pytest.approx(logz, abs=2e-6 * score.num_tokens)
        assert score.raw == pytest.approx(score.nll - score.logz, abs=2e-6)
        assert score.is_greedy == greedy
        assert not score.truncated


def test_equals_stock_loglikelihood(lm):
    stock = HFLM.loglikelihood(lm, tiny.requests(PAIRS), disable_tqdm=True)
    for ours, (logprob, is_greedy) in zip(
        lm.loglikelihood(tiny.requests(PAIRS)), stock, strict=True
    ):
        assert ours[0] == pytest.approx(logprob, abs=5e-5 * ours.num_tokens)
        assert ours[1] == is_greedy


def test_a_head_wider_than_the_tokenizer_gives_what_stock_gives():
    """Rows that no token uses take their share of the softmax, in stock as here."""
    model = tiny.llama(320 + 16)
    with torch.no_grad():
        model.lm_head.weight[320:] *= 20
    lm = hflm(model=model)
    stock = HFLM.loglikelihood(lm, tiny.requests(PAIRS), disable_tqdm=True)
    for ours, (logprob, _) in zip(lm.loglikelihood(tiny.requests(PAIRS)), stock, strict=True):
        assert ours[0] == pytest.approx(logprob, abs=5e-5 * ours.num_tokens)
        assert ours.nll > 3, "the unused rows hold most of the mass"


def test_a_greedy_continuation_is_called_greedy(lm):
    ids = lm.tokenizer(CONTEXT)["input_ids"]
    for _ in range(12):
        ids.append(int(lm.model(torch.tensor([ids])).logits[0, -1].argmax()))
    start = len(lm.tokenizer(CONTEXT)["input_ids"])
    row = Row(tuple(ids[:start]), tuple(ids[start:]))
    other = Row(row.prefix, (*row.continuation[:-1], (row.continuation[-1] + 1) % 320))
    greedy, not_greedy = engine_of(lm, [row]).score_whole([row, other])
    assert greedy.greedy.all()
    assert not_greedy.greedy.tolist() == [True] * 11 + [False]


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_batch_size_does_not_matter(lm, batch_size):
    other = hflm(batch_size=batch_size)
    for found, expected in zip(
        other.loglikelihood(tiny.requests(PAIRS)),
        lm.loglikelihood(tiny.requests(PAIRS)),
        strict=True,
    ):
        close(found, expected)


def test_request_order_does_not_matter(lm):
    expected = dict(zip(PAIRS, lm.loglikelihood(tiny.requests(PAIRS)), strict=True))
    for seed in range(3):
        shuffled = random.Random(seed).sample(PAIRS, len(PAIRS))
        for pair, found in zip(shuffled, lm.loglikelihood(tiny.requests(shuffled)), strict=True):
            close(found, expected[pair])


def test_first_token_counts(lm):
    first, second = lm.loglikelihood(
        tiny.requests([(CONTEXT, " Salt of rivers"), (CONTEXT, " halt of rivers")])
    )
    assert first.nll_sum != second.nll_sum


def test_num_bytes_is_utf8_without_the_separator(lm):
    (score,) = lm.loglikelihood(tiny.requests([(CONTEXT, " αβγ 海水")]))
    assert score.num_bytes == len("αβγ 海水".encode())
    assert score.nll * score.num_tokens == pytest.approx(score.nll_sum)


# ---- token values


def test_token_values_are_those_that_make_up_the_sums(lm):
    plain = score_requests(lm, tiny.requests(PAIRS))
    rows = encode(lm, PAIRS)
    for score, same, row in zip(
        score_requests(lm, tiny.requests(PAIRS), extras=Extras()), plain, rows, strict=True
    ):
        assert same.tokens is None
        assert vars(same) == vars(score) | {"tokens": None}
        assert score.tokens.token_ids.tolist() == list(row.continuation)
        for name in ("nll", "raw", "logz"):
            values = score.tokens[name]
            assert values.dtype == np.float32
            assert values.shape == (score.num_tokens,)
            total = getattr(score, f"{name}_sum")
            assert values.sum(dtype=np.float64) == pytest.approx(total, rel=1e-6, abs=1e-5)
        assert score.tokens.extra == {}


def test_zlib_length_is_that_of_the_stripped_text(lm):
    (score,) = lm.loglikelihood(tiny.requests([(CONTEXT, "  αβγ 海水 – naïve \n")]))
    text = "αβγ 海水 – naïve".encode()
    assert (score.num_bytes, score.num_zlib_bytes) == (len(text), len(zlib.compress(text)))


def test_a_candidate_without_a_score_has_no_token_values():
    lm = hflm(max_length=20)
    pairs = [(CONTEXT, " rivers"), (CONTEXT, " the lazy dog; " * 9)]
    short, long = score_requests(lm, tiny.requests(pairs), extras=Extras(moments=True))
    assert set(short.tokens.extra) == {"logp_mean", "logp_var"}
    assert long.tokens is None


def test_max_length_of_a_nested_config_is_found():
    model = tiny.llama(max_position_embeddings=64)
    model.config.text_config = LlamaConfig(max_position_embeddings=131_072)
    lm = hflm(model=model)
    assert lm.max_length == 131_072
    long = "Background: the sea is salt. " * 40
    assert len(encode(lm, [(long, " r")])[0].prefix) > 64
    assert not lm.loglikelihood(tiny.requests([(long, " rivers")]))[0].truncated


# ---- numerics and models


def test_nan_logits_reach_the_score():
    model = tiny.llama()
    model.lm_head.weight.data[5] = math.nan
    (score,) = hflm(model=model).loglikelihood(tiny.requests(PAIRS[:1]))
    assert math.isnan(score.nll)


def test_encoder_decoder_is_refused():
    config = T5Config(
        vocab_size=320, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    lm = hflm(model=T5ForConditionalGeneration(config))
    with pytest.raises(TypeError, match="encoder-decoder"):
        lm.loglikelihood(tiny.requests(PAIRS[:1]))


def test_other_backends_are_refused_with_the_models_that_work():
    class Steered(HFLM):
        def _model_call(self, inps, attn_mask=None, labels=None):
            return super()._model_call(inps) + 1

    for model in (object(), hflm(Steered)):
        with pytest.raises(TypeError, match="--model hf"):
            check_supported(model)


def test_thinking_is_refused(lm):
    lm.enable_thinking = True
    try:
        with pytest.raises(ValueError, match="enable_thinking"):
            score_requests(lm, tiny.requests(PAIRS[:1]))
    finally:
        lm.enable_thinking = None


def test_no_requests_no_scores(lm):
    assert lm.loglikelihood([]) == []


# ---- cache


class Recorder:
    def __init__(self):
        self.seen = []

    def add_partial(self, kind, arguments, answer):
        self.seen.append((kind, arguments, answer))


def test_every_distinct_request_goes_to_the_cache_once():
    lm = hflm()
    lm.cache_hook = Recorder()
    found = lm.loglikelihood(tiny.requests(PAIRS))
    assert {kind for kind, _, _ in lm.cache_hook.seen} == {"loglikelihood"}
    assert sorted(args for _, args, _ in lm.cache_hook.seen) == sorted(set(PAIRS))
    for _, args, answer in lm.cache_hook.seen:
        assert answer == found[PAIRS.index(args)]


def test_the_longest_row_is_checked_not_the_longest_prefix(lm):
    rows = [Row((5,) * 100, (6,) * 5), Row((5,) * 95, (6,) * 200)]
    assert engine_of(lm, rows).checked_tokens == 295


def test_another_model_has_an_engine_of_its_own():
    lm = hflm()
    pair = [("Why is the sea salt?", " rivers")]
    before = lm.loglikelihood(tiny.requests(pair))
    assert lm.loglikelihood(tiny.requests(pair)) == before
    lm._model = tiny.llama(seed=5)
    (score,) = lm.loglikelihood(tiny.requests(pair))
    (row,) = encode(lm, pair)
    assert score.nll_sum == pytest.approx(float(tiny.plain_scores(lm.model, row).nll.sum()))


def test_the_callers_autocast_is_not_the_models(lm):
    before = lm.loglikelihood(tiny.requests(PAIRS))
    with torch.autocast("cpu", torch.bfloat16):
        assert lm.loglikelihood(tiny.requests(PAIRS)) == before


def test_a_model_in_train_mode_is_refused():
    lm = hflm()
    lm.model.train()
    with pytest.raises(ValueError, match=r"train mode, where dropout .* model\.eval\(\)"):
        lm.loglikelihood(tiny.requests(PAIRS))


@pytest.mark.parametrize("text", ["a \ud800 b", "\udfff"])
@pytest.mark.parametrize("where", [0, 1])
def test_half_a_surrogate_pair_is_refused(lm, text, where):
    pair = ("Why?", " salt")
    pair = (text, pair[1]) if where == 0 else (pair[0], text)
    with pytest.raises(ValueError, match=r"candidate 0 .* half of a surrogate pair"):
        lm.loglikelihood(tiny.requests([pair]))


def test_an_empty_candidate_is_refused_with_its_item(lm):
    with pytest.raises(ValueError, match=r"task demo, item paper 1: candidate 1 is empty"):
        lm.loglikelihood(tiny.requests([(CONTEXT, " rivers"), (CONTEXT, "")], task="demo"))


def test_a_candidate_without_tokens_is_refused_with_its_item(lm):
    """Whitespace after a header is none, and a normaliser may remove what a reader cannot see."""
    requests = tiny.requests([(CONTEXT, " rivers"), (CONTEXT, " \n")], task="demo")
    with pytest.raises(ValueError, match=r"task demo, item paper 1: candidate 1 .* has no tokens"):
        score_requests(lm, requests, after_header={"demo"})
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    deaf = hflm(tokenizer=tokenizer)
    requests = tiny.requests([(CONTEXT, "\u200b"), (CONTEXT, " rivers")], task="demo")
    with pytest.raises(ValueError, match=r"item paper 0: candidate 0 .* has no tokens"):
        deaf.loglikelihood(requests)
