from __future__ import annotations

from typing import Any

import pytest

from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.datasets.prompt_template import Prompt, written

ROW = {"q": "Why?", "good": "So.", "bad": ["No.", "Never."]}


def filled(text: str, row: dict[str, Any]) -> str:
    problems: list[tuple[str, str, str]] = []
    found = Prompt(text, list(row)).render(row, problems)
    assert problems == []
    return found


def fault(text: str, row: dict[str, Any]) -> str:
    """The problem of the one field that keeps the prompt from being made."""
    problems: list[tuple[str, str, str]] = []
    assert Prompt(text, list(row)).render(row, problems) == ""
    ((field, problem, remedy),) = problems
    return f"{field}: {problem}. {remedy}"


def test_a_prompt_may_loop_and_ask() -> None:
    prompt = (
        "{% for turn in turns %}- {{ turn }}\n{% endfor %}{% if hint %}({{ hint }}){% endif %}:"
    )
    found = [filled(prompt, {"turns": ["A\r\nB", "C"], "hint": h}) for h in (None, "", "look")]
    plain = "- A\nB\n- C\n"
    assert found == [f"{plain}:", f"{plain}:", f"{plain}(look):"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("Q: {{ question }}", "{{ question }}, which is no column; the columns are: q, good, bad"),
        (
            "Q: {q} {{ good }}",
            "prompt has {q}; a column is written in two pairs of braces: {{ q }}",
        ),
        ("{{ q", "prompt: line 1"),
        (None, "prompt is None, not text"),
        ('{{ row["hnt"] }}:', "{{ hnt }}, which is no column"),
    ],
)
def test_a_faulty_template_is_an_error(prompt: Any, message: str) -> None:
    with pytest.raises(DatasetError) as error:
        Prompt(prompt, list(ROW))
    assert message in str(error.value)


@pytest.mark.parametrize("prompt", ["{{ q.__class__.__mro__ }}", "{{ q.nothing }}"])
def test_what_cannot_be_filled_in_is_a_problem_of_the_item(prompt: str) -> None:
    assert fault(prompt, ROW).startswith("prompt: cannot be filled in (")


@pytest.mark.parametrize("empty", ["", None, []])
@pytest.mark.parametrize("column", ["q", "my q"])
def test_an_empty_column_is_a_problem_unless_it_is_asked_for(column: str, empty: Any) -> None:
    place, row = written(column), {column: empty, "other": "x"}
    message = f"{column}: is empty, and the prompt needs it. Fill it in, or write "
    assert fault(f"{{{{ other }}}} {{{{ {place} }}}}", row) == (
        f"{message}{{% if {place} %}}...{{% endif %}} in the prompt"
    )
    assert filled(f"{{{{ other }}}}{{% if {place} %}} {{{{ {place} }}}}{{% endif %}}", row) == "x"


def test_an_item_that_has_a_problem_already_gets_no_prompt() -> None:
    problems = [("good", "is empty", "Fill it in")]
    assert Prompt("{{ q }}", list(ROW)).render(ROW, problems) == ""
    assert len(problems) == 1


def test_a_prompt_without_columns_is_allowed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    assert filled("A:", ROW) == "A:"
    assert "the prompt names no column" in caplog.text


@pytest.mark.parametrize(
    "asks",
    [
        '{% if row["hint"] %} ({{ row["hint"] }}){% endif %}',
        '{{ row["hint"] if row["hint"] }}',
        '{{ row["hint"] or "" }}',
        '{{ row["hint"] | default("", true) }}',
        "{{ hint | d('', true) | upper }}",
    ],
)
def test_a_lookup_may_be_asked_for(asks: str) -> None:
    assert filled(f"Q: {{{{ q }}}}{asks}:", ROW | {"hint": ""}) == "Q: Why?:"


def test_a_template_may_have_a_row_of_its_own() -> None:
    table = [{"year": 1, "text": "a"}, {"year": 2, "text": "b"}]
    prompt = "{% for row in table %}{{ row.year }}: {{ row.text }};{% endfor %}"
    assert filled(prompt, ROW | {"table": table}) == "1: a;2: b;"
    assert filled("The {{ row }}:", ROW | {"row": "third"}) == "The third:"
    assert fault("The {{ row }}:", ROW | {"row": ""}).startswith("row: is empty, and the prompt")
