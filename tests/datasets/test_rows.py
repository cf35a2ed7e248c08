from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest

from lm_eval_hyprank.datasets import hub, rows
from lm_eval_hyprank.datasets.findings import DatasetError

# What type-guessing readers turn into a number, a missing value or a timestamp.
TEXTS = [
    "007",
    "NA",
    "null",
    "2024-01-01",
    "1e3",
    "True",
    "αβγ – ∑",
    'a "quoted", text\nin two lines',
]


def csv_text(delimiter: str = ",") -> str:
    cells = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    return (
        delimiter.join(["n", "text"])
        + "\n"
        + "".join(f"{delimiter.join(['x', c])}\n" for c in cells)
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", csv_text()),
        ("b.csv", csv_text(";")),
        ("a.TSV", csv_text("\t")),
        ("a.jsonl", "".join(json.dumps({"n": "x", "text": text}) + "\n\n" for text in TEXTS)),
        ("a.json", json.dumps([{"n": "x", "text": text} for text in TEXTS])),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_texts_stay_as_they_are(name: str, text: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    found = rows.read(str(path))
    assert [row.values for row in found.rows] == [{"n": "x", "text": text} for text in TEXTS]
    assert found.columns == ["n", "text"]
    assert found.findings == []


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    values = [{"id": "007", "n": 1, "of": ["a", "b"]}, {"id": "008", "n": None, "of": []}]
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(values).to_parquet(path)
    found = rows.read(str(path))
    assert [(row.number, row.values) for row in found.rows] == [(1, values[0]), (2, values[1])]


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet", "hub"])
def test_a_number_that_is_none_is_missing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandas writes it so where a cell is empty."""
    value = {"id": math.nan, "of": [1.5, math.nan, -math.inf], "in": {"a": math.nan, "t": "nan"}}
    path = tmp_path / f"a{kind}"
    split = datasets.Dataset.from_list([value])
    if kind == ".parquet":
        split.to_parquet(path)
    elif kind != "hub":
        path.write_text(json.dumps(value if kind == ".jsonl" else [value]), encoding="utf-8")
    monkeypatch.setattr(hub, "load", lambda *_: {"test": split})
    (row,) = rows.read("me/one" if kind == "hub" else str(path)).rows
    assert row.values == {"id": None, "of": [1.5, None, -math.inf], "in": {"a": None, "t": "nan"}}


def test_rows_are_numbered_by_the_line_on_which_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,"two\nlines"\n\n3,4\n', encoding="utf-8")
    assert [row.number for row in rows.read(str(path)).rows] == [2, 5]
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"b": 2}\n', encoding="utf-8")
    found = rows.read(str(path))
    assert [row.number for row in found.rows] == [1, 3]
    assert found.columns == ["a", "b"]


def test_a_text_may_be_longer_than_a_csv_reader_takes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "x" * 200_000 + "\n", encoding="utf-8")
    assert len(rows.read(str(path)).rows[0].values["a"]) == 200_000


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("a.csv", "a,b\n1,2\n1,2,3\n", "a.csv:3: has 3 cells, and the header has 2 columns. Put a"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl:2: is not readable JSON (Expecting value"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl:2: is no JSON object. Write each row as"),
        ("a.json", '[{"a": 1}, 2]', "a.json:2: is no JSON object. Write each row as"),
    ],
)
def test_a_faulty_row_is_a_finding(name: str, text: str, finding: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = rows.read(str(tmp_path / name))
    assert [str(one)[: len(finding)] for one in found.findings] == [finding]
    assert len(found.rows) == 1


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", b"a,b\n1,\xff\n", "a.csv:2: byte 7 of the file is not UTF-8. Save the file"),
        ("a.csv", b"a,,b\n1,2,3\n", "a.csv:1: column 2 has no name. Name it"),
        ("a.csv", b"a,b,a\n1,2,3\n", "a.csv:1: two columns are named 'a'. Rename"),
        ("a.csv", b" \n", "holds no row"),
        # Where the next row begins cannot be told: whatever is skipped, rows are lost.
        (
            "a.csv",
            b'a,b\n1,2\n3,"4\n',
            "a.csv:3: is not readable CSV (unexpected end",
        ),
        ("a.csv", b'a,b\n1,2\n3,"the 5" pipe"\n5,6\n', "a.csv:3: is not readable CSV"),
        ("a.json", b'{"a": 1}', "holds no list of objects"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "one object a line is named .jsonl"),
        ("a.xlsx", b"PK", "is none of: .jsonl, .json, .csv, .tsv, .parquet. Convert"),
        ("a.parquet", b"no parquet", "a.parquet cannot be read"),
    ],
)
def test_an_unreadable_file_is_an_error(
    name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DatasetError, match=message.replace("(", r"\(")):
        rows.read(str(tmp_path / name))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("missing/file.csv", "missing/file.csv does not exist"),
        ("nofile", "nofile does not exist"),
        (".", "is a folder; name a file in it"),
        ("", "give the path of a file"),
        (7, "give the path of a file"),
    ],
)
def test_data_that_is_no_file_is_an_error(data: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        rows.read(data)


SPLITS = {
    "one": {"train": [{"a": "1"}]},
    "test": {"train": [{"a": "1"}], "test": [{"a": "2"}]},
    "two": {"x": [{"a": "1"}], "y": [{"a": "2"}]},
}


def test_a_hub_data_set_gives_its_only_split_or_test(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, subset: str | None, revision: str | None) -> Any:
        asked.append((name, subset, revision))
        splits = SPLITS[name.removeprefix("me/")]
        return {split: datasets.Dataset.from_list(values) for split, values in splits.items()}

    monkeypatch.setattr(hub, "load", load)
    assert rows.read("me/one", subset="s", revision="r").rows[0].values == {"a": "1"}
    assert asked == [("me/one", "s", "r")]
    assert rows.read("me/test").rows[0].values == {"a": "2"}
    assert rows.read("me/two", split="y").rows[0].values == {"a": "2"}
    for name, split in (("me/two", None), ("me/one", "test")):
        with pytest.raises(DatasetError, match=r"has the splits .*; choose one as `split`"):
            rows.read(name, split=split)
