from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
from transformers import T5Config, T5ForConditionalGeneration

import lm_eval_hyprank
from lm_eval_hyprank import rank_candidates
from lm_eval_hyprank.filters import CandidateScore
from lm_eval_hyprank.models.tokens import encode
from tests import tiny
from tests.models.test_hf import CONTEXT, hflm

TEXTS = ["rivers carry salt.", "the brown fox jumps", "rivers carry gold.", "lazy dogs"]


@pytest.fixture(scope="module")
def model():
    return tiny.llama()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


def test_ranks_by_the_first_score_and_shows_all(model, tokenizer):
    table = rank_candidates(model, tokenizer, CONTEXT, TEXTS)
    assert list(table.columns) == ["candidate", "nll", "rank_nll", "raw", "rank_raw"]
    assert list(table["rank_nll"]) == [1, 2, 3, 4]
    assert list(table["nll"]) == sorted(table["nll"])
    assert sorted(table["rank_raw"]) == [1, 2, 3, 4]
    assert [TEXTS[index] for index in table.index] == list(table["candidate"])


def test_scores_are_those_of_a_plain_forward_pass(model, tokenizer):
    table = rank_candidates(model, tokenizer, CONTEXT, TEXTS).sort_index()
    rows = encode(hflm(), [(CONTEXT, f" {text}") for text in TEXTS])
    for (_, found), row in zip(table.iterrows(), rows, strict=True):
        nll, raw, _, _ = tiny.plain_sums(model, row.prefix, row.continuation)
        assert found["nll"] == pytest.approx(nll / len(row.continuation), abs=2e-6)
        assert found["raw"] == pytest.approx(raw / len(row.continuation), abs=2e-6)


def test_equal_candidates_share_the_mean_rank(model, tokenizer):
    table = rank_candidates(model, tokenizer, CONTEXT, [TEXTS[0]] * 3 + [TEXTS[1]])
    assert sorted(table["rank_nll"]) in ([1, 3, 3, 3], [2, 2, 2, 4])


def test_scores_with_parameters_and_of_tokens(model, tokenizer):
    scores = [
        {"score": "min_k", "percent": 100},
        "nll",
        "min_k_plus",
        {"score": "logz", "higher_is_better": True},
        "raw_precap",
        "raw",
    ]
    table = rank_candidates(model, tokenizer, CONTEXT, TEXTS, scores)
    assert list(table["min_k(percent=100)"]) == pytest.approx(list(table["nll"]), rel=1e-6)
    assert list(table["raw_precap"]) == list(table["raw"])
    assert list(table["logz(higher_is_better=True)"]) == pytest.approx(
        list(table["raw"] - table["nll"]), abs=1e-6
    )


def test_the_separator_is_scored(model, tokenizer):
    newline = rank_candidates(model, tokenizer, CONTEXT, TEXTS, "nll", separator="\n")
    space = rank_candidates(model, tokenizer, CONTEXT, TEXTS, "nll")
    assert list(newline.columns) == ["candidate", "nll", "rank_nll"]
    assert set(newline["nll"]).isdisjoint(space["nll"])


@pytest.mark.parametrize("kind", [np.array, pd.Series])
def test_arrays_and_series_are_taken(model, tokenizer, kind):
    found = rank_candidates(model, tokenizer, CONTEXT, kind(TEXTS))
    pd.testing.assert_frame_equal(found, rank_candidates(model, tokenizer, CONTEXT, TEXTS))


def test_without_a_separator_whitespace_is_the_callers(model, tokenizer):
    spaced = [f" {text}" for text in TEXTS]
    found = rank_candidates(model, tokenizer, CONTEXT, spaced, separator="")
    expected = rank_candidates(model, tokenizer, CONTEXT, TEXTS)
    assert list(found["nll"]) == list(expected["nll"])
    rank_candidates(model, tokenizer, CONTEXT + " ", TEXTS, separator="")


def test_model_and_tokenizer_are_left_as_they_were(caplog):
    model, tokenizer = tiny.llama().train(), tiny.tokenizer()
    tokenizer.pad_token = None
    with caplog.at_level(logging.WARNING):
        first = rank_candidates(model, tokenizer, CONTEXT, TEXTS)
    assert model.training
    assert tokenizer.pad_token is None
    assert not caplog.records
    pd.testing.assert_frame_equal(first, rank_candidates(model, tokenizer, CONTEXT, TEXTS))


def test_a_part_that_does_not_train_stays_so():
    model = tiny.llama().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    rank_candidates(model, tiny.tokenizer(), CONTEXT, TEXTS)
    assert [module.training for module in model.modules()] == modes


def test_a_score_that_is_no_number_ranks_nothing(model, tokenizer, monkeypatch):
    monkeypatch.setattr(CandidateScore, "value", lambda self, response: math.nan)
    with pytest.raises(ValueError, match=r"candidate 0 has no finite raw_precap \(nan\)"):
        rank_candidates(model, tokenizer, CONTEXT, TEXTS, scores="raw_precap")


@pytest.mark.parametrize("before", [None, "false"])
def test_threads_leave_the_environment_as_it_was(model, tokenizer, monkeypatch, before):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)

    def rank(number):
        return rank_candidates(model, tokenizer, f"{CONTEXT} {number}", TEXTS)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(rank, range(24)))) == 24
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"candidates": "one text"}, TypeError, "candidates is str; give a list of texts"),
        ({"candidates": ["a", None]}, TypeError, "candidate 1 is NoneType, not text"),
        ({"candidates": ["a", " \n"]}, ValueError, "candidate 1 is empty"),
        ({"candidates": np.array([["a", "b"]])}, TypeError, "candidate 0 is list, not text"),
        ({"candidates": pd.Series(["a", math.nan])}, TypeError, "candidate 1 is float, not text"),
        ({"candidates": ["a", " b"]}, ValueError, r"candidate 1 starts with.*strip.*or.*=\"\""),
        ({"context": "A:\n"}, ValueError, r"the context ends with.*strip the end.*or.*=\"\""),
        ({"candidates": ["a"]}, ValueError, "at least two candidates, got 1"),
        ({"candidates": []}, ValueError, "at least two candidates, got 0"),
        ({"candidates": ["a", "fox " * 600]}, ValueError, r"^candidate 1 has \d+ tokens, too many"),
        ({"context": None}, TypeError, "context is NoneType, not text"),
        ({"scores": ["nil"]}, ValueError, "unknown score 'nil'.*nll"),
        ({"scores": []}, ValueError, "scores is empty"),
        ({"scores": ["free_energy"]}, ValueError, "free_energy: .*temperature"),
        ({"scores": [{"percent": 10}]}, ValueError, "does not name a 'score'"),
        ({"model": "gpt2"}, TypeError, r"model is str; .*AutoModelForCausalLM"),
        ({"tokenizer": "gpt2"}, TypeError, r"tokenizer is str; .*AutoTokenizer"),
    ],
)
def test_what_cannot_be_ranked_is_said(model, tokenizer, changes, error, message):
    arguments = {
        "model": model,
        "tokenizer": tokenizer,
        "context": CONTEXT,
        "candidates": TEXTS,
        "scores": ["nll"],
    }
    with pytest.raises(error, match=message):
        rank_candidates(**(arguments | changes))


def test_a_model_of_nan_ranks_nothing(tokenizer):
    broken = tiny.llama()
    broken.lm_head.weight.data[:] = math.nan
    with pytest.raises(ValueError, match="candidate 0 has no finite score"):
        rank_candidates(broken, tokenizer, CONTEXT, TEXTS)


def test_an_encoder_decoder_is_refused(tokenizer):
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=320, d_model=32, d_ff=48, num_layers=1, num_heads=2, d_kv=8)
    )
    with pytest.raises(TypeError, match="encoder-decoder"):
        rank_candidates(model, tokenizer, CONTEXT, TEXTS)


def test_an_unknown_name_of_the_package_is_refused():
    with pytest.raises(AttributeError, match="'rank_candidate'"):
        _ = lm_eval_hyprank.rank_candidate


def test_importing_the_package_brings_no_torch():
    code = (
        "import sys, lm_eval_hyprank; sys.exit('torch' in sys.modules or 'lm_eval' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
