"""Controls joined to their runs; PMI against sums of log-probabilities worked out by hand."""

import math
import random

import pytest

from lm_eval_hyprank.report.build import build_report
from lm_eval_hyprank.report.controls import pmi_scores
from lm_eval_hyprank.report.found import ReportError
from lm_eval_hyprank.report.intervals import Settings
from lm_eval_hyprank.report.runs import read_runs
from tests.report.run_folder import TASK, documents, write_energy

SCORERS = {"nll": "nll", "nll_sum": "nll_sum"}
CONTROL = {
    "task": f"{TASK}_nocontext",
    "metadata": {"control": "no_context", "control_of": TASK},
    "date": "2026-01-03T00-00-00",
}


def log_probabilities(doc, name, given):
    """Log-probabilities of a candidate's tokens, with the context or without."""
    draw = random.Random(f"{doc['paper_id']} {name} {given}")
    text = doc["candidates"][doc["candidate_ids"].index(name)]
    return [-draw.expovariate(1 if given else 0.5) for _ in text.split()]


def scores(given):
    def of(doc):
        sums = [-math.fsum(log_probabilities(doc, n, given)) for n in doc["candidate_ids"]]
        sizes = [len(text.split()) for text in doc["candidates"]]
        return {"nll_sum": sums, "nll": [s / n for s, n in zip(sums, sizes, strict=True)]}

    return of


def write_both(folder, given=None, without=None):
    write_energy(folder, scores=scores(True), scorers=SCORERS, **(given or {}))
    docs = {"docs": documents(shown=3)}  # another order of candidates
    write_energy(
        folder, scores=scores(False), scorers=SCORERS, **docs, **CONTROL, **(without or {})
    )
    return read_runs([folder])


def test_pmi_is_what_the_context_adds_to_the_log_probability(tmp_path):
    found, absent = pmi_scores(write_both(tmp_path))
    assert absent == []
    table = found.set_index(["scorer", "paper_id", "candidate_id"])["score"]
    assert len(table) == 2 * 8 * 16
    for doc in documents():
        for name in doc["candidate_ids"]:
            with_context = log_probabilities(doc, name, True)
            without = log_probabilities(doc, name, False)
            # log p(h | c) − log p(h | "Hypothesis:"), token by token.
            terms = [a - b for a, b in zip(with_context, without, strict=True)]
            key = (doc["paper_id"], name)
            assert table[("dc_pmi", *key)] == pytest.approx(-math.fsum(terms))
            assert table[("pmi", *key)] == pytest.approx(-math.fsum(terms) / len(terms))


def test_pmi_systems_stand_in_the_report(tmp_path):
    report = build_report(write_both(tmp_path), Settings(resamples=50))
    systems = {one["id"]: one for one in report["systems"]}
    pmi = systems[f"Lark-1B|{TASK}|pmi"]
    assert (pmi["paradigm"], pmi["kind"]) == ("PMI per token", "energy")
    assert "hit@1" in systems[f"Lark-1B|{TASK}|dc_pmi"]["metrics"]
    ranks = report["papers"][0]["candidates"][0]["ranks"]
    assert ranks[list(systems).index(pmi["id"])] >= 1


@pytest.mark.parametrize(
    ("given", "without", "why"),
    [
        ({"fingerprint": None}, {"fingerprint": None}, "none and none"),
        ({}, {"fingerprint": None}, "and none"),
    ],
)
def test_no_pmi_of_runs_that_are_not_known_to_be_of_one_model(tmp_path, given, without, why):
    runs = write_both(tmp_path, given, without)
    found, absent = pmi_scores(runs)
    assert found.empty
    (entry,) = absent
    assert entry["model"] == "Lark-1B"
    assert why in entry["why"]
    report = build_report(runs, Settings(resamples=20))
    assert report["controls"]["pmi_absent"] == absent
    assert report["controls"]["shares"]  # the hits are still compared


def test_no_pmi_without_a_control(tmp_path):
    write_energy(tmp_path)
    found, (entry,) = pmi_scores(read_runs([tmp_path]))
    assert found.empty
    assert "no run of this model" in entry["why"]


def test_no_pmi_from_another_control(tmp_path):
    write_energy(tmp_path)
    metadata = {"control": "question_only", "control_of": TASK}
    write_energy(tmp_path, task=f"{TASK}_question_only", metadata=metadata)
    assert pmi_scores(read_runs([tmp_path]))[0].empty


def test_a_paper_invalid_in_the_control_is_invalid_under_pmi(tmp_path):
    paper = documents()[2]["paper_id"]

    def without(doc):
        found = scores(False)(doc)
        return {k: [math.nan] * 16 for k in found} if doc["paper_id"] == paper else found

    write_energy(tmp_path, scores=scores(True), scorers=SCORERS)
    write_energy(tmp_path, scores=without, scorers=SCORERS, **CONTROL)
    report = build_report(read_runs([tmp_path]), Settings(resamples=20))
    (pmi,) = [one for one in report["systems"] if one["scorer"] == "pmi"]
    assert (pmi["papers"], pmi["invalid"]) == (7, 1)
    share = report["controls"]["shares"][0]
    assert share["papers"] == 7


def test_what_the_context_is_worth_is_a_paired_difference(tmp_path):
    report = build_report(write_both(tmp_path), Settings(resamples=200))
    values = {one["id"]: one["metrics"] for one in report["systems"]}
    rows = report["controls"]["shares"]
    assert {row["metric"] for row in rows} == {"hit@1", "hit@5", "mrr", "win_rate"}
    for row in rows:
        scorer = row["system"].split("|")[2]
        full = values[row["system"]][row["metric"]]["value"]
        without = values[f"Lark-1B|{TASK}_nocontext|{scorer}"][row["metric"]]["value"]
        assert row["full"] == pytest.approx(full)
        assert row["without"] == pytest.approx(without)
        assert row["difference"] == pytest.approx(full - without)
        assert row["difference_low"] <= row["difference"] <= row["difference_high"]


def test_a_control_that_equals_its_task_loses_nothing(tmp_path):
    write_energy(tmp_path, scores=scores(True), scorers=SCORERS)
    write_energy(tmp_path, scores=scores(True), scorers=SCORERS, **CONTROL)
    report = build_report(read_runs([tmp_path]), Settings(resamples=50))
    for row in report["controls"]["shares"]:
        assert row["difference"] == row["difference_low"] == row["difference_high"] == 0
    pmi = next(one for one in report["systems"] if one["scorer"] == "pmi")
    assert pmi["metrics"]["hit@1"]["value"] == 1 / 16  # all candidates tied


def test_a_control_of_another_paper_set_is_refused(tmp_path):
    write_energy(tmp_path, scores=scores(True), scorers=SCORERS)
    docs = documents()
    docs[0]["candidates"][0] += "!"
    write_energy(tmp_path, scores=scores(False), scorers=SCORERS, docs=docs, **CONTROL)
    with pytest.raises(ValueError, match="has another text"):
        read_runs([tmp_path])


# --- two tasks that share scorers --------------------------------------------------------------

MORE = f"{TASK}_scores"
OF_TASK = {TASK: SCORERS, MORE: {"nll": "nll", "raw": "raw"}}


def write_runs(folder, runs, nll=0.0):
    """Runs of `TASK` (`nll`, `nll_sum`) and `MORE` (`nll`, `raw`), and of their controls.

    Args:
        folder: Where they go.
        runs: Model, task and whether it is the control without context.
        nll: What is added to the first candidate's `nll` in the last of them.
    """
    for number, (model, task, control) in enumerate(runs):
        change = nll if number == len(runs) - 1 else 0.0

        def of(doc, model=model, control=control, added=change):
            found = scores(not control)(doc)
            own = [value + len(model) for value in found["nll"]]
            return found | {"nll": [own[0] + added, *own[1:]], "raw": own[::-1]}

        options = {"metadata": {"control": "no_context", "control_of": task}} if control else {}
        write_energy(
            folder,
            model,
            scores=of,
            scorers=OF_TASK[task],
            task=task + "_nocontext" * control,
            date=f"2026-01-05T00-00-{number:02}",
            **options,
        )
    return read_runs([folder])


def listed(runs, control=""):
    own = runs.systems[runs.systems["control"] == control]
    return sorted(zip(own["model"], own["task"], own["scorer"], strict=True))


def both(model="one", tasks=(TASK, MORE), controls=()):
    return [*((model, task, False) for task in tasks), *((model, task, True) for task in controls)]


@pytest.mark.parametrize("controls", [(), (TASK,), (MORE,), (TASK, MORE)])
def test_a_scorer_that_two_tasks_share_is_one_system(tmp_path, controls):
    runs = write_runs(tmp_path, both(controls=controls))
    assert [own[1:] for own in listed(runs)] == [*((TASK, "nll"), (TASK, "nll_sum"), (MORE, "raw"))]
    assert f"nll: the numbers of {MORE} are those of {TASK} and stand once." in runs.notes
    expected = {"nll"} if controls else set()
    expected |= {"nll_sum"} if TASK in controls else set()
    expected |= {"raw"} if MORE in controls else set()
    assert sorted(own[2] for own in listed(runs, "no_context")) == sorted(expected)


@pytest.mark.parametrize(
    ("tasks", "controls", "shares", "pmi"),
    [
        ((TASK, MORE), (TASK,), {(TASK, "nll"), (TASK, "nll_sum")}, {"pmi", "dc_pmi"}),
        ((TASK, MORE), (MORE,), {(TASK, "nll"), (MORE, "raw")}, {"pmi"}),
        (
            (TASK, MORE),
            (TASK, MORE),
            {(TASK, "nll"), (TASK, "nll_sum"), (MORE, "raw")},
            {"pmi", "dc_pmi"},
        ),
        # A control of a task that was not run takes nothing from the other's.
        ((MORE,), (TASK, MORE), {(MORE, "nll"), (MORE, "raw")}, {"pmi"}),
        ((TASK,), (TASK, MORE), {(TASK, "nll"), (TASK, "nll_sum")}, {"pmi", "dc_pmi"}),
    ],
)
def test_controls_serve_shared_scorers(tmp_path, tasks, controls, shares, pmi):
    runs = write_runs(tmp_path, both(tasks=tasks, controls=controls))
    report = build_report(runs, Settings(resamples=50))
    found = {tuple(row["system"].split("|")[1:]) for row in report["controls"]["shares"]}
    assert found == shares
    scorers = {one["scorer"] for one in report["systems"]}
    assert scorers & {"pmi", "dc_pmi"} == pmi
    assert report["controls"]["pmi_absent"] == []


@pytest.mark.parametrize("alone", [TASK, MORE])
def test_models_stay_side_by_side(tmp_path, alone):
    """A scorer stands under the task that all its models ran."""
    runs = write_runs(tmp_path, [*both("one"), *both("three", tasks=(alone,))])
    assert [own[:2] for own in listed(runs) if own[2] == "nll"] == [
        *(("one", alone), ("three", alone))
    ]


def test_models_of_two_tasks_stay_apart(tmp_path):
    runs = write_runs(tmp_path, [*both("one", (TASK,)), *both("three", (MORE,))])
    assert [own[:2] for own in listed(runs) if own[2] == "nll"] == [
        *(("one", TASK), ("three", MORE))
    ]


def test_scorers_of_one_name_with_other_numbers_stay_apart(tmp_path):
    runs = write_runs(tmp_path, both(), nll=1e-3)
    assert [own[1] for own in listed(runs) if own[2] == "nll"] == [TASK, MORE]


@pytest.mark.parametrize("nll", [1e-3, 0.0])
def test_two_controls_of_one_scorer_are_never_averaged(tmp_path, nll):
    """A task's own control stands, whatever the other's numbers."""
    alone = write_runs(tmp_path / "alone", both(controls=(TASK,)))
    runs = write_runs(tmp_path / "both", both(controls=(TASK, MORE)), nll=nll)
    found = [
        build_report(each, Settings(resamples=50))["controls"]["shares"] for each in (alone, runs)
    ]
    name = f"one|{TASK}|nll"
    one, other = ([row for row in rows if row["system"] == name] for rows in found)
    assert one == other
    scores_of = runs.control_scores[runs.control_scores["scorer"] == "nll"]
    assert len(scores_of) == 8 * 16


def test_a_control_without_the_row_that_pmi_takes_is_named(tmp_path):
    write_energy(tmp_path, scores=scores(True), scorers={"nll_sum": "nll_sum"})
    write_energy(tmp_path, scores=scores(False), scorers={"nll": "nll"}, **CONTROL)
    (absent,) = pmi_scores(read_runs([tmp_path]))[1]
    assert absent["why"] == "its control without context has no row nll_sum"


# --- what does not belong together -------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"metadata": CONTROL["metadata"] | {"layout": "block"}}, "layout is inline in the task"),
        ({"more": {"chat_template_sha": "0123456789"}}, "chat_template is none in the task"),
        ({"more": {"n-shot": {CONTROL["task"]: 2}}}, "num_fewshot is none in the task and 2"),
        ({"fingerprint": "b" * 16}, "the model's fingerprint is [0-9a-f]{16} in the task and bbbb"),
    ],
)
def test_a_control_that_is_asked_otherwise_is_refused(tmp_path, change, said):
    for folder, options in (("alike", CONTROL), ("otherwise", CONTROL | change)):
        write_energy(tmp_path / folder, scores=scores(True), scorers=SCORERS)
        write_energy(tmp_path / folder, scores=scores(False), scorers=SCORERS, **options)
    read_runs([tmp_path / "alike"])
    with pytest.raises(ReportError, match=said) as error:
        read_runs([tmp_path / "otherwise"])
    assert "Run the control again as the task was run" in str(error.value)
    assert "--task" not in str(error.value)


def test_a_control_that_was_run_twice_counts_once(tmp_path):
    """With options of another task, say, which metadata hands to every task of a call."""
    write_energy(tmp_path, scores=scores(True), scorers=SCORERS)
    for date, options in (("2026-01-03", {}), ("2026-01-04", {"of_another": 1})):
        write_energy(
            tmp_path,
            scores=scores(False),
            scorers=SCORERS,
            task=CONTROL["task"],
            metadata=CONTROL["metadata"] | options,
            date=f"{date}T00-00-00",
        )
    runs = read_runs([tmp_path])
    assert len(listed(runs, "no_context")) == len(SCORERS)
    assert len(build_report(runs, Settings(resamples=20))["controls"]["shares"]) == 2 * 4
