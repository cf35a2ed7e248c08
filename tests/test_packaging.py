"""What an installation gets: entry points, the files of the wheel, reasons for dependencies."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import lm_eval
import pytest
from lm_eval.api import registry
from lm_eval.tasks import TaskManager

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = "lm_eval_hyprank"

METRICS = "lm_eval_hyprank.metrics"
AGGREGATIONS = {f"hit@{k}": f"{METRICS}:hit_at_{k}" for k in (1, 2, 3, 5)} | {
    "mrr": f"{METRICS}:mrr"
}
FILTERS = "lm_eval_hyprank.filters"
ENTRY_POINTS = {
    "console_scripts": {"hyprank": "lm_eval_hyprank.cli:main"},
    "lm_eval.models": {
        "hf-energy": "lm_eval_hyprank.models.hf:EnergyHFLM",
        "sentence-embedding": "lm_eval_hyprank.models.embedding:SentenceEmbeddingLM",
    },
    "lm_eval.filters": {
        "candidate_score": f"{FILTERS}:CandidateScore",
        "embedding_score": f"{FILTERS}:EmbeddingScore",
        "judge_ranking": "lm_eval_hyprank.judge.replies:JudgeRanking",
        "judge_verdict": "lm_eval_hyprank.judge.replies:JudgeVerdict",
    },
    "lm_eval.metrics": dict.fromkeys([*AGGREGATIONS, "win_rate"], f"{METRICS}:passthrough"),
    "lm_eval.aggregations": AGGREGATIONS | {"krippendorff_alpha": "lm_eval_hyprank.experts:alpha"},
}
LOOK_UP = {
    "lm_eval.models": registry.get_model,
    "lm_eval.filters": registry.get_filter,
    "lm_eval.metrics": registry.get_metric,
    "lm_eval.aggregations": registry.get_aggregation,
}


def package_files(folder: Path) -> set[Path]:
    """Files under ``folder`` that belong to the project, as an installer would see them."""
    return {
        path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store"
    }


def installed(group: str) -> dict[str, EntryPoint]:
    """This distribution's entry points of a group, by name."""
    return {
        entry.name: entry
        for entry in entry_points(group=group)
        if entry.dist is not None and entry.dist.name == DISTRIBUTION
    }


@pytest.mark.parametrize("group", ENTRY_POINTS)
def test_entry_points_are_declared(group: str) -> None:
    assert {name: entry.value for name, entry in installed(group).items()} == ENTRY_POINTS[group]
    for entry in installed(group).values():
        assert callable(entry.load())


@pytest.mark.parametrize("group", LOOK_UP)
def test_entry_points_name_what_the_decorators_register(group: str) -> None:
    """lm_eval's discovery reports a collision where the two differ."""
    for name, entry in installed(group).items():
        found = entry.load()
        assert f"{found.__module__}:{found.__name__}" == entry.value
        assert LOOK_UP[group](name) is found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tree as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_the_tasks_and_nothing_else(wheel: Path) -> None:
    expected = {
        path.relative_to(ROOT).as_posix(): path for path in package_files(ROOT / DISTRIBUTION)
    }
    tasks = ROOT / "task_configs"
    expected |= {
        f"lm_eval/tasks/hyprank/{path.relative_to(tasks).as_posix()}": path
        for path in package_files(tasks)
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert found == expected.keys()
        for name, path in expected.items():
            assert archive.read(name) == path.read_bytes(), name

    # The tree that the wheel mirrors is itself free of strays.
    kinds = {Path(name).suffix for name in found if not name.endswith("/py.typed")}
    assert kinds <= {".py", ".jsonl", ".jinja", ".yaml", ".js", ".css", ".json"}
    data = {name for name in found if name.endswith(".jsonl")}
    assert {name.rsplit("/", 1)[1] for name in data} == {"papers.jsonl", "ranking.jsonl"}
    assert all(name.startswith("lm_eval_hyprank/datasets/demo_data/") for name in data)
    # A module inside lm_eval would replace one of its own.
    added = {name for name in found if name.startswith("lm_eval/")}
    assert added == {name for name in found if name.endswith(".yaml")}
    assert added


def test_installed_tasks_are_those_of_the_tree() -> None:
    (folder,) = (Path(path, "tasks", "hyprank") for path in lm_eval.__path__)
    tasks = ROOT / "task_configs"
    installed_files = {path.relative_to(folder) for path in package_files(folder)}
    assert installed_files == {path.relative_to(tasks) for path in package_files(tasks)}
    for path in installed_files:
        assert (folder / path).read_bytes() == (tasks / path).read_bytes(), (
            f"{path} changed since the package was installed; run: make install"
        )


@pytest.mark.slow
def test_lm_eval_finds_the_tasks_without_a_flag() -> None:
    names = set(TaskManager().all_tasks)
    assert names >= {"researchbench_energy", "researchbench_energy_by_discipline"}
    assert "hyprank_demo_energy" in names


def declared(text: str) -> set[str]:
    """Names of the packages in a part of pyproject.toml, as imported."""
    return {name.replace("-", "_") for name in re.findall(r'^    "([\w-]+)', text, re.M)}


def test_every_dependency_states_its_reason() -> None:
    # Read as text: a parser would drop the comments.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(
        r"^(?:requires|dependencies|test|dev|demo|report|embedding) = \[\n(.*?)^\]",
        text,
        re.M | re.S,
    )
    assert len(lists) == 7
    for line in "".join(lists).splitlines():
        own_extra = rf'    "{DISTRIBUTION}\[\w+\]",\s+# .{{10,}}'
        assert re.fullmatch(rf'    "[^"]+>=[^"]+",\s+# .{{10,}}|{own_extra}', line), line


def test_every_import_of_the_package_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    runtime = text[text.index("\ndependencies = [") : text.index("\n[project.optional")]
    extras = re.findall(r"^(?:report|embedding) = \[\n(.*?)^\]", text, re.M | re.S)
    known = declared(runtime + "".join(extras)) | {DISTRIBUTION, "pydantic_core"}
    known |= {"sklearn", "yaml"} | sys.stdlib_module_names  # scikit-learn and pyyaml
    for path in sorted((ROOT / DISTRIBUTION).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if node.level == 0 else []
            for name in names:
                assert name.split(".")[0] in known, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_constraints_pin_every_dependency() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = declared(text[text.index("\ndependencies = [") : text.index("\n[project.scripts]")])
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].replace("-", "_") for line in pins if "==" in line}
    assert len(named) >= 18
    assert named - {DISTRIBUTION} <= pinned
