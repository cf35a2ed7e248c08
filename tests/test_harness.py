"""Runs through lm-eval's own evaluator, on tiny models and the demo set."""

import copy
import json
import logging
import math
import shutil

import lm_eval
import lm_eval.evaluator
import pytest
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

import lm_eval_hyprank.tasks  # noqa: F401
from lm_eval_hyprank import ContinuationScore, harness
from lm_eval_hyprank.datasets import demo
from lm_eval_hyprank.metrics import process_results
from lm_eval_hyprank.models import hf
from lm_eval_hyprank.models.hf import EnergyHFLM
from lm_eval_hyprank.models.tokens import encode
from lm_eval_hyprank.scores import min_k
from tests import tiny
from tests.conftest import TASK_CONFIGS

SCORERS = {"nll", "raw", "logz", "nll_sum", "raw_sum", "shortest"}
METRICS = {"hit@1", "hit@2", "hit@3", "hit@5", "mrr", "win_rate", "tie_rate", "invalid"}
TASK = "hyprank_demo_energy"

STOCK_TASK = {
    "task": "stock_choice",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "question",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.demo_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A tiny model saved as a user would have it."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.demo_llama().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def stock_task(tmp_path_factory):
    """An ordinary multiple-choice task on local data."""
    data = tmp_path_factory.mktemp("stock") / "data.jsonl"
    rows = [
        {"question": f"Is {n} even?", "choices": ["yes", "no"], "answer": n % 2} for n in range(6)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return STOCK_TASK | {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
    }


def evaluate(tasks, lm="hf", *, folder=None, **options):
    arguments = {"pretrained": str(folder), "dtype": "float32"} if folder else {}
    return lm_eval.simple_evaluate(
        model=lm,
        model_args=options.pop("model_args", arguments),
        tasks=tasks,
        device="cpu",
        batch_size=8,
        bootstrap_iters=10,
        # Only our own tasks: reading lm-eval's thousands takes seconds each time.
        task_manager=TaskManager(
            include_path=str(TASK_CONFIGS),
            include_defaults=False,
            metadata=options.pop("metadata", {}),
        ),
        **options,
    )


@pytest.fixture(scope="module")
def run(folder):
    return evaluate([TASK], folder=folder)


def test_one_row_a_scorer_and_metric_each_with_a_standard_error(run):
    row = run["results"][TASK]
    for scorer in SCORERS:
        for metric in METRICS:
            assert isinstance(row[f"{metric},{scorer}"], float), (metric, scorer)
            assert isinstance(row[f"{metric}_stderr,{scorer}"], float), (metric, scorer)
    assert {key.split(",")[1] for key in row if "," in key} == SCORERS


def test_nothing_is_aggregated_by_guess(folder, caplog):
    with caplog.at_level(logging.WARNING):
        evaluate([TASK], folder=folder, limit=2)
    for phrase in ("No aggregation", "aggregation is not", "higher_is_better"):
        assert phrase not in caplog.text


def test_samples_hold_sixteen_scores_a_scorer(run):
    samples = run["samples"][TASK]
    assert len(samples) == 12 * len(SCORERS)
    for sample in samples:
        assert len(sample["filtered_resps"]) == 16
        assert all(isinstance(score, float) for score in sample["filtered_resps"])
        assert len(sample["num_tokens"]) == 16
        assert sample["truncated"] is False
        responses = [resps[0] for resps in sample["resps"]]
        assert all(isinstance(response, ContinuationScore) for response in responses)
        if (row := sample["filter"]) in ("nll", "raw", "nll_sum", "raw_sum"):
            assert sample["filtered_resps"] == [getattr(response, row) for response in responses]
        if sample["filter"] == "logz":
            assert sample["filtered_resps"] == [-response.logz for response in responses]
        if sample["filter"] == "shortest":
            sizes = [len(text.encode()) for text in sample["doc"]["candidates"]]
            assert sample["filtered_resps"] == sizes


def test_metrics_can_be_recomputed_from_the_samples_file(run, tmp_path):
    results = copy.deepcopy(run)  # saving turns what it saves into strings
    samples = results.pop("samples")
    tracker = EvaluationTracker(output_path=str(tmp_path / "a" / "b"))
    tracker.general_config_tracker.model_name_sanitized = "tiny"
    tracker.save_results_aggregated(results=results, samples=samples)
    tracker.save_results_samples(task_name=TASK, samples=samples[TASK])
    (results_file,) = tmp_path.rglob("results_*.json")
    (samples_file,) = tmp_path.rglob("samples_*.jsonl")
    saved = json.loads(results_file.read_text(encoding="utf-8"))["results"][TASK]
    recomputed: dict[str, list[float]] = {}
    for line in samples_file.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        scores = [float(score) for score in sample["filtered_resps"]]
        for metric, value in process_results(sample["doc"], scores).items():
            recomputed.setdefault(f"{metric},{sample['filter']}", []).append(value)
    assert len(recomputed) == len(SCORERS) * len(METRICS)
    for key, values in recomputed.items():
        assert saved[key] == pytest.approx(sum(values) / len(values), abs=1e-9)


def test_the_gold_does_not_sit_at_one_index(run):
    golds = {s["doc"]["gold"] for s in run["samples"][TASK]}
    assert len(golds) > 3


def test_the_run_says_what_produced_it(run, folder):
    assert run["hyprank"]["prefix_reuse"] == "shared"
    assert run["hyprank"]["device"] == "cpu"
    assert len(run["hyprank"]["model_fingerprint"]) == 16


def test_hf_energy_is_known_by_name_and_gives_the_same(run, folder):
    other = evaluate([TASK], "hf-energy", folder=folder)
    assert other["results"] == run["results"]
    assert other["hyprank"] == run["hyprank"]


def test_stock_tasks_stay_bit_equal_in_the_same_run(folder, stock_task, monkeypatch):
    with monkeypatch.context() as stock:
        stock.setattr(lm_eval.evaluator, "evaluate", lm_eval.evaluator.evaluate.without_hyprank)
        alone = evaluate([dict(stock_task)], folder=folder)
    mixed = evaluate([TASK, dict(stock_task)], folder=folder)
    assert mixed["results"]["stock_choice"] == alone["results"]["stock_choice"]
    for ours, stock in zip(
        mixed["samples"]["stock_choice"], alone["samples"]["stock_choice"], strict=True
    ):
        assert ours["resps"] == stock["resps"]
        assert not any(isinstance(r[0], ContinuationScore) for r in ours["resps"])
    assert len(mixed["samples"][TASK]) == 12 * len(SCORERS)


def test_a_stock_task_runs_on_hf_energy(folder, stock_task):
    ours = evaluate([dict(stock_task)], "hf-energy", folder=folder)
    stock = evaluate([dict(stock_task)], folder=folder)
    assert ours["results"]["stock_choice"]["acc,none"] == pytest.approx(
        stock["results"]["stock_choice"]["acc,none"]
    )
    assert "hyprank" not in stock


def test_the_model_is_left_as_it_was(folder):
    lm = HFLM(pretrained=str(folder), device="cpu", dtype="float32")
    evaluate([TASK], lm, limit=1)
    assert "loglikelihood" not in vars(lm)


def test_install_is_idempotent():
    wrapped = lm_eval.evaluator.evaluate
    harness.install()
    assert lm_eval.evaluator.evaluate is wrapped


# ---- models that cannot give the scores


class PairModel(LM):
    """A backend whose loglikelihood returns plain pairs; counts how often it is asked."""

    asked = 0

    def loglikelihood(self, requests):
        PairModel.asked += 1
        return [(-1.0, False) for _ in requests]

    loglikelihood_rolling = generate_until = loglikelihood


def test_a_model_of_plain_pairs_is_refused_before_it_is_asked():
    with pytest.raises(TypeError, match=r"PairModel does not return.*--model hf"):
        evaluate([TASK], PairModel())
    assert PairModel.asked == 0


@pytest.mark.parametrize("name", ["local-completions", "local-chat-completions"])
def test_api_models_are_refused_before_the_first_call(name, folder):
    # Nothing listens on the discard port: a call would fail with another error.
    arguments = {
        "model": "m",
        "base_url": "http://127.0.0.1:9/v1/completions",
        "tokenizer": str(folder),
    }
    with pytest.raises(TypeError, match="--model hf"):
        evaluate([TASK], name, model_args=arguments, apply_chat_template="chat" in name)


# ---- bad numbers


def test_a_nan_in_one_candidate_makes_that_paper_invalid(folder, caplog, monkeypatch):
    lm = EnergyHFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8)
    honest = EnergyHFLM.loglikelihood

    def spoilt(self, requests, disable_tqdm=False):
        found = honest(self, requests, disable_tqdm)
        found[5] = ContinuationScore(**{**vars(found[5]), "nll_sum": math.nan, "is_greedy": False})
        return found

    monkeypatch.setattr(EnergyHFLM, "loglikelihood", spoilt)
    with caplog.at_level(logging.WARNING):
        results = evaluate([TASK], lm)
    first = results["samples"][TASK][0]
    assert first["filter"] == "nll"
    assert first["invalid"] == 1.0
    assert "hit@1" not in first
    row = results["results"][TASK]
    assert row["invalid,nll"] == pytest.approx(1 / 12)
    valid = [s["hit@1"] for s in results["samples"][TASK] if s["filter"] == "nll" and "hit@1" in s]
    assert len(valid) == 11
    assert row["hit@1,nll"] == pytest.approx(sum(valid) / 11)
    assert "1 item(s) have candidates without a finite score" in caplog.text
    assert first["doc"]["paper_id"] in caplog.text
    # Every scorer ranks the same papers, the control too.
    assert row["invalid,raw"] == row["invalid,shortest"] == row["invalid,nll"]


def test_a_model_of_nan_has_no_metrics_at_all(tokenizer):
    broken = tiny.demo_llama()
    broken.lm_head.weight.data[:] = math.nan
    lm = EnergyHFLM(pretrained=broken, tokenizer=tokenizer, batch_size=8)
    row = evaluate([TASK], lm, limit=3)["results"][TASK]
    assert row["invalid,nll"] == 1.0
    assert "hit@1,nll" not in row
    assert row["invalid,shortest"] == 1.0


def test_truncation_is_told_per_sample_and_counted(folder, caplog):
    lm = EnergyHFLM(
        pretrained=str(folder), device="cpu", dtype="float32", max_length=300, batch_size=8
    )
    with caplog.at_level(logging.WARNING):
        results = evaluate([TASK], lm)
    cut = {s["doc_id"] for s in results["samples"][TASK] if s["truncated"]}
    assert cut
    assert f"{len(cut)} item(s) were scored on a text cut to fit" in caplog.text


# ---- limits and samples


def test_samples_keep_their_identity_whatever_the_order(run, folder):
    chosen = evaluate([TASK], folder=folder, samples={TASK: [5, 2, 9]})
    full = {(s["doc"]["paper_id"], s["filter"]): s for s in run["samples"][TASK]}
    assert len(chosen["samples"][TASK]) == 3 * len(SCORERS)
    for sample in chosen["samples"][TASK]:
        twin = full[sample["doc"]["paper_id"], sample["filter"]]
        assert sample["doc"] == twin["doc"]
        assert sample["filtered_resps"] == pytest.approx(twin["filtered_resps"], abs=1e-5)


@pytest.mark.parametrize("indices", [[-1], [0, -2], [3, 3]])
def test_negative_and_repeated_samples_are_refused(folder, indices):
    with pytest.raises(ValueError, match=r"--samples of hyprank_demo_energy.*from 0, each"):
        evaluate([TASK], folder=folder, samples={TASK: indices})


def test_limit_one_has_no_standard_error_and_no_crash(folder):
    row = evaluate([TASK], folder=folder, limit=1)["results"][TASK]
    assert row["hit@1_stderr,nll"] == "N/A"


@pytest.mark.parametrize("task", [TASK, "hyprank_demo_judge_psc", "hyprank_demo_controls"])
def test_few_shot_examples_are_refused(folder, task):
    with pytest.raises(ValueError, match="no few-shot examples, and num_fewshot is 5"):
        evaluate([task], folder=folder, num_fewshot=5)


def test_no_few_shot_examples_may_be_asked_for(run, folder):
    assert evaluate([TASK], folder=folder, num_fewshot=0)["results"] == run["results"]
    assert run["n-shot"] == {TASK: 0}


@pytest.mark.parametrize("task", [TASK, "hyprank_demo_judge", "hyprank_demo_judge_psc"])
def test_repeats_that_nobody_would_read_are_refused(task):
    manager = TaskManager(include_path=str(TASK_CONFIGS), include_defaults=False)
    (loaded,) = manager.load([task])["tasks"].values()
    loaded.set_config("repeats", 3)
    with pytest.raises(ValueError, match=r"repeats: 3 .* of which the first alone"):
        harness.check_prompts({task: loaded})


@pytest.mark.parametrize(
    ("limit", "samples"), [(1, None), (0.1, None), (None, {TASK: [3]}), (None, {TASK: [1, 2]})]
)
def test_fewer_items_than_processes_are_refused(folder, limit, samples):
    class ThreeRanks(HFLM):
        world_size = 3

    lm = ThreeRanks(pretrained=str(folder), device="cpu", dtype="float32")
    with pytest.raises(ValueError, match=r"[12] item\(s\) for 3 processes"):
        evaluate([TASK], lm, limit=limit, samples=samples)


def test_cached_requests_are_refused(folder):
    with pytest.raises(ValueError, match="--cache_requests files prompts under the task's name"):
        evaluate([TASK], folder=folder, cache_requests=True)


# ---- the response cache


def test_a_second_run_is_served_by_the_cache(run, folder, tmp_path, monkeypatch):
    cache = str(tmp_path / "cache")
    first = evaluate([TASK], folder=folder, use_cache=cache)

    def never(*_args, **_kwargs):
        raise AssertionError("the model was asked although everything is cached")

    monkeypatch.setattr(harness, "score_requests", never)
    second = evaluate([TASK], folder=folder, use_cache=cache)
    assert first["results"] == second["results"] == run["results"]


def test_after_a_break_only_the_missing_requests_run(run, folder, tmp_path, monkeypatch):
    cache = str(tmp_path / "cache")
    honest = harness.score_requests

    class Killed(BaseException):
        pass

    def break_off(model, requests, **options):
        honest(model, requests[: 5 * 16], **options)
        raise Killed

    monkeypatch.setattr(harness, "score_requests", break_off)
    with pytest.raises(Killed):
        evaluate([TASK], folder=folder, use_cache=cache)

    asked = []

    def counting(model, requests, **options):
        asked.extend(requests)
        return honest(model, requests, **options)

    monkeypatch.setattr(harness, "score_requests", counting)
    resumed = evaluate([TASK], folder=folder, use_cache=cache)
    assert len(asked) == 7 * 16
    assert resumed["results"] == run["results"]


def test_another_models_cache_is_refused(folder, tmp_path, tokenizer):
    cache = str(tmp_path / "cache")
    evaluate([TASK], folder=folder, use_cache=cache, limit=1)
    other = tmp_path / "other"
    tiny.demo_llama(seed=1).save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match=r"written by another model.*--use_cache"):
        evaluate([TASK], folder=other, use_cache=cache, limit=1)


def test_changed_weights_under_the_same_name_are_noticed(folder, tmp_path):
    cache, path = str(tmp_path / "cache"), tmp_path / "model"
    shutil.copytree(folder, path)
    evaluate([TASK], folder=path, use_cache=cache, limit=1)
    tiny.demo_llama(seed=2).save_pretrained(path)
    with pytest.raises(ValueError, match="other weights"):
        evaluate([TASK], folder=path, use_cache=cache, limit=1)


def test_a_cache_of_stock_pairs_is_refused(folder, tmp_path, stock_task):
    cache = str(tmp_path / "cache")
    evaluate([dict(stock_task)], folder=folder, use_cache=cache)
    with pytest.raises(ValueError, match=r"kept no record.*--use_cache"):
        evaluate([TASK], folder=folder, use_cache=cache, limit=1)


def test_a_cache_of_ours_serves_a_stock_task_beside(folder, tmp_path, stock_task):
    cache = str(tmp_path / "cache")
    tasks = [TASK, dict(stock_task)]
    first = evaluate(tasks, folder=folder, use_cache=cache, limit=2)
    second = evaluate([TASK, dict(stock_task)], folder=folder, use_cache=cache, limit=2)
    assert first["results"] == second["results"]


# ---- values of tokens


def test_an_ordinary_run_keeps_no_values_of_tokens(run):
    assert all(r[0].tokens is None for sample in run["samples"][TASK] for r in sample["resps"])


@pytest.mark.parametrize("model", ["hf", "hf-energy"])
def test_scorers_get_the_values_of_tokens_that_they_need(run, folder, model):
    task = "hyprank_demo_energy_scores"
    results = evaluate([task], model, folder=folder, limit=2)
    by_filter = {(s["doc_id"], s["filter"]): s for s in results["samples"][task]}
    base = {(s["doc_id"], s["filter"]): s for s in run["samples"][TASK]}
    for (doc_id, name), sample in by_filter.items():
        assert all(math.isfinite(score) for score in sample["filtered_resps"]), name
        responses = [resps[0] for resps in sample["resps"]]
        assert set(responses[0].tokens.extra) == {
            "precap", "logp_mean", "logp_var", "free_energy_t2.0"
        }  # fmt: skip
        if (doc_id, name) in base:
            assert sample["filtered_resps"] == base[doc_id, name]["filtered_resps"]
        expected = {
            "raw_precap": [r.raw for r in responses],
            "nll_byte": [r.nll_sum / r.num_bytes for r in responses],
            "min_k": [min_k(r.tokens, percent=20) for r in responses],
        }
        if name in expected:
            assert sample["filtered_resps"] == pytest.approx(expected[name], rel=1e-12)
    assert {name for _, name in by_filter} == {
        "nll", "raw", "raw_precap", "nll_byte", "nll_zlib", "zlib_ratio", "nll_first", "min_k",
        "min_k_plus", "free_energy_t2",
    }  # fmt: skip


def test_samples_files_do_not_hold_the_values_of_tokens(folder, tmp_path):
    results = evaluate(["hyprank_demo_energy_scores"], folder=folder, limit=1)
    (samples,) = results["samples"].values()
    tracker = EvaluationTracker(output_path=str(tmp_path))
    tracker.general_config_tracker.model_name_sanitized = "tiny"
    tracker.save_results_aggregated(results={"results": {}}, samples={"task": samples})
    tracker.save_results_samples(task_name="task", samples=samples)
    (file,) = tmp_path.rglob("samples_*.jsonl")
    for line in file.read_text(encoding="utf-8").splitlines():
        assert all(len(response[0]) == 2 for response in json.loads(line)["resps"])


SCORES_TASK = "hyprank_demo_energy_scores"


def test_a_cache_of_sums_is_refused_where_values_of_tokens_are_needed(folder, tmp_path):
    cache = str(tmp_path / "cache")
    evaluate([TASK], folder=folder, use_cache=cache, limit=1)
    with pytest.raises(ValueError, match="lacks the values of every token, logits") as caught:
        evaluate([SCORES_TASK], folder=folder, use_cache=cache, limit=1)
    assert "free energies at temperature 2.0, which" in str(caught.value)
    assert "need a cache path of their own" in str(caught.value)
    assert "Extras(" not in str(caught.value)


def test_a_cache_that_a_judge_began_takes_values_of_tokens(folder, tmp_path):
    cache = str(tmp_path / "cache")
    judge = "hyprank_demo_judge"
    options = {"use_cache": cache, "limit": 1, "gen_kwargs": "max_gen_toks=1"}
    evaluate([judge], folder=folder, **options)
    results = evaluate([SCORES_TASK], folder=folder, use_cache=cache, limit=1)
    assert "nll_first" in str(results["results"][SCORES_TASK])


def test_a_cache_with_values_of_tokens_keeps_them_whoever_adds_to_it(folder, tmp_path, monkeypatch):
    cache = str(tmp_path / "cache")
    first = evaluate([SCORES_TASK], folder=folder, use_cache=cache, limit=1)
    evaluate([TASK], folder=folder, use_cache=cache, limit=2)

    def never(*_args, **_kwargs):
        raise AssertionError("the model was asked although everything is cached")

    monkeypatch.setattr(harness, "score_requests", never)
    second = evaluate([SCORES_TASK], folder=folder, use_cache=cache, limit=2)
    for new, old in zip(
        second["samples"][SCORES_TASK], first["samples"][SCORES_TASK], strict=False
    ):
        if new["doc_id"] == old["doc_id"] and new["filter"] == old["filter"]:
            assert new["filtered_resps"] == old["filtered_resps"]
    assert {s["doc_id"] for s in second["samples"][SCORES_TASK]} == {0, 1}


def test_a_function_of_ones_own_reads_the_values_of_tokens(folder):
    """The example of docs/scores.md: any scorer beside it that needs them asks for them."""

    def worst(resps, docs):
        return [float(response.tokens.nll.max()) for response, *_ in resps]

    config = load_yaml(TASK_CONFIGS / "demo" / "hyprank_demo_energy.yaml")
    config["filter_list"] = [
        {"name": "worst", "filter": [{"function": "custom", "filter_fn": worst}]},
        {
            "name": "least",
            "filter": [{"function": "candidate_score", "score": "min_k", "percent": 1}],
        },
    ]
    samples = evaluate([config], folder=folder, limit=1)["samples"][TASK]
    own, ours = (sample["filtered_resps"] for sample in samples)
    assert own == ours


# ---- discovery and configuration


def test_the_group_has_every_metric_and_scorer_of_its_tasks_weighted_by_papers(
    folder, write_folder, ranking_rows, paper_rows
):
    for number in range(3):
        name = f"{ranking_rows[0]['sample_id']}{number}"
        gold = f"Another gold {number} holds."
        ranking_rows.append(ranking_rows[0] | {"sample_id": name, "gold_hypothesis": gold})
        paper_rows.append(paper_rows[0] | {"sample_id": name})
    group = "researchbench_energy_by_discipline"
    path = write_folder(ranking_rows, paper_rows)
    found = evaluate([group], folder=folder, metadata={"dataset_path": str(path)})
    sizes = {name: found["n-samples"][name]["effective"] for name in found["samples"]}
    assert sorted(sizes.values()) == [1] * 11 + [4]
    for scorer in SCORERS:
        for metric in METRICS:
            key = f"{metric},{scorer}"
            total = sum(found["results"][name][key] * size for name, size in sizes.items())
            assert found["groups"][group][key] == pytest.approx(total / 15)


def test_a_run_of_controls_scores_each_with_its_own_context(run, folder):
    results = evaluate(["hyprank_demo_controls"], folder=folder)
    base = {(s["doc_id"], s["filter"]): s for s in run["samples"][TASK]}
    for name, samples in results["samples"].items():
        metadata = results["configs"][name]["metadata"]
        assert metadata["control_of"] == TASK
        expected = demo.load(control=metadata["control"])["test"]["context"]
        for sample in samples:
            twin = base[sample["doc_id"], sample["filter"]]
            assert sample["arguments"][0][0] == expected[sample["doc_id"]]
            assert sample["doc"]["candidates"] == twin["doc"]["candidates"]
            assert sample["num_tokens"] == twin["num_tokens"]
            same = sample["filtered_resps"] == twin["filtered_resps"]
            assert same == (sample["filter"] == "shortest")
    assert len(results["samples"]) == 4


@pytest.mark.parametrize(
    ("layout", "tail", "separator"),
    [("inline", "\nHypothesis:", " "), ("block", "\nHypothesis:", "\n")],
)
def test_layouts_reach_the_prompt(folder, layout, tail, separator):
    results = evaluate([TASK], folder=folder, metadata={"layout": layout}, limit=1)
    context, continuation = results["samples"][TASK][0]["arguments"][0]
    assert context.startswith("Background:" + separator)
    assert context.endswith(tail)
    assert continuation.startswith(separator)
    assert continuation[1:] == results["samples"][TASK][0]["doc"]["candidates"][0]


HEADER = "<s>assistant\n"
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.mark.parametrize("model", [HFLM, EnergyHFLM])
@pytest.mark.parametrize("layout", ["inline", "block"])
def test_under_a_chat_template_the_candidate_alone_is_scored(folder, model, layout, monkeypatch):
    lm = model(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8)
    lm.tokenizer.chat_template = CHAT_TEMPLATE
    rows = []

    def watched(*arguments):
        rows.extend(encode(*arguments))
        return rows

    monkeypatch.setattr(hf, "encode", watched)
    metadata = {"layout": layout}
    results = evaluate([TASK], lm, metadata=metadata, limit=1, apply_chat_template=True)
    sample = results["samples"][TASK][0]
    context = sample["arguments"][0][0]
    assert context.endswith(f"Hypothesis:</s>\n{HEADER}")
    ids = [lm.tokenizer(text)["input_ids"] for text in sample["doc"]["candidates"]]
    assert [list(row.continuation) for row in rows] == ids
    assert {row.prefix for row in rows} == {tuple(lm.tokenizer(context)["input_ids"])}
    assert sample["num_tokens"] == list(map(len, ids))
    nll = tiny.plain_sums(lm.model, rows[0].prefix, rows[0].continuation)[0] / len(ids[0])
    assert sample["filtered_resps"][0] == pytest.approx(nll, abs=2e-6)


def test_after_a_prefix_of_the_answer_the_separator_is_scored(folder):
    lm = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8)
    lm.tokenizer.chat_template = CHAT_TEMPLATE
    config = load_yaml(TASK_CONFIGS / "demo" / "hyprank_demo_energy.yaml")
    config["gen_prefix"] = "Hypothesis:"
    results = evaluate([config], lm, limit=1, apply_chat_template=True)
    sample = results["samples"][TASK][0]
    texts = [f" {text}" for text in sample["doc"]["candidates"]]
    assert sample["num_tokens"] == [len(lm.tokenizer(text)["input_ids"]) for text in texts]


def test_model_arguments_do_not_reach_the_data_set(folder):
    arguments = {"pretrained": str(folder), "dtype": "float32", "revision": "main"}
    assert evaluate([TASK], model_args=arguments, limit=1, metadata=arguments)
