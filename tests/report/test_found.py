"""What a run is, by its results file alone: its kind, and how it was asked."""

import dataclasses
import inspect

import pytest
from lm_eval.config.task import TaskConfig
from lm_eval.tasks._yaml_loader import load_yaml

from lm_eval_hyprank import tasks
from lm_eval_hyprank.judge import prompts
from lm_eval_hyprank.report import found
from tests.conftest import TASK_CONFIGS

FILES = [
    path
    for path in sorted(TASK_CONFIGS.rglob("*.yaml"))
    if not path.read_text(encoding="utf-8").startswith("group:")
]


def run_of(path):
    """The run of a YAML's task as lm-eval describes it."""
    fields = {field.name for field in dataclasses.fields(TaskConfig)}
    known = {key: value for key, value in load_yaml(path).items() if key in fields}
    configs = {"mine": TaskConfig(**known).to_dict()}
    return found.Found(path.parent, path, "", {"configs": configs}, "mine", ("mine",))


def kind_by_name(name):
    if name == "_judge":
        return ""  # it has no reader yet
    names = {"psc": "judge_psc", "pairwise": "pairwise", "judge": "judge", "embedding": "embedding"}
    return next((kind for part, kind in names.items() if part in name), "energy")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_yaml_that_includes_ours_and_has_metadata_of_its_own_is_read_alike(path, tmp_path):
    """lm-eval replaces an included task's metadata whole."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"include: {path}\ntask: mine\nmetadata: {{version: 2.0}}\n", encoding="utf-8")
    ours, theirs = run_of(path), run_of(mine)
    assert theirs.metadata == {"version": 2.0}
    assert ours.kind == theirs.kind == kind_by_name(path.stem)
    left_out = "" if ours.kind else "not a hypothesis-ranking task"
    if path.stem == "experts":  # whether the run has samples or not
        left_out = found.EXPERTS
    assert found._why_left_out(ours, ()) == found._why_left_out(theirs, ()) == left_out


def test_options_are_those_that_the_tasks_take():
    for name, default in tasks._JUDGE_OPTIONS.items():
        assert found._ASKING[name][0] == str(default).lower()
    takes = inspect.signature(tasks.researchbench).parameters
    assert found._ASKING["layout"][0] == takes["layout"].default
    makers = {
        "judge": prompts.listwise,
        "judge_psc": prompts.several_orders,
        "pairwise": prompts.pairwise,
    }
    for kind, make in makers.items():
        read = {name for name, (_, kinds) in found._ASKING.items() if kind in kinds}
        arguments = inspect.signature(make).parameters.keys() - {"papers"}
        assert read == arguments | {"discipline"}
    known = {*tasks.OPTIONS, *tasks._JUDGE_OPTIONS, *takes} - {"others"}
    assert known == (found._ASKING.keys() | found._TASK_METADATA) & known
