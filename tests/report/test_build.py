"""The report's content, and its published schema."""

import copy
import json
import math
from importlib.resources import files

import jsonschema
import pandas as pd
import pytest
from scipy.stats import rankdata

from lm_eval_hyprank.judge.replies import Reading
from lm_eval_hyprank.judge.scoring import figures as position_counts
from lm_eval_hyprank.report.build import build_report
from lm_eval_hyprank.report.intervals import Settings
from lm_eval_hyprank.report.runs import NO_MODEL, read_runs
from lm_eval_hyprank.report.tables import tables
from lm_eval_hyprank.report.write import write_report
from tests.report.conftest import SCORERS, shuffled, with_sums
from tests.report.run_folder import (
    IDS,
    TASK,
    documents,
    write_energy,
    write_judge,
    write_pairwise,
    write_psc,
)


@pytest.fixture(scope="module")
def validator():
    text = files("lm_eval_hyprank.report").joinpath("report.schema.json").read_text("utf-8")
    schema = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def system(report, name):
    (found,) = [one for one in report["systems"] if one["id"] == name]
    return found


def numbers(report, candidate, key):
    """A candidate's scores or ranks by the system's id, those that there are."""
    ids = [one["id"] for one in report["systems"]]
    named = dict(zip(ids, candidate[key], strict=True))
    return {name: value for name, value in named.items() if value is not None}


def test_the_report_follows_its_schema(report, validator):
    validator.validate(json.loads(json.dumps(report, allow_nan=False)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda report: report.pop("systems"),
        lambda report: report.update(extra=1),
        lambda report: report["systems"][0].update(kind="oracle"),
        lambda report: report["systems"][0]["metrics"]["hit@1"].pop("value"),
        lambda report: report["systems"][0]["metrics"].update(mrr=0.5),
        lambda report: report["comparisons"][0].update(p=1.5),
        lambda report: report["papers"][0]["candidates"][0].update(scores=["1.0"]),
        lambda report: report["papers"][0]["candidates"][0].update(ranks=[0.5]),
        lambda report: report["papers"][0]["candidates"][0].update(ranks={"a": 1}),
    ],
)
def test_the_schema_refuses_other_shapes(report, validator, spoil):
    spoilt = copy.deepcopy(report)
    spoil(spoilt)
    assert not validator.is_valid(spoilt)


def test_values_equal_what_lm_eval_wrote(report, runs_folder):
    (file,) = runs_folder.glob("acme__Lark-3B/results_*.json")
    written = json.loads(file.read_text(encoding="utf-8"))["results"][TASK]
    for scorer in ("nll", "raw"):
        metrics = system(report, f"Lark-3B|{TASK}|{scorer}")["metrics"]
        for metric in ("hit@1", "hit@2", "hit@3", "hit@5", "mrr", "win_rate"):
            assert metrics[metric]["value"] == pytest.approx(written[f"{metric},{scorer}"])


def test_a_judges_values_equal_what_lm_eval_wrote(report, runs_folder):
    (file,) = runs_folder.glob("gpt-x/results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    for task in ("researchbench_judge", "researchbench_judge_psc"):
        written = results[task]
        judge = system(report, f"gpt-x|{task}|judge")
        for metric, theirs in (
            *((f"hit@{k}", f"hit@{k}") for k in (1, 2, 3, 5)),
            ("win_rate", "win_rate_half"),
            ("win_rate_terminal", "win_rate_terminal"),
        ):
            assert judge["metrics"][metric]["value"] == pytest.approx(written[f"{theirs},judge"])
            assert judge["metrics_valid"][metric]["value"] == pytest.approx(
                written[f"{theirs}_valid,judge"]
            )
        assert judge["parse_rate"] == pytest.approx(written["parse_rate,judge"])
        assert "mrr" not in judge["metrics"]
        assert "rank_histogram" not in judge
        assert judge["invalid_reasons"] == {"refusal": 1}
    pairwise = system(report, "gpt-x|researchbench_pairwise|judge")
    written = results["researchbench_pairwise"]
    for metric in ("accuracy", "both_correct", "contradiction", "both_wrong"):
        assert pairwise["metrics"][metric]["value"] == pytest.approx(written[f"{metric},judge"])
    assert pairwise["invalid"] == 8  # one negative without verdicts: no rank of the gold
    assert "hit@1" not in pairwise["metrics"]
    assert pairwise["parse_rate"] == pytest.approx(28 / 30)


def test_a_judge_that_takes_what_is_shown_first_is_seen(tmp_path, validator):
    """Listwise by its five, in several orders by its five in each, pairwise by its verdicts."""
    write_judge(tmp_path, lambda doc: doc["candidate_ids"][:5])
    write_psc(tmp_path, lambda doc, order: None if order == 2 else shown_in(doc, order)[:5])
    write_pairwise(tmp_path, lambda doc, other, gold_first: True)
    made = build_report(read_runs([tmp_path]), Settings(resamples=50))
    validator.validate(made)
    assert [one["metrics"]["chose_shown_first"]["value"] for one in made["systems"]] == [1.0] * 3
    single = system(made, "gpt-x|researchbench_judge|judge")["positions"]
    assert [row["first_choices"] for row in single] == [8] + [0] * 15
    golds = [doc["candidate_ids"].index("gold") for doc in documents(shown=1)]
    assert [row["gold_shown"] for row in single] == [golds.count(n) for n in range(16)]
    for place, row in enumerate(single):
        hits = [row.get("gold_hit@1"), row.get("gold_hit@5")]
        assert hits == ([place == 0, place < 5] if row["gold_shown"] else [None, None])
    several = system(made, "gpt-x|researchbench_judge_psc|judge")["positions"]
    assert [row["first_choices"] for row in several] == [16] + [0] * 15
    assert sum(row["gold_shown"] for row in several) == 16  # the unread order is left out


def shown_in(doc, order):
    return [doc["candidate_ids"][index] for index in doc["orders"][order]]


def test_positions_equal_the_counts_beside_lm_evals_results(runs_folder, report):
    """The counts that a run of a judge writes into its results file are made from its replies."""
    readings = []
    for doc in documents(shown=1):
        named = shuffled(doc)
        ids = doc["candidate_ids"]
        value = None if named is None else [ids.index(name) for name in named]
        readings.append((doc | {"orders": []}, [Reading(value, None if value else "refusal")]))
    written = position_counts(readings)
    positions = system(report, "gpt-x|researchbench_judge|judge")["positions"]
    for key in ("first_choices", "gold_shown", "gold_hit@1", "gold_hit@5"):
        assert [row.get(key) for row in positions] == written[key]


def test_a_judge_without_a_readable_reply_has_no_hits(tmp_path):
    write_judge(tmp_path, lambda doc: None)
    made = build_report(read_runs([tmp_path]), Settings(resamples=50))
    judge = made["systems"][0]
    assert judge["metrics"]["hit@5"]["value"] == 0
    assert "metrics_valid" not in judge
    assert judge["parse_rate"] == 0


def test_a_pairwise_judge_may_stand_alone(tmp_path, validator):
    write_pairwise(tmp_path, lambda doc, other, first: first)
    made = build_report(read_runs([tmp_path]), Settings(resamples=50))
    validator.validate(made)
    (judge,) = made["systems"]
    assert judge["metrics"]["accuracy"]["value"] == judge["metrics"]["hit@1"]["value"] == 1
    assert made["papers"][0]["candidates"][0]["ranks"] == [None]


def test_a_gold_that_orders_leave_tied_but_ranked_keeps_its_win_rate(tmp_path):
    lists = [["gold", *IDS[1:5]], ["fake_1", "gold", *IDS[2:5]]]
    write_psc(tmp_path, lambda doc, order: lists[order], orders=2)
    made = build_report(read_runs([tmp_path]), Settings(resamples=50))
    judge = made["systems"][0]["metrics"]
    # Nine points each: the gold and fake_1 are tied at the top of sixteen.
    assert judge["hit@1"]["value"] == 0.5
    assert judge["win_rate"]["value"] == judge["win_rate_terminal"]["value"] == 14.5 / 15


def test_invalid_papers_are_counted_and_without_rank(report):
    paper = documents()[1]["paper_id"]
    one = system(report, f"Lark-3B|{TASK}|nll")
    assert (one["papers"], one["invalid"]) == (7, 1)
    (entry,) = [each for each in report["papers"] if each["paper_id"] == paper]
    for candidate in entry["candidates"]:
        ranks, scores = (numbers(report, candidate, key) for key in ("ranks", "scores"))
        assert one["id"] not in ranks
        assert one["id"] not in scores
        assert f"Lark-1B|{TASK}|nll" in ranks


def test_every_candidate_has_each_systems_score_and_mean_rank(report, runs_folder):
    runs = read_runs([runs_folder])
    scores = pd.concat([runs.scores, runs.control_scores])
    systems = {one["id"] for one in report["systems"] if one["kind"] == "energy"}
    systems -= {one for one in systems if one.endswith("pmi")}  # the report's own
    seen = 0
    for (system, paper_id), mine in scores.groupby(["system", "paper_id"], sort=False):
        (entry,) = [each for each in report["papers"] if each["paper_id"] == paper_id]
        if system not in systems or not mine["score"].map(math.isfinite).all():
            continue
        seen += 1
        own = {c["id"]: numbers(report, c, "scores")[system] for c in entry["candidates"]}
        ranks = {c["id"]: numbers(report, c, "ranks")[system] for c in entry["candidates"]}
        ids = mine["candidate_id"].tolist()
        assert own == pytest.approx(dict(zip(ids, mine["score"], strict=True)), rel=5e-6)
        assert ranks == dict(zip(ids, rankdata(mine["score"]), strict=True))
    assert seen == 8 * len(systems) - 2  # one paper is invalid under two scorers


def test_a_candidates_scores_have_six_digits(report):
    numbers = [n for c in report["papers"][0]["candidates"] for n in c["scores"] if n is not None]
    assert all(len(f"{abs(number)}".replace(".", "").lstrip("0")) <= 6 for number in numbers)
    assert any(isinstance(number, float) for number in numbers)


def test_unranked_candidates_of_a_judge_share_a_rank(report):
    name = "gpt-x|researchbench_judge|judge"
    candidates = report["papers"][0]["candidates"]
    ranks = sorted(numbers(report, candidate, "ranks")[name] for candidate in candidates)
    assert not any(name in numbers(report, candidate, "scores") for candidate in candidates)
    assert ranks == [1, 2, 3, 4, 5, *[11] * 11]


def test_papers_of_one_doi_are_one_cluster(report):
    assert report["paper_set"]["papers"] == 8
    assert report["paper_set"]["dois"] == 7


def test_pooled_rows_take_scorers_of_several_models(report):
    assert [(row["scorer"], row["models"]) for row in report["pooled"]] == [("nll", 2), ("raw", 2)]
    values = [system(report, f"Lark-{m}|{TASK}|nll") for m in ("1B", "3B")]
    total = sum(one["metrics"]["hit@5"]["value"] * one["papers"] for one in values)
    pooled = report["pooled"][0]["metrics"]["hit@5"]["value"]
    assert pooled == pytest.approx(total / sum(one["papers"] for one in values))


def test_controls_are_systems_of_their_own_and_not_compared(report):
    control = system(report, f"Lark-1B|{TASK}_nocontext|nll")
    assert (control["control"], control["control_of"]) == ("no_context", TASK)
    assert "tier" not in control
    compared = {pair[side] for pair in report["comparisons"] for side in "ab"}
    assert compared == {
        one["id"] for one in report["systems"] if "control" not in one and one["kind"] != "pairwise"
    }
    assert all("tier" in system(report, name) for name in compared)


def test_length_is_in_tokens_where_known_and_else_in_bytes(report):
    assert system(report, f"Lark-1B|{TASK}|nll")["matched"]["length"] == "tokens"
    shortest = system(report, f"{NO_MODEL}|{TASK}|shortest")
    assert shortest["matched"]["length"] == "bytes"
    assert shortest["length_correlation"]["value"] == pytest.approx(1.0)


def test_the_best_of_many_is_named_with_its_correction(report):
    best = report["best"]
    assert best["papers"] == 8  # one is invalid under one of the models: a miss there
    assert best["of"] == 9  # nll, raw, nll_sum, pmi and dc_pmi; nll and raw; two listwise judges
    assert best["system"].split("|")[0] in ("Lark-1B", "Lark-3B")
    assert best["corrected"]["value"] <= best["naive"]["value"] + 1e-9
    assert sum(best["chosen"].values()) == pytest.approx(1.0)


TWO = {"nll": "nll", "raw": "raw"}


def notes_of(report):
    return tables(report)[0].notes


def standing(report):
    """The tiers, in their order, as sets of models and scorers."""
    tiers = {}
    for one in report["systems"]:
        if "tier" in one and one["model"] != "Few":
            tiers.setdefault(one["tier"], set()).add((one["model"], one["scorer"]))
    return [tiers[tier] for tier in sorted(tiers)]


@pytest.mark.parametrize("ranked", [0, 1, 2, 24])
def test_a_model_with_few_valid_papers_changes_nothing_for_the_others(ranked, tmp_path, validator):
    """Its gold is first wherever it has scores."""
    docs = documents(48)
    for doc in docs:
        doc["doi"] = doc["paper_id"]
    valid = {doc["paper_id"] for doc in docs[:ranked]}

    def few(doc):
        own = [-float(i == doc["gold"]) for i in range(16)]
        own = own if doc["paper_id"] in valid else [math.nan] * 16
        return {"nll": own, "raw": own}

    models = {"acme/Good": with_sums("good", 9.0), "acme/Weak": with_sums("weak", -9.0)}
    reports = []
    for folder in ("alone", "beside"):
        for model, scores in models.items():
            write_energy(tmp_path / folder, model, docs=docs, scores=scores, scorers=TWO)
        if folder == "beside":
            write_energy(tmp_path / folder, "acme/Few", docs=docs, scores=few, scorers=TWO)
        made = build_report(read_runs([tmp_path / folder]), Settings(resamples=50))
        validator.validate(json.loads(json.dumps(made)))
        reports.append(made)
    alone, beside = reports
    assert standing(beside) == standing(alone)
    assert beside["agreement"] == alone["agreement"]
    best, other = beside["best"], alone["best"]
    assert best["papers"] == 48
    assert {**best, "of": 0} == {**other, "of": 0}
    own = system(beside, f"Few|{TASK}|nll")
    assert own["invalid"] == 48 - ranked
    assert "compared" not in system(beside, f"Good|{TASK}|nll")
    if not ranked:
        assert not {"tier", "compared"} & own.keys()
        return
    assert own["metrics"]["hit@1"]["value"] == 1.0
    assert own["compared"]["value"] == ranked / 48
    assert own["tier"] > system(beside, f"Good|{TASK}|nll")["tier"] == 1
    assert any("is a miss in tests, tiers and the best" in note for note in notes_of(beside))
    assert not any("is a miss in tests" in note for note in notes_of(alone))


def test_an_interval_without_width_says_so(tmp_path):
    perfect = {"nll": 0.0, "raw": 0.0, "shortest": 0.0}

    def scores(doc):
        return {k: [-1.0 if i == doc["gold"] else 0.0 for i in range(16)] for k in perfect}

    write_energy(tmp_path, scores=scores)
    made = build_report(read_runs([tmp_path]), Settings(resamples=50))
    assert made["systems"][0]["metrics"]["hit@1"] == {
        **{"value": 1.0, "low": 1.0, "high": 1.0},
        "degenerate": True,
    }


def test_one_paper_has_values_without_intervals(tmp_path):
    write_energy(tmp_path, docs=documents(1))
    made = build_report(read_runs([tmp_path]), Settings(resamples=50))
    assert all("low" not in cell for cell in made["systems"][0]["metrics"].values())
    assert "best" not in made
    json.dumps(made, allow_nan=False)


def test_a_model_without_a_number_has_no_metrics_and_stands_in_every_table(tmp_path, validator):
    write_energy(tmp_path, scores=lambda doc: {k: [float("nan")] * 16 for k in SCORERS})
    for others in (0, 1):
        if others:
            write_energy(tmp_path, "acme/Lark-3B")
        made = build_report(read_runs([tmp_path]), Settings(resamples=50))
        validator.validate(made)
        assert made["systems"][0]["metrics"] == {}
        assert made["systems"][0]["invalid"] == 8
        assert made["pooled"] == []  # of one model with numbers at most
        write_report(made, tmp_path / f"report {others}")
        text = (tmp_path / f"report {others}" / "report.md").read_text(encoding="utf-8")
        assert "| Lark-1B | 0 | – | – |" in text


def test_an_unreadable_reply_is_a_miss_wherever_a_judge_is_compared(tmp_path):
    """A judge that is right whenever it can be read, which is once in four papers."""
    docs = documents(24)
    read = {doc["paper_id"] for doc in docs[::4]}
    first = ["gold", *(name for name in IDS if name != "gold")][:5]
    for doc in docs:  # half of the candidates are about as long as the gold
        doc["doi"] = doc["paper_id"]
    write_judge(tmp_path, lambda doc: first if doc["paper_id"] in read else None, docs=docs)
    write_energy(tmp_path, docs=docs, scores=with_sums("good", 9.0), scorers=SCORERS)
    made = build_report(read_runs([tmp_path]), Settings(resamples=50))
    judge = system(made, "gpt-x|researchbench_judge|judge")
    nll = system(made, f"Lark-1B|{TASK}|nll")
    assert judge["metrics"]["hit@1"]["value"] == 0.25
    assert nll["metrics"]["hit@1"]["value"] == 1.0
    assert judge["tier"] > nll["tier"] == 1
    (pair,) = [p for p in made["comparisons"] if {p["a"], p["b"]} == {nll["id"], judge["id"]}]
    assert (pair["a"], pair["difference"], pair["papers"]) == (nll["id"], 0.75, 24)
    assert judge["matched"]["papers"] == nll["matched"]["papers"] == 24
    assert judge["matched"]["hit@1"]["value"] == 0.25


def test_without_text_no_word_of_the_data_is_left(runs_folder, validator):
    made = build_report(read_runs([runs_folder]), Settings(resamples=50), text=False)
    validator.validate(made)
    text = json.dumps(made)
    for doc in documents():
        for word in (doc["title"], "Survey", "holds"):
            assert word not in text
    with_text = build_report(read_runs([runs_folder]), Settings(resamples=50))
    paper = with_text["papers"][0]
    assert paper["title"] == documents()[0]["title"]
    assert paper["context"] == documents()[0]["context"]
    assert {c["id"]: c["text"] for c in paper["candidates"]} == dict(
        zip(documents()[0]["candidate_ids"], documents()[0]["candidates"], strict=True)
    )


def test_candidates_of_any_number_are_counted(tmp_path):
    docs = documents(4)
    last = docs[3]
    keep = [i for i, name in enumerate(last["candidate_ids"]) if name in IDS[:5]]
    last["candidates"] = [last["candidates"][i] for i in keep]
    last["candidate_ids"] = [last["candidate_ids"][i] for i in keep]
    last["gold"] = last["candidate_ids"].index("gold")
    write_energy(tmp_path, docs=docs)
    made = build_report(read_runs([tmp_path]), Settings(resamples=50))
    assert "candidates" not in made["paper_set"]
    assert made["paper_set"]["candidates_range"] == [5, 16]


def test_superseded_runs_are_named(report):
    (entry,) = report["files"]["superseded"]
    assert entry["file"].endswith("results_2025-01-01T00-00-00.json")


def test_runs_in_another_order_give_the_same_report(tmp_path, report):
    """What is in a report depends on the runs, not on the folders' order."""
    for name, seed in (("b", "acme/Lark-1B"), ("a", "acme/Lark-3B")):
        write_energy(tmp_path / name, seed, scores=with_sums(seed), scorers=SCORERS)
    settings = Settings(resamples=50)
    one = build_report(read_runs([tmp_path / "a", tmp_path / "b"]), settings)
    other = build_report(read_runs([tmp_path / "b", tmp_path / "a"]), settings)
    assert pd.Series(one).drop("files").to_dict() == pd.Series(other).drop("files").to_dict()
