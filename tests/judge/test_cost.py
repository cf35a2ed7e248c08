import json

import pytest

from lm_eval_hyprank import cli, task_files, tasks
from lm_eval_hyprank.judge.prompts import render, views
from tests import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.demo_tokenizer().save_pretrained(folder)
    return str(folder)


def table(text):
    return {
        words[0]: [int(word.replace(",", "")) for word in words[1:]]
        for line in text.splitlines()
        if (words := line.split()) and words[0].startswith("hyprank_demo")
    }


def test_requests_and_tokens_are_counted(tokenizer, capsys):
    names = ["hyprank_demo_judge", "hyprank_demo_judge_psc", "hyprank_demo_pairwise"]
    options = ["--limit", "2", "--max_gen_toks", "100"]
    assert cli.main(["cost", *names, "--tokenizer", tokenizer, *options]) == 0
    found = table(capsys.readouterr().out)
    encode = tiny.demo_tokenizer().encode
    loaders = (tasks.judge, tasks.judge_psc, tasks.judge_pairwise)
    for name, load in zip(names, loaders, strict=True):
        docs = list(load(demo=True)["test"])[:2]
        sizes = [len(encode(render(v))) for doc in docs for v in views(doc) or [doc]]
        assert found[name] == [len(sizes), sum(sizes), max(sizes), 100 * len(sizes)]
    assert [found[name][0] for name in names] == [2, 10, 60]


def test_a_narrow_terminal_cuts_nothing(tokenizer, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    names = ["hyprank_demo_judge_psc", "hyprank_demo_pairwise"]
    assert cli.main(["cost", *names, "--tokenizer", tokenizer, "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert {name: len(numbers) for name, numbers in table(out).items()} == dict.fromkeys(names, 4)
    assert max(map(len, out.splitlines()[:5])) < 100  # no wider than it must be


def test_the_source_tree_serves_where_lm_eval_lies_elsewhere(
    tokenizer, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(task_files, "installed", lambda: tmp_path / "none")
    command = ["cost", "hyprank_demo_judge", "--tokenizer", tokenizer, "--limit", "2"]
    assert cli.main(command) == 0
    assert table(capsys.readouterr().out)["hyprank_demo_judge"][0] == 2


def test_what_is_no_judge_is_said_before_any_data_is_read(tokenizer, capsys, tmp_path):
    metadata = json.dumps({"dataset_path": str(tmp_path / "none")})
    command = ["cost", "--tokenizer", tokenizer, "--metadata", metadata]
    assert cli.main([*command, "researchbench_energy"]) == 2
    assert capsys.readouterr().err.startswith("researchbench_energy asks no judge")
    assert cli.main([*command, "researchbench_judge"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_metadata_counts_and_the_budget_is_the_tasks_own(tokenizer, capsys):
    command = ["cost", "hyprank_demo_judge_psc", "--tokenizer", tokenizer]
    assert cli.main([*command, "--metadata", json.dumps({"num_orders": 3})]) == 0
    requests, _, _, replies = table(capsys.readouterr().out)["hyprank_demo_judge_psc"]
    assert (requests, replies) == (36, 36 * 4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hyprank_demo_judgee"], "no task hyprank_demo_judgee; a judge is asked by: "),
        (["hyprank_demo_energy"], "hyprank_demo_energy asks no judge"),
        (["hyprank_demo_judge", "--tokenizer", "nothing-5"], "no model or encoding 'nothing-5'"),
        (["hyprank_demo_judge", "--tokenizer", "./nothing"], "'./nothing' cannot be loaded"),
    ],
)
def test_what_cannot_be_counted_is_said(tokenizer, capsys, arguments, message):
    given = arguments if "--tokenizer" in arguments else [*arguments, "--tokenizer", tokenizer]
    assert cli.main(["cost", *given]) == 2
    assert message in capsys.readouterr().err
