from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval._cli import HarnessCLI

import lm_eval_hyprank
from lm_eval_hyprank import cli
from lm_eval_hyprank.datasets.findings import DatasetError
from lm_eval_hyprank.datasets.validation import PAPERS_FILE, RANKING_FILE

Rows = list[dict[str, Any]]
Write = Callable[[Rows, Rows], Path]

REPOSITORY = Path(lm_eval_hyprank.__path__[0]).parent
TASK_CONFIGS = REPOSITORY / "task_configs"
ESCAPE = "\x1b"


def words(text: str) -> str:
    """The text without line breaks and table spacing."""
    return " ".join(text.split())


# --- validate -------------------------------------------------------------------------------


def test_validate_describes_the_data(
    write_folder: Write,
    ranking_rows: Rows,
    paper_rows: Rows,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranking_rows[1]["doi"] = ranking_rows[0]["doi"]
    ranking_rows[2]["doi"] = ""
    ranking_rows[3]["gold_hypothesis"] = "The study holds."
    folder = write_folder(ranking_rows, paper_rows)
    assert cli.main(["validate", str(folder)]) == 0
    out = capsys.readouterr().out
    first, *lines = out.splitlines()
    assert first == f"Data: {folder}"
    assert lines[0] == "No problems found in 12 papers."
    assert ESCAPE not in out
    assert max(map(len, lines)) <= 80
    shown = words(out)
    for fact in [
        "Cell Biology 1",
        "usable papers (rows) 12",
        "distinct DOIs 10",
        "rows that share their DOI with another row 2",
        "rows without a DOI 1",
        # Rows 0 to 9 have golds of 13 characters, fakes of 15 and models of 16; row 3's gold has
        # 16; in rows 10 and 11 every text is longer by one.
        "characters of a negative / of its gold, median 1.22",
        "negatives more than 1.33 times as long as the gold 0.00%",
        "gold is the shortest of the 16 (by chance 6.25%) 91.67%",
        "gold is the longest of the 16 (by chance 6.25%) 0.76%",
        'golds that say "the paper", "the authors", "the study" 8.33%',
    ]:
        assert fact in shown


def test_validate_shows_every_finding(
    write_folder: Write,
    ranking_rows: Rows,
    paper_rows: Rows,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for row in ranking_rows[:11]:
        row["gold_hypothesis"] = ""
    ranking_rows[0]["discipline"] = "[bold]x[/bold] :smile: [/]"
    paper_rows[11]["background_survey"] = 5
    folder = write_folder(ranking_rows, paper_rows).rename(tmp_path / "[bold]:smile:")
    assert cli.main(["validate", str(folder)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"Data: {folder}\n")
    shown = words(out)
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert ESCAPE not in out
    assert out.index(RANKING_FILE) < out.index(PAPERS_FILE)
    for number, row in enumerate(ranking_rows[:11], start=1):
        assert f" {number} {row['sample_id']} " in shown
    assert shown.count("Fill it in, or take the") == 11
    assert "[bold]x[/bold] :smile: [/]" in shown
    assert "12 Physics/1011 is a number, not text. background_survey Write it as a JSON" in shown
    assert "13 problem(s) found, 0 papers are without one." in shown
    assert "Papers per discipline" not in out


def test_validate_without_folder_asks_the_hub(
    valid_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def locate(path: None, revision: str | None) -> Path:
        asked.append((path, revision))
        return valid_folder

    monkeypatch.setattr(cli, "locate", locate)
    assert cli.main(["validate"]) == 0
    assert cli.main(["validate", "--revision", "v1"]) == 0
    assert asked == [(None, None), (None, "v1")]
    assert f"Data: {valid_folder}" in capsys.readouterr().out


def test_validate_without_the_hub(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def locate(path: None, revision: str | None) -> Path:
        raise DatasetError("It is gated.\nAsk [politely].")

    monkeypatch.setattr(cli, "locate", locate)
    assert cli.main(["validate"]) == 2
    assert capsys.readouterr() == ("", "It is gated.\nAsk [politely].\n")


def test_validate_takes_folder_or_revision(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "DIR", "--revision", "v1"]) == 2
    assert "leave it out" in capsys.readouterr().err


def test_validate_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"{tmp_path / 'none'}: does not exist. Point to the folder that holds")


def test_validate_in_a_pipe_of_a_plain_locale(
    write_folder: Write, ranking_rows: Rows, paper_rows: Rows
) -> None:
    """Nothing outside ASCII can be written there; the command must not break over it."""
    ranking_rows[0]["sample_id"] = "Math/\u03b1\u6f22"
    folder = write_folder(ranking_rows, paper_rows)
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "PYTHON"))}
    variables |= {"PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval_hyprank.cli", "validate", str(folder)],
        env=variables,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == b""
    assert rb"Math/\u03b1\u6f22" in done.stdout
    assert done.stdout.isascii()


def test_validate_real_data(researchbench_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", str(researchbench_dir)]) == 0
    shown = words(capsys.readouterr().out)
    rows = (researchbench_dir / RANKING_FILE).read_text(encoding="utf-8").splitlines()
    disciplines = Counter(json.loads(row)["discipline"] for row in rows)
    assert f"No problems found in {len(rows)} papers." in shown
    for discipline, count in disciplines.items():
        assert f"{discipline} {count}" in shown


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = words(capsys.readouterr().err)
    for text in (
        "usage: hyprank",
        "validate check a ResearchBench",
        "cost say how",
        "run `lm_eval",
    ):
        assert text in shown


@pytest.mark.parametrize("arguments", [["bogus"], ["validate", "--bogus"]])
def test_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: hyprank" in capsys.readouterr().err


# --- doctor ---------------------------------------------------------------------------------


def test_doctor_finds_the_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_finds_task", lambda folder: folder is None)
    assert cli.main(["doctor"]) == 0
    shown = words(capsys.readouterr().out)
    assert f"lm_eval is in {Path(lm_eval.__file__).parent}" in shown
    for package in ("lm_eval", "torch", "transformers", "lm_eval_hyprank"):
        assert f"{package} {cli._version(package)} " in shown
    assert "`lm_eval --tasks researchbench_energy` works" in shown


def test_doctor_names_the_include_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_finds_task", lambda folder: folder is not None)
    assert cli.main(["doctor"]) == 1
    assert f"    --include_path {TASK_CONFIGS}\n" in capsys.readouterr().out


def test_doctor_without_task_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_finds_task", lambda folder: False)
    assert cli.main(["doctor"]) == 1
    assert "install this package again" in capsys.readouterr().out


def test_doctor_sees_that_our_task_folder_hides_lm_eval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shadow = types.ModuleType("lm_eval")
    shadow.__path__ = ["/site-packages/lm_eval"]
    shadow.__file__ = None
    monkeypatch.setitem(sys.modules, "lm_eval", shadow)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "/site-packages/lm_eval hides the real lm_eval" in out
    assert "editable_mode=compat" in out


def test_task_is_found_in_the_clone(tmp_path: Path) -> None:
    assert cli._finds_task(TASK_CONFIGS)
    assert not cli._finds_task(tmp_path)


# --- run ------------------------------------------------------------------------------------


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """What lm-eval was asked to run; nothing is run."""
    runs: list[argparse.Namespace] = []
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, options: runs.append(options))
    return runs


def run(task: str, folder: Path, *more: str) -> int:
    options = {
        "--model": "hf-energy",
        "--model_args": "pretrained=none,dtype=float32",
        "--tasks": task,
        "--include_path": str(TASK_CONFIGS),
        "--metadata": json.dumps({"dataset_path": str(folder)}),
    }
    return cli.main(["run", *(word for option in options.items() for word in option), *more])


OUR_TASKS = [
    "researchbench_energy",
    "researchbench_energy_by_discipline",
    "researchbench_energy_physics",
    "researchbench_energy_phys*",
    "arc_easy,researchbench_energy",
]


@pytest.mark.parametrize("task", OUR_TASKS)
def test_run_checks_the_data_before_anything_else(
    task: str,
    write_folder: Write,
    ranking_rows: Rows,
    paper_rows: Rows,
    executed: list[argparse.Namespace],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranking_rows[2]["gold_hypothesis"] = ""
    folder = write_folder(ranking_rows, paper_rows)
    assert run(task, folder) == 2
    assert executed == []
    out, err = capsys.readouterr()
    assert out == ""
    assert "ranking/ranking.jsonl:3 Business/102 gold_hypothesis: is empty." in err
    assert "Traceback" not in err


@pytest.mark.parametrize("task", OUR_TASKS)
def test_run_hands_good_data_to_lm_eval(
    task: str, valid_folder: Path, executed: list[argparse.Namespace]
) -> None:
    before = list(sys.argv)
    assert run(task, valid_folder, "--limit", "3") == 0
    assert sys.argv == before
    assert len(executed) == 1
    assert executed[0].tasks == task.split(",")
    assert executed[0].model == "hf-energy"
    assert executed[0].model_args == {"pretrained": "none", "dtype": "float32"}
    assert executed[0].metadata == {"dataset_path": str(valid_folder)}
    assert executed[0].limit == 3


def test_run_leaves_other_tasks_alone(tmp_path: Path, executed: list[argparse.Namespace]) -> None:
    assert run("arc_easy", tmp_path / "none") == 0
    assert len(executed) == 1


def test_run_reads_the_config_file(
    tmp_path: Path, executed: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "tasks: researchbench_energy\n"
        f"include_path: {TASK_CONFIGS}\n"
        f"metadata: {{dataset_path: {tmp_path / 'none'}}}\n",
        encoding="utf-8",
    )
    assert cli.main(["run", "--config", str(config)]) == 2
    assert executed == []
    assert f"{tmp_path / 'none'}: does not exist" in capsys.readouterr().err


def test_run_shows_an_error_in_the_run_as_a_message(
    valid_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(self: HarnessCLI, options: argparse.Namespace) -> None:
        raise DatasetError("The data went away.")

    monkeypatch.setattr(HarnessCLI, "execute", execute)
    assert run("researchbench_energy", valid_folder) == 2
    assert capsys.readouterr().err.endswith("The data went away.\n")


def test_run_knows_our_models(valid_folder: Path, executed: list[argparse.Namespace]) -> None:
    from lm_eval.api.registry import get_model

    assert run("researchbench_energy", valid_folder) == 0
    assert get_model("hf-energy").__name__ == "EnergyHFLM"


@pytest.mark.parametrize("path", ["taken", "taken/deeper", "taken/results.json"])
def test_an_output_path_that_cannot_be_written_is_refused_before_the_run(
    path: str,
    tmp_path: Path,
    valid_folder: Path,
    executed: list[argparse.Namespace],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    output = str(tmp_path / path)
    assert run("researchbench_energy", valid_folder, "--output_path", output) == 2
    assert executed == []
    assert f"--output_path {output}: results cannot be written there" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out/deep", "out/[1].json"])
def test_results_that_were_not_written_are_no_success(
    name: str, tmp_path: Path, valid_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / name
    written = tmp_path / "out" / ("[1]_2026.json" if output.suffix else "deep/m/results_1.json")

    def execute(self: HarnessCLI, options: argparse.Namespace) -> None:
        if next(turns):
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text("{}", encoding="utf-8")

    turns = iter([False, True, False, False])
    monkeypatch.setattr(HarnessCLI, "execute", execute)
    for code in (1, 0, 1):
        task = "researchbench_energy"
        assert run(task, valid_folder, "--output_path", str(output)) == code
    monkeypatch.setenv("RANK", "1")  # another process writes
    assert run("researchbench_energy", valid_folder, "--output_path", str(output)) == 0


def test_our_tasks_are_found_in_groups_and_tags(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    # The folder's name must not make a foreign task ours.
    folder = tmp_path / "lm_eval_hyprank.x"
    folder.mkdir()
    for name, text in {
        "ours": "task: ours\ntag: [tagged]\ncustom_dataset: !function lm_eval_hyprank.tasks.load",
        "other": "task: other\ntag: [tagged]\ncustom_dataset: !function utils.load",
        "plain": "task: plain\ndataset_path: some/where",
        "group": "group: all\ntask: [other, {task: ours}, {group: inner, task: [plain]}]",
        "outer": "group: outer\ntask: [{group: all}, missing]",
        "none": "group: none\ntask: [other, plain]",
    }.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    index = TaskManager(include_path=folder, include_defaults=False).task_index
    for name, expected in {
        "ours": {"ours"},
        "other": set(),
        "tagged": {"ours"},
        "all": {"ours"},
        "outer": {"ours"},
        "none": set(),
        "missing": set(),
    }.items():
        assert cli._our_tasks([name], index) == expected
