"""Any ranking data as documents for lm-eval: each item with its prompt and its own candidates.

A file says in one of four ways which candidates an item has and which of them are gold:

* a list column `candidates`, and a column `gold` with the text or texts of the gold;
* the same with `gold_index`, the place or places of the gold in the list, from 0;
* a column or several columns `gold`, and a column or several `negatives`;
* a row for each candidate: `id` joins the rows of an item, `candidate` is the text, `label` says
  whether it is gold.

Where experts judged the candidates instead, `relevance` (a grade for each candidate, higher is
better) or `experts` (columns with the rank that each expert gave, 1 is best) stands in place of
the gold; see `lm_eval_hyprank.experts`.
"""

from __future__ import annotations

import ast
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import datasets
from pydantic_core import PydanticCustomError

from lm_eval_hyprank.datasets import rows as _rows
from lm_eval_hyprank.datasets.documents import FEATURES, flag, shuffled
from lm_eval_hyprank.datasets.findings import REMEDIES, DatasetError, Finding, findings_error
from lm_eval_hyprank.datasets.prompt_template import Prompt
from lm_eval_hyprank.datasets.rows import Row
from lm_eval_hyprank.datasets.texts import clean, filled_text, folded, repeated_texts
from lm_eval_hyprank.experts import consensus

_logger = logging.getLogger(__name__)

_REMEDIES = REMEDIES | {"blank": "Fill it in, or take the item out"}
TRUE = {"1", "true", "yes"}
FALSE = {"0", "false", "no"}

# Which arguments may stand together, all of them.
_SHAPES: dict[frozenset[str], str] = {
    frozenset(names.split()): names
    for names in (
        "candidates gold",
        "candidates gold_index",
        "gold negatives",
        "candidate id label",
        "candidates relevance",
        "candidates experts",
        "candidate id relevance",
        "candidate id experts",
    )
}

Columns = str | Sequence[str]


@dataclass
class _Item:
    """An item as it is put together.

    Attributes:
        row: Its (first) row.
        id: What identifies it.
        texts: The column and the text of each candidate.
        gold: Indices of the gold candidates.
        judgements: A list for each expert: each candidate's value, higher is better, None if none.
        problems: Field, problem and remedy of what is wrong with it.
    """

    row: Row
    id: str
    texts: list[tuple[str, str]] = field(default_factory=list)
    gold: list[int] = field(default_factory=list)
    judgements: list[list[float | None]] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)


def load(
    data: str,
    prompt: str,
    *,
    id: str | None = None,
    candidates: Columns | None = None,
    gold: Columns | None = None,
    gold_index: str | None = None,
    negatives: Columns | None = None,
    candidate: str | None = None,
    label: str | None = None,
    relevance: str | None = None,
    experts: Columns | None = None,
    group: str | None = None,
    only: Any = None,
    separator: str = " ",
    split: str | None = None,
    subset: str | None = None,
    dataset_revision: str | None = None,
    skip_invalid: bool | str = False,
) -> datasets.DatasetDict:
    """Loads the items as documents.

    Args:
        data: Path of a JSONL, JSON, CSV, TSV or Parquet file, or ``owner/name`` of a data set on
            the hub. A relative path counts from the working directory.
        prompt: A Jinja template of what stands before a candidate: ``{{ column }}``, or
            ``{{ row["any column"] }}``. What the columns hold is never taken for a template.
        id: The column that identifies an item; the row's number by default.
        candidates: Column with the list of candidates, or several columns of one text each.
        gold: Column or columns with the gold, each a text or a list of texts.
        gold_index: Column with the place of the gold in the list (or among the columns, empty ones
            counted), from 0, or a list of places.
        negatives: Column or columns with the other candidates, each a text or a list of texts.
        candidate: Where each row is a candidate: the column with its text.
        label: The column that says whether the row's candidate is gold: 1 or 0, true or false.
        relevance: Column with the candidates' grades: a list (null for an empty column), or a
            number where each row is a candidate. Higher is better.
        experts: Columns, one an expert, with the candidates' ranks in the same way; 1 is best,
            equal ranks are ties and null (an empty cell) is a candidate that was not ranked.
        group: The column that a report groups by.
        only: Takes the items of this group only.
        separator: What stands between prompt and candidate.
        split: The hub's split.
        subset: The hub's subset.
        dataset_revision: The hub's branch, tag or commit.
        skip_invalid: Leaves out the items with findings instead of refusing the data.

    Returns:
        The split "test" with the columns of `documents.FEATURES`, `discipline` being the
        group; `gold` is a list of indices where some item has several golds. Where experts
        judged, `judgements` (a list for each expert: the candidates' values, higher is better,
        null where there is none; a rank enters negated) and `best` (the indices that come first
        in the experts' consensus) stand in its place.

    Raises:
        DatasetError: The data or an argument cannot be used.
    """
    given = {
        "candidates": _names("candidates", candidates),
        "gold": _names("gold", gold),
        "gold_index": _names("gold_index", gold_index),
        "negatives": _names("negatives", negatives),
        "candidate": _names("candidate", candidate),
        "label": _names("label", label),
        "relevance": _names("relevance", relevance),
        "experts": _names("experts", experts),
        "id": _names("id", id),
        "group": _names("group", group),
    }
    _check_shape({name for name, columns in given.items() if columns})
    if not isinstance(separator, str):
        raise DatasetError(f"separator is {separator!r}, not text")
    table = _rows.read(data, split, subset, dataset_revision)
    if not table.rows and not table.findings:
        raise DatasetError(f"{table.source}: holds no row")
    for name, columns in given.items():
        for column in columns:
            if table.rows and column not in table.columns:
                raise DatasetError(
                    f"{name} is {column!r}, which is no column of {table.source}; "
                    f"it has: {', '.join(table.columns)}"
                )
    of_candidates = ("candidate", "label", "relevance", "experts") if candidate else ()
    own = {column for name in of_candidates for column in given[name]}
    template = Prompt(prompt, table.columns, own)
    if candidate:
        items = _join_rows(table.rows, given, template.columns | {*given["group"]})
    else:
        items = _take_rows(table.rows, given, in_cells=table.source.endswith((".csv", ".tsv")))
    if gold_index and any(item.gold for item in items) and not any(0 in i.gold for i in items):
        _logger.warning(
            "%s is never 0 in %s: does it count from 1? The first candidate is number 0; if it "
            "does, subtract 1 in every row, or all golds are wrong",
            gold_index,
            table.source,
        )
    documents, findings = [], list(table.findings)
    first_rows: dict[str, int] = {}
    for item in items:
        first = first_rows.setdefault(item.id, item.row.number)
        if item.id and first != item.row.number:
            item.problems.append(
                (id or "id", f"stands in row {first} already", "Keep one of the rows")
            )
        _check_candidates(item, judged=bool(relevance or experts))
        context = template.render(item.row.values, item.problems)
        if context[-1:].isspace() and separator[:1].isspace():
            problem = f"ends with whitespace, and the separator {separator!r} starts with it"
            remedy = 'Take it out at the end of the prompt, or set separator: ""'
            item.problems.append(("prompt", problem, remedy))
        category = _cell(item, group) if group else ""
        if item.problems:
            file = _file_name(table.source)
            findings += [Finding(file, item.row.number, item.id, *one) for one in item.problems]
        else:
            documents.append(_document(item, context, separator, category))
    findings.sort(key=lambda finding: finding.row)
    # A candidate whose item is not known cannot be skipped: some item would lack it unnoticed.
    lost = bool(candidate) and (bool(table.findings) or not all(item.id for item in items))
    if findings and (lost or not (flag(skip_invalid) and documents)):
        skippable = bool(documents) and not lost
        raise findings_error(table.source, findings, folder=False, skippable=skippable)
    if findings:
        _logger.warning(
            "skip_invalid: %d problem(s) in %s; %d items are used, left out are rows %s",
            len(findings),
            table.source,
            len(documents),
            ", ".join(str(row) for row in dict.fromkeys(finding.row for finding in findings)),
        )
    if only is not None:
        present = sorted({document["discipline"] for document in documents})
        documents = [document for document in documents if document["discipline"] == str(only)]
        if not documents:
            names = ", ".join(present)
            raise DatasetError(f"There is no item of group {str(only)!r}; present: {names}")
    return datasets.DatasetDict({"test": _split(documents, judged=bool(relevance or experts))})


def _split(documents: list[dict[str, Any]], judged: bool) -> datasets.Dataset:
    features = dict(FEATURES)
    indices = datasets.Sequence(datasets.Value("int64"))
    if judged:
        del features["gold"]
        grades = datasets.Sequence(datasets.Value("float64"))
        features |= {"best": indices, "judgements": datasets.Sequence(grades)}
    elif any(len(document["gold"]) > 1 for document in documents):
        features["gold"] = indices
    else:
        documents = [document | {"gold": document["gold"][0]} for document in documents]
    return datasets.Dataset.from_list(documents, features=datasets.Features(features))


def _names(argument: str, columns: Any) -> list[str]:
    """Returns the names of the columns that an argument gives."""
    names = [] if columns is None else [columns] if isinstance(columns, str) else columns
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise DatasetError(f"{argument} is {columns!r}; give the name of a column, or a list")
    return list(names)


def _check_shape(given: set[str]) -> None:
    shape = given - {"group"}
    if "candidate" not in shape:
        shape -= {"id"}
    if frozenset(shape) not in _SHAPES:
        ways = "; ".join(" + ".join(names.split()) for names in _SHAPES.values())
        got = " + ".join(sorted(shape)) or "none of them"
        raise DatasetError(f"Say where the candidates are by one of: {ways}. Given: {got}.")


# --- rows to items --------------------------------------------------------------------------


def _take_rows(rows: Sequence[Row], given: Mapping[str, list[str]], in_cells: bool) -> list[_Item]:
    """Makes an item of each row.

    Args:
        rows: The rows.
        given: The arguments' columns.
        in_cells: Whether lists are spelt as text, as in a CSV file.
    """
    items = []
    for row in rows:
        item = _Item(row, "")
        item.id = _cell(item, given["id"][0]) if given["id"] else str(row.number)
        if given["negatives"]:
            for name in ("gold", "negatives"):
                texts = _texts(item, given[name], in_cells)
                if name == "gold":
                    item.gold = list(range(len(texts)))
                    if not texts:
                        item.problems.append((given[name][0], "is empty", _REMEDIES["blank"]))
                item.texts += texts
        else:
            columns = given["candidates"]
            item.texts = _texts(item, columns, in_cells, one_each=len(columns) > 1)
            # What a place or a list of grades counts: the columns, or the entries of the only one.
            places = columns if len(columns) > 1 else [place for place, _ in item.texts]
            if given["gold"]:
                _find_gold(item, given["gold"], in_cells)
            elif given["gold_index"]:
                _take_gold_index(item, given["gold_index"][0], places)
            for column in (*given["relevance"], *given["experts"]):
                _take_judgements(item, column, places, rank=bool(given["experts"]))
        items.append(item)
    return items


def _join_rows(
    rows: Sequence[Row], given: Mapping[str, list[str]], shared: Set[str]
) -> list[_Item]:
    """Makes an item of the rows that share an id, wherever they stand.

    Args:
        rows: A row for each candidate.
        given: The arguments' columns.
        shared: The columns in which an item's rows must agree.
    """
    (id_column,), (text_column,) = given["id"], given["candidate"]
    items: dict[str, _Item] = {}
    for row in rows:
        probe = _Item(row, "")
        name = _cell(probe, id_column)
        item = items.setdefault(name or f"row {row.number}", probe)
        if item is probe:
            item.id = name
            item.judgements = [[] for _ in (*given["relevance"], *given["experts"])]
        for column in sorted(shared):
            if row.values.get(column) != item.row.values.get(column):
                item.problems.append(
                    (
                        column,
                        f"differs between rows {item.row.number} and {row.number} of the item",
                        "Write the same in all rows of an item",
                    )
                )
        place = f"{text_column} (row {row.number})"
        text = _checked(item, place, row.values.get(text_column))
        item.texts.append((place, text))
        if given["label"]:
            value = row.values.get(given["label"][0])
            word = str(value).strip().lower()
            if word in TRUE | FALSE:
                item.gold += [len(item.texts) - 1] if word in TRUE else []
            else:
                problem = f"{_said(value)} in row {row.number}, which says neither yes nor no"
                item.problems.append((given["label"][0], problem, "Write 1 or 0"))
        for number, column in enumerate((*given["relevance"], *given["experts"])):
            value = row.values.get(column)
            grade = _grade(item, f"{column} (row {row.number})", value, bool(given["experts"]))
            item.judgements[number].append(grade)
    return list(items.values())


def _cell(item: _Item, column: str) -> str:
    """Returns a name from the item's row, which may be a number."""
    value = item.row.values.get(column)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return _checked(item, column, str(value) if number else value)


def _checked(item: _Item, place: str, value: Any) -> str:
    """Returns the clean text, "" with a problem noted where it is none."""
    if value is None or isinstance(value, str):
        try:
            return filled_text(value or "")
        except PydanticCustomError as error:
            problem, remedy = error.message(), _REMEDIES[error.type]
    else:
        problem, remedy = f"is {value!r:.40}, not text", "Write it as text"
    item.problems.append((place, problem, remedy))
    return ""


def _texts(
    item: _Item, columns: Sequence[str], in_cells: bool, one_each: bool = False
) -> list[tuple[str, str]]:
    """Returns the candidates in the columns, a missing value or empty cell being none.

    Args:
        item: The item.
        columns: The columns.
        in_cells: Whether lists are spelt as text, as in a CSV file.
        one_each: Whether each column has one text, whatever it reads like, and no list.
    """
    texts = []
    for column in columns:
        value = item.row.values.get(column)
        if not one_each:
            value = _listed(value, (str, type(None)))
        # Of several columns, each has one text, which may read like anything.
        if in_cells and not one_each and len(columns) == 1 and _is_python_list(value):
            remedy = 'Write it as JSON: ["one", "two"]'
            item.problems.append((column, "holds a list as Python or NumPy prints it", remedy))
            continue
        if isinstance(value, list) and not one_each:
            places = [(f"{column}[{index}]", text) for index, text in enumerate(value)]
        else:
            places = [] if value is None or value == "" else [(column, value)]
        texts += [(place, _checked(item, place, text)) for place, text in places]
    return texts


def _listed(value: Any, kind: type | tuple[type, ...]) -> Any:
    """Returns the list of a kind that a cell of a CSV file spells in JSON, else the value."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = _rows.without_nan(json.loads(value))
        except (ValueError, RecursionError):
            return value
        if isinstance(found, list) and all(isinstance(one, kind) for one in found):
            return found
    return value


def _is_python_list(value: Any) -> bool:
    """Whether a cell spells a list of texts in Python, which pandas writes into CSV files."""
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return False
    try:
        found = ast.literal_eval(value.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return isinstance(found, list) and any(isinstance(one, str) for one in found)


def _find_gold(item: _Item, columns: Sequence[str], in_cells: bool) -> None:
    """Finds the gold texts among the candidates."""
    where = {folded(text): index for index, (_, text) in reversed([*enumerate(item.texts)])}
    value = item.row.values.get(columns[0])
    # A candidate may read like a list, and the gold with it.
    known = len(columns) == 1 and isinstance(value, str) and folded(clean(value)) in where
    golds = _texts(item, columns, in_cells, one_each=known)
    if not golds:
        item.problems.append((columns[0], "is empty", _REMEDIES["blank"]))
    for place, text in golds:
        index = where.get(folded(text))
        if text and index is None:
            remedy = "Write it as it stands among the candidates, or use gold_index or negatives"
            item.problems.append((place, "is none of the candidates", remedy))
        elif index is not None and index not in item.gold:
            item.gold.append(index)


def _take_gold_index(item: _Item, column: str, places: Sequence[str]) -> None:
    """Finds the gold by its number among the places, of which empty columns are some."""
    if not places:
        return  # `_check_candidates` says that there is nothing to count
    where = _indices(item)
    value = _listed(item.row.values.get(column), int)
    for one in value if isinstance(value, list) else [value]:
        remedy = "Write the place of the gold among the candidates, the first being 0"
        try:
            # pandas makes 2.0 of 2 where another row has none.
            index = int(float(one)) if float(one).is_integer() else None
        except (TypeError, ValueError, OverflowError):
            index = None
        if isinstance(one, bool) or index is None:
            problem = f"{_said(one)}, no whole number"
        elif not 0 <= index < len(places):
            problem = f"is {index}, and the item has candidates 0 to {len(places) - 1}"
            if index == len(places):
                remedy += "; if the column counts from 1, subtract 1 in every row"
        elif (gold := where.get(places[index])) is None:
            problem = f"is {index}, and {places[index]}, the candidate in that place, is empty"
            remedy = "Fill it in, or correct the place; empty columns count too"
        else:
            item.gold += [] if gold in item.gold else [gold]
            continue
        item.problems.append((column, problem, remedy))


def _take_judgements(item: _Item, column: str, places: Sequence[str], rank: bool) -> None:
    """Takes what an expert says of the places; an empty column is no candidate and has no grade."""
    where = _indices(item)
    value = _listed(item.row.values.get(column), (int, float, type(None)))
    if not isinstance(value, list) or len(value) != len(places):
        found = f"holds {len(value)}" if isinstance(value, list) else "is no list of"
        empty = "" if len(places) == len(item.texts) else ", empty ones among them"
        problem = f"{found} numbers for {len(places)} candidates{empty}"
        item.problems.append((column, problem, "Give one number (or null) a candidate"))
        return
    judged: list[float | None] = [None] * len(item.texts)
    for index, one in enumerate(value):
        grade = _grade(item, f"{column}[{index}]", one, rank)
        candidate = where.get(places[index])
        if candidate is not None:
            judged[candidate] = grade
        elif grade is not None:
            problem = f"is {one!r}, and {places[index]}, the candidate in that place, is empty"
            item.problems.append((f"{column}[{index}]", problem, "Fill it in, or write null here"))
    item.judgements.append(judged)


def _indices(item: _Item) -> dict[str, int]:
    return {place: index for index, (place, _) in enumerate(item.texts)}


def _said(value: Any) -> str:
    return "is empty" if value in (None, "") else f"is {value!r:.40}"


def _grade(item: _Item, place: str, value: Any, rank: bool) -> float | None:
    """Returns a relevance or a negated rank, None where there is none."""
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and number >= (1 if rank else 0):
        return -number if rank else number
    kind = "rank (1 is best)" if rank else "relevance (0 or more, higher is better)"
    item.problems.append((place, f"is {value!r:.40}, no {kind}", "Correct or empty it"))
    return None


# --- checks ---------------------------------------------------------------------------------


def _check_candidates(item: _Item, judged: bool) -> None:
    """Checks that there is something to rank, and that no two candidates read the same."""
    for place, problem in repeated_texts(item.texts):
        item.problems.append((place, problem, "Replace one of the two, or take the item out"))
    if item.problems:
        return  # what follows would only repeat it
    count = len(item.texts)
    if count < 2:
        problem = f"the item has {count} candidate(s)"
        remedy = 'Give it at least two (a list in a CSV cell is ["a", "b"]), or take it out'
    elif judged:
        if any(len(judged) - judged.count(None) > 1 for judged in item.judgements):
            return
        problem = "no expert judges two of the candidates"
        remedy = "Add a judgement, or take the item out"
    elif not item.gold:
        problem, remedy = "no candidate is gold", "Mark the gold, or take the item out"
    elif len(item.gold) == count:
        problem, remedy = "every candidate is gold", "Add a negative, or take the item out"
    else:
        return
    item.problems.append(("", problem, remedy))


# --- items to documents ---------------------------------------------------------------------


def _file_name(source: str) -> str:
    return source.rpartition("/")[2]


def _document(item: _Item, context: str, separator: str, group: str) -> dict[str, Any]:
    order = shuffled(item.id, len(item.texts))
    counts: Counter[str] = Counter()
    labels = []
    for index in range(len(item.texts)):
        kind = "candidate" if item.judgements else "gold" if index in item.gold else "negative"
        counts[kind] += 1
        alone = kind == "gold" and len(item.gold) == 1
        labels.append(kind if alone else f"{kind}_{counts[kind]}")
    document: dict[str, Any] = {
        "paper_id": item.id,
        "discipline": group,
        "doi": "",
        "title": "",
        "context": context,
        "separator": separator,
        "candidates": [item.texts[index][1] for index in order],
        "candidate_ids": [labels[index] for index in order],
    }
    if not item.judgements:
        return document | {"gold": sorted(order.index(index) for index in item.gold)}
    judged = [[one[index] for index in order] for one in item.judgements]
    agreed = consensus(judged)
    best = max(value for value in agreed if value is not None)
    document["best"] = [index for index, value in enumerate(agreed) if value == best]
    return document | {"judgements": judged}
