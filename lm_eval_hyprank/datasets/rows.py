"""Rows of any data file, each with its place in the file, and what cannot be read.

JSON and CSV are read with the standard library: the readers of `datasets` guess types from the
values, so that "007" becomes 7, "NA" a missing value and "2024-01-01" a timestamp. Parquet and
the hub's data sets say their types.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from lm_eval_hyprank.datasets import hub
from lm_eval_hyprank.datasets.findings import DatasetError, Finding
from lm_eval_hyprank.datasets.texts import printable

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DELIMITERS = ",;\t"


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        number: The line on which it begins (JSONL, CSV), else its number in the file, from 1.
        values: Column name to value.
    """

    number: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """What a file or a hub data set holds.

    Attributes:
        source: The file's path, or the data set's name on the hub.
        columns: All column names, in the order of their first appearance.
        rows: The rows that could be read.
        findings: What could not be.
    """

    source: str
    columns: list[str]
    rows: list[Row]
    findings: list[Finding]


def read(
    data: str, split: str | None = None, subset: str | None = None, revision: str | None = None
) -> Rows:
    """Reads a whole file or hub data set.

    Args:
        data: Path of a file with one of `SUFFIXES`, or ``owner/name`` of a data set on the hub.
        split: The hub's split; its only one or "test" by default.
        subset: The hub's subset (configuration).
        revision: The hub's branch, tag or commit.

    Returns:
        Rows and findings. Texts are as they stand in the file; a number that is none is None.

    Raises:
        DatasetError: There is no such file or data set, or nothing of it can be read.
    """
    if not isinstance(data, str) or not data.strip():
        raise DatasetError(f"data is {data!r}; give the path of a file, or owner/name on the hub")
    path = Path(data).expanduser()
    suffix = path.suffix.lower()
    if not path.exists() and suffix not in SUFFIXES and _HUB_NAME.fullmatch(data):
        table = _from_hub(data, split, subset, revision)
        return Rows(data, table.column_names, _numbered(table), [])
    if not path.is_file():
        problem = "is a folder; name a file in it" if path.is_dir() else "does not exist"
        raise DatasetError(f"data: {path.absolute()} {problem}")
    if suffix not in SUFFIXES:
        raise DatasetError(f"data: {path} is none of: {', '.join(SUFFIXES)}. Convert or rename it")
    if suffix == ".parquet":
        return _parquet(path)
    findings: list[Finding] = []
    reader = {".jsonl": _jsonl, ".json": _json}.get(suffix, _csv)
    rows = list(reader(path.name, _decoded(path), findings))
    return Rows(str(path), list(dict.fromkeys(c for r in rows for c in r.values)), rows, findings)


def _numbered(values: Iterable[Any]) -> list[Row]:
    return [Row(number, without_nan(dict(one))) for number, one in enumerate(values, start=1)]


def without_nan(value: Any) -> Any:
    """Returns the value with None for NaN, which pandas writes for what is missing."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, list):
        return [without_nan(one) for one in value]
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    return value


def _parquet(path: Path) -> Rows:
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DatasetError(f"{path} cannot be read ({printable(str(error))})") from error
    return Rows(str(path), table.column_names, _numbered(table.to_pylist()), [])


def _from_hub(name: str, split: str | None, subset: str | None, revision: str | None) -> Any:
    splits = hub.load(name, subset, revision)
    chosen = split or ("test" if "test" in splits else next(iter(splits)))
    if chosen not in splits or (split is None and chosen != "test" and len(splits) > 1):
        raise DatasetError(f"{name} has the splits {', '.join(splits)}; choose one as `split`")
    return splits[chosen]


def _decoded(path: Path) -> str:
    """Returns the text of a UTF-8 file, or a UTF-16 file that begins with its mark."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror})") from error
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DatasetError(
            f"{path.name}:{line}: byte {error.start + 1} of the file is not "
            f"{'UTF-16' if utf16 else 'UTF-8'}. Save the file as UTF-8."
        ) from None
    if not text.strip():
        raise DatasetError(f"{path}: holds no row. Restore the file's content.")
    return text


def _jsonl(file: str, text: str, findings: list[Finding]) -> Iterator[Row]:
    # Split by line feeds alone: other separators may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                value = without_nan(json.loads(line))
            except (ValueError, RecursionError) as error:
                problem = f"is not readable JSON ({error})"
                remedy = "Write one JSON object per line"
                findings.append(Finding(file, number, "", "", problem, remedy))
            else:
                yield from _objects(file, [value], number, findings)


def _json(file: str, text: str, findings: list[Finding]) -> Iterator[Row]:
    try:
        value = without_nan(json.loads(text))
    except (ValueError, RecursionError) as error:
        hint = "a file with one object a line is named .jsonl"
        raise DatasetError(f"{file} is not readable JSON ({error}); {hint}.") from None
    if not isinstance(value, list):
        raise DatasetError(f"{file} holds no list of objects. Write [{{...}}, {{...}}].")
    yield from _objects(file, value, 1, findings)


def _objects(file: str, values: list[Any], first: int, findings: list[Finding]) -> Iterator[Row]:
    for number, value in enumerate(values, start=first):
        if isinstance(value, dict):
            yield Row(number, value)
        else:
            problem = "is no JSON object"
            remedy = 'Write each row as an object: {"column": "value"}'
            findings.append(Finding(file, number, "", "", problem, remedy))


def _csv(file: str, text: str, findings: list[Finding]) -> Iterator[Row]:
    """Reads a CSV file with a header; the delimiter is the one that the header has most of."""
    header_line = text.lstrip().partition("\n")[0]
    delimiter = max(_DELIMITERS, key=header_line.count)
    csv.field_size_limit(2**31 - 1)  # a text may be longer than the usual 131,072 characters
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            # Where the next row begins cannot be told, so what follows cannot be skipped over.
            raise DatasetError(
                f"{file}:{line}: is not readable CSV ({error}), nor is what follows it. Put a text "
                'with line breaks or quotes in "...", its quotes doubled.'
            ) from None
        if cells is None:
            return
        number, line = line, reader.line_num + 1
        if not any(cell.strip() for cell in cells):
            continue
        if not header:
            header = [cell.strip() for cell in cells]
            _check_header(file, header)
        elif len(cells) != len(header):
            problem = f"has {len(cells)} cells, and the header has {len(header)} columns"
            remedy = f'Put a text that contains {delimiter!r} or a line break in "..."'
            findings.append(Finding(file, number, "", "", problem, remedy))
        else:
            yield Row(number, dict(zip(header, cells, strict=True)))


def _check_header(file: str, header: list[str]) -> None:
    if "" in header:
        place = header.index("") + 1
        raise DatasetError(f"{file}:1: column {place} has no name. Name it, or take it out.")
    repeated = next((name for name in header if header.count(name) > 1), None)
    if repeated is not None:
        raise DatasetError(f"{file}:1: two columns are named {repeated!r}. Rename one of them.")
