"""Values of tokens in files, and scores made of them without the model."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from lm_eval_hyprank import harness, token_file
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.filters import CandidateScore
from lm_eval_hyprank.metrics import process_results
from lm_eval_hyprank.models.hf import EnergyHFLM, score_requests
from lm_eval_hyprank.scores import TOKEN_SCORES
from tests import tiny
from tests.test_harness import SCORES_TASK, TASK, evaluate


@pytest.fixture(scope="module")
def lm():
    return EnergyHFLM(pretrained=tiny.demo_llama(), tokenizer=tiny.demo_tokenizer(), batch_size=8)


@pytest.fixture(scope="module")
def stored(lm, tmp_path_factory):
    """A run's folder and results."""
    folder = tmp_path_factory.mktemp("tokens")
    tasks = [TASK, SCORES_TASK]
    results = evaluate(tasks, lm, limit=3, metadata={"token_scores": str(folder)})
    return folder, results


def test_a_score_from_the_file_is_the_filters_number(stored):
    folder, results = stored
    table = pd.read_parquet(folder / SCORES_TASK).set_index(["paper_id", "candidate_id"])
    scorers = {"min_k": {"percent": 20}, "min_k_plus": {"percent": 20}, "raw_precap": {}}
    scorers |= {"nll_first": {"tokens": 10}, "free_energy_t2": {"temperature": 2}}
    seen = 0
    for sample in results["samples"][SCORES_TASK]:
        name, doc = sample["filter"], sample["doc"]
        for candidate, score in zip(doc["candidate_ids"], sample["filtered_resps"], strict=True):
            row = table.loc[(doc["paper_id"], candidate)]
            if name in scorers:
                entry = TOKEN_SCORES["free_energy" if "energy" in name else name]
                values = token_file.token_values(row)
                assert entry.compute(values, **scorers[name]) == score
                seen += 1
            if name == "nll_byte":
                assert row["nll"].sum(dtype=float) / row["num_bytes"] == pytest.approx(score)
            if name == "zlib_ratio":
                found = row["nll"].mean(dtype=float) / row["num_zlib_bytes"]
                assert found == pytest.approx(score)
    assert seen == 3 * 16 * len(scorers)


def test_metrics_of_a_new_score_are_a_few_lines_of_pandas(stored):
    """The example of docs/scores.md, on a score whose metrics the run knows."""
    folder, results = stored
    tokens = pd.read_parquet(folder / TASK)
    tokens["score"] = [nll.mean() for nll in tokens["nll"]]
    papers = [paper for _, paper in tokens.groupby("paper_id")]
    found = [
        process_results({"gold": p["gold"].tolist().index(True)}, p["score"].tolist())
        for p in papers
    ]
    for metric, value in pd.DataFrame(found).mean().items():
        assert value == pytest.approx(results["results"][TASK][f"{metric},nll"])


def test_the_file_says_what_it_holds(stored, lm):
    folder, results = stored
    (file,) = (folder / TASK).iterdir()
    assert file.name == "00000-of-00001.parquet"
    origin = json.loads(pq.read_schema(file).metadata[b"hyprank"])
    assert origin["model_fingerprint"] == results["hyprank"]["model_fingerprint"]
    assert origin["task"] == TASK
    table = pd.read_parquet(file)
    for _, row in table.iterrows():
        assert len(row["token_ids"]) == row["num_tokens"]
        assert np.allclose(row["nll"], row["raw"] + row["logz"], atol=1e-5)
    golds = table[table["gold"]]
    assert list(golds["candidate_id"]) == ["gold"] * 3
    for sample in results["samples"][TASK]:
        doc = sample["doc"]
        mine = table[table["paper_id"] == doc["paper_id"]]
        assert list(mine["candidate_id"]) == doc["candidate_ids"]
        text = lm.tokenizer.decode(mine["token_ids"].iloc[0])
        assert text.strip() == doc["candidates"][0]


def test_nothing_is_overwritten_and_nothing_is_scored_first(stored, lm, monkeypatch):
    folder, _ = stored
    before = {path: path.read_bytes() for path in folder.rglob("*.parquet")}
    monkeypatch.setattr(harness, "score_requests", None)
    with pytest.raises(ValueError, match=r"holds values of tokens already; name another folder"):
        evaluate([TASK], lm, limit=1, metadata={"token_scores": str(folder)})
    assert {path: path.read_bytes() for path in folder.rglob("*.parquet")} == before


def test_two_tasks_of_one_folder_are_refused(tmp_path):
    """Their names differ in what a folder's name cannot hold."""
    config = SimpleNamespace(metadata={"token_scores": str(tmp_path)})
    tasks = dict.fromkeys(["my task", "other", "my_task"], SimpleNamespace(config=config))
    with pytest.raises(ValueError, match="my task and my_task would both go to"):
        harness.token_folders(tasks)


@pytest.mark.parametrize("value", [True, 3, " "])
def test_a_name_that_is_no_folder_is_refused(lm, value):
    with pytest.raises(ValueError, match=r"token_scores is .*\"token_scores\": \"DIR\""):
        evaluate([TASK], lm, limit=1, metadata={"token_scores": value})


@pytest.mark.parametrize("error", [OSError, MemoryError, KeyError])
def test_a_failure_leaves_no_file_and_the_results(tmp_path, lm, monkeypatch, caplog, error):
    def fail(_table, path, **_kwargs):
        path.write_bytes(b"half of it")
        raise error("disk full")

    monkeypatch.setattr(pq, "write_table", fail)
    results = evaluate([TASK], lm, limit=1, metadata={"token_scores": str(tmp_path)})
    assert "nll" in str(results["results"][TASK])
    assert f"the values of {TASK}'s tokens are lost: " in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_stock_tasks_documents_need_no_names(tmp_path):
    lm = EnergyHFLM(pretrained=tiny.llama(), tokenizer=tiny.tokenizer())
    instances = tiny.requests([("the quick", " fox"), ("the quick", " dog")])
    for index, (instance, score) in enumerate(
        zip(instances, score_requests(lm, instances, extras=Extras()), strict=True)
    ):
        instance.doc, instance.idx, instance.doc_id = {"gold": "A", "query": "the"}, index, 7
        instance.resps = [score]
    token_file.write(tmp_path, 0, 1, instances, {})
    table = pd.read_parquet(tmp_path)
    assert table["paper_id"].tolist() == ["7", "7"]
    assert table["candidate_id"].tolist() == ["0", "1"]
    assert table["gold"].isna().all()
    assert table["nll"].notna().all()


def test_what_was_cached_is_stored_too(tmp_path, lm):
    metadata = {"token_scores": str(tmp_path / "a")}
    cache = str(tmp_path / "cache")
    evaluate([TASK], lm, limit=1, metadata=metadata, use_cache=cache)
    metadata = {"token_scores": str(tmp_path / "b")}
    evaluate([TASK], lm, limit=2, metadata=metadata, use_cache=cache)
    first, second = (pd.read_parquet(tmp_path / name / TASK) for name in "ab")
    assert len(second) == 2 * 16
    pd.testing.assert_frame_equal(second.iloc[:16], first)


def test_a_candidate_without_a_score_has_a_row_without_values(tmp_path):
    lm = EnergyHFLM(pretrained=tiny.llama(), tokenizer=tiny.tokenizer(), max_length=20)
    pairs = [("Hypothesis:", " rivers"), ("Hypothesis:", " the lazy dog; " * 9)]
    instances = tiny.requests(pairs)
    doc = {"paper_id": "p", "candidate_ids": ["gold", "fake"], "gold": 0}
    for index, instance in enumerate(instances):
        instance.doc, instance.idx = doc, index
        instance.resps = [score_requests(lm, instances, extras=Extras(moments=True))[index]]
    folder = token_file.folder_for(str(tmp_path), "my::task")
    assert folder.name == "my__task"
    token_file.write(folder, 0, 1, instances, {})
    short, long = (row for _, row in pd.read_parquet(folder).iterrows())
    assert len(short["logp_var"]) == short["num_tokens"]
    assert long["nll"] is None
    assert bool(long["truncated"])
    assert math.isnan(CandidateScore(score="min_k").apply([instances[1].resps], [doc])[0])
