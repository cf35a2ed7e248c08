"""Controls joined to their runs; PMI against sums of log-probabilities worked out by hand."""

import math
import random

import pytest

from lm_eval_hyprank.report.build import build_report
from lm_eval_hyprank.report.controls import pmi_scores
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
        ({"fingerprint": "a" * 16}, {"fingerprint": "b" * 16}, "aaaaaaaaaaaaaaaa and bbbb"),
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


def write_more(folder, given=None, without=None, controls=(TASK, MORE)):
    """A task and one with `nll` and another scorer, `raw`, and controls of either."""

    def with_raw(of, seed):
        return lambda doc: of(doc) | {"raw": [nll - len(seed) for nll in of(doc)["nll"][::-1]]}

    more = {"nll": "nll", "raw": "raw"}
    write_energy(folder, scores=scores(True), scorers=SCORERS)
    given = with_raw(given or scores(True), "x")
    write_energy(folder, task=MORE, scores=given, scorers=more, date="2026-01-04T00-00-00")
    for task in controls:
        write_energy(
            folder,
            scores=with_raw(scores(False), "xx"),
            scorers=SCORERS if task == TASK else more,
            task=f"{task}_nocontext",
            metadata={"control": "no_context", "control_of": task},
            date=f"2026-01-05T00-00-0{len(task) % 10}",
        )
    return read_runs([folder])


@pytest.mark.parametrize("controls", [(), (TASK,), (MORE,), (TASK, MORE)])
def test_a_scorer_that_two_tasks_share_is_one_system(tmp_path, controls):
    runs = write_more(tmp_path, controls=controls)
    own = runs.systems[runs.systems["control"] == ""]
    assert list(zip(own["task"], own["scorer"], strict=True)) == [
        *((TASK, "nll"), (TASK, "nll_sum"), (MORE, "raw"))
    ]
    assert f"Lark-1B: nll of {MORE} are those of {TASK} and stand once." in runs.notes
    theirs = runs.systems[runs.systems["control"] != ""]
    expected = {"nll"} if controls else set()
    expected |= {"nll_sum"} if TASK in controls else set()
    expected |= {"raw"} if MORE in controls else set()
    assert sorted(theirs["scorer"]) == sorted(expected)


@pytest.mark.parametrize(
    ("controls", "shares", "pmi"),
    [
        ((TASK,), {(TASK, "nll"), (TASK, "nll_sum")}, {"pmi", "dc_pmi"}),
        ((MORE,), {(TASK, "nll"), (MORE, "raw")}, {"pmi"}),
        ((TASK, MORE), {(TASK, "nll"), (TASK, "nll_sum"), (MORE, "raw")}, {"pmi", "dc_pmi"}),
    ],
)
def test_the_control_of_either_task_serves_a_shared_scorer(tmp_path, controls, shares, pmi):
    report = build_report(write_more(tmp_path, controls=controls), Settings(resamples=50))
    found = {tuple(row["system"].split("|")[1:]) for row in report["controls"]["shares"]}
    assert found == shares
    assert {one["scorer"] for one in report["systems"]} >= pmi
    assert report["controls"]["pmi_absent"] == []


def test_scorers_of_one_name_with_other_numbers_stay_apart(tmp_path):
    def otherwise(doc):
        found = scores(True)(doc)
        return found | {"nll": [found["nll"][0] + 1e-3, *found["nll"][1:]]}

    own = write_more(tmp_path, given=otherwise, controls=()).systems
    assert list(own.loc[own["scorer"] == "nll", "task"]) == [TASK, MORE]
