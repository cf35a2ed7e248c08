"""The reader, on folders as lm-eval leaves them."""

import json
import math

import lm_eval
import pytest
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

import lm_eval_hyprank.tasks  # noqa: F401
from lm_eval_hyprank.ranking import gold_rank
from lm_eval_hyprank.report.found import ReportError
from lm_eval_hyprank.report.runs import NO_MODEL, read_runs
from tests import tiny
from tests.conftest import TASK_CONFIGS
from tests.report.run_folder import (
    IDS,
    SCORERS,
    TASK,
    documents,
    edit,
    nan_for,
    samples_of,
    scores_of,
    write_energy,
    write_judge,
    write_pairwise,
    write_psc,
)

DEMO = "hyprank_demo_energy"


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory):
    """What lm-eval itself writes: a tiny model on the demo and on its control."""
    folder = tmp_path_factory.mktemp("real")
    tiny.demo_llama().save_pretrained(folder / "model")
    tiny.demo_tokenizer().save_pretrained(folder / "model")
    tracker = EvaluationTracker(output_path=str(folder / "out"))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "model"), "dtype": "float32"},
        tasks=[DEMO, f"{DEMO}_nocontext"],
        device="cpu",
        batch_size=8,
        bootstrap_iters=10,
        limit=3,
        evaluation_tracker=tracker,
        task_manager=TaskManager(include_path=str(TASK_CONFIGS), include_defaults=False),
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task, lines in samples.items():
        tracker.save_results_samples(task_name=task, samples=lines)
    return folder / "out"


def edit_lines(path, change):
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = change(lines) or lines
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def systems(runs):
    return list(runs.systems["system"])


# --- what is read -------------------------------------------------------------------------


def test_what_lm_eval_writes_is_read(real_folder):
    runs = read_runs([real_folder])
    assert len(runs.papers) == 3
    assert len(runs.candidates) == 48
    base = runs.systems[runs.systems["control"] == ""]
    assert list(base["scorer"]) == ["nll", "raw", "logz", "nll_sum", "raw_sum", "shortest"]
    assert set(runs.systems.loc[runs.systems["control"] != "", "control"]) == {"no_context"}
    assert runs.scores["num_tokens"].notna().sum() == 5 * 48  # `shortest` is of no model
    assert any("3 of the task's 12 papers" in note for note in runs.notes)
    assert runs.runs[0].fingerprint == runs.runs[1].fingerprint != None  # noqa: E711
    assert runs.papers["context"].str.startswith("Background: ").all()


def test_made_up_folders_have_the_keys_that_real_ones_have(real_folder, tmp_path):
    made = write_energy(tmp_path)
    (real,) = real_folder.rglob("results_*.json")
    own, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in (made, real))
    assert own.keys() - theirs.keys() == set()
    (line,) = samples_of(made).read_text(encoding="utf-8").splitlines()[:1]
    (other,) = samples_of(real, DEMO).read_text(encoding="utf-8").splitlines()[:1]
    assert json.loads(line).keys() - json.loads(other).keys() == set()
    assert json.loads(line)["doc"].keys() == json.loads(other)["doc"].keys()


def test_scores_are_numbers_though_the_files_hold_text(tmp_path):
    write_energy(tmp_path)
    runs = read_runs([tmp_path])
    doc = documents()[2]
    rows = runs.scores[
        (runs.scores["paper_id"] == doc["paper_id"]) & (runs.scores["scorer"] == "raw")
    ]
    expected = dict(zip(doc["candidate_ids"], scores_of("acme/Lark-1B", doc)["raw"], strict=True))
    assert dict(zip(rows["candidate_id"], rows["score"], strict=True)) == expected
    assert rows["is_gold"].sum() == 1


def test_ten_and_more_sorts_behind_nine(tmp_path):
    """As text, 10.2 sorts before 9.8."""

    def scores(doc):
        return {name: [9.8 if i == doc["gold"] else 10.2 for i in range(16)] for name in SCORERS}

    write_energy(tmp_path, scores=scores)
    runs = read_runs([tmp_path])
    gold = runs.scores[runs.scores["is_gold"] & (runs.scores["scorer"] == "nll")]
    assert (gold["score"] == 9.8).all()


def test_length_alone_is_one_system_whatever_the_models(tmp_path):
    write_energy(tmp_path, "acme/Lark-1B")
    write_energy(tmp_path, "acme/Lark-3B")
    runs = read_runs([tmp_path])
    (row,) = runs.systems[runs.systems["scorer"] == "shortest"].to_dict("records")
    assert (row["model"], row["kind"]) == (NO_MODEL, "trivial")
    assert systems(runs)[0] == f"Lark-1B|{TASK}|nll"
    assert len(runs.systems) == 5


def test_chance_is_one_system_whatever_the_models(tmp_path):
    def scores(doc):
        return scores_of("x", doc) | {"chance": [0.0] * 16}

    for model in ("acme/Lark-1B", "acme/Lark-3B"):
        write_energy(tmp_path, model, scores=scores, scorers={"nll": "nll", "chance": ""})
    table = systems(read_runs([tmp_path]))
    assert len(table) == 3
    (row,) = [one for one in read_runs([tmp_path]).systems.itertuples() if one.scorer == "chance"]
    assert (row.model, row.kind) == (NO_MODEL, "trivial")


def test_length_alone_is_taken_from_a_model_that_could_score_the_paper(tmp_path):
    paper = documents()[0]["paper_id"]
    write_energy(tmp_path, "acme/Lark-1B", scores=nan_for(paper))
    write_energy(tmp_path, "acme/Lark-3B")
    runs = read_runs([tmp_path])
    shortest = runs.scores[runs.scores["scorer"] == "shortest"]
    assert shortest["score"].map(math.isfinite).all()


def test_invalid_papers_keep_their_rows_and_are_named(tmp_path):
    paper = documents()[3]["paper_id"]
    write_energy(tmp_path, scores=nan_for(paper))
    runs = read_runs([tmp_path])
    rows = runs.scores[(runs.scores["scorer"] == "nll") & (runs.scores["paper_id"] == paper)]
    assert len(rows) == 16
    assert rows["score"].isna().sum() == 1
    assert any(paper in note and "nll" in note for note in runs.notes)


def test_truncated_contexts_are_named(tmp_path):
    file = write_energy(tmp_path)

    def cut(lines):
        for line in lines:
            line["truncated"] = line["doc_id"] == 1

    edit_lines(samples_of(file), cut)
    runs = read_runs([tmp_path])
    assert runs.runs[0].truncated == (documents()[1]["paper_id"],)
    assert any("was cut to fit" in note for note in runs.notes)


def test_candidates_are_joined_by_id_whatever_their_order(tmp_path):
    write_energy(tmp_path / "a", "acme/Lark-1B")
    write_energy(tmp_path / "b", "acme/Lark-3B", docs=documents(shown=7))
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    doc = documents(shown=7)[4]
    mine = runs.scores[
        (runs.scores["system"] == f"Lark-3B|{TASK}|nll")
        & (runs.scores["paper_id"] == doc["paper_id"])
    ]
    expected = dict(zip(doc["candidate_ids"], scores_of("acme/Lark-3B", doc)["nll"], strict=True))
    assert dict(zip(mine["candidate_id"], mine["score"], strict=True)) == expected
    # The rows stand in one order for all systems.
    orders = runs.scores.groupby("system", sort=False)["candidate_id"].apply(tuple)
    assert orders.nunique() == 1


@pytest.mark.parametrize(
    "part",
    [
        lambda name: ("dataset_kwargs", {"discipline": name}),
        lambda name: ("metadata", {"only": name}),
    ],
)
def test_a_group_of_parts_is_one_run(tmp_path, part):
    docs = documents()
    place = {"date": "2026-01-02T03-04-05.000006"}
    members = {}
    for discipline in ("Math", "Physics", "Law", "Biology"):
        mine = [doc for doc in docs if doc["discipline"] == discipline]
        name = f"{TASK}_{discipline.lower()}"
        file = write_energy(tmp_path, docs=mine, task=name, **place)
        members[name] = part(discipline)

    def group(results):
        results["group_subtasks"] = {f"{TASK}_by_discipline": list(members)}
        for name, (field, value) in members.items():
            results["configs"][name][field] = value

    edit(file, group)
    write_energy(tmp_path, "acme/Lark-3B")  # the whole task, of another model
    runs = read_runs([tmp_path])
    assert set(runs.systems["task"]) == {f"{TASK}_by_discipline", TASK}
    assert len(runs.papers) == 8
    assert [run.papers for run in runs.runs] == [8, 8]


def test_a_group_of_controls_is_not_one_run(tmp_path):
    write_energy(tmp_path)
    controls = {}
    for control in ("no_context", "question_only"):
        name = f"{TASK}_{control}"
        file = write_energy(
            tmp_path,
            task=name,
            date="2026-01-03T00-00-00",
            metadata={"control": control, "control_of": TASK},
        )
        controls[name] = control
    edit(file, lambda results: results.update(group_subtasks={"controls": list(controls)}))
    runs = read_runs([tmp_path])
    assert set(runs.control_scores["control"]) == {"no_context", "question_only"}
    assert set(runs.scores["task"]) == {TASK}
    assert "shortest" not in set(runs.control_scores["scorer"])


# --- repeats and names --------------------------------------------------------------------


def test_the_newest_of_a_repeat_is_taken_and_the_others_named(tmp_path):
    old = write_energy(tmp_path, date="2026-01-02T00-00-00.5", scores=lambda d: scores_of("x", d))
    new = write_energy(tmp_path, date="2026-02-01T00-00-00")
    runs = read_runs([tmp_path])
    assert len(runs.systems) == 3
    gold = runs.scores[runs.scores["is_gold"] & (runs.scores["scorer"] == "nll")].iloc[0]
    assert gold["score"] == scores_of("acme/Lark-1B", documents()[0])["nll"][documents()[0]["gold"]]
    (entry,) = runs.files["superseded"]
    assert entry["file"].endswith(old.name)
    assert new.name in entry["why"]


def test_storing_the_values_of_tokens_makes_no_other_task(tmp_path):
    write_energy(tmp_path)
    write_energy(tmp_path, date="2026-02-01T00-00-00", metadata={"token_scores": "values"})
    runs = read_runs([tmp_path])
    assert set(runs.systems["task"]) == {TASK}
    assert len(runs.files["superseded"]) == 1


def test_a_whole_run_is_taken_before_a_newer_one_with_a_limit(tmp_path):
    write_energy(tmp_path)
    smoke = write_energy(tmp_path, docs=documents(2), total=8, date="2026-02-01T00-00-00")
    runs = read_runs([tmp_path])
    assert len(runs.papers) == 8
    (entry,) = runs.files["superseded"]
    assert entry["file"].endswith(smoke.name)
    assert "2 of 8 papers" in entry["why"]


def test_a_broken_run_that_a_newer_one_replaces_does_no_harm(tmp_path):
    old = write_energy(tmp_path)
    samples_of(old).unlink()
    write_energy(tmp_path, date="2026-02-01T00-00-00")
    assert len(read_runs([tmp_path]).systems) == 3


def other_text():
    docs = documents()
    docs[4]["candidates"][2] += "!"
    return docs


@pytest.mark.parametrize("dates", [("01", "02"), ("02", "01")])
@pytest.mark.parametrize(
    ("docs", "said"),
    [
        (documents(5), "papers, of which"),
        (other_text(), "has another text"),
        ([doc | {"context": "Other:"} for doc in documents()], "the prompt of paper"),
        ([doc | {"separator": "\n"} for doc in documents()], "see the option separator"),
    ],
)
@pytest.mark.parametrize("hashed", [True, False])
def test_a_repeat_on_other_papers_is_refused(tmp_path, dates, docs, said, hashed):
    """Whichever is newer: the other's papers would be lost without a word."""
    files = [
        write_energy(
            tmp_path,
            docs=own,
            date=f"2026-{date}-01T00-00-00",
            metadata={"dataset_path": f"/data/{date}"},
            more={"task_hashes": {TASK: date}} if hashed else {},
        )
        for date, own in zip(dates, (documents(), docs), strict=True)
    ]
    text = refused(tmp_path)
    assert said in text
    assert all(file.name in text for file in files)
    assert "put the runs in two folders" in text
    assert "--task" not in text
    assert "behind" not in text


@pytest.mark.parametrize("hashes", [("a", "a"), ("a", "b"), ("a", None)])
def test_a_repeat_on_the_same_papers_elsewhere_is_a_repeat(tmp_path, hashes):
    """lm-eval's hash is another one in another number of processes."""
    for number, known in enumerate(hashes):
        write_energy(
            tmp_path,
            date=f"2026-01-0{number + 1}T00-00-00",
            metadata={"dataset_path": f"/data/{number}", "dataset_revision": str(number)},
            more={"task_hashes": {TASK: known}} if known else {},
        )
    runs = read_runs([tmp_path])
    assert len(runs.systems) == 3
    assert len(runs.files["superseded"]) == 1


def test_a_task_of_another_version_takes_the_place_of_the_older(tmp_path):
    write_energy(tmp_path, docs=[doc | {"context": "Old:"} for doc in documents()])
    write_energy(tmp_path, date="2026-02-01T00-00-00", version=2.0)
    assert read_runs([tmp_path]).runs[0].version == "2.0"


def test_disciplines_of_one_model_are_no_repeats(tmp_path):
    for number, name in enumerate(("Math", "Law")):
        docs = [doc for doc in documents() if doc["discipline"] == name]
        write_energy(
            tmp_path,
            docs=docs,
            date=f"2026-01-0{number + 1}T00-00-00",
            metadata={"discipline": name},
        )
    text = refused(tmp_path)
    assert f"{TASK} (discipline=Math)" in text
    assert f"{TASK} (discipline=Law)" in text


def test_one_folder_given_twice_is_read_once(tmp_path):
    write_energy(tmp_path)
    runs = read_runs([tmp_path, tmp_path / "acme__Lark-1B"])
    assert len(runs.systems) == 3
    assert runs.files["superseded"] == []


def test_the_same_weights_elsewhere_are_the_same_model(tmp_path):
    same = {"fingerprint": "a" * 16}
    write_energy(tmp_path, "/disk/one/Lark-1B", date="2026-01-01T00-00-00", **same)
    write_energy(tmp_path, "acme/Lark-1B", date="2026-01-02T00-00-00", **same)
    runs = read_runs([tmp_path])
    assert set(runs.systems["model"]) == {"Lark-1B", NO_MODEL}
    assert len(runs.files["superseded"]) == 1


@pytest.mark.parametrize(
    ("one", "other", "labels"),
    [
        ({}, {"dtype": "bfloat16"}, {"Lark-1B", "Lark-1B (dtype=bfloat16)"}),
        (
            {"dtype": "float32"},
            {"dtype": "bfloat16"},
            {"Lark-1B (dtype=float32)", "Lark-1B (dtype=bfloat16)"},
        ),
        ({}, {"peft": "me/lora-x"}, {"Lark-1B", "Lark-1B + lora-x"}),
        ({}, {"gguf_file": "Lark-1B-Q4.gguf"}, {"Lark-1B", "Lark-1B Lark-1B-Q4"}),
        ({"revision": "a|b"}, {}, {"Lark-1B (revision=a¦b)", "Lark-1B"}),
    ],
)
def test_models_get_short_names_that_differ(tmp_path, one, other, labels):
    write_energy(tmp_path / "a", model_args=one)
    write_energy(tmp_path / "b", model_args=other)
    runs = read_runs([tmp_path])
    assert set(runs.systems["model"]) == labels | {NO_MODEL}


def test_weights_changed_under_one_name_are_two_models(tmp_path):
    write_energy(tmp_path, date="2026-01-01T00-00-00", fingerprint="a" * 16)
    write_energy(tmp_path, date="2026-01-02T00-00-00", fingerprint="b" * 16)
    runs = read_runs([tmp_path])
    assert set(runs.systems["model"]) == {"Lark-1B [aaaaaaaa]", "Lark-1B [bbbbbbbb]", NO_MODEL}


def test_how_a_model_is_run_makes_no_other_model_and_secrets_are_not_shown(tmp_path):
    for folder, arguments in (("a", {"batch_size": "1"}), ("b", {"token": "hf_secret"})):
        write_energy(tmp_path / folder, model_args=arguments, fingerprint=None)
    runs = read_runs([tmp_path])
    assert len(runs.files["superseded"]) == 1
    assert "hf_secret" not in repr(runs)


def test_arguments_as_one_text_are_understood(tmp_path):
    write_energy(tmp_path, model_args="pretrained=acme/Lark-1B,dtype=float32", fingerprint=None)
    runs = read_runs([tmp_path])
    assert runs.runs[0].pretrained == "acme/Lark-1B"
    assert runs.systems["model"][0] == "Lark-1B"


def test_a_folder_of_a_model_is_named_without_its_path(tmp_path):
    write_energy(tmp_path, "/home/someone/models/Lark-1B/")
    run = read_runs([tmp_path]).runs[0]
    assert (run.model, run.pretrained) == ("Lark-1B", "Lark-1B")


def test_two_orders_of_a_judge_are_two_systems(tmp_path):
    first = documents(shown=1)
    write_judge(tmp_path / "a", lambda doc: IDS[:5], docs=first, metadata={"order_seed": 0})
    write_judge(tmp_path / "b", lambda doc: IDS[:5], docs=first, metadata={"order_seed": 1})
    runs = read_runs([tmp_path])
    assert systems(runs) == [
        "gpt-x|researchbench_judge|judge",
        "gpt-x|researchbench_judge (order_seed=1)|judge",
    ]


def test_a_models_only_run_has_the_label_of_how_it_was_asked(tmp_path):
    """And not that of another model's plain run."""
    for model, seed in (("one", 0), ("one", 1), ("two", 1)):
        folder = tmp_path / f"{model}{seed}"
        write_judge(folder, lambda doc: IDS[:5], model, metadata={"order_seed": seed})
    assert systems(read_runs([tmp_path])) == [
        "one|researchbench_judge|judge",
        "one|researchbench_judge (order_seed=1)|judge",
        "two|researchbench_judge (order_seed=1)|judge",
    ]


def test_what_else_differs_between_runs_of_a_task_stands_in_its_label(tmp_path):
    """As what a task of one's own is told by --metadata."""
    write_energy(tmp_path, "acme/Lark-1B", metadata={"author": "me", "style": "short"})
    write_energy(tmp_path, "acme/Lark-3B", metadata={"author": "me"})
    assert set(read_runs([tmp_path]).systems["task"]) == {f"{TASK} (style=short)", TASK}


def test_how_replies_are_drawn_stands_in_the_label_where_it_differs(tmp_path):
    for model, room in (("one", 4096), ("two", 8192)):
        settings = {"max_gen_toks": room, "temperature": 0.0}
        file = write_judge(tmp_path, lambda doc: IDS[:5], model)
        edit(file, lambda results, own=settings: generate(results, own))
    assert {own.split("|")[1] for own in systems(read_runs([tmp_path]))} == {
        "researchbench_judge (max_gen_toks=4096)",
        "researchbench_judge (max_gen_toks=8192)",
    }


def generate(results, settings):
    results["configs"]["researchbench_judge"]["generation_kwargs"] = settings


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("chat_template_sha", "no chat template (Lark-1B) and with a chat template (Lark-3B)"),
        (
            "system_instruction_sha",
            "system instruction none (Lark-1B) and with system instruction 01234567 (Lark-3B)",
        ),
    ],
)
def test_models_that_were_given_other_prompts_are_named(tmp_path, key, said):
    write_energy(tmp_path / "a", "acme/Lark-1B")
    write_energy(tmp_path / "b", "acme/Lark-3B", more={key: "0123456789"})
    runs = read_runs([tmp_path])
    assert f"{TASK} was run with {said}." in runs.notes
    assert [key[:-4] in run.details for run in runs.runs] == [False, True]
    assert not any("was run with" in note for note in read_runs([tmp_path / "b"]).notes)


# --- judges -------------------------------------------------------------------------------


def test_a_judges_list_becomes_points(tmp_path):
    write_judge(tmp_path, lambda doc: ["fake_1", "gold", "fake_2", "fake_3", "fake_4"])
    runs = read_runs([tmp_path])
    one = runs.scores[runs.scores["paper_id"] == runs.papers["paper_id"][0]]
    points = dict(zip(one["candidate_id"], one["score"], strict=True))
    assert [points[name] for name in ("fake_1", "gold", "fake_4", "fake_5", "model_1")] == [
        *(-5, -4, -1, 0, 0)
    ]


def test_a_reply_that_cannot_be_read_has_no_score_and_its_reason(tmp_path):
    write_judge(tmp_path, lambda doc: None if doc["discipline"] == "Law" else IDS[:5])
    runs = read_runs([tmp_path])
    law = runs.scores["discipline"] == "Law"
    assert runs.scores.loc[law, "score"].isna().all()
    assert runs.scores.loc[~law, "score"].notna().all()
    assert set(runs.replies["invalid"]) == {"", "refusal: no"}
    assert any("no reply that can be read for 2 papers" in note for note in runs.notes)


def test_several_orders_are_aggregated_with_their_ties(tmp_path):
    def rank(doc, order):
        lists = [["gold", *IDS[1:5]], ["fake_1", "gold", *IDS[2:5]], ["fake_1", "gold", *IDS[6:9]]]
        return None if doc["paper_id"] == "Math/10000" and order == 2 else lists[order]

    write_psc(tmp_path, rank)
    runs = read_runs([tmp_path])
    gold = runs.scores[runs.scores["is_gold"]].set_index("paper_id")["score"]
    assert gold["Math/10000"] == -9  # 5 + 4 of two orders, tied with fake_1's 4 + 5
    assert gold["Law/10002"] == -13
    assert len(runs.replies) == 24
    assert (runs.replies["invalid"] != "").sum() == 1


def test_pairwise_verdicts_become_metrics(tmp_path):
    def prefers_first(doc, other, gold_first):
        if other == "fake_1":
            return None  # unreadable
        return gold_first if other != "fake_2" else True  # fake_2: always the first

    write_pairwise(tmp_path, prefers_first)
    runs = read_runs([tmp_path])
    row = runs.pairwise.iloc[0]
    assert row["accuracy"] == pytest.approx(27 / 28)
    assert row["both_correct"] == pytest.approx(13 / 14)
    assert row["contradiction"] == pytest.approx(1 / 14)
    assert not row["valid"]  # without a verdict on fake_1 the gold has no rank
    assert runs.scores.empty


def test_an_embedding_model_is_a_system_and_its_length_control_is_none(tmp_path):
    def scores(doc):
        found = scores_of("embedding", doc)
        return {"cosine": found["nll"], "shortest": found["shortest"]}

    scorers = {"cosine": "cosine", "shortest": "num_bytes"}
    file = write_energy(tmp_path, "minilm", scores=scores, scorers=scorers, task="embedding_task")

    def of_kind(results):
        config = results["configs"]["embedding_task"]
        for entry in config["filter_list"]:
            entry["filter"][0]["function"] = "embedding_score"

    edit(file, of_kind)
    write_energy(tmp_path)
    runs = read_runs([tmp_path])
    assert list(runs.systems["kind"]) == ["embedding", "energy", "energy", "trivial"]
    assert runs.systems["paradigm"][0] == "Embedding"


def test_judges_and_energies_of_the_same_papers_go_together(tmp_path):
    write_energy(tmp_path)
    write_judge(tmp_path, lambda doc: IDS[:5])
    runs = read_runs([tmp_path])
    assert set(runs.scores["kind"]) == {"energy", "judge", "trivial"}


# --- what is refused ----------------------------------------------------------------------


def refused(*folders, tasks=()):
    with pytest.raises(ReportError) as caught:
        read_runs(list(folders), tasks)
    return str(caught.value)


def test_other_papers_are_refused_and_a_task_can_be_named(tmp_path):
    write_energy(tmp_path, task="hyprank_demo_energy", docs=documents(3))
    write_energy(tmp_path, "acme/Lark-3B")
    text = refused(tmp_path)
    assert "3 and 8 papers" in text
    assert "Lark-1B on hyprank_demo_energy" in text
    assert "Lark-3B on researchbench_energy" in text
    assert "--task" in text
    assert "behind" not in text
    runs = read_runs([tmp_path], [TASK])
    assert len(runs.papers) == 8
    assert "not among the tasks asked for" in runs.files["left_out"][0]["why"]


def test_a_named_task_brings_its_controls(tmp_path):
    write_energy(tmp_path)
    write_energy(
        tmp_path, task=f"{TASK}_nocontext", metadata={"control": "no_context", "control_of": TASK}
    )
    write_energy(tmp_path, task="other", docs=documents(2))
    runs = read_runs([tmp_path], [TASK])
    assert set(runs.control_scores["task"]) == {f"{TASK}_nocontext"}


def test_a_task_that_is_not_there_is_an_error(tmp_path):
    write_energy(tmp_path)
    text = refused(tmp_path, tasks=["researchbench_enrgy"])
    assert "no run of researchbench_enrgy" in text
    assert "the tasks there: researchbench_energy" in text


def test_a_partial_run_beside_a_whole_one_is_refused(tmp_path):
    write_energy(tmp_path)
    write_energy(tmp_path, "acme/Lark-3B", docs=documents(2), total=8)
    assert "8 and 2 papers" in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda doc: doc["candidates"].__setitem__(3, "another text"), "has another text"),
        (lambda doc: doc["candidate_ids"].__setitem__(3, "fake_9"), "candidates of other names"),
        (lambda doc: doc.update(doi="10.1/other"), "the doi of paper"),
        (lambda doc: doc.update(discipline="Arts"), "the discipline of paper"),
        (lambda doc: doc.update(gold=(doc["gold"] + 1) % 16), "another gold"),
    ],
)
def test_other_data_are_refused(tmp_path, change, said):
    write_energy(tmp_path)
    docs = documents()
    change(docs[5])
    write_energy(tmp_path, "acme/Lark-3B", docs=docs)
    text = refused(tmp_path)
    assert said in text
    assert docs[5]["paper_id"] in text


def test_another_prompt_layout_is_refused(tmp_path):
    write_energy(tmp_path)
    write_energy(
        tmp_path, "acme/Lark-3B", docs=documents(layout="block"), metadata={"layout": "block"}
    )
    text = refused(tmp_path)
    assert "the prompt of paper" in text
    assert "from character 11 on" in text
    assert "layout" in text


def test_another_separator_is_refused(tmp_path):
    write_energy(tmp_path)
    docs = [doc | {"separator": "\n"} for doc in documents()]
    write_energy(tmp_path, "acme/Lark-3B", docs=docs)
    text = refused(tmp_path)
    assert documents()[0]["paper_id"] in text
    assert "stands ' ' and '\\n'; see the option separator" in text


def test_layouts_of_one_model_are_no_repeats(tmp_path):
    write_energy(tmp_path)
    write_energy(
        tmp_path,
        date="2026-02-01T00-00-00",
        docs=documents(layout="block"),
        metadata={"layout": "block"},
    )
    assert "the prompt of paper" in refused(tmp_path)


def test_another_version_of_the_task_is_refused(tmp_path):
    write_energy(tmp_path)
    write_energy(tmp_path, "acme/Lark-3B", version=2.0)
    assert "is of version 1.0 in the one and 2.0 in the other" in refused(tmp_path)


def test_a_run_without_samples_says_how_to_get_them(tmp_path):
    file = write_energy(tmp_path)
    samples_of(file).unlink()
    text = refused(tmp_path)
    assert "--log_samples" in text
    assert str(file) in text


def test_a_line_that_was_cut_off_is_named(tmp_path):
    path = samples_of(write_energy(tmp_path))
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:-40], encoding="utf-8")
    said = refused(tmp_path)
    assert f"{path}, line 24" in said
    assert "cut off" in said


def test_lost_lines_are_noticed(tmp_path):
    path = samples_of(write_energy(tmp_path))
    edit_lines(path, lambda lines: lines[:-1])
    assert "7 papers under filter 'shortest', but lm-eval counted 8" in refused(tmp_path)


def test_lines_written_twice_are_noticed(tmp_path):
    path = samples_of(write_energy(tmp_path))
    edit_lines(path, lambda lines: [*lines, lines[0]])
    said = refused(tmp_path)
    assert f"{path}, line 25" in said
    assert "first on line 1" in said


@pytest.mark.parametrize("metric", ["hit@1", "hit@5", "mrr", "win_rate", "tie_rate", "invalid"])
def test_numbers_that_do_not_follow_from_the_samples_are_refused(tmp_path, metric):
    file = write_energy(tmp_path)

    def change(results):
        results["results"][TASK][f"{metric},raw"] += 1e-6

    edit(file, change)
    text = refused(tmp_path)
    assert f"{metric} of filter 'raw'" in text
    assert str(file) in text


def test_a_changed_score_is_noticed(tmp_path):
    path = samples_of(write_energy(tmp_path))

    def swap(lines):
        best = lines[0]["filtered_resps"]
        best[lines[0]["doc"]["gold"]] = "99.0"

    edit_lines(path, swap)
    assert "was changed or belongs to another run" in refused(tmp_path)


@pytest.mark.parametrize("change", [lambda ids: ids[1:], lambda ids: [ids[0], *ids[:-1]]])
def test_an_order_that_does_not_hold_the_candidates_is_refused(tmp_path, change):
    def spoil(lines):
        order = lines[2]["judge"]["orders"][1]
        order["candidate_ids"] = change(order["candidate_ids"])

    results = write_psc(tmp_path, lambda doc, order: IDS[:5])
    edit_lines(samples_of(results, "researchbench_judge_psc"), spoil)
    said = refused(tmp_path)
    assert "line 3: an order of the judge does not hold the candidates" in said


@pytest.mark.parametrize("metric", ["hit@1", "win_rate_half", "win_rate_terminal_valid"])
def test_a_judges_numbers_are_checked_too(tmp_path, metric):
    file = write_judge(tmp_path, lambda doc: IDS[2:7])

    def change(results):
        results["results"]["researchbench_judge"][f"{metric},judge"] += 1e-6

    edit(file, change)
    assert f"{metric} of filter 'judge'" in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line["doc"].pop("candidate_ids"), "'candidate_ids' is missing"),
        (lambda line: line["doc"].pop("gold"), "'gold' is missing"),
        (lambda line: line["doc"].update(gold=16), "do not fit together"),
        (lambda line: line["doc"].update(gold=[1, 2]), "several golds"),
        (lambda line: line["doc"]["candidate_ids"].__setitem__(0, "fake_1"), "do not fit together"),
        (lambda line: line.pop("filtered_resps"), "'filtered_resps' is missing"),
        (lambda line: line["filtered_resps"].pop(), "15 scores for 16 candidates"),
        (lambda line: line["filtered_resps"].__setitem__(0, "N/A"), "not one number a candidate"),
        (lambda line: line["filtered_resps"].__setitem__(0, ["1.0"]), "not one number a candidate"),
        (lambda line: line["num_tokens"].pop(), "15 num_tokens for 16 candidates"),
    ],
)
def test_malformed_samples_are_named_by_line_and_field(tmp_path, change, said):
    path = samples_of(write_energy(tmp_path))
    edit_lines(path, lambda lines: change(lines[7]) and None)
    text = refused(tmp_path)
    assert f"{path}, line 8" in text
    assert said in text


@pytest.mark.parametrize(
    ("content", "said"),
    [(b'{"doc": 1}\n[2]\n', "'filter' is missing"), (b"[2]\n", "not a JSON object"),
     (b"\xff\xfe\n", "not UTF-8"), (b"\n", "not JSON")],
)  # fmt: skip
def test_samples_of_other_programs_are_refused(tmp_path, content, said):
    path = samples_of(write_energy(tmp_path))
    path.write_bytes(content)
    assert said in refused(tmp_path)


def test_a_results_file_that_was_cut_off_is_named(tmp_path):
    file = write_energy(tmp_path)
    file.write_text(file.read_text(encoding="utf-8")[:200], encoding="utf-8")
    assert str(file) in refused(tmp_path)


def test_nothing_to_read_says_what_is_there(tmp_path):
    write_energy(tmp_path, task="hellaswag", scorers={})
    text = refused(tmp_path)
    assert "hellaswag: not a hypothesis-ranking task" in text
    assert "--output_path" in text
    assert "is not a folder" in refused(tmp_path / "absent")


# --- what is left aside -------------------------------------------------------------------


def test_other_peoples_files_are_left_out_and_named(tmp_path):
    file = write_energy(tmp_path)
    other = {"task": "hellaswag", "filter_list": [{"name": "none", "filter": [{"function": "x"}]}]}

    def add(results):
        results["configs"]["hellaswag"] = other
        results["results"]["hellaswag"] = {"acc,none": 0.5, "acc_stderr,none": "N/A"}
        results["n-samples"]["hellaswag"] = {"original": 9, "effective": 9}

    edit(file, add)
    (tmp_path / "notes_2026-01-01T00-00-00.json").write_text('{"a": 1}', encoding="utf-8")
    (tmp_path / "package.json").write_text("{", encoding="utf-8")
    runs = read_runs([tmp_path])
    assert sorted(entry["why"] for entry in runs.files["left_out"]) == [
        "hellaswag: not a hypothesis-ranking task",
        "not a results file of lm-eval",
    ]
    assert len(runs.systems) == 3


def test_a_task_with_several_golds_is_left_out_and_named(tmp_path):
    write_energy(tmp_path)
    docs = [doc | {"gold": [doc["gold"], (doc["gold"] + 1) % 16]} for doc in documents()]
    write_energy(tmp_path, task="my_golds", docs=docs)
    runs = read_runs([tmp_path])
    assert set(runs.systems["task"]) == {TASK}
    (entry,) = runs.files["left_out"]
    assert "my_golds" in entry["why"]
    assert "several golds" in entry["why"]
    assert "several golds" in refused(tmp_path, tasks=["my_golds"])


@pytest.mark.parametrize("metadata", [{}, {"kind": "expert"}, {"only": "Europe"}])
def test_expert_rankings_are_left_out_and_named(tmp_path, metadata):
    """Told by the data: a YAML that includes ours may have metadata of its own."""

    def judged(lines):
        for line in lines:
            del line["doc"]["gold"]
            line["doc"] |= {"judgements": [[1.0] * 16], "best": [0]}

    write_energy(tmp_path)
    file = write_energy(tmp_path, task="my_experts", metadata=metadata, date="2026-01-03T00-00-00")
    edit_lines(samples_of(file, "my_experts"), judged)
    runs = read_runs([tmp_path])
    assert set(runs.systems["task"]) == {TASK}
    (entry,) = runs.files["left_out"]
    assert entry["why"].startswith("my_experts: ranked against experts")
    assert "lm-eval's own table" in entry["why"]


def test_a_run_of_an_older_version_has_no_fingerprint_and_is_read(tmp_path):
    write_energy(tmp_path, fingerprint=None)
    assert read_runs([tmp_path]).runs[0].fingerprint is None


def test_a_results_file_of_any_name_is_found(tmp_path):
    """`--output_path x.json` makes x_DATE.json, its samples beside it."""
    file = write_energy(tmp_path)
    file.rename(file.with_name(file.name.replace("results_", "mine_")))
    assert len(read_runs([tmp_path]).systems) == 3


def test_file_names_begin_at_the_folder_given(tmp_path):
    write_energy(tmp_path / "runs" / "deep")
    names = [entry["file"] for entry in read_runs([tmp_path / "runs"]).files["read"]]
    assert len(names) == 2
    assert all(name.startswith("runs/deep/acme__Lark-1B/") for name in names)


def test_the_rank_rule_is_that_of_the_package(tmp_path):
    """Ties by expectation: a constant scorer is at chance and passes the check."""
    constant = {name: [0.0] * 16 for name in SCORERS}
    file = write_energy(tmp_path, scores=lambda doc: constant)
    written = json.loads(file.read_text(encoding="utf-8"))["results"][TASK]
    assert written["hit@1,nll"] == gold_rank([0.0] * 16, 0).hit(1) == 1 / 16
    assert len(read_runs([tmp_path]).systems) == 3
