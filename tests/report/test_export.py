"""Results for the hub and for "Every Eval Ever", against the formats' definitions."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from huggingface_hub import parse_eval_result_entries

from lm_eval_hyprank.report.build import build_report
from lm_eval_hyprank.report.export import exports
from lm_eval_hyprank.report.intervals import Settings
from lm_eval_hyprank.report.runs import read_runs
from lm_eval_hyprank.report.tables import overall
from tests.report.run_folder import (
    IDS,
    TASK,
    documents,
    edit,
    write_energy,
    write_judge,
    write_pairwise,
    write_psc,
)

HERE = Path(__file__).parent
UUID4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def schema(name):
    return json.loads((HERE / f"{name}.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def files(report):
    return exports(report)


def entries(files, model):
    return yaml.safe_load(files[f"hub/{model}/.eval_results/hyprank.yaml"])


def records(files):
    return [json.loads(text) for name, text in files.items() if name.startswith("every_eval_ever")]


def test_the_hubs_files_follow_its_format(files):
    hub = {name: yaml.safe_load(text) for name, text in files.items() if name.startswith("hub/")}
    assert sorted(hub) == [
        f"hub/{model}/.eval_results/hyprank.yaml" for model in ("Lark-1B", "Lark-3B", "gpt-x")
    ]
    for content in hub.values():
        jsonschema.validate(content, schema("eval_results"))
        assert parse_eval_result_entries(content)


def test_a_hub_entry_has_value_interval_and_date(files, report):
    first = entries(files, "Lark-1B")[0]
    (nll,) = [one for one in report["systems"] if one["id"] == f"Lark-1B|{TASK}|nll"]
    cell = nll["metrics"]["hit@1"]
    assert first["dataset"] == {"id": "ankilok/ResearchBench", "task_id": TASK}
    assert first["value"] == pytest.approx(cell["value"], abs=1e-6)
    assert f"95 % interval {cell['low']:.4f} to {cell['high']:.4f}" in first["notes"]
    assert "scorer nll, 8 papers" in first["notes"]
    assert first["date"].startswith("2026-01-0")
    assert "1 papers invalid" in entries(files, "Lark-3B")[0]["notes"]


def test_records_follow_every_eval_ever(files):
    found = records(files)
    assert len(found) == 4  # two models' energies, the judge twice; pairwise has no Hit@1
    for record in found:
        jsonschema.validate(record, schema("every_eval_ever"))
    for name in files:
        if name.startswith("every_eval_ever"):
            assert re.fullmatch(rf"every_eval_ever/data/[^/]+/[^/]+/[^/]+/{UUID4}\.json", name)


def test_a_record_has_every_metric_with_its_interval(files, report):
    (record,) = [one for one in records(files) if one["model_info"]["id"] == "acme/Lark-1B"]
    results = {one["evaluation_result_id"]: one for one in record["evaluation_results"]}
    (raw,) = [one for one in report["systems"] if one["id"] == f"Lark-1B|{TASK}|raw"]
    for metric, cell in raw["metrics"].items():
        details = results[f"{TASK}.raw.{metric}"]["score_details"]
        assert details["score"] == cell["value"]
        interval = details["uncertainty"]["confidence_interval"]
        assert (interval["lower"], interval["upper"]) == (cell["low"], cell["high"])
        assert details["uncertainty"]["num_bootstrap_samples"] == 200
    assert results[f"{TASK}.raw.hit@5"]["metric_config"]["metric_parameters"] == {"k": 5}
    assert record["model_info"]["developer"] == "acme"
    assert record["model_info"]["inference_engine"]["name"] == "transformers"
    assert not any("shortest" in name or "nocontext" in name for name in results)


def test_what_is_better_when_lower_is_said_as_the_tasks_say_it(files):
    folder = HERE.parents[1] / "task_configs" / "researchbench"
    lines = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.yaml"))
    pattern = r"\{metric: ([\w@]+),.*higher_is_better: (true|false)\}"
    tasks_say = {metric: value == "false" for metric, value in re.findall(pattern, lines)}
    compared = set()
    for record in records(files):
        for result in record["evaluation_results"]:
            config = result["metric_config"]
            if config["metric_name"] in tasks_say:
                assert config["lower_is_better"] is tasks_say[config["metric_name"]], config
                compared.add(config["metric_name"])
    assert {"hit@1", "mrr", "chose_shown_first"} <= compared


def test_a_judges_record_has_its_parse_rate(files):
    (record,) = [
        one for one in records(files) if one["evaluation_id"].startswith("researchbench_judge/")
    ]
    details = record["evaluation_results"][0]["score_details"]["details"]
    assert float(details["parse_rate"]) == 7 / 8
    assert details["invalid"] == "1"


def test_a_judge_of_pairs_says_no_number_of_papers_that_is_not_its_own(tmp_path):
    """It ranks the gold of no paper here, and has verdicts on all."""
    write_pairwise(tmp_path, lambda doc, other, first: None if other == "fake_1" else first)
    made = build_report(read_runs([tmp_path]), Settings(resamples=20))
    made["systems"][0]["metrics"]["hit@1"] = {"value": 0.5}  # else it is not exported
    (record,) = records(exports(made))
    results = {one["metric_config"]["metric_name"]: one for one in record["evaluation_results"]}
    counts = {
        metric: one["score_details"]["uncertainty"].get("num_samples")
        for metric, one in results.items()
    }
    assert counts.pop("hit@1") == 0
    assert "accuracy" in counts
    assert set(counts.values()) == {None}
    jsonschema.validate(record, schema("every_eval_ever"))


def test_an_interval_without_width_is_not_exported(tmp_path):
    def never(doc):
        own = [float(name == "gold") for name in doc["candidate_ids"]]
        return dict.fromkeys(("nll", "raw", "shortest"), own)

    write_energy(tmp_path, scores=never)
    files = exports(build_report(read_runs([tmp_path]), Settings(resamples=20)))
    (entry, *_) = entries(files, "Lark-1B")
    assert entry["value"] == 0
    assert "interval" not in entry["notes"]
    (record,) = records(files)
    for result in record["evaluation_results"]:
        assert "confidence_interval" not in result["score_details"]["uncertainty"]


def test_no_text_of_the_data_is_exported(files):
    everything = "".join(files.values())
    for doc in documents():
        assert doc["title"] not in everything
        assert doc["paper_id"] not in everything
    assert "holds" not in everything
    assert "Survey" not in everything


def test_a_partial_run_is_not_exported(tmp_path):
    write_energy(tmp_path, total=100)
    assert exports(build_report(read_runs([tmp_path]), Settings(resamples=20))) == {}


@pytest.mark.parametrize("task", [TASK, "hyprank_demo_energy"])
def test_data_that_are_not_the_hubs_make_no_hub_entry(tmp_path, task):
    write_energy(tmp_path, task=task, metadata={"dataset_path": "/data"} if task == TASK else {})
    files = exports(build_report(read_runs([tmp_path]), Settings(resamples=20)))
    assert not any(name.startswith("hub/") for name in files)
    (record,) = records(files)
    assert record["evaluation_results"][0]["source_data"] == {
        "dataset_name": task,
        "source_type": "other",
    }


def judge(folder, model, **options):
    return write_judge(folder, lambda doc: IDS[:5], model, **options)


def psc(folder, model, **options):
    return write_psc(folder, lambda doc, order: IDS[:5], model, **options)


def pairwise(folder, model, **options):
    return write_pairwise(folder, lambda doc, other, first: first, model, **options)


ORDERED = [("order_seed", 1), ("background", False), ("template", "mine.jinja")]


@pytest.mark.parametrize(
    ("write", "option", "value"),
    [
        *((judge, *one) for one in [*ORDERED, ("order", "gold_first"), ("discipline", "Law")]),
        *((psc, *one) for one in [*ORDERED, ("num_orders", 8), ("discipline", "Law")]),
        *((pairwise, *one) for one in [*ORDERED[1:], ("discipline", "Law")]),
        (write_energy, "layout", "block"),
        (write_energy, "discipline", "Law"),
    ],
)
def test_what_was_asked_otherwise_is_told_apart_and_never_published_unmarked(
    tmp_path, write, option, value
):
    write(tmp_path, "one")
    write(tmp_path, "two", metadata={option: value})
    made = build_report(read_runs([tmp_path]), Settings(resamples=20))
    tasks = {run["model"]: run["task"] for run in made["models"]}
    marked = f"{tasks['one']} ({option}={value})"
    assert tasks["two"] == marked
    assert made["agreement"] == []
    assert any(marked in section for section, _ in overall(made).rows)
    files = exports(made)
    hub = [name for name in files if name.startswith("hub/")]
    assert hub == ["hub/one/.eval_results/hyprank.yaml"]
    (record,) = [one for one in records(files) if one["model_info"]["name"] == "two"]
    jsonschema.validate(record, schema("every_eval_ever"))
    assert record["evaluation_id"].startswith(marked)
    for result in record["evaluation_results"]:
        assert result["evaluation_name"].startswith(marked)
        assert result["score_details"]["details"]["options"] == f"{option}={value}"


@pytest.mark.parametrize(
    ("write", "metadata"),
    [
        (write_energy, {"order_seed": 1, "order": "gold_first", "background": False}),
        (judge, {"layout": "block"}),
        (judge, {"order": "seed", "order_seed": 0, "background": True, "template": None}),
        (write_energy, {"layout": "inline"}),
    ],
)
def test_what_changes_nothing_of_a_task_is_no_option(tmp_path, write, metadata):
    """What is for other tasks of the call, or holds anyway."""
    write(tmp_path, "one", metadata=metadata)
    (run,) = (made := build_report(read_runs([tmp_path]), Settings(resamples=20)))["models"]
    assert run["task"] == run["name"]
    assert "options" not in run
    assert "hub/one/.eval_results/hyprank.yaml" in exports(made)


def test_how_replies_were_drawn_stands_beside_the_number(tmp_path):
    def generate(results):
        settings = {"max_gen_toks": 8192, "temperature": 0.0}
        results["configs"]["researchbench_judge"]["generation_kwargs"] = settings
        results["config"]["gen_kwargs"] = {"max_gen_toks": 8192, "of_no_use": 1}

    edit(judge(tmp_path, "one", more={"chat_template_sha": "0123456789"}), generate)
    files = exports(build_report(read_runs([tmp_path]), Settings(resamples=20)))
    (entry,) = entries(files, "one")
    assert "generation max_gen_toks=8192, chat template 01234567," in entry["notes"]
    (record,) = records(files)
    details = record["evaluation_results"][0]["score_details"]["details"]
    assert details["generation"] == "max_gen_toks=8192"


def test_the_revision_of_the_data_is_kept(tmp_path):
    write_energy(tmp_path, metadata={"dataset_revision": "abc123"})
    files = exports(build_report(read_runs([tmp_path]), Settings(resamples=20)))
    assert entries(files, "Lark-1B")[0]["dataset"]["revision"] == "abc123"


def test_names_of_files_are_plain_and_stay_different(report):
    renamed = copy.deepcopy(report)
    for entry in [*renamed["models"], *renamed["systems"]]:
        entry["model"] = {"Lark-1B": "org:Lark/1B|<x>", "Lark-3B": "org Lark 1B <x>"}.get(
            entry["model"], entry["model"]
        )
    names = {name.split("/")[1] for name in exports(renamed) if name.startswith("hub/")}
    assert len(names) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)


def test_exports_are_the_same_each_time(report, files):
    assert exports(report) == files
