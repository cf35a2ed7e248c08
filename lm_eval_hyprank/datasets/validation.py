"""Reads a folder in the layout of ResearchBench and says all that is wrong with it.

``ranking/ranking.jsonl`` holds the questions and the 16 candidates of each paper,
``papers/papers.jsonl`` the background; ``sample_id`` joins the two. `check_folder` returns the
papers that can be used and every finding, not just the first, so that data can be repaired in
one go.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from lm_eval_hyprank.datasets.findings import REMEDIES, Finding
from lm_eval_hyprank.datasets.texts import clean, filled_text, optional_text, repeated_texts

RANKING_FILE = "ranking/ranking.jsonl"
PAPERS_FILE = "papers/papers.jsonl"
_LAYOUT_REMEDY = f"Point to the folder that holds {RANKING_FILE} and {PAPERS_FILE}"

DISCIPLINES = (
    "Astronomy",
    "Biology",
    "Business",
    "Cell Biology",
    "Chemistry",
    "Earth Science",
    "Energy Science",
    "Environmental Science",
    "Law",
    "Material Science",
    "Math",
    "Physics",
)

# How many negatives of each kind stand beside the gold.
NEGATIVES = {"fake_negative_hypotheses": 5, "model_negative_hypotheses": 10}

_JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}

# pydantic's error type -> what is wrong; `filled_text` and `_discipline` say it themselves.
_PROBLEMS = {
    "missing": "is missing",
    "string_type": "is {found}, not text",
    "list_type": "is {found}, not a list",
}

_REMEDIES = REMEDIES | {"discipline": f"Use one of: {', '.join(DISCIPLINES)}"}


@dataclass(frozen=True)
class Paper:
    """One paper with its candidates; every text is clean and none but doi and title is empty.

    Attributes:
        sample_id: The paper's key in both files.
        discipline: One of `DISCIPLINES`.
        doi: The paper's DOI, may be empty.
        title: The paper's title, may be empty.
        survey: What was known before (the prompt's background).
        question: The research question.
        gold: The paper's own hypothesis.
        fakes: Five negatives taken from elsewhere.
        models: Ten negatives that models wrote.
    """

    sample_id: str
    discipline: str
    doi: str
    title: str
    survey: str
    question: str
    gold: str
    fakes: tuple[str, ...]
    models: tuple[str, ...]


def layout_findings(folder: Path) -> list[Finding]:
    """Says whether the folder and its two files are there."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        return [Finding(str(folder), 0, "", "", problem, _LAYOUT_REMEDY)]
    return [
        Finding(file, 0, "", "", f"does not exist in {folder}", _LAYOUT_REMEDY)
        for file in (RANKING_FILE, PAPERS_FILE)
        if not (folder / file).is_file()
    ]


def check_folder(folder: Path) -> tuple[list[Paper], list[Finding]]:
    """Reads and checks the whole folder.

    Rows of ``papers/papers.jsonl`` that no ranking row names are never used, so what they hold
    is not judged.

    Args:
        folder: Holds ``ranking/ranking.jsonl`` and ``papers/papers.jsonl``.

    Returns:
        The papers without any finding, in the order of the ranking file; and all findings, by
        file and row.
    """
    findings = layout_findings(folder)
    ranking = _read(folder, RANKING_FILE, findings)
    papers = _read(folder, PAPERS_FILE, findings)
    ranked_ids = {_sample_id(raw) for _, raw in ranking}
    paper_ids = {_sample_id(raw) for _, raw in papers}

    parsed_ranking: list[_RankingRow] = []
    first_rows: dict[str, int] = {}
    for row, raw in ranking:
        sample_id = _sample_id(raw)
        findings += _repeated_id(RANKING_FILE, row, sample_id, first_rows)
        if ranking_row := _parse(_RankingRow, RANKING_FILE, row, raw, findings):
            parsed_ranking.append(ranking_row)
        findings += _candidate_findings(row, raw)
        # Without a single readable paper the file itself is the finding.
        if sample_id and paper_ids and sample_id not in paper_ids:
            problem = f"has no row in {PAPERS_FILE}"
            remedy = "Add the paper's row there, or take this one out"
            findings.append(Finding(RANKING_FILE, row, sample_id, "sample_id", problem, remedy))

    parsed_papers: dict[str, _PaperRow] = {}
    first_rows = {}
    for row, raw in papers:
        sample_id = _sample_id(raw)
        if ranking and sample_id and sample_id not in ranked_ids:
            continue
        findings += _repeated_id(PAPERS_FILE, row, sample_id, first_rows)
        if paper_row := _parse(_PaperRow, PAPERS_FILE, row, raw, findings):
            parsed_papers[paper_row.sample_id] = paper_row

    findings.sort(key=lambda finding: (finding.file == PAPERS_FILE, finding.row))
    faulty = {finding.sample_id for finding in findings}
    return [
        _join(row, parsed_papers[row.sample_id])
        for row in parsed_ranking
        if row.sample_id not in faulty and row.sample_id in parsed_papers
    ], findings


def _discipline(value: str) -> str:
    """Validates the name of a discipline."""
    if value not in DISCIPLINES:
        shown = value if len(value) <= 40 else f"{value[:40]}..."
        problem = "is '{shown}', none of the twelve disciplines"
        raise PydanticCustomError("discipline", problem, {"shown": shown})
    return value


_Text = Annotated[str, AfterValidator(filled_text)]
_OptionalText = Annotated[str | None, AfterValidator(optional_text)]


class _RankingRow(BaseModel):
    """What is used of a row of the ranking file."""

    model_config = ConfigDict(strict=True)

    sample_id: _Text
    discipline: Annotated[_Text, AfterValidator(_discipline)]
    doi: _OptionalText = ""
    research_question: _Text
    gold_hypothesis: _Text
    fake_negative_hypotheses: list[_Text]
    model_negative_hypotheses: list[_Text]


class _PaperRow(BaseModel):
    """What is used of a row of the papers file."""

    model_config = ConfigDict(strict=True)

    sample_id: _Text
    title: _OptionalText = ""
    background_survey: _Text


_Row = TypeVar("_Row", _RankingRow, _PaperRow)


def _read(folder: Path, file: str, findings: list[Finding]) -> list[tuple[int, dict[str, Any]]]:
    """Returns the rows of a JSONL file with their line numbers; adds what cannot be read."""
    path = folder / file
    if not path.is_file():
        return []  # named by layout_findings

    def report(row: int, problem: str, remedy: str) -> None:
        findings.append(Finding(file, row, "", "", problem, remedy))

    try:
        data = path.read_bytes()
    except OSError as error:
        report(0, f"cannot be read ({error.strerror})", "Make the file readable")
        return []
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        report(0, "is UTF-16, not UTF-8", "Save the file as UTF-8")
        return []
    if not data.strip():
        report(0, "holds no row", "Restore the file's content")
        return []

    rows: list[tuple[int, dict[str, Any]]] = []
    # Split by line feeds alone: other separators may stand inside a JSON string.
    for row, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            problem = f"byte {error.start + 1} of the line is not UTF-8"
            report(row, problem, "Save the file as UTF-8")
        except (ValueError, RecursionError) as error:
            report(row, f"is not readable JSON ({error})", "Write one JSON object per line")
        else:
            if isinstance(value, dict):
                rows.append((row, value))
            else:
                problem = f"is {_JSON_TYPES[type(value)]}, not a JSON object"
                report(row, problem, "Write one JSON object per line")
    return rows


def _sample_id(raw: dict[str, Any]) -> str:
    """Returns the row's clean sample_id, empty where it cannot be read."""
    value = raw.get("sample_id")
    return clean(value) if isinstance(value, str) else ""


def _parse(
    model: type[_Row], file: str, row: int, raw: dict[str, Any], findings: list[Finding]
) -> _Row | None:
    """Returns the validated row, or None with its findings added."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name, *indices = detail["loc"]
            problem = _PROBLEMS.get(detail["type"])
            if problem is None:
                problem = detail["msg"]
            else:
                problem = problem.format(found=_JSON_TYPES[type(detail["input"])])
            findings.append(
                Finding(
                    file,
                    row,
                    _sample_id(raw),
                    f"{name}{''.join(f'[{index}]' for index in indices)}",
                    problem,
                    _REMEDIES[detail["type"]],
                )
            )
        return None


def _repeated_id(file: str, row: int, sample_id: str, first_rows: dict[str, int]) -> list[Finding]:
    """Says whether the sample_id stood in an earlier row, and remembers it."""
    first = first_rows.setdefault(sample_id, row)
    if not sample_id or first == row:
        return []
    problem = f"stands in row {first} already"
    return [Finding(file, row, sample_id, "sample_id", problem, "Keep one of the rows")]


def _candidate_findings(row: int, raw: dict[str, Any]) -> list[Finding]:
    """Checks the number of candidates and that no two of them read the same.

    Works on the raw row, so that these findings are made beside those of `_parse`.
    """
    findings = []

    def report(field: str, problem: str, remedy: str) -> None:
        findings.append(Finding(RANKING_FILE, row, _sample_id(raw), field, problem, remedy))

    candidates = [("gold_hypothesis", raw.get("gold_hypothesis"))]
    for field, expected in NEGATIVES.items():
        negatives = raw.get(field)
        if not isinstance(negatives, list):
            continue
        if len(negatives) != expected:
            problem = f"holds {len(negatives)} candidates, not {expected}"
            report(field, problem, f"Give exactly {expected} negatives")
        candidates += [(f"{field}[{index}]", text) for index, text in enumerate(negatives)]

    readable = [(field, clean(text)) for field, text in candidates if isinstance(text, str)]
    for field, problem in repeated_texts(readable):
        report(field, problem, "Replace one of the two, or take the paper out")
    return findings


def _join(ranking: _RankingRow, paper: _PaperRow) -> Paper:
    """Returns the paper: background and title from the papers file, all else from the ranking."""
    return Paper(
        sample_id=ranking.sample_id,
        discipline=ranking.discipline,
        doi=ranking.doi or "",
        title=paper.title or "",
        survey=paper.background_survey,
        question=ranking.research_question,
        gold=ranking.gold_hypothesis,
        fakes=tuple(ranking.fake_negative_hypotheses),
        models=tuple(ranking.model_negative_hypotheses),
    )
