from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_hyprank.datasets import demo, researchbench
from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.datasets.researchbench import document, load, locate, other_paper, prompt
from lm_eval_hyprank.datasets.validation import DISCIPLINES, PAPERS_FILE, RANKING_FILE
from lm_eval_hyprank.datasets.validation import Paper as PaperRecord
from tests.conftest import TASK_CONFIGS

Rows = list[dict[str, Any]]
Write = Callable[[Rows, Rows], Path]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LC_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"PYTHONPATH": str(Path(researchbench.__file__).parents[2])} | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


# --- documents ------------------------------------------------------------------------------


def test_columns(valid_folder: Path) -> None:
    data = load(valid_folder)
    assert list(data) == ["test"]
    assert data["test"].column_names == [
        "paper_id",
        "discipline",
        "doi",
        "title",
        "context",
        "separator",
        "candidates",
        "candidate_ids",
        "gold",
    ]
    row = data["test"][5]
    assert row["paper_id"] == "Earth Science/105"
    assert row["discipline"] == "Earth Science"
    assert (row["doi"], row["title"]) == ("10.0/5", "Title 5")
    assert row["context"] == (
        "Background: Survey 5 says what was known.\n"
        "Research Question: What is question 5?\n"
        "Hypothesis:"
    )
    assert row["separator"] == " "
    by_id = dict(zip(row["candidate_ids"], row["candidates"], strict=True))
    expected = {"gold": "Gold 5 holds."}
    expected |= {f"fake_{index + 1}": f"Fake 5.{index} holds." for index in range(5)}
    expected |= {f"model_{index + 1}": f"Model 5.{index} holds." for index in range(10)}
    assert by_id == expected
    assert row["candidate_ids"][row["gold"]] == "gold"


def test_block_layout(valid_folder: Path) -> None:
    row = load(valid_folder, layout="block")["test"][0]
    assert row["context"] == (
        "Background:\nSurvey 0 says what was known.\n"
        "Research Question:\nWhat is question 0?\n"
        "Hypothesis:"
    )
    assert row["separator"] == "\n"


def test_unknown_layout(valid_folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"layout is 'lines'; use one of: inline, block"):
        load(valid_folder, layout="lines")


HAZARDS = ["{{ x }}", "{% if x %}", "{background}", "{", "}}", "{0}", "%s", "\\n", "$x_{i}$"]


@pytest.mark.parametrize("layout", ["inline", "block"])
def test_template_signs_stay_as_they_are(
    layout: str, write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    hazard = " ".join(HAZARDS)
    ranking_rows[0]["research_question"] = f"Q {hazard}"
    ranking_rows[0]["gold_hypothesis"] = f"G {hazard}"
    paper_rows[0]["background_survey"] = f"S {hazard}"
    rows = load(write_folder(ranking_rows, paper_rows), layout=layout)["test"]
    gap = rows[0]["separator"]
    assert rows[0]["context"] == (
        f"Background:{gap}S {hazard}\nResearch Question:{gap}Q {hazard}\nHypothesis:"
    )
    assert rows[0]["candidates"][rows[0]["gold"]] == f"G {hazard}"


def test_prompts_differ_and_hold_no_placeholder(valid_folder: Path) -> None:
    contexts = list(load(valid_folder)["test"]["context"])
    assert len(set(contexts)) == 12
    for number, context in enumerate(contexts):
        assert f"Survey {number} " in context
        assert "{" not in context


def test_artefacts_are_cleaned(write_folder: Write, ranking_rows: Rows, paper_rows: Rows) -> None:
    ranking_rows[0]["research_question"] = " a_x000D_\nb\r\nc\rd "
    ranking_rows[0]["model_negative_hypotheses"][0] = "\ne_x000D_f\n"
    paper_rows[0]["background_survey"] = "# Head_x000D_\r\n\r\ntext  two\t"
    row = load(write_folder(ranking_rows, paper_rows))["test"][0]
    assert row["context"] == (
        "Background: # Head\n\ntext  two\nResearch Question: a\nb\nc\nd\nHypothesis:"
    )
    assert row["candidates"][row["candidate_ids"].index("model_1")] == "e\nf"


@given(
    st.lists(st.text(min_size=1), min_size=18, max_size=18),
    st.sampled_from(["inline", "block"]),
    st.text(min_size=1),
)
def test_document_loses_nothing(texts: list[str], layout: str, sample_id: str) -> None:
    survey, question, gold, *negatives = texts
    paper = PaperRecord(
        sample_id,
        "Math",
        "",
        "",
        survey,
        question,
        gold,
        tuple(negatives[:5]),
        tuple(negatives[5:]),
    )
    made = document(paper, layout, prompt(paper, layout))
    gap = made["separator"]
    assert made["context"] == "".join(
        ["Background:", gap, survey, "\nResearch Question:", gap, question, "\nHypothesis:"]
    )
    assert Counter(made["candidates"]) == Counter([gold, *negatives])
    assert made["candidates"][made["gold"]] == gold
    assert made["candidate_ids"][made["gold"]] == "gold"
    for number, negative in enumerate(negatives[5:], start=1):
        assert made["candidates"][made["candidate_ids"].index(f"model_{number}")] == negative


def test_real_data(researchbench_dir: Path) -> None:
    rows = load(researchbench_dir)["test"]
    lines = (researchbench_dir / RANKING_FILE).read_text(encoding="utf-8").splitlines()
    assert len(rows) == len(lines) > 0
    for row in rows:
        whole = row["context"] + "".join(row["candidates"])
        assert "_x000D_" not in whole
        assert "\r" not in whole
        assert row["context"].endswith("\nHypothesis:")
        assert len(set(row["candidates"])) == 16
        assert row["candidate_ids"][row["gold"]] == "gold"


def test_demo_data() -> None:
    rows = demo.load(layout="block")["test"]
    assert sorted(rows["discipline"]) == sorted(DISCIPLINES)
    assert set(rows["separator"]) == {"\n"}


# --- controls -------------------------------------------------------------------------------


def two_a_discipline(ranking: Rows, papers: Rows) -> None:
    """Halves the disciplines, so that each has two papers."""
    for rows in (ranking, papers):
        for row, discipline in zip(rows, DISCIPLINES[:6] * 2, strict=True):
            row["discipline"] = discipline


@pytest.mark.parametrize("layout", ["inline", "block"])
def test_controls_keep_all_but_the_context(
    layout: str, write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    two_a_discipline(ranking_rows, paper_rows)
    folder = write_folder(ranking_rows, paper_rows)
    base = load(folder, layout=layout)["test"]
    gap = base["separator"][0]
    for control in researchbench.CONTROLS:
        found = load(folder, layout=layout, control=control)["test"]
        for name in base.column_names:
            if name != "context":
                assert list(found[name]) == list(base[name])
        for number, context in enumerate(found["context"]):
            survey = f"Background:{gap}Survey {number} says what was known.\n"
            question = f"Research Question:{gap}What is question {number}?\n"
            other = base["context"][(number + 6) % 12]
            assert (
                context
                == {
                    "no_context": "Hypothesis:",
                    "question_only": f"{question}Hypothesis:",
                    "background_only": f"{survey}Hypothesis:",
                    "shuffled_context": other,
                }[control]
            )


def test_an_unknown_control_is_refused(valid_folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"control is 'nocontext'.*no_context, question_only"):
        load(valid_folder, control="nocontext")


def test_a_paper_alone_in_its_discipline_cannot_be_given_another_context(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    two_a_discipline(ranking_rows, paper_rows)
    folder = write_folder(ranking_rows[:11], paper_rows[:11])
    lonely = ranking_rows[5]["sample_id"]
    with pytest.raises(DatasetError, match=f"1 of 11 .*to take a context from: {lonely} "):
        load(folder, control="shuffled_context")


NOT_TO_BE_TAKEN: list[dict[str, Any]] = [
    {"sample_id": "own"},
    {"doi": "10.1/A"},
    {"survey": "own survey"},
    {"question": "own question"},
    {"gold": "own fake"},
    {"gold": "own gold"},
]


@pytest.mark.parametrize("shared", NOT_TO_BE_TAKEN)
def test_no_context_is_taken_that_belongs_to_the_paper_or_a_candidate(
    shared: dict[str, Any],
) -> None:
    own = PaperRecord(
        "own", "Math", "10.1/a", "", "own survey", "own question", "own gold", ("own fake",), ()
    )
    other = PaperRecord("other", "Math", "10.1/o", "", "survey", "question", "gold", (), ())
    assert other_paper(own, [other]) is other
    assert other_paper(own, [dataclasses.replace(other, **shared)]) is None


def test_two_papers_without_a_doi_are_not_the_same() -> None:
    one = PaperRecord("one", "Math", "", "", "s 1", "q 1", "g 1", (), ())
    two = PaperRecord("two", "Math", "", "", "s 2", "q 2", "g 2", (), ())
    assert other_paper(one, [one, two]) is two


def test_the_context_taken_depends_on_the_two_papers_alone(researchbench_dir: Path) -> None:
    papers = researchbench._usable_papers(locate(researchbench_dir), False)
    taken = {paper.sample_id: other_paper(paper, papers) for paper in papers}
    assert None not in taken.values()
    assert len(set(taken.values())) > 24  # independent choices among 47 leave about 30
    for paper in papers:
        fewer = [p for p in reversed(papers) if p is taken[paper.sample_id] or p.gold < paper.gold]
        assert other_paper(paper, fewer) is taken[paper.sample_id]


def test_real_data_allows_every_control(researchbench_dir: Path) -> None:
    base = load(researchbench_dir)["test"]
    own = dict(zip(base["context"], base["discipline"], strict=True))
    found = load(researchbench_dir, control="shuffled_context")["test"]
    for row, context in zip(found, base["context"], strict=True):
        assert row["context"] != context
        assert own[row["context"]] == row["discipline"]


def test_the_demo_takes_another_disciplines_context() -> None:
    base, found = (demo.load(control=c)["test"] for c in (None, "shuffled_context"))
    for row, context in zip(found, base["context"], strict=True):
        assert row["context"] != context
        assert row["context"] in base["context"]


# --- order of the candidates ----------------------------------------------------------------


def test_order_does_not_depend_on_the_other_papers(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    folder = write_folder(ranking_rows, paper_rows)
    full = {row["paper_id"]: row for row in load(folder)["test"]}
    part = write_folder(ranking_rows[7:2:-1], paper_rows).rename(folder.with_name("part"))
    rows = list(load(part)["test"])
    assert [row["paper_id"] for row in rows] == [row["sample_id"] for row in ranking_rows[7:2:-1]]
    assert all(row == full[row["paper_id"]] for row in rows)


PRINT_HASH = """
import hashlib, json
from lm_eval_hyprank.datasets.researchbench import load
rows = list(load({folder!r})["test"])
print(hashlib.sha256(json.dumps(rows).encode("ascii")).hexdigest())
"""


def test_processes_agree_whatever_their_locale(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    ranking_rows[0]["sample_id"] = paper_rows[0]["sample_id"] = "Math/\u03b1\u6f22"
    ranking_rows[0]["gold_hypothesis"] = "\u0391\u03b1 \u2013 \u6f22\u5b57 \u2192 na\u00efve"
    folder = write_folder(ranking_rows, paper_rows)
    # Raw UTF-8 in the files, not ASCII escapes.
    for file, rows in ((RANKING_FILE, ranking_rows), (PAPERS_FILE, paper_rows)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / file).write_bytes(text.encode("utf-8"))
    code = PRINT_HASH.format(folder=str(folder))
    runs = [
        python(code, PYTHONUTF8="1", PYTHONHASHSEED="1"),
        python(code, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C", PYTHONHASHSEED="2"),
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[1].stderr
    assert runs[0].stdout == runs[1].stdout
    row = load(folder)["test"][0]
    assert row["candidates"][row["gold"]] == ranking_rows[0]["gold_hypothesis"]


# --- arguments ------------------------------------------------------------------------------


def test_discipline(valid_folder: Path) -> None:
    assert list(load(valid_folder, discipline="Law")["test"]["paper_id"]) == ["Law/108"]


def test_discipline_without_papers(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    folder = write_folder([ranking_rows[0], ranking_rows[3]], paper_rows)
    with pytest.raises(
        DatasetError, match=r"'Law'; present: Astronomy, Cell Biology\. Run "
    ) as error:
        load(folder, discipline="Law")
    named = re.findall(r"researchbench_energy\w*", str(error.value))
    assert named == [f"researchbench_energy{end}" for end in ("_astronomy", "_cell_biology", "")]
    # They are the names of tasks.
    folder = TASK_CONFIGS / "researchbench"
    assert {f"{name}.yaml" for name in named} <= {path.name for path in folder.rglob("*.yaml")}


def test_findings_refuse_the_data(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    ranking_rows[2]["gold_hypothesis"] = ""
    folder = write_folder(ranking_rows, paper_rows)
    with pytest.raises(DatasetError) as caught:
        load(folder)
    assert "ranking/ranking.jsonl:3 Business/102 gold_hypothesis: is empty." in str(caught.value)
    assert f"`hyprank validate {folder}`" in str(caught.value)
    assert "skip_invalid" in str(caught.value)
    # Repaired data is read anew in the same process.
    ranking_rows[2]["gold_hypothesis"] = "Repaired."
    assert len(load(write_folder(ranking_rows, paper_rows))["test"]) == 12


@pytest.mark.parametrize("flag", [True, "true", "True"])
def test_skip_invalid(
    flag: bool | str,
    write_folder: Write,
    ranking_rows: Rows,
    paper_rows: Rows,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranking_rows[2]["gold_hypothesis"] = ""
    ranking_rows[2]["doi"] = 1
    paper_rows[4]["background_survey"] = 3
    ranking_rows[6]["sample_id"] = None
    folder = write_folder(ranking_rows, paper_rows)
    with (folder / RANKING_FILE).open("a", encoding="utf-8") as stream:
        stream.write("{\n")
    with caplog.at_level(logging.WARNING, logger="lm_eval_hyprank"):
        for discipline in (None, "Law"):
            rows = load(folder, skip_invalid=flag, discipline=discipline)["test"]
            assert len(rows) == (9 if discipline is None else 1)
            assert not {"Business/102", "Chemistry/104"} & set(rows["paper_id"])
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "2 paper(s)" in message
    assert "(Business/102, Chemistry/104)" in message
    assert "2 row(s) without a readable sample_id" in message
    assert "9 papers are used" in message


@pytest.mark.parametrize("flag", [False, "false"])
def test_skip_invalid_is_off(
    flag: bool | str, write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    ranking_rows[2]["gold_hypothesis"] = ""
    with pytest.raises(DatasetError, match="Business/102"):
        load(write_folder(ranking_rows, paper_rows), skip_invalid=flag)


@pytest.mark.parametrize("flag", ["yes", 1, None])
def test_skip_invalid_is_a_flag(flag: Any, valid_folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"skip_invalid is .*; use true or false"):
        load(valid_folder, skip_invalid=flag)


def test_nothing_left_to_skip_to(write_folder: Write, ranking_rows: Rows, paper_rows: Rows) -> None:
    ranking_rows[0]["gold_hypothesis"] = ""
    with pytest.raises(DatasetError, match="Astronomy/100 gold_hypothesis"):
        load(write_folder(ranking_rows[:1], paper_rows), skip_invalid=True)


# --- where the data is ----------------------------------------------------------------------


def test_local_folder(valid_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(valid_folder.parent)
    monkeypatch.setenv("HOME", str(valid_folder.parent))
    for path in (valid_folder, str(valid_folder), valid_folder.name, f"~/{valid_folder.name}"):
        assert locate(path, "ignored") == valid_folder


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"does not exist\. Point to the folder") as caught:
        locate(str(tmp_path / "none"))
    assert str(tmp_path / "none") in str(caught.value)


def test_file_in_place_of_the_folder(valid_folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"is not a folder\. Point to the folder"):
        load(valid_folder / RANKING_FILE)


def test_folder_without_a_file(valid_folder: Path) -> None:
    (valid_folder / PAPERS_FILE).unlink()
    with pytest.raises(DatasetError, match=r"papers/papers\.jsonl: does not exist in .* Point to"):
        load(valid_folder)


@pytest.mark.parametrize("path", ["", " ", 2024, ["a"]])
def test_path_that_is_none(path: Any) -> None:
    with pytest.raises(DatasetError, match=r"""dataset_path is .*'\{"dataset_path": "DIR"\}'"""):
        locate(path)


def test_revision_that_is_no_text() -> None:
    with pytest.raises(DatasetError, match=r"dataset_revision is 120000\.0, not text"):
        load(dataset_revision=12e4)  # type: ignore[arg-type]
