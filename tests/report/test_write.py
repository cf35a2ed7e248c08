"""A report's files, as `hyprank report` writes them."""

import json
import os
import subprocess
import sys

import pytest

from lm_eval_hyprank.cli import main
from lm_eval_hyprank.report.write import as_json
from tests.report.run_folder import TASK, documents, samples_of, write_energy

FAST = ["--resamples", "50"]


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_everything_is_written_and_the_same_bytes_each_time(tmp_path, runs_folder, capsys):
    assert main(["report", str(runs_folder), "-o", str(tmp_path / "a" / "b"), *FAST]) == 0
    said = capsys.readouterr().out
    assert "8 papers, 3 model(s)" in said
    assert "Superseded: runs/acme__Lark-1B/results_2025-01-01T00-00-00.json" in said
    assert "no finite score for 1 paper (Physics/10001)" in said
    first = contents(tmp_path / "a" / "b")
    assert {"index.html", "report.md", "report.json"} < first.keys()
    for name in ("hits", "disciplines", "ranks", "length", "agreement"):
        assert first[f"figures/{name}.svg"].startswith(b"<?xml")
        assert first[f"figures/{name}.png"].startswith(b"\x89PNG")
        assert f"figures/{name}.svg" in first["report.md"].decode()
    assert "\n## Names\n\nScores. With z" in first["report.md"].decode()
    for name in ("overall", "disciplines", "gold_beats", "judges", "length", "controls"):
        assert {f"tables/{name}.csv", f"tables/{name}.tex"} < first.keys()
    assert any(name.startswith("export/hub/Lark-1B/.eval_results/") for name in first)
    # Another process, with another hash seed and another locale, into another folder.
    environment = os.environ | {"PYTHONHASHSEED": "7", "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "lm_eval_hyprank.cli", "report", str(runs_folder)]
    subprocess.run(
        [*command, "-o", str(tmp_path / "other"), *FAST],
        check=True,
        env=environment,
        capture_output=True,
    )
    assert contents(tmp_path / "other") == first


@pytest.mark.parametrize("option", [["--seed", "-1"], ["--resamples", "0"], ["--seed", "x"]])
def test_numbers_that_cannot_be_are_refused_before_anything_is_read(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "none"), "-o", str(tmp_path / "out"), *option])
    assert f"argument {option[0]}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_seed_changes_intervals_and_no_value(tmp_path):
    write_energy(tmp_path / "runs")
    reports = []
    for seed in ("0", "1"):
        out = tmp_path / seed
        assert main(["report", str(tmp_path / "runs"), "-o", str(out), *FAST, "--seed", seed]) == 0
        reports.append(json.loads((out / "report.json").read_bytes()))
    one, other = (report["systems"][0]["metrics"]["mrr"] for report in reports)
    assert one["value"] == other["value"]
    assert (one["low"], one["high"]) != (other["low"], other["high"])


def test_report_json_has_a_line_for_each_paper_and_system(report, tmp_path):
    text = as_json(report)
    assert json.loads(text) == json.loads(json.dumps(report))
    lines = [line.removesuffix(",") for line in text.splitlines()]
    for key in ("papers", "systems", "comparisons"):
        start = lines.index(f'"{key}": [') + 1
        end = start + len(report[key])
        assert [json.loads(line) for line in lines[start:end]] == report[key]
        assert lines[end] == "]"
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"a": float("nan")})


def test_bca_intervals_on_request(tmp_path):
    write_energy(tmp_path / "runs")
    arguments = ["report", str(tmp_path / "runs"), "-o", str(tmp_path / "out")]
    assert main([*arguments, *FAST, "--interval", "bca"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert report["settings"]["interval"] == "bca"
    assert "bca bootstrap" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_no_text_leaves_no_text_in_any_file(tmp_path):
    write_energy(tmp_path / "runs")
    arguments = ["report", str(tmp_path / "runs"), "-o", str(tmp_path / "out"), *FAST]
    assert main([*arguments, "--no-text"]) == 0
    for name, content in contents(tmp_path / "out").items():
        for doc in documents():
            assert doc["title"].encode() not in content, name
        assert b"holds holds" not in content, name
        assert b"Survey" not in content, name


@pytest.mark.slow
def test_a_report_is_replaced_whole(tmp_path):
    write_energy(tmp_path / "one" / "runs")
    write_energy(tmp_path / "one" / "runs", "acme/Lark-3B")
    out = str(tmp_path / "out")
    assert main(["report", str(tmp_path / "one"), "-o", out, *FAST]) == 0
    assert (tmp_path / "out" / "figures" / "agreement.svg").is_file()
    write_energy(tmp_path / "two")
    assert main(["report", str(tmp_path / "two"), "-o", out, *FAST]) == 0
    assert not (tmp_path / "out" / "figures" / "agreement.svg").exists()


def test_a_folder_of_other_things_is_left_alone(tmp_path, capsys):
    write_energy(tmp_path / "runs")
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "figures" / "mine.png").touch()
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "out")]) == 2
    assert "holds files that are no report" in capsys.readouterr().err
    assert (tmp_path / "out" / "figures" / "mine.png").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b"null",
        b'{"version": 1, "results": []}',
        b'{"schema_version": "2.0", "suites": []}',  # another program's
        b'{"schema_version": "1.0", "paper_set": {"papers"',  # cut off
        b"\xff\xfe{}",
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_report_json_of_others_keeps_every_byte(content, tmp_path, capsys):
    write_energy(tmp_path / "runs")
    out = tmp_path / "out"
    for name in ("figures/mine.png", "tables/mine.csv", "export/mine.txt", "index.html"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(b"mine")
    (out / "report.json").write_bytes(content)
    before = contents(out)
    assert main(["report", str(tmp_path / "runs"), "-o", str(out), *FAST]) == 2
    assert "holds files that are no report" in capsys.readouterr().err
    assert contents(out) == before


def test_a_file_in_the_way_is_an_error_before_any_work(tmp_path, capsys):
    (tmp_path / "out").touch()
    assert main(["report", str(tmp_path / "absent"), "-o", str(tmp_path / "out")]) == 2
    assert "choose another -o" in capsys.readouterr().err


def test_what_cannot_be_read_is_said_without_a_traceback(tmp_path, capsys):
    file = write_energy(tmp_path / "runs")
    samples_of(file).unlink()
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "--log_samples" in error
    assert "Traceback" not in error


def test_one_task_of_several(tmp_path):
    write_energy(tmp_path / "runs")
    write_energy(tmp_path / "runs", task="other", docs=documents(2))
    arguments = ["report", str(tmp_path / "runs"), "-o", str(tmp_path / "out"), *FAST]
    assert main(arguments) == 2
    assert main([*arguments, "--task", TASK]) == 0


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_a_count_that_is_none_is_refused(count, capsys):
    with pytest.raises(SystemExit):
        main(["report", "runs", "-o", "out", "--resamples", count])
    assert "--resamples" in capsys.readouterr().err


def without(package):
    """Runs code in a Python that lacks a package."""
    return f"import sys; sys.modules[{package!r}] = None; from lm_eval_hyprank.cli import main; "


@pytest.mark.parametrize("package", ["matplotlib", "statsmodels"])
def test_the_extra_is_named_where_it_is_missing(tmp_path, package):
    code = without(package) + "sys.exit(main(['report', 'runs', '-o', 'out']))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert found.returncode == 2, found.stderr
    assert "pip install 'lm_eval_hyprank[report]'" in found.stderr
    assert not (tmp_path / "out").exists()


def test_other_commands_do_without_the_extra(tmp_path):
    code = "".join(
        f"sys.modules[{name!r}] = None; " for name in ("matplotlib", "statsmodels", "jinja2")
    )
    code = (
        "import sys; " + code + "from lm_eval_hyprank.cli import main; main(['report', '--help'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "--no-text" in found.stdout
