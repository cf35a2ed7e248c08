from functools import partial

import pytest

from lm_eval_hyprank import tasks
from lm_eval_hyprank.datasets.findings import DatasetError


def test_model_arguments_are_ignored(valid_folder):
    split = tasks.researchbench(
        dataset_path=str(valid_folder), pretrained="m", revision="main", max_length=100
    )["test"]
    assert len(split) == 12


@pytest.mark.parametrize("name", ["datset_path", "dataset_dir_path", "lay_out", "skip_invalids"])
@pytest.mark.parametrize("load", [tasks.researchbench, tasks.demo])
def test_a_misspelt_option_is_refused_with_the_right_name(load, name):
    with pytest.raises(DatasetError, match=rf"'{name}'.*is no option; '\w+' is"):
        load(**{name: "x"})


JUDGES = [tasks.judge, tasks.judge_psc, tasks.judge_pairwise]


@pytest.mark.parametrize("name", ["dataset_paht", "skip_invalids", "oder", "order_sed", "templat"])
@pytest.mark.parametrize("load", JUDGES)
def test_a_misspelt_option_of_a_judge_is_refused(load, name, valid_folder):
    with pytest.raises(DatasetError, match=rf"'{name}'.*is no option; '\w+' is"):
        load(**{"dataset_path": str(valid_folder), name: "x"})


def warnings(caplog):
    return [one.getMessage() for one in caplog.records if one.name.startswith("lm_eval_hyprank")]


OF_DATA = {"dataset_path": "DIR", "dataset_revision": "main", "skip_invalid": "true"}


@pytest.mark.parametrize(
    ("load", "used", "unused"),
    [
        (tasks.demo, {"layout": "block"}, OF_DATA),
        *((judge, {"demo": True}, OF_DATA | {"layout": "block"}) for judge in JUDGES),
    ],
)
def test_the_demo_names_each_option_that_it_does_not_use(load, used, unused, caplog):
    assert len(load(**used)["test"]) == 12
    assert not warnings(caplog)
    assert len(load(**used, **unused)["test"]) == 12
    said = [message.partition(" is not used: ")[0] for message in warnings(caplog)]
    assert sorted(said) == sorted(unused)


@pytest.mark.parametrize(
    ("load", "taken"),
    [
        (tasks.judge, {"order": "gold_first", "order_seed": 1}),
        (tasks.judge_psc, {"num_orders": 3, "order_seed": 1}),
        (tasks.judge_pairwise, {}),
    ],
)
def test_an_option_of_another_judge_is_refused(load, taken):
    every = {"order": "gold_first", "order_seed": 1, "num_orders": 3}
    assert load(demo=True, background=False, **taken)["test"]
    for name in every.keys() - taken:
        with pytest.raises(DatasetError, match=rf"has {name}, which a [\w-]+ judge") as error:
            load(demo=True, **taken, **{name: every[name]})
        said = str(error.value)
        takes = said.partition("it takes: ")[2].partition(". Leave it out")[0]
        assert set(takes.split(", ")) == {"template", "background", *taken}
        assert "run the tasks that take it in a command of their own" in said


def test_continuations_put_the_separator_before_each_candidate():
    doc = {"separator": "\n", "candidates": ["a", " b {{ x }}"]}
    assert tasks.continuations(doc) == ["\na", "\n b {{ x }}"]


def test_a_control_is_not_run_under_the_tasks_own_name(valid_folder):
    options = {"dataset_path": str(valid_folder), "control": "no_context"}
    with pytest.raises(DatasetError, match="researchbench_controls"):
        tasks.researchbench(**options)
    with pytest.raises(DatasetError, match="researchbench_controls"):
        tasks.demo(control="no_context")
    split = tasks.researchbench(**options, control_of="researchbench_energy")["test"]
    assert set(split["context"]) == {"Hypothesis:"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "{{ q }}"}, "lacks 'data' in dataset_kwargs"),
        ({"data": "x.csv"}, "lacks 'prompt' in dataset_kwargs"),
        (
            {"data": "x.csv", "prompt": "", "candidats": "c"},
            "'candidats'.* no option; 'candidates' is",
        ),
        (
            {"data": "x.csv", "prompt": "", "gold_idx": "c"},
            "'gold_idx'.* no option; 'gold_index' is",
        ),
        (
            {"data": "x.csv", "prompt": "", "token_score": "DIR"},
            "'token_score'.* no option; 'token_scores' is",
        ),
    ],
)
def test_what_any_data_set_lacks_or_misspells_is_said(arguments, message):
    with pytest.raises(DatasetError, match=message):
        tasks.ranking_dataset(**arguments)


def test_any_data_set_ignores_the_models_arguments(tmp_path, caplog):
    data = tmp_path / "a.csv"
    data.write_text("q,gold,wrong\nWhy?,So.,No.\n", encoding="utf-8")
    split = tasks.ranking_dataset(
        data=str(data),
        prompt="{{ q }}",
        gold="gold",
        negatives="wrong",
        pretrained="m",
        revision="main",
        dtype="float32",
        device="cpu",
        batch_size=8,
        max_length=100,
        trust_remote_code=True,
        version=1.0,
        kind="energy",
        token_scores="DIR",
        skip_invalid="true",
    )["test"]
    assert split[0]["context"] == "Why?"
    assert not warnings(caplog)


def test_any_data_set_names_what_it_does_not_use_and_refuses_what_a_report_would_name(
    tmp_path, caplog
):
    data = tmp_path / "a.csv"
    data.write_text("q,gold,wrong\nWhy?,So.,No.\n", encoding="utf-8")
    wanted = {"data": str(data), "prompt": "{{ q }}", "gold": "gold", "negatives": "wrong"}
    assert tasks.ranking_dataset(**wanted, dataset_path="x")["test"]
    assert "dataset_path is not used: the YAML's dataset_kwargs say" in caplog.text
    for name in ("layout", "discipline"):
        with pytest.raises(DatasetError, match=f"has {name}, which does nothing here: write"):
            tasks.ranking_dataset(**wanted, **{name: "block"})


@pytest.mark.parametrize("load", [tasks.demo, *(partial(judge, demo=True) for judge in JUDGES)])
def test_the_demo_has_no_discipline_to_choose(load):
    with pytest.raises(DatasetError, match="has discipline, which does nothing here"):
        load(discipline="Law")


def test_the_label_is_not_embedded():
    doc = {"context": "Background: b\nResearch Question: q\nHypothesis:"}
    assert tasks.background_and_question(doc) == "Background: b\nResearch Question: q"
