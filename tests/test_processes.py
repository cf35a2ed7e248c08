"""The command line as users run it, in processes of its own: several ranks, kills, resuming."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from tests import tiny
from tests.conftest import ROOT, TASK_CONFIGS

pytestmark = pytest.mark.slow

TASK = "hyprank_demo_energy"
LAUNCH = [
    # Without a GPU, --multi_gpu starts the processes all the same; with --cpu, accelerate leaves
    # the start to MPI and launches but one.
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
    "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
]  # fmt: skip
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "ACCELERATE_USE_CPU": "true",  # lets launched processes find each other without a GPU
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.demo_llama().save_pretrained(path)
    tiny.demo_tokenizer().save_pretrained(path)
    return path


def lm_eval_command(folder, output, *more):
    return [
        "-m", "lm_eval", "run", "--model", "hf",
        "--model_args", f"pretrained={folder},dtype=float32",
        "--tasks", TASK, "--include_path", str(TASK_CONFIGS), "--device", "cpu",
        "--batch_size", "8", "--output_path", str(output), "--log_samples", *more,
    ]  # fmt: skip


def run(command, *, timeout=240):
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout
    )


def table(stdout):
    return [line for line in stdout.splitlines() if line.startswith("|")]


def saved(output):
    (file,) = output.rglob("results_*.json")
    return json.loads(file.read_text(encoding="utf-8"))["results"][TASK]


@pytest.fixture(scope="module")
def single(folder, tmp_path_factory):
    """The table and the saved results of one process."""
    output = tmp_path_factory.mktemp("single")
    done = run([sys.executable, *lm_eval_command(folder, output)])
    assert done.returncode == 0, done.stderr
    return table(done.stdout), saved(output)


def test_the_literal_command_prints_a_row_for_each_scorer_and_metric(single):
    rows, results = single
    assert len(rows) == 2 + 6 * 8
    for scorer in ("nll", "raw", "logz", "nll_sum", "raw_sum", "shortest"):
        for metric in ("hit@1", "hit@2", "hit@3", "hit@5", "mrr", "win_rate"):
            assert any(f"|{scorer}" in row and f"|{metric}" in row for row in rows)
            assert isinstance(results[f"{metric},{scorer}"], float)


@pytest.mark.parametrize("limit", [None, "1"])
def test_accelerate_launch_gives_the_table_of_one_process(single, folder, tmp_path, limit):
    more = [] if limit is None else ["--limit", limit]
    launched = run([*LAUNCH, *lm_eval_command(folder, tmp_path, *more)])
    assert launched.returncode == 0, launched.stderr
    if limit is None:
        assert table(launched.stdout) == single[0]
        assert saved(tmp_path) == single[1]
    else:
        assert len(table(launched.stdout)) == len(single[0])


def test_ranks_that_share_the_papers_give_the_table_of_one_process(single, folder, tmp_path):
    command = [*LAUNCH, "-m", "tests.two_ranks", str(folder), str(tmp_path), "tokens=1"]
    launched = run(command)
    assert launched.returncode == 0, launched.stderr
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert len(found["papers"]) == 12 * 6
    assert len(set(found["papers"])) == 12
    tokens = tmp_path / "tokens" / TASK
    names = ["00000-of-00002.parquet", "00001-of-00002.parquet"]
    assert sorted(path.name for path in tokens.iterdir()) == names
    stored = pd.read_parquet(tokens)
    assert sorted(stored["paper_id"]) == sorted([*set(found["papers"])] * 16)
    assert not stored.duplicated(["paper_id", "candidate_id"]).any()
    for key, value in single[1].items():
        assert found["results"][TASK][key] == pytest.approx(value), key


def test_an_odd_number_of_papers_is_counted_once_each(folder, tmp_path):
    launched = run([*LAUNCH, "-m", "tests.two_ranks", str(folder), str(tmp_path), "limit=3"])
    assert launched.returncode == 0, launched.stderr
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["results"][TASK]["sample_len"] == 3
    assert len(found["papers"]) == 3 * 6
    assert len(set(found["papers"])) == 3


NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise OSError(101, "Network is unreachable")
socket.getaddrinfo = socket.socket.connect = refuse
"""


def test_local_data_and_model_need_no_network_from_any_folder(single, folder, tmp_path):
    """Offline as the hub's libraries understand it, and with every connection refused."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
    environment = ENVIRONMENT | {"HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(tmp_path)}
    include = ["--include_path", str(TASK_CONFIGS)]
    answers = [
        subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
        )
        for command in (
            lm_eval_command(folder, tmp_path / "out"),
            ["-m", "lm_eval", "ls", "tasks", *include],
            ["-m", "lm_eval", "validate", "--tasks", f"{TASK},researchbench_judge_psc", *include],
        )
    ]  # fmt: skip
    assert [answer.returncode for answer in answers] == [0, 0, 0], answers
    scored, listed, valid = (answer.stdout for answer in answers)
    assert table(scored) == single[0]
    assert TASK in listed
    assert "All tasks found and valid" in valid


def test_fewer_papers_than_ranks_end_with_a_message(folder, tmp_path):
    launched = run(
        [*LAUNCH, "-m", "tests.two_ranks", str(folder), str(tmp_path), "limit=1"], timeout=120
    )
    assert launched.returncode != 0
    assert "1 item(s) for 2 processes" in launched.stderr


def test_a_failing_rank_ends_all_with_the_paper_named(folder, tmp_path):
    launched = run(
        [*LAUNCH, "-m", "tests.two_ranks", str(folder), str(tmp_path), "fail=1"], timeout=120
    )
    assert launched.returncode != 0
    assert re.search(r"failed while scoring task hyprank_demo_energy, item \w+", launched.stderr)
    assert "out of memory, say" in launched.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_valid_paper_costs_the_others_nothing(folder, tmp_path, rank):
    command = [*LAUNCH, "-m", "tests.two_ranks", str(folder), str(tmp_path), f"invalid={rank}"]
    launched = run(command)
    assert launched.returncode == 0, launched.stderr
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    row = found["results"][TASK]
    assert len(found["hits"]) == 6
    assert row["hit@1,nll"] == pytest.approx(sum(found["hits"]) / 6)
    assert row["invalid,nll"] == 0.5
    assert row["invalid,raw"] == 0


def cached_answers(path):
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            # Without what the package notes of the model and its values.
            query = "select count(*) from unnamed where key not like 'hyprank:%'"
            return connection.execute(query).fetchone()[0]
    except sqlite3.OperationalError:  # not made yet
        return 0


def test_a_killed_run_goes_on_where_it_stopped(smollm2, tmp_path):
    """A real kill in mid-run; the rerun asks the model only for what is missing."""
    cache = tmp_path / "cache"
    limit = ["--limit", "3"]
    command = [
        sys.executable,
        *lm_eval_command(smollm2, tmp_path / "out", *limit, "--use_cache", str(cache)),
    ]
    database = Path(f"{cache}_rank0.db")
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 240
        while cached_answers(database) < 16 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    kept = cached_answers(database)
    assert 16 <= kept < 48
    resumed = run(command)
    assert resumed.returncode == 0, resumed.stderr
    assert f"Cached requests: {kept}, Requests remaining: {48 - kept}" in resumed.stderr
    straight = tmp_path / "straight"
    whole = run([sys.executable, *lm_eval_command(smollm2, straight, *limit)])
    assert table(resumed.stdout) == table(whole.stdout)
    for key, value in saved(straight).items():
        assert saved(tmp_path / "out")[key] == pytest.approx(value), key
