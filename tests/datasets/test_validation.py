from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_hyprank.datasets.findings import Finding
from lm_eval_hyprank.datasets.validation import DISCIPLINES, PAPERS_FILE, RANKING_FILE, check_folder

Rows = list[dict[str, Any]]
Write = Callable[[Rows, Rows], Path]

DELETE = object()
LONE_SURROGATE = "\ud800"

# Edits of row 2 (the second line) of either file: name -> file, field, value, and what the
# finding must say: its field, a part of the problem, a part of the remedy.
FIELD_FAULTS = {
    **{
        f"missing {field}": (file, field, DELETE, field, "is missing", "Add the field")
        for file, field in [
            (RANKING_FILE, "discipline"),
            (RANKING_FILE, "research_question"),
            (RANKING_FILE, "gold_hypothesis"),
            (RANKING_FILE, "fake_negative_hypotheses"),
            (RANKING_FILE, "model_negative_hypotheses"),
            (PAPERS_FILE, "background_survey"),
        ]
    },
    **{
        f"blank {field}": (file, field, " \r\n_x000D_\t", field, "is empty", "Fill it in")
        for file, field in [
            (RANKING_FILE, "discipline"),
            (RANKING_FILE, "research_question"),
            (RANKING_FILE, "gold_hypothesis"),
            (PAPERS_FILE, "background_survey"),
        ]
    },
    **{
        f"wrong type {field}": (file, field, value, field, problem, remedy)
        for file, field, value, problem, remedy in [
            (RANKING_FILE, "discipline", 3, "is a number, not text", "JSON string"),
            (RANKING_FILE, "doi", ["10.0/1"], "is a list, not text", "JSON string"),
            (RANKING_FILE, "research_question", None, "is null, not text", "JSON string"),
            (RANKING_FILE, "gold_hypothesis", {}, "is an object, not text", "JSON string"),
            (RANKING_FILE, "fake_negative_hypotheses", "x", "is text, not a list", "JSON list"),
            (RANKING_FILE, "model_negative_hypotheses", True, "is true or false", "JSON list"),
            (PAPERS_FILE, "background_survey", 1.5, "is a number, not text", "JSON string"),
            (PAPERS_FILE, "title", 7, "is a number, not text", "JSON string"),
        ]
    },
    "NUL": (RANKING_FILE, "gold_hypothesis", "a\0b", "gold_hypothesis", "NUL", "Remove"),
    "NUL title": (PAPERS_FILE, "title", "a\0b", "title", "NUL", "Remove"),
    "lone surrogate": (
        PAPERS_FILE,
        "background_survey",
        f"a{LONE_SURROGATE}b",
        "background_survey",
        "half of a surrogate pair",
        "full surrogate pair",
    ),
    "unknown discipline": (
        RANKING_FILE,
        "discipline",
        "Alchemy {x}",
        "discipline",
        "is 'Alchemy {x}', none of the twelve",
        "Cell Biology, Chemistry",
    ),
}


@pytest.mark.parametrize("name", FIELD_FAULTS)
def test_field_fault_is_named(
    name: str, write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    file, field, value, named, problem, remedy = FIELD_FAULTS[name]
    rows = ranking_rows if file == RANKING_FILE else paper_rows
    if value is DELETE:
        del rows[1][field]
    else:
        rows[1][field] = value
    papers, findings = check_folder(write_folder(ranking_rows, paper_rows))
    assert [(f.file, f.row, f.sample_id, f.field) for f in findings] == [
        (file, 2, "Biology/101", named)
    ]
    assert problem in findings[0].problem
    assert remedy in findings[0].remedy
    assert str(findings[0]).startswith(f"{file}:2 Biology/101 {named}: {findings[0].problem}. ")
    assert [paper.discipline for paper in papers] == [DISCIPLINES[0], *DISCIPLINES[2:]]


# The same for faults among the candidates: name -> (edit of the row, field, problem, remedy).
CANDIDATE_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str, str, str]] = {
    "four fakes": (
        lambda row: row["fake_negative_hypotheses"].pop(),
        "fake_negative_hypotheses",
        "holds 4 candidates, not 5",
        "exactly 5",
    ),
    "eleven models": (
        lambda row: row["model_negative_hypotheses"].append("One more."),
        "model_negative_hypotheses",
        "holds 11 candidates, not 10",
        "exactly 10",
    ),
    "no models": (
        lambda row: row["model_negative_hypotheses"].clear(),
        "model_negative_hypotheses",
        "holds 0 candidates, not 10",
        "exactly 10",
    ),
    "blank candidate": (
        lambda row: row["model_negative_hypotheses"].__setitem__(9, " \n"),
        "model_negative_hypotheses[9]",
        "is empty",
        "Fill it in",
    ),
    "candidate of wrong type": (
        lambda row: row["fake_negative_hypotheses"].__setitem__(0, ["Fake"]),
        "fake_negative_hypotheses[0]",
        "is a list, not text",
        "JSON string",
    ),
    "candidate is gold": (
        lambda row: row["model_negative_hypotheses"].__setitem__(2, "Gold\r\n 1   holds. "),
        "model_negative_hypotheses[2]",
        "same text as gold_hypothesis",
        "Replace one",
    ),
    "candidate twice": (
        lambda row: row["model_negative_hypotheses"].__setitem__(0, "Fake_x000D_\n1.3 holds."),
        "model_negative_hypotheses[0]",
        "same text as fake_negative_hypotheses[3]",
        "Replace one",
    ),
}


@pytest.mark.parametrize("name", CANDIDATE_FAULTS)
def test_candidate_fault_is_named(
    name: str, write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    edit, field, problem, remedy = CANDIDATE_FAULTS[name]
    edit(ranking_rows[1])
    papers, findings = check_folder(write_folder(ranking_rows, paper_rows))
    assert [(f.file, f.row, f.sample_id, f.field) for f in findings] == [
        (RANKING_FILE, 2, "Biology/101", field)
    ]
    assert problem in findings[0].problem
    assert remedy in findings[0].remedy
    assert len(papers) == 11


def test_valid_folder_has_no_findings(valid_folder: Path, ranking_rows: Rows) -> None:
    papers, findings = check_folder(valid_folder)
    assert findings == []
    assert [paper.sample_id for paper in papers] == [row["sample_id"] for row in ranking_rows]
    assert papers[3].survey == "Survey 3 says what was known."
    assert papers[3].gold == "Gold 3 holds."
    assert papers[3].models[9] == "Model 3.9 holds."


def test_real_data_has_no_findings(researchbench_dir: Path) -> None:
    papers, findings = check_folder(researchbench_dir)
    assert findings == []
    assert {paper.discipline for paper in papers} == set(DISCIPLINES)


@pytest.mark.parametrize("value", ["", None, DELETE])
def test_doi_and_title_may_be_empty(
    value: object, write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    for row, field in ((ranking_rows[0], "doi"), (paper_rows[0], "title")):
        row.pop(field)
        if value is not DELETE:
            row[field] = value
    papers, findings = check_folder(write_folder(ranking_rows, paper_rows))
    assert findings == []
    assert (papers[0].doi, papers[0].title) == ("", "")


@pytest.mark.parametrize("file", [RANKING_FILE, PAPERS_FILE])
@pytest.mark.parametrize("value", [DELETE, "  ", 5])
def test_unreadable_sample_id(
    file: str, value: object, write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    row = (ranking_rows if file == RANKING_FILE else paper_rows)[1]
    del row["sample_id"]
    if value is not DELETE:
        row["sample_id"] = value
    papers, findings = check_folder(write_folder(ranking_rows, paper_rows))
    assert (file, 2, "", "sample_id") in [(f.file, f.row, f.sample_id, f.field) for f in findings]
    assert len(papers) == 11


@pytest.mark.parametrize("file", [RANKING_FILE, PAPERS_FILE])
def test_repeated_sample_id(
    file: str, write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    rows = ranking_rows if file == RANKING_FILE else paper_rows
    rows.append({**rows[4], "sample_id": f" {rows[4]['sample_id']}"})
    papers, findings = check_folder(write_folder(ranking_rows, paper_rows))
    expected = Finding(
        file, 13, "Chemistry/104", "sample_id", "stands in row 5 already", "Keep one of the rows"
    )
    assert findings == [expected]
    assert "Chemistry/104" not in [paper.sample_id for paper in papers]


def test_ranking_row_without_its_paper(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    del paper_rows[11]
    papers, findings = check_folder(write_folder(ranking_rows, paper_rows))
    assert len(papers) == 11
    assert [(f.file, f.row, f.sample_id, f.field) for f in findings] == [
        (RANKING_FILE, 12, "Physics/1011", "sample_id")
    ]
    assert f"has no row in {PAPERS_FILE}" in findings[0].problem
    assert "Add the paper's row" in findings[0].remedy


def test_paper_row_without_ranking_row_is_not_judged(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    unused = {"sample_id": "Math/unused", "background_survey": ""}
    papers, findings = check_folder(write_folder(ranking_rows, [*paper_rows, unused, unused]))
    assert findings == []
    assert len(papers) == 12


@pytest.mark.parametrize("file", [RANKING_FILE, PAPERS_FILE])
@pytest.mark.parametrize(
    ("line", "problem", "remedy"),
    [
        (b'{"sample_id": "Math/1", ', "is not readable JSON", "one JSON object per line"),
        (b"[" * 100_000, "is not readable JSON", "one JSON object per line"),
        (b'["Math/1"]', "is a list, not a JSON object", "one JSON object per line"),
        (b"null", "is null, not a JSON object", "one JSON object per line"),
        (b'{"sample_id": "Z\xfcrich"}', "byte 17 of the line is not UTF-8", "as UTF-8"),
    ],
    ids=["cut", "deep", "list", "null", "latin-1"],
)
def test_unreadable_line(
    file: str, line: bytes, problem: str, remedy: str, valid_folder: Path
) -> None:
    with (valid_folder / file).open("ab") as stream:
        stream.write(b"\n" + line + b"\n")
    papers, findings = check_folder(valid_folder)
    assert len(papers) == 12
    assert [(f.file, f.row, f.sample_id, f.field) for f in findings] == [(file, 14, "", "")]
    assert problem in findings[0].problem
    assert remedy in findings[0].remedy


@pytest.mark.parametrize("file", [RANKING_FILE, PAPERS_FILE])
@pytest.mark.parametrize(
    ("content", "problem", "remedy"),
    [
        (None, "does not exist", "Point to the folder"),
        (b" \n\n", "holds no row", "Restore"),
        ("{}\n".encode("utf-16"), "is UTF-16", "as UTF-8"),
    ],
    ids=["missing", "empty", "utf-16"],
)
def test_unusable_file(
    file: str, content: bytes | None, problem: str, remedy: str, valid_folder: Path
) -> None:
    if content is None:
        (valid_folder / file).unlink()
    else:
        (valid_folder / file).write_bytes(content)
    papers, findings = check_folder(valid_folder)
    assert papers == []
    assert [(f.file, f.row, f.sample_id, f.field) for f in findings] == [(file, 0, "", "")]
    assert problem in findings[0].problem
    assert remedy in findings[0].remedy
    assert str(findings[0]).startswith(f"{file}: {problem}")


def test_file_that_may_not_be_read(valid_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    _, findings = check_folder(valid_folder)
    assert [f.problem for f in findings] == ["cannot be read (Permission denied)"] * 2


def test_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, problem in ((tmp_path / "none", "does not exist"), (file, "is not a folder")):
        papers, findings = check_folder(path)
        assert papers == []
        assert [(f.file, f.problem) for f in findings] == [(str(path), problem)]
        assert RANKING_FILE in findings[0].remedy


def test_all_findings_are_gathered(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    row = ranking_rows[0]
    row["discipline"] = "Alchemy"
    row["research_question"] = ""
    row["fake_negative_hypotheses"] = ["", 3, "Same.", "Same."]
    paper_rows[0]["background_survey"] = None
    del paper_rows[1]
    _, findings = check_folder(write_folder(ranking_rows, paper_rows))
    assert [(f.file, f.row, f.field) for f in findings] == [
        (RANKING_FILE, 1, "discipline"),
        (RANKING_FILE, 1, "research_question"),
        (RANKING_FILE, 1, "fake_negative_hypotheses[0]"),
        (RANKING_FILE, 1, "fake_negative_hypotheses[1]"),
        (RANKING_FILE, 1, "fake_negative_hypotheses"),
        (RANKING_FILE, 1, "fake_negative_hypotheses[3]"),
        (RANKING_FILE, 2, "sample_id"),
        (PAPERS_FILE, 1, "background_survey"),
    ]


def test_findings_are_in_the_order_of_the_rows(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    for rows in (ranking_rows, paper_rows):
        rows[0].update(doi=1, title=1)
        rows[2].update(doi=1, title=1)
    folder = write_folder(ranking_rows, paper_rows)
    for file in (RANKING_FILE, PAPERS_FILE):
        lines = (folder / file).read_text(encoding="utf-8").splitlines()
        (folder / file).write_text("\n".join([lines[0], "{", *lines[1:]]), encoding="utf-8")
    _, findings = check_folder(folder)
    assert [(f.file, f.row) for f in findings] == [
        (file, row) for file in (RANKING_FILE, PAPERS_FILE) for row in (1, 2, 4)
    ]


def test_byte_order_mark_and_unicode_line_separators(
    valid_folder: Path, ranking_rows: Rows
) -> None:
    survey = "one\u2028two\x85three"
    path = valid_folder / PAPERS_FILE
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows[0]["background_survey"] = survey
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode("utf-8"))
    papers, findings = check_folder(valid_folder)
    assert findings == []
    assert papers[0].survey == survey


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=16,
)


@given(
    field=st.sampled_from(
        [
            "sample_id",
            "discipline",
            "doi",
            "research_question",
            "gold_hypothesis",
            "fake_negative_hypotheses",
            "model_negative_hypotheses",
            "background_survey",
            "title",
        ]
    ),
    value=_JSON,
)
def test_any_json_value_is_used_or_named(field: str, value: object) -> None:
    ranking: dict[str, object] = {
        "sample_id": "Math/1",
        "discipline": "Math",
        "research_question": "Why?",
        "gold_hypothesis": "Gold.",
        "fake_negative_hypotheses": [f"Fake {index}." for index in range(5)],
        "model_negative_hypotheses": [f"Model {index}." for index in range(10)],
    }
    paper: dict[str, object] = {"sample_id": "Math/1", "background_survey": "Survey."}
    (paper if field in ("background_survey", "title") else ranking)[field] = value
    with TemporaryDirectory() as folder:
        for file, row in ((RANKING_FILE, ranking), (PAPERS_FILE, paper)):
            (Path(folder) / file).parent.mkdir()
            (Path(folder) / file).write_text(json.dumps(row), encoding="utf-8")
        papers, findings = check_folder(Path(folder))
    assert len(papers) == (0 if findings else 1)
    for finding in findings:
        assert finding.field.startswith(field)
        assert str(finding).isprintable()
