import logging
import math

import pytest
from lm_eval.models.huggingface import HFLM
from peft import PromptTuningConfig, TaskType, get_peft_model
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from lm_eval_hyprank.models.tokens import encode
from tests import tiny
from tests.models.test_hf import CONTEXT, PAIRS, hflm


@pytest.fixture(scope="module")
def lm():
    return hflm()


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


def test_virtual_tokens_take_positions_too():
    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    prompt = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5)
    model = get_peft_model(GPT2LMHeadModel(config), prompt).eval()
    lm = hflm(model=model)
    (score,) = lm.loglikelihood(tiny.requests([("salt and rivers " * 20, " sea")]))
    assert score.truncated
    assert math.isfinite(score.nll)


# ---- vocabularies


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
