"""The embedded demo dataset: its schema, and that text length alone does not reveal the gold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from lm_eval_hyprank.datasets.demo import FOLDER as DATA
from lm_eval_hyprank.datasets.validation import DISCIPLINES

Row = dict[str, Any]
Measure = Callable[[str], int]

RANKING_SCHEMA: dict[str, type] = {
    "sample_id": str,
    "discipline": str,
    "doi": str,
    "research_question": str,
    "gold_hypothesis": str,
    "fake_negative_hypotheses": list,
    "model_negative_hypotheses": list,
    "source_variant": str,
}
PAPERS_SCHEMA: dict[str, type] = {
    "sample_id": str,
    "discipline": str,
    "doi": str,
    "title": str,
    "abstract": str,
    "research_question": str,
    "background_survey": str,
    "main_hypothesis": str,
    "fine_grained_hypothesis": str,
    "experiments_details": str,
    "inspirations": list,
    "source_index": int,
}


def n_bytes(text: str) -> int:
    """Length of a text in UTF-8 bytes."""
    return len(text.encode("utf-8"))


def read_rows(name: str) -> list[Row]:
    """Rows of one demo file, after checking its encoding and line ends."""
    raw = (DATA / name / f"{name}.jsonl").read_bytes()
    assert b"\r" not in raw
    assert raw.endswith(b"\n")
    lines = raw.decode("utf-8").removesuffix("\n").split("\n")
    rows: list[Row] = [json.loads(line) for line in lines]
    # Readable text rather than \u escapes, since people will open the files.
    assert lines == [json.dumps(row, ensure_ascii=False) for row in rows]
    return rows


RANKING = read_rows("ranking")
PAPERS = read_rows("papers")

by_discipline = pytest.mark.parametrize("row", RANKING, ids=lambda row: row["discipline"])
by_measure = pytest.mark.parametrize("measure", [n_bytes, len], ids=["bytes", "characters"])


def candidates(row: Row) -> list[str]:
    """The 16 candidates of a ranking row, the gold first."""
    return [
        row["gold_hypothesis"],
        *row["fake_negative_hypotheses"],
        *row["model_negative_hypotheses"],
    ]


def length_rank(row: Row, measure: Measure) -> float:
    """Rank of the gold by length, 1 = shortest, ties counted at their middle."""
    gold, *negatives = [measure(text) for text in candidates(row)]
    shorter = sum(length < gold for length in negatives)
    equal = sum(length == gold for length in negatives)
    return 1 + shorter + equal / 2


@pytest.mark.parametrize(
    ("rows", "schema"),
    [(RANKING, RANKING_SCHEMA), (PAPERS, PAPERS_SCHEMA)],
    ids=["ranking", "papers"],
)
def test_schema(rows: list[Row], schema: dict[str, type]) -> None:
    for row in rows:
        assert list(row) == list(schema)
        for field, kind in schema.items():
            assert type(row[field]) is kind, (row["sample_id"], field)
            texts = row[field] if kind is list else [row[field]] if kind is str else []
            assert all(isinstance(text, str) and text == text.strip() != "" for text in texts)


def test_each_discipline_once_and_files_join() -> None:
    assert [row["discipline"] for row in RANKING] == list(DISCIPLINES)
    shared = ("sample_id", "discipline", "doi", "research_question")
    assert [[row[f] for f in shared] for row in RANKING] == [
        [row[f] for f in shared] for row in PAPERS
    ]
    assert [row["source_index"] for row in PAPERS] == list(range(len(DISCIPLINES)))


@by_discipline
def test_identity_and_counts(row: Row) -> None:
    folded_doi = re.sub(r"[^a-z0-9]", "", row["doi"].lower())
    assert row["doi"].startswith("10.")
    assert row["sample_id"] == f"{row['discipline']}/{folded_doi}"
    assert row["source_variant"] == "demo"
    assert len(row["fake_negative_hypotheses"]) == 5
    assert len(row["model_negative_hypotheses"]) == 10
    assert row["research_question"].endswith("?")


@pytest.mark.parametrize("row", PAPERS, ids=lambda row: row["discipline"])
def test_paper_texts(row: Row) -> None:
    assert 700 <= len(row["background_survey"]) <= 1200
    assert "\n" not in row["background_survey"]
    assert 1 <= len(row["inspirations"]) <= 2


def test_no_candidate_occurs_twice() -> None:
    folded = [" ".join(text.split()).casefold() for row in RANKING for text in candidates(row)]
    assert len(folded) == 16 * len(DISCIPLINES)
    assert len(set(folded)) == len(folded)


@by_discipline
def test_candidates_speak_of_the_subject(row: Row) -> None:
    """In published rankings words such as "the authors" give the gold away."""
    told = re.compile(r"\b(papers?|authors?|stud(y|ies)|articles?|findings?|we|our)\b", re.I)
    for text in candidates(row):
        assert told.search(text) is None, text
        assert text.endswith(".")
        assert "\n" not in text


@by_discipline
def test_gold_shares_its_opening(row: Row) -> None:
    gold, *negatives = [text.split()[0] for text in candidates(row)]
    assert gold in negatives


@by_discipline
@by_measure
def test_lengths_within_a_quarter_of_the_gold(row: Row, measure: Measure) -> None:
    gold, *negatives = [measure(text) for text in candidates(row)]
    assert 230 <= gold <= 420
    assert all(0.75 * gold <= length <= 1.25 * gold for length in negatives)


@by_measure
@pytest.mark.parametrize("pick", [min, max], ids=["shortest", "longest"])
def test_length_ranker_stays_at_chance(measure: Measure, pick: Callable[..., int]) -> None:
    """A tie counts as a full hit: the strictest reading of Hit@1 <= 1/12."""
    hits = 0
    for row in RANKING:
        lengths = [measure(text) for text in candidates(row)]
        hits += lengths[0] == pick(lengths)
    assert hits / len(RANKING) <= 1 / 12


@by_measure
def test_gold_length_ranks_are_spread_about_the_middle(measure: Measure) -> None:
    ranks = sorted(length_rank(row, measure) for row in RANKING)
    assert 6 <= sum(ranks) / len(ranks) <= 11
    assert ranks[0] <= 4
    assert ranks[-1] >= 13
    assert len(set(ranks)) >= 6
