"""Metrics of single papers by hand, and of whole runs of judges of a known kind."""

import json
import math
import random

import lm_eval
import pytest
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from scipy.stats import binom

from lm_eval_hyprank.judge.replies import Reading
from lm_eval_hyprank.judge.scoring import (
    aggregate,
    borda,
    listwise_results,
    note,
    pairwise_results,
    psc_results,
)
from tests.conftest import TASK_CONFIGS

IDS = [f"c{index}" for index in range(16)]
NOTHING = Reading(None, "empty")


def doc(gold=0, **fields):
    return {"candidates": IDS, "candidate_ids": IDS, "gold": gold, **fields}


# ---- one list


@pytest.mark.parametrize(
    ("gold", "hits", "terminal", "half"),
    [
        (7, (1, 1, 1, 1), 1, 1),
        (3, (0, 1, 1, 1), 14 / 15, 14 / 15),
        (15, (0, 0, 0, 1), 11 / 15, 11 / 15),
        (2, (0, 0, 0, 0), 0, 5 / 15),  # ties with ten others for the last eleven ranks
    ],
)
def test_a_list_of_five(gold, hits, terminal, half):
    found = listwise_results(doc(gold), [Reading([7, 3, 1, 0, 15])])
    assert tuple(found[f"hit@{k}"] for k in (1, 2, 3, 5)) == hits
    assert found["win_rate_terminal"] == pytest.approx(terminal)
    assert found["win_rate_half"] == pytest.approx(half)
    for name in ("hit@1", "hit@2", "hit@3", "hit@5", "win_rate_terminal", "win_rate_half"):
        assert found[f"{name}_valid"] == found[name]
    assert found["parse_rate"] == 1
    assert "mrr" not in found


def test_an_invalid_reply_misses_over_all_papers_and_is_absent_over_the_valid():
    found = listwise_results(doc(), [NOTHING])
    assert set(found.values()) == {0.0}
    assert not any(name.endswith("_valid") or name == "chose_shown_first" for name in found)


def test_the_published_win_rate_below_chance_is_the_tie_rule():
    """The paper's GPT-5: shares of golds at ranks 1 to 5; 58.3 % outside."""
    shares = [0.166, 0.066, 0.048, 0.057, 0.080]
    readings = [listwise_results(doc(gold), [Reading([0, 1, 2, 3, 4])]) for gold in range(6)]
    weights = [*shares, 1 - sum(shares)]
    for name, published in (("win_rate_terminal", 0.374), ("win_rate_half", 0.568)):
        found = sum(w * r[name] for w, r in zip(weights, readings, strict=True))
        assert found == pytest.approx(published, abs=0.002)


# ---- several orders


def orders(*starts):
    return [[(start + place) % 16 for place in range(16)] for start in starts]


def test_rankings_are_turned_back_to_candidates_and_aggregated_by_points():
    paper = doc(gold=2, orders=orders(0, 2, 4))
    # Candidates 2 3 4 5 6; 2 3 4 5 6; 5 4 6 7 8.
    readings = [Reading([2, 3, 4, 5, 6]), Reading([0, 1, 2, 3, 4]), Reading([1, 0, 2, 3, 4])]
    found = psc_results(paper, readings)
    assert borda([[2, 3, 4, 5, 6]] * 2 + [[5, 4, 6, 7, 8]], 16) == (
        [0, 0, 10, 8, 10, 9, 5, 2, 1] + [0] * 7
    )
    assert found["hit@1"] == 0.5  # tied with candidate 4
    assert found["hit@2"] == 1
    assert found["hit@1_single"] == found["hit@5_single"] == pytest.approx(2 / 3)
    assert found["agreement@1"] == pytest.approx(1 / 3)
    assert found["agreement@5"] == pytest.approx((1 + 3 / 5 + 3 / 5) / 3)
    assert found["chose_shown_first"] == pytest.approx(1 / 3)
    told = note(paper, readings)
    assert told["ranking"] == [IDS[n] for n in (2, 4, 5, 3, 6, 7, 8)]
    assert told["orders"][1]["candidate_ids"][0] == "c2"
    assert told["orders"][1]["ranking"] == [IDS[n] for n in (2, 3, 4, 5, 6)]


def test_a_paper_counts_by_the_orders_that_can_be_read():
    paper = doc(gold=2, orders=orders(0, 2, 4))
    found = psc_results(paper, [Reading([2, 3, 4, 5, 6]), NOTHING, NOTHING])
    assert found["hit@1"] == found["hit@1_valid"] == 1
    assert found["hit@1_single"] == found["parse_rate"] == pytest.approx(1 / 3)
    assert "agreement@1" not in found
    none = psc_results(paper, [NOTHING] * 3)
    assert set(none.values()) == {0.0}
    assert "hit@1_valid" not in none
    assert note(paper, [NOTHING] * 3)["ranking"] is None


def test_the_aggregate_does_not_depend_on_which_order_came_first():
    rankings = [random.Random(seed).sample(range(16), 5) for seed in range(5)]
    assert aggregate(rankings, 16) == aggregate(rankings[::-1], 16)


# ---- pairs

PAIRS = [pair for j in range(1, 16) for pair in ([0, j], [j, 0])]


def verdicts(outcome):
    """Readings where outcome(j, gold_first) says whether the gold wins; None is unreadable."""
    readings = []
    for left, right in PAIRS:
        won = outcome(left + right, left == 0)
        readings.append(NOTHING if won is None else Reading(int(won != (left == 0))))
    return readings


def pair_results(outcome):
    return pairwise_results(doc(orders=PAIRS), verdicts(outcome))


def test_a_gold_that_always_wins():
    found = pair_results(lambda j, gold_first: True)
    ones = {n for n, v in found.items() if v == 1}
    assert ones == found.keys() - {"contradiction", "both_wrong", "chose_shown_first"}
    assert found["contradiction"] == found["both_wrong"] == 0
    assert found["chose_shown_first"] == 0.5


def test_who_always_takes_the_first_contradicts_itself_and_says_nothing():
    found = pair_results(lambda j, gold_first: gold_first)
    assert found["contradiction"] == found["chose_shown_first"] == 1
    assert found["both_correct"] == found["both_wrong"] == 0
    assert (found["accuracy_gold_first"], found["accuracy_gold_second"]) == (1, 0)
    majorities = found["beats_majority_gold_first"], found["beats_majority_gold_second"]
    assert majorities == (1, 0)
    assert found["accuracy"] == found["win_rate"] == 0.5
    assert found["hit@1"] == pytest.approx(1 / 16)
    assert found["hit@5"] == pytest.approx(5 / 16)


def test_the_gold_ranks_below_those_it_always_loses_to():
    found = pair_results(lambda j, gold_first: j > 2)
    assert (found["hit@2"], found["hit@3"]) == (0, 1)
    assert found["mrr"] == pytest.approx(1 / 3)
    assert found["both_wrong"] == pytest.approx(2 / 15)
    assert found["win_rate"] == found["both_correct"] == pytest.approx(13 / 15)


@pytest.mark.parametrize(("wins", "majority"), [(7, 0), (8, 1)])
def test_eight_of_fifteen_are_a_majority(wins, majority):
    found = pair_results(lambda j, gold_first: j <= wins)
    assert found["beats_majority_gold_first"] == majority
    assert found["beats_majority_gold_second"] == majority


def test_an_unreadable_verdict_is_no_vote():
    found = pair_results(lambda j, gold_first: None if j == 1 and gold_first else True)
    assert found["accuracy"] == found["accuracy_gold_first"] == found["win_rate"] == 1
    assert found["both_correct"] == 1
    assert found["parse_rate"] == found["accuracy_all"] == pytest.approx(29 / 30)
    told = note(doc(orders=PAIRS), verdicts(lambda j, first: None if j == 1 and first else True))
    assert told["verdicts"][:2] == [
        {"candidate_id": "c1", "gold_first": True, "winner": None, "invalid": "empty"},
        {"candidate_id": "c1", "gold_first": False, "winner": "gold", "invalid": None},
    ]


def test_a_majority_that_unreadable_verdicts_could_turn_is_absent():
    found = pair_results(lambda j, gold_first: None if j <= 2 else j <= 9)
    assert "beats_majority_gold_first" not in found  # 7 wins, 6 losses, 2 unknown
    assert "hit@1" not in found
    assert found["accuracy"] == pytest.approx(7 / 13)
    decided = pair_results(lambda j, gold_first: None if j <= 2 else j <= 10)
    assert decided["beats_majority_gold_first"] == 1


def test_no_verdict_at_all():
    found = pair_results(lambda j, gold_first: None)
    assert found == {"parse_rate": 0.0, "accuracy_all": 0.0}


# ---- whole runs


class Judge(LM):
    """Answers by a function of the prompt's document and the view of it that is asked about."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def generate_until(self, requests, disable_tqdm=False):
        return [self.answer(request) for request in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def shown_gold(request):
    """Where the prompt shows the gold."""
    doc = request.doc
    return list(doc["orders"][request.idx]).index(0) if doc["orders"] else doc["gold"]


def evaluate(task, answer, **metadata):
    return lm_eval.simple_evaluate(
        model=Judge(answer),
        tasks=[task],
        task_manager=TaskManager(
            include_path=str(TASK_CONFIGS), include_defaults=False, metadata=metadata
        ),
        bootstrap_iters=10,
    )


@pytest.fixture(autouse=True)
def no_survey_of_the_machine(monkeypatch):
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def ranked(first, size=16):
    return json.dumps({"ranking": [first, *(n for n in range(size) if n != first)][:5]})


def within(value, chance, n):
    low, high = binom.interval(0.999, n, chance)
    return low / n <= value <= high / n


@pytest.mark.parametrize("seed", range(3))
def test_a_judge_that_always_says_the_same_is_at_chance_and_shown_as_biased(
    researchbench_dir, seed
):
    task = "researchbench_judge_psc"
    results = evaluate(
        task,
        lambda request: '{"ranking": [0, 1, 2, 3, 4]}',
        dataset_path=str(researchbench_dir),
        order_seed=seed,
    )
    row, found = results["results"][task], results["hyprank"]["judge"][task]
    assert found["replies"] == found["valid"] == 48 * 5
    assert within(row["hit@1_single,judge"], 1 / 16, 240)
    assert within(row["hit@5_single,judge"], 5 / 16, 240)
    assert row["chose_shown_first,judge"] == 1
    assert found["first_choices"] == [240] + [0] * 15
    assert sum(found["gold_shown"]) == 240
    assert found["gold_hit@1"] == [1] + [0] * 15
    assert found["gold_hit@5"] == [1] * 5 + [0] * 11


def test_a_perfect_judge_scores_one(researchbench_dir):
    for task, size in (("researchbench_judge", 48), ("researchbench_judge_psc", 240)):
        results = evaluate(
            task,
            lambda request: ranked(shown_gold(request)),
            dataset_path=str(researchbench_dir),
        )
        row, found = results["results"][task], results["hyprank"]["judge"][task]
        for name in ("hit@1", "hit@5", "win_rate_terminal", "win_rate_half", "parse_rate"):
            assert row[f"{name},judge"] == 1
        assert row["hit@1_stderr,judge"] == 0
        assert found["replies"] == size
        assert found["first_choices"] == found["gold_shown"]
        assert set(found["gold_hit@1"]) <= {1.0, None}


def test_a_random_judge_is_at_chance():
    generator = random.Random(0)
    hits = 0
    for seed in range(10):
        results = evaluate(
            "hyprank_demo_judge",
            lambda request: json.dumps({"ranking": generator.sample(range(16), 5)}),
            order_seed=seed,
        )
        hits += 12 * results["results"]["hyprank_demo_judge"]["hit@5,judge"]
    assert within(hits / 120, 5 / 16, 120)


def test_failures_of_one_judge_neither_hide_nor_flatter():
    """Half the replies of a judge that is else perfect cannot be read."""
    turns = iter(range(12))
    results = evaluate(
        "hyprank_demo_judge",
        lambda request: ranked(shown_gold(request)) if next(turns) % 2 else "Hm.",
    )
    row = results["results"]["hyprank_demo_judge"]
    assert row["hit@1,judge"] == row["parse_rate,judge"] == 0.5
    assert row["hit@1_valid,judge"] == 1
    assert results["hyprank"]["judge"]["hyprank_demo_judge"]["invalid"] == {"no ranking": 6}


@pytest.mark.parametrize(
    ("answer", "accuracy", "contradiction"),
    [
        (lambda request: json.dumps({"better": 1 + shown_gold(request)}), 1, 0),
        (lambda request: json.dumps({"better": 2 - shown_gold(request)}), 0, 0),
        (lambda request: '{"better": 2}', 0.5, 1),
    ],
)
def test_pairwise_runs(answer, accuracy, contradiction):
    task = "hyprank_demo_pairwise"
    results = evaluate(task, answer)
    row = results["results"][task]
    assert row["accuracy,judge"] == row["win_rate,judge"] == accuracy
    assert row["contradiction,judge"] == contradiction
    assert results["hyprank"]["judge"][task] == {"replies": 360, "valid": 360, "invalid": {}}
    assert len(results["samples"][task]) == 12
    winners = {v["winner"] for v in results["samples"][task][0]["judge"]["verdicts"]}
    assert winners == ({"gold", "other"} if contradiction else {("other", "gold")[accuracy]})


@pytest.mark.parametrize(
    "task", ["hyprank_demo_judge", "hyprank_demo_judge_psc", "hyprank_demo_pairwise"]
)
def test_every_metric_that_is_listed_has_a_value_and_none_is_guessed(task, caplog):
    answer = '{"better": 1}' if "pair" in task else '{"ranking": [0, 1, 2, 3, 4]}'
    row = evaluate(task, lambda request: answer)["results"][task]
    from lm_eval_hyprank import tasks

    emitted = {
        "hyprank_demo_judge": lambda: tasks.listwise_results(doc(), [Reading([0, 1, 2, 3, 4])]),
        "hyprank_demo_judge_psc": lambda: tasks.psc_results(
            doc(orders=orders(0, 1)), [Reading([0, 1, 2, 3, 4])] * 2
        ),
        "hyprank_demo_pairwise": lambda: tasks.pairwise_results(
            doc(orders=PAIRS), [Reading(0)] * 30
        ),
    }[task]()
    assert {f"{name},judge" for name in emitted} == {
        key for key in row if "," in key and "_stderr" not in key
    }
    assert all(math.isfinite(row[f"{name}_stderr,judge"]) for name in emitted)
    for phrase in ("No aggregation", "aggregation is not", "higher_is_better"):
        assert phrase not in caplog.text


@pytest.mark.parametrize(
    ("task", "noted"),
    [
        ("hyprank_demo_judge", "ranking"),
        ("hyprank_demo_judge_psc", "orders"),
        ("hyprank_demo_pairwise", "verdicts"),
    ],
)
def test_a_task_of_ones_own_with_metadata_of_its_own_is_told_of_alike(task, noted, tmp_path):
    """lm-eval replaces an included task's metadata whole."""
    (tmp_path / "mine.yaml").write_text(
        f"include: {TASK_CONFIGS}/demo/{task}.yaml\ntask: mine\nmetadata: {{version: 2.0}}\n",
        encoding="utf-8",
    )
    answer = '{"better": 1}' if "pair" in task else '{"ranking": [0, 1, 2, 3, 4]}'
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=Judge(lambda request: answer), tasks=["mine"], task_manager=manager, limit=2
    )
    assert noted in results["samples"]["mine"][0]["judge"]
