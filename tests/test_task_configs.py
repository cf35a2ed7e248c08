"""The tasks' YAML files by themselves: nothing is run."""

import pytest
import yaml
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

import lm_eval_hyprank.tasks  # noqa: F401
from lm_eval_hyprank.metrics import process_results
from tests.conftest import TASK_CONFIGS


def test_the_task_manager_lists_the_tasks_where_they_are_installed():
    names = TaskManager().all_tasks
    assert {
        "researchbench_energy",
        "researchbench_energy_by_discipline",
        "hyprank_demo_energy",
    } <= set(names)


def test_configs_are_pure_yaml_that_name_functions_of_the_package():
    assert not list(TASK_CONFIGS.rglob("*.py"))
    for path in TASK_CONFIGS.rglob("*.yaml"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "!function" in line:
                assert "!function lm_eval_hyprank.tasks." in line, path


@pytest.mark.parametrize(
    ("base", "group"),
    [
        ("hyprank_demo_energy", "hyprank_demo_controls"),
        ("researchbench_energy", "researchbench_controls"),
        ("researchbench_energy_scores", "researchbench_scores_controls"),
    ],
)
def test_controls_say_what_they_are_and_keep_the_rest_of_their_task(base, group):
    manager = TaskManager(include_path=str(TASK_CONFIGS), include_defaults=False)
    (path,) = TASK_CONFIGS.rglob(f"{group}.yaml")
    names = yaml.safe_load(path.read_text(encoding="utf-8"))["task"]
    assert [name.removeprefix(base) for name in names] == [
        "_nocontext",
        "_question_only",
        "_background_only",
        "_shuffled_context",
    ]
    original = load_yaml(manager.task_index[base].yaml_path)
    for name in names:
        config = load_yaml(manager.task_index[name].yaml_path)
        control = name.removeprefix(f"{base}_").replace("nocontext", "no_context")
        metadata = {**original["metadata"], "control": control, "control_of": base}
        assert config == original | {"task": name, "metadata": metadata}


def test_group_metrics_are_those_the_tasks_emit():
    emitted = set(process_results({"gold": 0}, [1.0, 2.0]))
    base = (TASK_CONFIGS / "researchbench" / "_energy.yaml").read_text(encoding="utf-8")
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda _, node: node.value)
    listed = [m["metric"] for m in yaml.load(base, loader)["metric_list"]]
    (group,) = TASK_CONFIGS.rglob("researchbench_energy_by_discipline.yaml")
    grouped = yaml.safe_load(group.read_text(encoding="utf-8"))["aggregate_metric_list"]
    assert set(listed) == emitted == {entry["metric"] for entry in grouped}
