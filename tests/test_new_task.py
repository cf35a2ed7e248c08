"""`hyprank new`: from a data file to a task that runs."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval._cli import HarnessCLI
from lm_eval.tasks import TaskManager

from lm_eval_hyprank import cli, new_task, task_files, token_file
from lm_eval_hyprank.datasets import rows
from lm_eval_hyprank.tasks import ranking_dataset
from tests import tiny
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")


def write(path: Path, values: list[dict[str, Any]]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, values[0])
            writer.writeheader()
            writer.writerows(values)
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in values), encoding="utf-8")
    return path


def twenty_rows() -> list[dict[str, Any]]:
    """What a stranger may have: names with spaces, braces, quotes, numbers as ids, gaps."""
    return [
        {
            "Nr": f"{n:03}",
            "Topic": ["sea", "deep sky"][n % 2],
            "The question": f'What is "{n}" plus one, and is {{{{ x }}}} {{% y %}} a number?',
            "Right answer": f"It is {n + 1}.",
            "Wrong answer 1": f"It is {n + 2}, I believe.",
            "Wrong answer 2": "" if n % 3 else f"Nobody knows {n}.",
            "Year": 1990 + n,
        }
        for n in range(20)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.llama(max_position_embeddings=512).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def command(out: str) -> list[str]:
    """The next command that was printed."""
    (line,) = [line for line in out.splitlines() if line.startswith("    lm_eval run ")]
    return shlex.split(line)


def test_from_a_csv_to_a_ranked_table_by_what_is_printed(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write(tmp_path / "my data.csv", twenty_rows())
    before = data.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "mine", "--data", "my data.csv"]) == 0
    out = capsys.readouterr().out
    assert "20 items with 2 to 3 candidates each." in out
    # 7 of the 20 have three candidates.
    assert f"hit@1 {(7 / 3 + 13 / 2) / 20:.4f}" in out
    assert '  | The question: What is "0" plus one, and is {{ x }} {% y %} a number?' in out
    assert "  | Right answer:" in out
    for line in (
        "gold:        Right answer (guessed)",
        "negatives:   Wrong answer 1, Wrong answer 2 (guessed)",
        "id:          Nr (guessed)",
        "group:       Topic (guessed)",
    ):
        assert line in out

    words = [word.replace("MODEL", f"{model},dtype=float32") for word in command(out)]
    monkeypatch.setattr("sys.argv", [*words, "--device", "cpu"])
    harness = HarnessCLI()
    options = harness.parse_args()
    assert options.batch_size == "auto"
    results = lm_eval.simple_evaluate(
        model=options.model,
        model_args=options.model_args,
        tasks=options.tasks,
        device="cpu",
        bootstrap_iters=10,
        task_manager=TaskManager(include_path=options.include_path, include_defaults=False),
    )
    row = results["results"]["mine"]
    assert row["sample_len"] == 20
    assert row["hit@1,chance"] == pytest.approx((7 / 3 + 13 / 2) / 20)
    assert row["win_rate,chance"] == 0.5
    for scorer in ("nll", "raw", "logz", "nll_sum", "raw_sum", "shortest"):
        assert row[f"invalid,{scorer}"] == 0
        assert 0 <= row[f"hit@1,{scorer}"] <= 1
    sample = results["samples"]["mine"][0]
    assert (
        '"0" plus one, and is {{ x }} {% y %} a number?\nRight answer' in sample["arguments"][0][0]
    )
    assert data.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hyprank_tasks", "my data.csv"]


def test_a_task_for_each_group(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "d.csv", twenty_rows())
    folder = tmp_path / "tasks"
    arguments = ["new", "mine", "--data", str(data), "--output", str(folder), "--per-group"]
    assert cli.main(arguments) == 0
    assert "--tasks mine_by_group" in capsys.readouterr().out
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=["mine_by_group"],
        device="cpu",
        bootstrap_iters=10,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    rows_of = results["results"]
    assert [rows_of[f"mine_{name}"]["sample_len"] for name in ("sea", "deep_sky")] == [10, 10]
    groups = {s["doc"]["discipline"] for s in results["samples"]["mine_deep_sky"]}
    assert groups == {"deep sky"}
    whole = results["groups"]["mine_by_group"]
    for metric in ("hit@1", "mrr", "win_rate", "invalid"):
        both = [rows_of[f"mine_{name}"][f"{metric},nll"] for name in ("sea", "deep_sky")]
        assert whole[f"{metric},nll"] == pytest.approx(sum(both) / 2)


def test_groups_of_any_script_have_tasks_with_plain_names_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {
        "a b": "mine_a_b",
        "a_b": "mine_a_b_2",
        "by group": "mine_by_group_2",
        "okologie": "mine_okologie",
        "Ökologie": "mine_okologie_2",
        "Énergie (renouvelable)": "mine_energie_renouvelable",
        "??": "mine_group",
        "中文": "mine_group_2",
        "日本": "mine_group_3",
    }
    values = [
        {"question": f"q{n}", "topic": group, "gold": "x", "wrong": "y"}
        for n in range(2)
        for group in reversed(named)
    ]
    data, folder = write(tmp_path / "d.csv", values), tmp_path / "tasks"
    arguments = ["new", "mine", "--data", str(data), "--output", str(folder), "--per-group"]
    assert cli.main(arguments) == 0
    names = {"mine", "mine_by_group", *named.values()}
    assert {path.name for path in folder.iterdir()} == {f"{name}.yaml" for name in names}
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    tasks = manager.load(["mine_by_group"])["tasks"]
    assert {name: set(task.eval_docs["discipline"]) for name, task in tasks.items()} == {
        name: {group} for group, name in named.items()
    }
    assert {token_file.folder_for(str(tmp_path), name).name for name in names} == names


FILLER = {"question": "Why?", "source": "a book"}


@pytest.mark.parametrize(
    ("values", "guessed"),
    [
        ([{"gold": "a", "negatives": ["b", "c"]}], {"gold": "gold", "negatives": "negatives"}),
        (
            [{"gold_hypothesis": "a", "fake_1": "b", "fake_2": "c"}],
            {"gold": "gold_hypothesis", "negatives": ["fake_1", "fake_2"]},
        ),
        (
            [{"response": "a", "distractors": ["b"]}],
            {"gold": "response", "negatives": "distractors"},
        ),
        ([{"chosen": "a", "rejected": "b"}], {"gold": "chosen", "negatives": "rejected"}),
        ([{"choices": ["a", "b"], "answer": 1}], {"candidates": "choices", "gold_index": "answer"}),
        ([{"endings": ["a", "b"], "label": "1"}], {"candidates": "endings", "gold_index": "label"}),
        ([{"options": ["a", "b"], "answer": "b"}], {"candidates": "options", "gold": "answer"}),
        (
            [{"qid": "x", "candidate": text, "label": text == "a"} for text in "ab"],
            {"id": "qid", "candidate": "candidate", "label": "label"},
        ),
        (
            [{"item_id": 7, "text": t, "anna": "", "rank_a": 1, "rank_b": 2} for t in "ab"],
            {"id": "item_id", "candidate": "text", "experts": ["rank_a", "rank_b"]},
        ),
        (
            [{"peptide": p, "description": t, "correct": t[0]} for p in "ab" for t in ("1x", "0y")],
            {"id": "peptide", "candidate": "description", "label": "correct"},
        ),
        (
            [{"id": 7, "answer": t, "relevance": g} for t, g in (("a", 0), ("b", 2))],
            {"id": "id", "candidate": "answer", "relevance": "relevance"},
        ),
        (
            [{"responses": ["a", "b"], "grade": [1, 0]}],
            {"candidates": "responses", "relevance": "grade"},
        ),
        (
            [{"paper_id": f"p{n}", "gold": "a", "wrong": "b", "field": "x" * n} for n in (1, 2, 2)],
            {"gold": "gold", "negatives": "wrong", "group": "field"},
        ),
        (
            [{"paper_id": f"p{n}", "gold": "a", "wrong": "b"} for n in (1, 2)],
            {"id": "paper_id", "gold": "gold", "negatives": "wrong"},
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_columns_are_guessed_from_names_and_values(
    values: list[dict[str, Any]], guessed: dict[str, Any], suffix: str, tmp_path: Path
) -> None:
    if suffix == ".csv":
        values = [
            {k: json.dumps(v) if isinstance(v, list) else v for k, v in one.items()}
            for one in values
        ]
    path = write(tmp_path / f"data{suffix}", [FILLER | one for one in values])
    table = rows.read(str(path))
    columns = new_task.guess(table, {})
    assert columns == guessed
    prompt = new_task.guess_prompt(table, columns)
    assert prompt.startswith("Question: {{ question }}\n")
    assert "source" not in prompt
    # What was guessed is complete: the data loads by it.
    assert len(ranking_dataset(data=str(path), prompt=prompt, **columns)["test"]) >= 1


@pytest.mark.parametrize(
    ("values", "prompt"),
    [
        (
            {"turns": ["a", "b"], "hint": "c"},
            "Turns: {{ turns | join('\\n') }}\nGold:",
        ),
        (
            {"first part": "a", "p_2": "b"},
            'First part: {{ row["first part"] }}\nP 2: {{ p_2 }}\nGold:',
        ),
        ({"question": "", "number": 5}, None),
        # What may be another gold would give the answer away.
        ({"claim": "a", "correct answers": "b"}, "Claim: {{ claim }}\nGold:"),
        ({"response": "a", "distractor": "b"}, None),
    ],
)
def test_a_prompt_is_made_of_what_is_left(
    values: dict[str, Any], prompt: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "data.jsonl", [{**values, "gold": "x", "wrong": "y"}])
    table = rows.read(str(path))
    if prompt is None:
        said = r"but such as may hold an answer \(response\)" if "response" in values else "; write"
        with pytest.raises(ValueError, match=f"No column is left for a prompt.*{said}"):
            new_task.guess_prompt(table, new_task.guess(table, {}))
    else:
        assert new_task.guess_prompt(table, new_task.guess(table, {})) == prompt


@pytest.mark.parametrize(
    ("suffix", "empty"), [(".csv", ""), (".jsonl", ""), (".jsonl", None), (".jsonl", math.nan)]
)
def test_a_column_that_is_empty_at_times_is_asked_for(
    suffix: str, empty: Any, tmp_path: Path
) -> None:
    values = [{"question": "a", "context": c, "gold": "x", "wrong": "y"} for c in (empty, "c")]
    path = write(tmp_path / f"data{suffix}", values)
    table = rows.read(str(path))
    columns = new_task.guess(table, {})
    prompt = new_task.guess_prompt(table, columns)
    found = ranking_dataset(data=str(path), prompt=prompt, **columns)["test"]["context"]
    assert list(found) == ["Question: a\nGold:", "Question: a\nContext: c\nGold:"]


def test_a_column_that_is_often_empty_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [
        {"question": "a", "context": "c" * (n > 1), "gold": "x", "wrong": "y"} for n in range(4)
    ]
    data = write(tmp_path / "d.csv", values)
    assert cli.main(["new", "n", "--data", str(data), "--output", str(tmp_path)]) == 0
    assert "context is empty in 2 of 4 rows; the prompt leaves it out" in capsys.readouterr().out


@pytest.mark.parametrize(("rest", "items"), [({"context": "c"}, 6), ({}, 2)])
def test_an_empty_cell_is_a_fault_of_its_row_that_can_be_skipped(
    rest: dict[str, str], items: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of six questions is forgotten; or one of two where it is all of the prompt."""
    values = [{"question": "a", "gold": "x", "wrong": "y", **rest} for _ in range(items)]
    values[1]["question"] = ""
    data = write(tmp_path / "d.csv", values)
    folder = tmp_path / "tasks"
    arguments = ["new", "n", "--data", str(data), "--output", str(folder)]
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert "d.csv:3 3 question: is empty, and the prompt needs it" in err
    assert err.endswith("`--skip-invalid` leaves the named items out.\n")
    assert not folder.exists()
    assert cli.main([*arguments, "--skip-invalid"]) == 0
    assert f"{items - 1} items with 2 candidates each." in capsys.readouterr().out
    task = yaml.safe_load((folder / "n.yaml").read_text(encoding="utf-8"))
    assert "{% if" not in task["dataset_kwargs"]["prompt"]
    assert len(ranking_dataset(**task["dataset_kwargs"])["test"]) == items - 1


def test_a_repeated_id_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [{"nr": n, "question": "a", "gold": "x", "wrong": "y"} for n in (1, 4, 2, 4)]
    data = write(tmp_path / "d.csv", values)
    assert cli.main(["new", "n", "--data", str(data), "--output", str(tmp_path)]) == 0
    line = "nr would be the id, but '4' occurs in rows 3 and 5: the row's number is the id instead."
    assert line in capsys.readouterr().out
    kwargs = yaml.safe_load((tmp_path / "n.yaml").read_text(encoding="utf-8"))["dataset_kwargs"]
    assert "id" not in kwargs


def test_a_list_of_candidates_does_not_end_the_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"question": "a", "choices": ["x", "y"], "label": 0}])
    table = rows.read(str(path))
    prompt = new_task.guess_prompt(table, new_task.guess(table, {}))
    assert prompt == "Question: {{ question }}\nAnswer:"


@pytest.fixture
def documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text of docs/any_dataset.md, in a working directory that holds its data file."""
    text = (ROOT / "docs" / "any_dataset.md").read_text(encoding="utf-8")
    (data,) = re.findall(r"```csv\n(.*?)```", text, re.DOTALL)
    (tmp_path / "capitals.csv").write_text(data, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return text


def test_the_commands_of_the_documentation_work(documentation: str, tmp_path: Path) -> None:
    commands = re.findall(r"^hyprank (new (?:.*\\\n)*.*)$", documentation, re.MULTILINE)
    assert len(commands) == 2
    for one in commands:
        assert cli.main(shlex.split(one.replace("\\\n", ""))) == 0
    assert len([*(tmp_path / "hyprank_tasks").iterdir()]) == 2


def test_the_tasks_of_the_documentation_have_the_items_it_says(
    documentation: str, tmp_path: Path
) -> None:
    templates = (task_files.folder() / "templates").as_posix()
    for block in re.findall(r"```yaml\n(.*?)```", documentation, re.DOTALL):
        if (name := yaml.safe_load(block)["task"]).startswith("capitals"):
            task = block.replace("/path/to/templates", templates)
            (tmp_path / f"{name}.yaml").write_text(task, encoding="utf-8")
    # Included, the template leaves alone what the task says of itself.
    (tmp_path / "both.yaml").write_text(
        f"include: [capitals_europe.yaml, {templates}/embedding.yaml]\n"
        "task: capitals_europe_embedding\n",
        encoding="utf-8",
    )
    groups = {
        "capitals": {"Europe", "Africa"},
        "capitals_embedding": {"Europe", "Africa"},
        "capitals_europe": {"Europe"},
        "capitals_europe_embedding": {"Europe"},
    }
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = manager.load(list(groups))["tasks"]
    assert {name: set(task.eval_docs["discipline"]) for name, task in found.items()} == groups


def test_what_is_stated_is_not_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [{"x": "say", "gold": "no", "y": "a", "z 1": "b", "z 2": "c"}]
    data = write(tmp_path / "d.csv", values)
    stated = ["--gold", "y", "--negatives", "z 1", "z 2", "--prompt", "{{ x }}\\nThen:"]
    assert cli.main(["new", "n", "--data", str(data), "--output", str(tmp_path), *stated]) == 0
    assert "y (as you said)" in capsys.readouterr().out
    task = yaml.safe_load((tmp_path / "n.yaml").read_text(encoding="utf-8"))
    assert Path(task["include"]).is_file()
    assert task["dataset_kwargs"] == {
        "data": data.as_posix(),
        "gold": "y",
        "negatives": ["z 1", "z 2"],
        "prompt": "{{ x }}\nThen:",
        "separator": " ",
    }


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        ([{"a": "x", "b": "y"}], [], "It cannot be told from the columns"),
        ([{"gold": "x", "wrong": "x", "question": "q"}], [], "wrong: is the same text as gold"),
        ([{"gold": "x", "wrong": "y", "question": "q"}], ["--per-group"], "add --group COLUMN"),
        (
            [{"gold": "x", "wrong": "y", "question": "q"}],
            ["--id", "k"],
            "id is 'k', which is no col",
        ),
    ],
)
def test_nothing_is_written_where_something_is_wrong(
    values: list[dict[str, Any]],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write(tmp_path / "d.csv", values)
    folder = tmp_path / "tasks"
    assert cli.main(["new", "n", "--data", str(data), "--output", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_names_and_files_in_the_way_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "d.csv", twenty_rows())
    assert cli.main(["new", "a b", "--data", str(data), "--output", str(tmp_path)]) == 2
    assert "other characters than" in capsys.readouterr().err
    for name in ("hellaswag", "mmlu", "hyprank_demo_energy"):
        assert cli.main(["new", name, "--data", str(data), "--output", str(tmp_path)]) == 2
        assert f"{name!r} already; choose another NAME" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [data]
    (tmp_path / "n.yaml").write_text("mine", encoding="utf-8")
    assert cli.main(["new", "n", "--data", str(data), "--output", str(tmp_path)]) == 2
    assert "n.yaml exists; choose another NAME" in capsys.readouterr().err
    assert (tmp_path / "n.yaml").read_text(encoding="utf-8") == "mine"


def test_run_tells_of_faulty_data_before_it_loads_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = twenty_rows()
    data = write(tmp_path / "d.csv", values)
    folder = str(tmp_path / "tasks")
    assert cli.main(["new", "mine", "--data", str(data), "--output", folder]) == 0
    values[4]["Right answer"] = ""
    write(data, values)
    run = ["run", "--model", "hf", "--model_args", "pretrained=no/model", "--tasks", "mine"]
    assert cli.main([*run, "--include_path", folder]) == 2
    assert "d.csv:6 004 Right answer: is empty. Fill it in" in capsys.readouterr().err


def test_the_worked_examples_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=["dialogue_response", "protein_text", "protein_curators"],
        device="cpu",
        bootstrap_iters=10,
        task_manager=TaskManager(include_path="docs/examples", include_defaults=False),
    )["results"]
    assert results["dialogue_response"]["sample_len"] == 12
    assert results["dialogue_response"]["win_rate,chance"] == 0.5
    assert results["protein_text"]["sample_len"] == 6
    agreement = results["protein_curators"]
    for metric in ("kendall_tau", "spearman", "top1", "ndcg@5", "ndcg@10"):
        assert -1 <= agreement[f"{metric},nll"] <= 1
    for metric in ("expert_kendall_tau", "kendall_w", "krippendorff_alpha"):
        assert agreement[f"{metric},nll"] == agreement[f"{metric},raw"] > 0.5
    # A scorer that says nothing has no correlation, rather than one of 0.
    assert "kendall_tau,chance" not in agreement
