from __future__ import annotations

import csv
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_hyprank.datasets import generic
from lm_eval_hyprank.datasets.documents import FEATURES, shuffled
from lm_eval_hyprank.datasets.findings import DatasetError

Values = list[dict[str, Any]]
Load = Callable[..., list[dict[str, Any]]]

PROMPT = "Q: {{ q }}\nA:"
WIDE = {"prompt": PROMPT, "gold": "good", "negatives": "bad"}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes rows as JSONL, or as CSV with ``csv=True``, and loads them."""

    def loaded(values: Values, **arguments: Any) -> list[dict[str, Any]]:
        if arguments.pop("csv", False):
            path = tmp_path / "data.csv"
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, values[0])
                writer.writeheader()
                writer.writerows(values)
        else:
            path = tmp_path / "data.jsonl"
            path.write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")
        return list(generic.load(str(path), **arguments)["test"])

    return loaded


def labelled(document: dict[str, Any]) -> dict[str, str]:
    return dict(zip(document["candidate_ids"], document["candidates"], strict=True))


ROW = {"q": "Why?", "good": "So.", "bad": ["No.", "Never."]}
EXPECTED = {"gold": "So.", "negative_1": "No.", "negative_2": "Never."}


@pytest.mark.parametrize(
    ("rows", "arguments"),
    [
        ([ROW], WIDE),
        ([{**ROW, "bad": "No.", "b2": "Never."}], {**WIDE, "negatives": ["bad", "b2"]}),
        ([{**ROW, "all": ["So.", "No.", "Never."]}], {"candidates": "all", "gold": "good"}),
        (
            [{**ROW, "all": ["So.", "No.", "Never."], "i": 0}],
            {"candidates": "all", "gold_index": "i"},
        ),
        (
            [
                {"q": "Why?", "n": 1, "text": text, "right": right}
                for text, right in (("So.", True), ("No.", False), ("Never.", 0))
            ],
            {"id": "n", "candidate": "text", "label": "right"},
        ),
    ],
)
def test_every_way_to_say_it_gives_the_same_document(
    rows: Values, arguments: dict[str, Any], load: Load
) -> None:
    (document,) = load(rows, **({"prompt": PROMPT} | arguments))
    assert document.keys() == FEATURES.keys()
    assert document["context"] == "Q: Why?\nA:"
    assert document["separator"] == " "
    assert labelled(document) == EXPECTED
    assert document["candidates"][document["gold"]] == "So."
    assert document["paper_id"] == "1"


@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        (
            {"q": "Why?", "good": "So.", "b1": "No.", "b2": "Never.", "b3": ""},
            {"gold": "good", "negatives": ["b1", "b2", "b3"]},
        ),
        (
            {"q": "Why?", "good": "So.", "bad": '["No.", "Never."]'},
            {"gold": "good", "negatives": "bad"},
        ),
        (
            {"q": "Why?", "all": '["So.", "No.", "Never."]', "i": "0"},
            {"candidates": "all", "gold_index": "i"},
        ),
    ],
)
def test_csv_cells_hold_lists_as_json_and_may_be_empty(
    row: dict[str, Any], arguments: dict[str, Any], load: Load
) -> None:
    (document,) = load([row], csv=True, prompt=PROMPT, **arguments)
    assert labelled(document) == EXPECTED


def test_several_golds_make_gold_a_list_for_all_items(load: Load) -> None:
    rows = [ROW, {"q": "How?", "good": ["So.", "Thus."], "bad": ["No."]}]
    one, two = load(rows, **WIDE)
    assert [one["candidates"][index] for index in one["gold"]] == ["So."]
    assert {two["candidates"][index] for index in two["gold"]} == {"So.", "Thus."}
    assert labelled(two) == {"gold_1": "So.", "gold_2": "Thus.", "negative_1": "No."}


@given(st.lists(st.integers(2, 40), min_size=1, max_size=5), st.data())
def test_any_number_of_candidates_is_shuffled_by_the_id_alone(
    sizes: list[int], data: st.DataObject
) -> None:
    rows = []
    for number, size in enumerate(sizes):
        texts = [f"text {number}.{index}" for index in range(size)]
        rows.append({"k": f"id {number}", "c": texts, "g": data.draw(st.integers(0, size - 1))})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        found = generic.load(str(path), "{{ k }}", id="k", candidates="c", gold_index="g")["test"]
    for row, document in zip(rows, found, strict=True):
        assert document["candidates"] == [row["c"][i] for i in shuffled(row["k"], len(row["c"]))]
        assert document["candidates"][document["gold"]] == row["c"][row["g"]]


def test_a_thousand_candidates_and_two_go_together(load: Load) -> None:
    rows = [{**ROW, "bad": [f"No {n}." for n in range(999)]}, {**ROW, "bad": ["No."]}]
    assert [len(document["candidates"]) for document in load(rows, **WIDE)] == [1000, 2]


def test_rows_of_an_item_need_not_stand_together(load: Load) -> None:
    rows = [
        {"n": item, "q": f"Q{item}?", "t": f"{item}{text}", "ok": text == "a", "note": text + item}
        for text in "abc"
        for item in "xy"
    ]
    found = load(rows, csv=True, prompt=PROMPT, id="n", candidate="t", label="ok")
    assert [document["paper_id"] for document in found] == ["x", "y"]
    assert labelled(found[1]) == {"gold": "ya", "negative_1": "yb", "negative_2": "yc"}


def test_groups_are_kept_and_may_be_taken_alone(load: Load) -> None:
    rows = [{**ROW, "year": year} for year in (2001, 2002, 2001)]
    assert [d["discipline"] for d in load(rows, **WIDE, group="year")] == ["2001", "2002", "2001"]
    assert [d["paper_id"] for d in load(rows, **WIDE, group="year", only=2001)] == ["1", "3"]
    with pytest.raises(DatasetError, match="no item of group '1999'; present: 2001, 2002"):
        load(rows, **WIDE, group="year", only="1999")


# --- the prompt -----------------------------------------------------------------------------

HOSTILE = "{{ 7*7 }} {% for x in y %} {# gone #} {q} ${q} %s _x000D_\r\n end"


def test_what_the_data_holds_is_never_a_template(load: Load) -> None:
    row = {"q": HOSTILE, "my col": HOSTILE, "good": HOSTILE + "!", "bad": ["{{ q }}"]}
    prompt = '{{ q }}|{{ row["my col"] }}|{{ q | upper }}:'
    (document,) = load([row], **(WIDE | {"prompt": prompt}))
    text = "{{ 7*7 }} {% for x in y %} {# gone #} {q} ${q} %s \n end"
    assert document["context"] == f"{text}|{text}|{text.upper()}:"
    assert labelled(document) == {"gold": text + "!", "negative_1": "{{ q }}"}


# --- faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"good": "  "}, "data.jsonl:2 2 good: is empty. Fill it in, or take the item out"),
        ({"good": None}, "data.jsonl:2 2 good: is empty. Fill it in"),
        ({"good": 5}, "data.jsonl:2 2 good: is 5, not text. Write it as text"),
        ({"bad": ["No.", ""]}, "data.jsonl:2 2 bad[1]: is empty. Fill it in"),
        ({"bad": ["No.", 3]}, "data.jsonl:2 2 bad[1]: is 3, not text"),
        ({"bad": ["a b", "a\n b"]}, "data.jsonl:2 2 bad[1]: is the same text as bad[0] (white"),
        ({"bad": [" So."]}, "data.jsonl:2 2 bad[0]: is the same text as good (whitespace aside)"),
        ({"bad": []}, "data.jsonl:2 2: the item has 1 candidate(s). Give it at least two"),
        ({"bad": None}, "data.jsonl:2 2: the item has 1 candidate(s). Give it at least two"),
        (
            {"q": ""},
            "data.jsonl:2 2 q: is empty, and the prompt needs it. Fill it in, or write {% ",
        ),
        ({"bad": ["\0"]}, "data.jsonl:2 2 bad[0]: holds a NUL character. Remove"),
    ],
)
def test_a_fault_names_file_row_field_and_remedy(
    changes: dict[str, Any], finding: str, load: Load
) -> None:
    with pytest.raises(DatasetError) as error:
        load([ROW, ROW | changes], **WIDE)
    first, second, last = str(error.value).split("\n")
    assert first.endswith("data.jsonl cannot be used: 1 problem(s) found.")
    assert second.strip().startswith(finding)
    assert last == """`--metadata '{"skip_invalid": true}'` leaves the named items out."""


@pytest.mark.parametrize(
    ("row", "arguments", "finding"),
    [
        ({"c": ["a", "b"], "g": "x"}, {"candidates": "c", "gold": "g"}, "g: is none of the cand"),
        ({"c": ["a", "b"], "g": ""}, {"candidates": "c", "gold": "g"}, "g: is empty. Fill"),
        (
            {"c": ["a", "b"], "g": ["a", "b"]},
            {"candidates": "c", "gold": "g"},
            "every candidate is",
        ),
        (
            {"c": ["a", "b"], "g": 2},
            {"candidates": "c", "gold_index": "g"},
            "g: is 2, and the item",
        ),
        ({"c": ["a", "b"], "g": -1}, {"candidates": "c", "gold_index": "g"}, "g: is -1, and the"),
        ({"c": ["a", "b"], "g": True}, {"candidates": "c", "gold_index": "g"}, "g: is True, no wh"),
        (
            {"c": [], "g": 1},
            {"candidates": "c", "gold_index": "g"},
            "1 1: the item has 0 candidate",
        ),
        (
            {"c": ["a", "b"], "g": None},
            {"candidates": "c", "gold_index": "g"},
            "g: is empty, no wh",
        ),
        ({"c": ["a", "b"], "g": [1]}, {"candidates": "c", "relevance": "g"}, "g: holds 1 numbers"),
        (
            {"c": ["a", "b"], "g": [1, "x"]},
            {"candidates": "c", "relevance": "g"},
            "g[1]: is 'x', no",
        ),
        ({"c": ["a", "b"], "g": [1, -1]}, {"candidates": "c", "relevance": "g"}, "g[1]: is -1, no"),
        (
            {"c": ["a", "b"], "g": [1, None]},
            {"candidates": "c", "relevance": "g"},
            "no expert judges",
        ),
        (
            {"c": ["a", "b"], "g": [1, 0]},
            {"candidates": "c", "experts": "g"},
            "g[1]: is 0, no rank",
        ),
        ({"c": "a", "g": 1}, {"id": "c", "candidate": "c", "label": "g"}, "the item has 1 cand"),
        (
            {"c": "a", "g": "maybe"},
            {"id": "c", "candidate": "c", "label": "g"},
            "g: is 'maybe' in row 1",
        ),
        (
            {"c": "", "g": 1, "k": "i"},
            {"id": "k", "candidate": "c", "label": "g"},
            "c (row 1): is empty",
        ),
        ({"c": "a", "g": 1, "k": ""}, {"id": "k", "candidate": "c", "label": "g"}, "k: is empty"),
    ],
)
def test_each_shape_has_its_faults(
    row: dict[str, Any], arguments: dict[str, Any], finding: str, load: Load
) -> None:
    with pytest.raises(DatasetError) as error:
        load([row], prompt="A:", **arguments)
    assert finding in str(error.value)


@pytest.mark.parametrize("value", ["['No.', 'Never.']", "['No.'\n 'Never.']", '["No." "Never."]'])
@pytest.mark.parametrize("column", ["good", "bad"])
def test_a_list_as_pandas_writes_it_is_no_candidate(column: str, value: str, load: Load) -> None:
    row = {"q": "Why?", "good": "So.", "bad": '["No.", "Never."]', "b2": "Nor that."}
    with pytest.raises(DatasetError, match=rf"{column}: holds a list as Python or NumPy prints"):
        load([row | {column: value}], csv=True, **WIDE)
    # Of several columns each has one text, and in JSON a text is a text.
    (document,) = load([row | {"b2": value}], csv=True, **(WIDE | {"negatives": ["bad", "b2"]}))
    assert labelled(document)["negative_3"] == value
    assert len(load([ROW | {column: value}], **WIDE)) == 1


@pytest.mark.parametrize(
    "value", ["[NH4+].[Cl-]", "[1]", "[sic]", "['tis the season]", "[{[1, 2]: 3}]"]
)
def test_brackets_alone_make_no_list(value: str, load: Load) -> None:
    (document,) = load([ROW | {"bad": value}], csv=True, **WIDE)
    assert labelled(document)["negative_1"] == value


@pytest.mark.parametrize("value", [2, 2.0, "2", "2.0", [2.0], "[2]"])
def test_a_whole_number_may_be_written_as_a_fraction(value: Any, load: Load) -> None:
    """pandas makes fractions of a column with a gap."""
    row = {"q": "a", "c": ["x", "y", "z"], "g": value}
    (document,) = load([row], prompt=PROMPT, candidates="c", gold_index="g")
    assert labelled(document)["gold"] == "z"


@pytest.mark.parametrize(
    "value", [2.5, "2.5", "two", math.inf, math.nan, 10**400, None, True, [None]]
)
def test_what_is_no_whole_number_is_no_place(value: Any, load: Load) -> None:
    row = {"q": "a", "c": ["x", "y", "z"], "g": value}
    with pytest.raises(DatasetError, match="no whole number"):
        load([row], prompt=PROMPT, candidates="c", gold_index="g")


LOOKUPS = ['{{ row["my q"] }}', "{{ row['my q'] | upper }}", "{{ row.q2 }}{{ row['my q'] }}"]


@pytest.mark.parametrize("prompt", LOOKUPS)
def test_columns_looked_up_by_name_are_those_of_the_prompt(prompt: str, load: Load) -> None:
    """So rows of an item may differ in all others, and an empty one is a fault."""
    rows = [{"n": "x", "my q": "Why?", "q2": "", "t": t, "ok": t == "a", "other": t} for t in "ab"]
    long = {"prompt": f"{prompt}:", "id": "n", "candidate": "t", "label": "ok"}
    if "q2" in prompt:
        with pytest.raises(DatasetError, match="q2: is empty, and the prompt needs it"):
            load(rows, **long)
        rows = [row | {"q2": "z"} for row in rows]
    (document,) = load(rows, **long)
    assert document["context"].endswith(":")
    for empty in ("", None):
        with pytest.raises(DatasetError, match="my q: is empty, and the prompt needs it") as error:
            load([row | {"my q": empty} for row in rows], **long)
        assert 'write {% if row["my q"] %}...{% endif %} in' in str(error.value)
    with pytest.raises(DatasetError, match="my q: differs between rows 1 and 2"):
        load([rows[0], rows[1] | {"my q": "Who?"}], **long)


@pytest.mark.parametrize(
    "prompt", ["{% for k, v in row.items() %}{{ v }}{% endfor %}:", "{{ row[q] }}:"]
)
def test_a_prompt_that_may_look_anywhere_never_looks_at_the_answer(prompt: str, load: Load) -> None:
    rows = [{"n": "x", "q": "q", "t": f"answer {t}", "ok": t == "a"} for t in "ab"]
    long = {"prompt": prompt, "id": "n", "candidate": "t", "label": "ok"}
    (document,) = load(rows, **long)
    assert "answer" not in document["context"]
    assert "True" not in document["context"]
    for named in ("{{ t }}", "{{ row['t'] }}", "{{ row.ok }}"):
        with pytest.raises(DatasetError, match="which differs among the candidates of an item"):
            load(rows, **(long | {"prompt": prompt + named}))
    with pytest.raises(DatasetError, match="q: differs between rows"):
        load([rows[0], rows[1] | {"q": "t"}], **long)


def test_whitespace_between_prompt_and_candidate_is_not_doubled(load: Load) -> None:
    spaced = WIDE | {"prompt": "Q: {{ q }}\nA: "}
    with pytest.raises(DatasetError, match="prompt: ends with whitespace, and the separator ' '"):
        load([ROW], **spaced)
    (document,) = load([ROW], **spaced, separator="")
    assert document["context"].endswith("A: ")
    # Jinja takes the last line break out.
    assert load([ROW], **(WIDE | {"prompt": "Q: {{ q }}\nA:\n"}))[0]["context"].endswith("A:")


def test_rows_of_an_item_must_agree_where_the_prompt_looks(load: Load) -> None:
    rows = [{"n": "x", "q": q, "t": q, "ok": q == "a"} for q in "ab"]
    with pytest.raises(DatasetError, match=r"data.jsonl:1 x q: differs between rows 1 and 2"):
        load(rows, prompt=PROMPT, id="n", candidate="t", label="ok")


def test_a_repeated_id_is_a_fault(load: Load) -> None:
    rows = [{**ROW, "k": key} for key in ("a", "b", "a")]
    with pytest.raises(DatasetError, match=r"data.jsonl:3 a k: stands in row 1 already. Keep one"):
        load(rows, **WIDE, id="k")


@pytest.mark.parametrize("places", [(1, 2), (1, 2, 3), (0, 1)])
def test_indices_that_may_count_from_1_are_doubted(
    places: tuple[int, ...], load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"q": "Why?", "c": ["a", "b", "c"], "g": place} for place in places]
    arguments = {"prompt": PROMPT, "candidates": "c", "gold_index": "g"}
    if 3 in places:
        hint = r"data.jsonl:3 3 g: is 3, and .*if the column counts from 1, subtract 1 in every"
        with pytest.raises(DatasetError, match=hint):
            load(rows, **arguments)
    else:
        load(rows, **arguments)
    assert ("g is never 0 in" in caplog.text) is (0 not in places)


def test_faulty_items_may_be_skipped_by_name(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    rows = [ROW, {**ROW, "good": ""}, ROW]
    found = load(rows, **WIDE, skip_invalid="true")
    assert [document["paper_id"] for document in found] == ["1", "3"]
    assert "2 items are used, left out are rows 2" in caplog.text
    with pytest.raises(DatasetError, match="1 problem") as error:
        load(rows[1:2], **WIDE, skip_invalid=True)
    assert "skip_invalid" not in str(error.value)  # nothing would be left


@pytest.mark.parametrize("fault", ['{"n": "", "t": "c", "ok": 0}', '{"n": "x", "t'])
def test_a_candidate_of_no_known_item_is_never_skipped(fault: str, tmp_path: Path) -> None:
    rows = [json.dumps({"n": n, "t": t, "ok": t == "a"}) for n in "xy" for t in "ab"]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*rows, fault]), encoding="utf-8")
    arguments = {"prompt": "A:", "id": "n", "candidate": "t", "label": "ok"}
    with pytest.raises(DatasetError, match=r"a.jsonl:5") as error:
        generic.load(str(path), **arguments, skip_invalid=True)
    assert "skip_invalid" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Say where the candidates are by one of: .* Given: none of them."),
        ({"gold": "good"}, "Given: gold."),
        ({"candidate": "q", "label": "good"}, "Given: candidate \\+ label."),
        (
            {"gold": "good", "negatives": "bad", "label": "q"},
            "Given: gold \\+ label \\+ negatives.",
        ),
        ({"gold": "god", "negatives": "bad"}, "gold is 'god', which is no column .*: q, good, bad"),
        ({"gold": "good", "negatives": 3}, "negatives is 3; give the name of a column, or a list"),
        ({**WIDE, "group": "x"}, "group is 'x', which is no column"),
        ({**WIDE, "separator": None}, "separator is None, not text"),
    ],
)
def test_arguments_that_say_nothing_clear_are_refused(
    arguments: dict[str, Any], message: str, load: Load
) -> None:
    with pytest.raises(DatasetError, match=message):
        load([ROW], **({"prompt": PROMPT} | arguments))


# --- what is missing ------------------------------------------------------------------------

MISSING = ["", None, math.nan]

# Each way to say it, and the columns of it that may lack their value.
ROLES: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (
        {"q": "Why?", "k": "a", "t": "T", "good": "So.", "bad": "No."},
        WIDE | {"id": "k", "group": "t"},
        ("q", "k", "t", "good", "bad"),
    ),
    (ROW | {"bad": ["No.", "Never."]}, WIDE, ("bad[0]",)),
    ({"q": "Why?", "c": ["a", "b"], "g": "a"}, {"candidates": "c", "gold": "g"}, ("c", "g")),
    ({"q": "Why?", "c": ["a", "b"], "g": 1}, {"candidates": "c", "gold_index": "g"}, ("c", "g")),
    (
        {"q": "Why?", "a": "x", "b": "y", "c": "z", "g": 1},
        {"candidates": ["a", "b", "c"], "gold_index": "g"},
        ("a", "b"),
    ),
    (
        {"q": "Why?", "a": "x", "b": "y", "c": "z", "r": [1, 2, 3]},
        {"candidates": ["a", "b", "c"], "experts": "r"},
        ("a", "r", "r[0]", "r[1]"),
    ),
    ({"q": "Why?", "c": ["a", "b"], "r": [1, 2]}, {"candidates": "c", "relevance": "r"}, ("r[1]",)),
    (
        {"q": "Why?", "k": "a", "t": "x", "ok": 1},
        {"id": "k", "candidate": "t", "label": "ok"},
        ("q", "k", "t", "ok"),
    ),
    (
        {"q": "Why?", "k": "a", "t": "x", "r": 1},
        {"id": "k", "candidate": "t", "experts": "r"},
        ("r",),
    ),
]


@pytest.mark.parametrize(
    ("row", "arguments", "role"),
    [(row, arguments, role) for row, arguments, roles in ROLES for role in roles],
)
def test_what_is_missing_is_the_same_however_it_is_written(
    row: dict[str, Any], arguments: dict[str, Any], role: str, load: Load
) -> None:
    outcomes = []
    column, _, index = role.removesuffix("]").partition("[")
    for missing in MISSING:
        value = missing
        if index:
            value = list(row[column])
            value[int(index)] = missing
        # A second row, where each row is a candidate.
        rows = [row | {column: value}]
        if "candidate" in arguments:
            rows.append(row | {"t": "y", **({"ok": 0} if "ok" in row else {"r": 2})})
        try:
            outcomes.append(load(rows, **({"prompt": PROMPT} | arguments)))
        except DatasetError as error:
            outcomes.append(str(error))
        assert "nan" not in str(outcomes[-1]).lower()
    assert outcomes[0] == outcomes[1] == outcomes[2]


COLUMNS = ["o0", "o1", "o2", "o3"]


def wide(blanks: set[int], missing: Any, **others: Any) -> dict[str, Any]:
    texts = {f"o{n}": missing if n in blanks else f"a{n}" for n in range(4)}
    return {"q": "Why?", **texts, **others}


def loaded(row: dict[str, Any], suffix: str, **arguments: Any) -> dict[str, Any]:
    """The document of a row, read from a file of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        with path.open("w", encoding="utf-8", newline="") as file:
            if suffix == ".csv":
                writer = csv.DictWriter(file, row)
                writer.writeheader()
                writer.writerow(row)
            else:
                file.write(json.dumps(row) + "\n")
        (document,) = generic.load(str(path), PROMPT, candidates=COLUMNS, **arguments)["test"]
    return document


BLANKS = st.sets(st.integers(0, 3))
WRITTEN = st.sampled_from([(".csv", ""), (".jsonl", ""), (".jsonl", None), (".jsonl", math.nan)])


@settings(deadline=None)
@given(st.integers(0, 3), BLANKS, WRITTEN)
def test_the_gold_index_counts_columns_and_never_names_another_text(
    gold: int, blanks: set[int], written: tuple[str, Any]
) -> None:
    suffix, missing = written
    row = wide(blanks, missing, answer=gold)
    if gold in blanks:
        with pytest.raises(DatasetError, match=f"answer: is {gold}, and o{gold}, .* is empty"):
            loaded(row, suffix, gold_index="answer")
    elif len(blanks) > 2:
        with pytest.raises(DatasetError, match=r"the item has 1 candidate"):
            loaded(row, suffix, gold_index="answer")
    else:
        document = loaded(row, suffix, gold_index="answer")
        assert document["candidates"][document["gold"]] == f"a{gold}"
        assert set(document["candidates"]) == {f"a{n}" for n in range(4) if n not in blanks}


@settings(deadline=None)
@given(BLANKS, st.sets(st.integers(0, 3)), WRITTEN, st.sampled_from(["relevance", "experts"]))
def test_grades_count_columns_and_never_pass_to_another_text(
    blanks: set[int], unjudged: set[int], written: tuple[str, Any], argument: str
) -> None:
    suffix, missing = written
    grades = [None if n in unjudged else n + 1 for n in range(4)]
    row = wide(blanks, missing, g=json.dumps(grades) if suffix == ".csv" else grades)
    judged = {n for n in range(4) if n not in blanks | unjudged}
    if lost := sorted(blanks - unjudged):
        with pytest.raises(
            DatasetError, match=rf"g\[{lost[0]}\]: is {lost[0] + 1}, and o{lost[0]}"
        ):
            loaded(row, suffix, **{argument: "g"})
    elif len(judged) < 2:
        with pytest.raises(DatasetError, match=r"no expert judges two|the item has \d candidate"):
            loaded(row, suffix, **{argument: "g"})
    else:
        document = loaded(row, suffix, **{argument: "g"})
        (found,) = document["judgements"]
        sign = -1 if argument == "experts" else 1
        assert dict(zip(document["candidates"], found, strict=True)) == {
            f"a{n}": sign * (n + 1) if n in judged else None for n in range(4) if n not in blanks
        }


def test_a_list_for_the_candidates_that_are_there_alone_is_refused(load: Load) -> None:
    row = wide({1}, "", g=[1, 2, 3])
    with pytest.raises(DatasetError, match="holds 3 numbers for 4 candidates, empty ones among"):
        load([row], prompt=PROMPT, candidates=COLUMNS, experts="g")


@pytest.mark.parametrize("value", ['["x"]', "[]", '["x", "y"]'])
def test_each_of_several_columns_has_one_text_and_no_list(value: str, load: Load) -> None:
    row = wide(set(), "", answer=2) | {"o1": value}
    for as_csv in (True, False):
        arguments = {"prompt": PROMPT, "candidates": COLUMNS, "gold_index": "answer"}
        (document,) = load([row], csv=as_csv, **arguments)
        assert set(document["candidates"]) == {"a0", value, "a2", "a3"}
        assert document["candidates"][document["gold"]] == "a2"
    with pytest.raises(DatasetError, match=r"o1: is \[.*, not text"):
        load([row | {"o1": json.loads(value)}], **arguments)


@pytest.mark.parametrize("hole", ['""', "null", "NaN"])
def test_a_hole_in_a_list_of_a_cell_is_a_fault(hole: str, load: Load) -> None:
    with pytest.raises(DatasetError, match=r"bad\[1\]: is empty"):
        load([ROW | {"bad": f'["No.", {hole}]'}], csv=True, **WIDE)


# --- experts --------------------------------------------------------------------------------


def test_ranks_of_experts_enter_negated_with_what_is_missing(load: Load) -> None:
    rows = [
        {"n": "x", "t": text, "anna": anna, "bert": bert}
        for text, anna, bert in (("a", "2", ""), ("b", "1", "1"), ("c", "2", "2.5"))
    ]
    (document,) = load(rows, csv=True, prompt="A:", id="n", candidate="t", experts=["anna", "bert"])
    assert "gold" not in document
    order = [document["candidates"].index(text) for text in "abc"]
    anna, bert = document["judgements"]
    assert [anna[index] for index in order] == [-2, -1, -2]
    assert [bert[index] for index in order] == [None, -1, -2.5]
    assert [document["candidates"][index] for index in document["best"]] == ["b"]
    assert set(labelled(document)) == {"candidate_1", "candidate_2", "candidate_3"}


def test_graded_relevance_is_one_judgement(load: Load) -> None:
    (document,) = load(
        [{"c": ["a", "b", "c"], "r": [0, 2, 2]}], prompt="A:", candidates="c", relevance="r"
    )
    (judged,) = document["judgements"]
    assert dict(zip(document["candidates"], judged, strict=True)) == {"a": 0, "b": 2, "c": 2}
    assert {document["candidates"][index] for index in document["best"]} == {"b", "c"}


@pytest.mark.parametrize("csv", [False, True])
@pytest.mark.parametrize("gold", ['["x"]', "[]", "['x']", "[1, 2]", "plain"])
def test_a_gold_that_reads_like_a_list_is_found_among_candidates_that_do(
    load: Load, gold: str, csv: bool
) -> None:
    row = {"q": "Why?", "a": gold, "b": "other", "good": gold}
    (item,) = load([row], csv=csv, prompt=PROMPT, candidates=["a", "b"], gold="good")
    assert labelled(item)["gold"] == gold


def test_a_grade_without_bounds_is_refused_and_not_missing(load: Load) -> None:
    row = {"q": "Why?", "all": ["a", "b", "c"], "grade": [math.inf, 1, 0]}
    with pytest.raises(DatasetError, match=r"grade\[0\]: is inf, no relevance"):
        load([row], prompt=PROMPT, candidates="all", relevance="grade")
