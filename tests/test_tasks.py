import pytest

from lm_eval_hyprank import tasks
from lm_eval_hyprank.datasets.validation import DatasetError


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


def test_the_demo_ignores_the_data_sets_options(valid_folder):
    assert len(tasks.demo(dataset_path=str(valid_folder), layout="block")["test"]) == 12


def test_continuations_put_the_separator_before_each_candidate():
    doc = {"separator": "\n", "candidates": ["a", " b {{ x }}"]}
    assert tasks.continuations(doc) == ["\na", "\n b {{ x }}"]
