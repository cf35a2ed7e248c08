import logging
import math
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from lm_eval_hyprank import ContinuationScore
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.models.hf import (
    EnergyHFLM,
    check_supported,
    encode,
    engine_of,
    model_fingerprint,
    score_requests,
)
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


# ---- token boundary


def ids_of(lm, pair):
    (row,) = encode(lm, [pair])
    return list(row.prefix), list(row.continuation)


def test_ids_are_those_of_the_joined_text(lm):
    for pair in PAIRS:
        prefix, continuation = ids_of(lm, pair)
        assert prefix + continuation == lm.tokenizer("".join(pair))["input_ids"]
        assert prefix == lm.tokenizer(pair[0])["input_ids"]


def test_a_dummy_space_at_the_start_of_every_text_is_there_once():
    """Llama's and Mistral's legacy tokenizers put a space before whatever they are given."""
    tokens = tiny.tokenizer(bos=True)
    tokens.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    lm = hflm(tokenizer=tokens)
    for pair in PAIRS:
        prefix, continuation = ids_of(lm, pair)
        assert prefix + continuation == tokens("".join(pair))["input_ids"]
        assert prefix == tokens(pair[0])["input_ids"]
        assert tokens.decode(continuation) == pair[1]


def test_same_split_as_lm_eval(lm):
    for pair in PAIRS:
        assert ids_of(lm, pair) == tuple(map(list, HFLM._encode_pair(lm, *pair)))


def test_a_token_that_spans_the_join_is_scored(lm, caplog):
    """The toy BPE has one token for "the": context "... th", continuation "e"."""
    whole = lm.tokenizer("jumps over the")["input_ids"]
    assert len(lm.tokenizer("jumps over th")["input_ids"]) >= len(whole)
    with caplog.at_level(logging.WARNING):
        prefix, continuation = ids_of(lm, ("jumps over th", "e"))
    assert prefix + continuation == whole
    context = lm.tokenizer("jumps over th")["input_ids"]
    assert prefix == whole[: len(prefix)] == context[: len(prefix)]
    assert continuation[0] != context[len(prefix)], "the first token in which the two differ"
    assert "1 of 1 continuations share a token" in caplog.text
    (score,) = lm.loglikelihood(tiny.requests([("jumps over th", "e")]))
    assert math.isfinite(score.nll_sum)
    assert score.num_tokens == len(continuation)


def test_a_token_that_spans_the_join_counts_for_the_context_if_others_follow(lm):
    """As in lm-eval: what stands beyond the context's token count, not what differs from it."""
    pair = ("jumps over th", "e lazy dog")
    whole, context = (lm.tokenizer(text)["input_ids"] for text in ("".join(pair), pair[0]))
    assert whole[: len(context)] != context
    assert ids_of(lm, pair) == (whole[: len(context)], whole[len(context) :])
    assert ids_of(lm, pair)[1] == HFLM._encode_pair(lm, *pair)[1]


def test_a_join_inside_the_very_first_token_still_has_a_context(lm):
    whole = lm.tokenizer("the")["input_ids"]
    assert len(whole) == 1
    assert ids_of(lm, ("th", "e")) == ([lm.prefix_token_id], whole)


def test_trailing_space_of_the_context_belongs_to_the_continuation(lm):
    spaced = (CONTEXT + " ", "rivers carry salt.")
    assert ids_of(lm, spaced) == ids_of(lm, (CONTEXT, " rivers carry salt."))


def test_empty_context_is_the_prefix_token(lm):
    prefix, continuation = ids_of(lm, ("", "rivers"))
    assert prefix == [lm.prefix_token_id]
    assert continuation == lm.tokenizer("rivers")["input_ids"]


@pytest.mark.parametrize("eos", [False, True])
def test_bos_stands_in_front_once_and_eos_nowhere(eos):
    lm = hflm(tokenizer=tiny.tokenizer(bos=True, eos=eos))
    tokens = lm.tokenizer
    prefix, continuation = ids_of(lm, PAIRS[0])
    plain = tokens("".join(PAIRS[0]), add_special_tokens=False)["input_ids"]
    assert prefix + continuation == [tokens.bos_token_id, *plain]
    assert tokens.eos_token_id not in continuation
    assert tokens.decode(continuation) == PAIRS[0][1]


def test_bos_already_in_the_text_is_not_doubled():
    lm = hflm(tokenizer=tiny.tokenizer(bos=True))
    prefix, _ = ids_of(lm, ("<s>" + CONTEXT, " rivers"))
    assert prefix.count(lm.tokenizer.bos_token_id) == 1
    assert prefix == ids_of(lm, (CONTEXT, " rivers"))[0]


def test_add_bos_token_false_is_obeyed():
    lm = hflm(tokenizer=tiny.tokenizer(bos=True), add_bos_token=False)
    prefix, _ = ids_of(lm, (CONTEXT, " rivers"))
    assert lm.tokenizer.bos_token_id not in prefix


def test_special_token_text_in_a_candidate_is_text(lm, caplog):
    with caplog.at_level(logging.WARNING):
        prefix, continuation = ids_of(lm, (CONTEXT, " rivers</s> carry"))
    assert lm.tokenizer.eos_token_id not in continuation
    assert lm.tokenizer.decode(continuation) == " rivers</s> carry"
    assert prefix == lm.tokenizer(CONTEXT)["input_ids"]
    assert "1 of 1 continuations spell a special token" in caplog.text


def test_what_a_text_reads_as_does_not_depend_on_other_pairs(lm):
    """The same characters, of which one pair's context makes a token and another's tail text."""
    pair, other = ("Why? a</s>", " b"), ("Why?", " a</s>")
    (alone,), (first, second) = encode(lm, [pair]), encode(lm, [pair, other])
    assert first == alone
    assert lm.tokenizer.eos_token_id in first.prefix
    assert lm.tokenizer.eos_token_id not in second.continuation


def test_added_special_tokens_are_text_in_a_candidate_too():
    tokens = tiny.tokenizer()
    tokens.add_tokens([AddedToken("<file_sep>", special=True)])
    assert "<file_sep>" not in tokens.all_special_tokens
    lm = hflm(tokenizer=tokens, model=tiny.llama(330))
    _, continuation = ids_of(lm, (CONTEXT, " a <file_sep> b"))
    assert tokens.convert_tokens_to_ids("<file_sep>") not in continuation
    assert tokens.decode(continuation) == " a <file_sep> b"


def test_a_continuation_of_whitespace_has_tokens(lm):
    (score,) = lm.loglikelihood(tiny.requests([(CONTEXT, "\n")]))
    assert score.num_tokens == 1
    assert math.isfinite(score.nll)
    assert math.isnan(score.nll_byte), "no bytes, no number"


def test_special_tokens_of_a_chat_template_stay_tokens(lm):
    prefix, _ = ids_of(lm, ("<s>user\nWhy?</s>", " rivers"))
    assert lm.tokenizer.eos_token_id in prefix


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


# ---- length


def test_left_truncation_is_the_same_for_all_candidates_and_keeps_bos(caplog):
    lm = hflm(tokenizer=tiny.tokenizer(bos=True), max_length=60)
    short, long = " rivers", " rivers carry salt to the sea, " * 2
    pairs = [(CONTEXT, short), (CONTEXT, long), ("A", " B")]
    with caplog.at_level(logging.WARNING):
        found = lm.loglikelihood(tiny.requests(pairs))
    assert [score.truncated for score in found] == [True, True, False]
    assert "1 context(s) do not fit" in caplog.text
    rows = encode(lm, pairs)
    room = 60 + 1 - len(rows[1].continuation)
    prefix = (rows[0].prefix[0], *rows[0].prefix[-(room - 1) :])
    assert prefix[0] == lm.tokenizer.bos_token_id
    for score, row in zip(found[:2], rows, strict=False):
        nll = tiny.plain_sums(lm.model, prefix, row.continuation)[0]
        assert score.nll_sum == pytest.approx(nll, abs=2e-6 * score.num_tokens)


def test_bos_of_a_chat_template_survives_the_cut():
    lm = hflm(tokenizer=tiny.tokenizer(bos=True), add_bos_token=False, max_length=30)
    pair = ("<s>" + CONTEXT, " rivers")
    (score,) = lm.loglikelihood(tiny.requests([pair]))
    (row,) = encode(lm, [pair])
    prefix = (row.prefix[0], *row.prefix[-(30 - len(row.continuation)) :])
    assert prefix[0] == lm.tokenizer.bos_token_id
    nll = tiny.plain_sums(lm.model, prefix, row.continuation)[0]
    assert score.truncated
    assert score.nll_sum == pytest.approx(nll, abs=2e-6 * score.num_tokens)


def test_longest_input_that_fits_is_not_cut(lm):
    row = encode(lm, [PAIRS[0]])[0]
    exact = hflm(max_length=len(row.prefix) + len(row.continuation) - 1)
    below = hflm(max_length=len(row.prefix) + len(row.continuation) - 2)
    assert not exact.loglikelihood(tiny.requests(PAIRS[:1]))[0].truncated
    assert below.loglikelihood(tiny.requests(PAIRS[:1]))[0].truncated


def test_a_candidate_longer_than_the_model_has_no_score_and_stops_nothing(caplog):
    lm = hflm(max_length=20)
    pairs = [(CONTEXT, " rivers carry salt"), (CONTEXT, " the lazy dog; " * 9)]
    with caplog.at_level(logging.WARNING):
        short, long = lm.loglikelihood(tiny.requests(pairs))
    assert math.isfinite(short.nll_sum)
    assert math.isnan(long.nll)
    assert math.isnan(long.raw_sum)
    assert long.num_tokens == len(encode(lm, pairs)[1].continuation)
    assert long.truncated
    assert "1 continuation(s) do not fit at all" in caplog.text


def test_a_candidate_that_does_not_fit_leaves_others_of_its_context_as_they_are(caplog):
    """Without a context of its own, a paper shares the context with all other papers."""
    lm = hflm(max_length=20)
    pairs = [("Hypothesis:", " rivers carry salt"), ("Hypothesis:", " the lazy dog; " * 9)]
    short, long = lm.loglikelihood(tiny.requests(pairs))
    assert (short.truncated, long.truncated) == (False, True)
    assert "0 context(s)" in caplog.text
    assert "1 continuation(s) do not fit at all" in caplog.text
    (alone,) = lm.loglikelihood(tiny.requests(pairs[:1]))
    assert short.nll_sum == pytest.approx(alone.nll_sum, abs=1e-5)


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


def test_bos_is_kept_where_the_vocabulary_is_not_text():
    """Nucleotides: no token for the letter x, and none for what is unknown."""
    letters = {"<s>": 0, "</s>": 1, "<pad>": 2, "A": 3, "C": 4, "G": 5, "T": 6}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    pair = ("ACGT", "GA")
    assert ids_of(hflm(tokenizer=tokenizer), pair) == ([0, 3, 4, 5, 6], [5, 3])


def test_virtual_tokens_take_positions_too():
    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    prompt = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5)
    model = get_peft_model(GPT2LMHeadModel(config), prompt).eval()
    lm = hflm(model=model)
    (score,) = lm.loglikelihood(tiny.requests([("salt and rivers " * 20, " sea")]))
    assert score.truncated
    assert math.isfinite(score.nll)


@pytest.mark.parametrize("change", ["alpha", "off", "scale"])
def test_fingerprint_tells_adapters_apart(change):
    """Their weights are the same, and what is made of them is not."""

    def adapted(alpha=8):
        config = LoraConfig(task_type=TaskType.CAUSAL_LM, lora_alpha=alpha)
        torch.manual_seed(0)
        return get_peft_model(tiny.llama(), config).eval()

    before = model_fingerprint(hflm(model=adapted()))
    assert model_fingerprint(hflm(model=adapted())) == before
    other = adapted(16 if change == "alpha" else 8)
    if change == "off":
        other.disable_adapter_layers()
    if change == "scale":
        for module in other.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = 3.0
    assert model_fingerprint(hflm(model=other)) != before


@pytest.mark.slow
def test_fingerprint_of_an_adapter_is_the_same_in_every_process():
    """Its settings hold sets, whose order is the process's own."""
    program = (
        "import torch; from peft import LoraConfig, get_peft_model; from tests import tiny\n"
        "from tests.models.test_hf import hflm, model_fingerprint\n"
        "torch.manual_seed(0); names = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'up_proj']\n"
        "model = get_peft_model(tiny.llama(), LoraConfig(target_modules=names))\n"
        "print(model_fingerprint(hflm(model=model)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_fingerprint_is_not_of_how_a_model_is_printed(monkeypatch):
    """Which differs between versions of torch and transformers, and may show an address."""
    before = model_fingerprint(hflm())
    monkeypatch.setattr(torch.nn.Linear, "extra_repr", lambda self: f"at {id(self)}")
    assert model_fingerprint(hflm()) == before


@pytest.mark.parametrize("entry", [0, 300, 383])
def test_fingerprint_sees_all_of_a_tensor(entry):
    """Of which it reads some values, not the first ones only."""
    model = tiny.llama(384)
    before = model_fingerprint(hflm(model=model))
    bias = torch.zeros(384)
    bias[max(0, entry - 1) : entry + 1] = 1.0
    model.register_buffer("bias", torch.zeros(384))
    zero = model_fingerprint(hflm(model=model))
    model.bias = bias
    assert len({before, zero, model_fingerprint(hflm(model=model))}) == 3


def test_fingerprint_tells_models_apart():
    same = [model_fingerprint(hflm()) for _ in range(2)]
    assert same[0] == same[1]
    requantised = tiny.llama()
    requantised.lm_head.weight.data += 1e-3
    moved = tiny.llama()
    moved.config._name_or_path = "/elsewhere"
    assert model_fingerprint(hflm(model=moved)) == same[0]
    others = [
        hflm(model=tiny.llama(seed=1)),
        hflm(model=requantised),
        hflm(model=tiny.llama().to(torch.bfloat16)),
        hflm(max_length=100),
        hflm(tokenizer=tiny.tokenizer(bos=True)),
        hflm(tokenizer=tiny.tokenizer(vocabulary=300)),
        hflm(model=tiny.llama(rope_theta=500.0)),
    ]
    assert len({same[0], *map(model_fingerprint, others)}) == len(others) + 1
