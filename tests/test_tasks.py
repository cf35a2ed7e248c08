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


@pytest.mark.parametrize("load", [tasks.demo, *JUDGES])
def test_the_demo_says_that_its_papers_are_its_own(load, valid_folder, caplog):
    options = {"demo": True} if load in JUDGES else {"layout": "block"}
    assert len(load(**options)["test"]) == 12
    assert "dataset_path" not in caplog.text
    assert len(load(dataset_path=str(valid_folder), **options)["test"]) == 12
    assert "dataset_path is not used" in caplog.text


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


def test_any_data_set_ignores_the_models_arguments(tmp_path):
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
        dataset_path="DIR",
        token_scores="DIR",
    )["test"]
    assert split[0]["context"] == "Why?"
