"""The study's commands, and our numbers beside the published ones on made-up runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import reproduce_paper
from lm_eval_hyprank.report.found import ReportError
from lm_eval_hyprank.report.intervals import Settings
from lm_eval_hyprank.report.runs import read_runs
from tests.report.run_folder import (
    documents,
    edit,
    write_energy,
    write_judge,
    write_pairwise,
    write_psc,
)

PUBLISHED = json.loads(reproduce_paper.PUBLISHED.read_text(encoding="utf-8"))
HUBS = [model.hub for model in reproduce_paper.MODELS]


def gold_at(place: int) -> Any:
    """A judge that names the gold at a place of its five, or not at all (5), or is mute (6)."""

    def rank(doc: dict[str, Any]) -> list[str] | None:
        named = [name for name in doc["candidate_ids"] if name != "gold"][:5]
        if place < 5:
            named[place] = "gold"
        return None if place == 6 else named

    return rank


def gold_first(doc: dict[str, Any]) -> dict[str, list[float]]:
    own = [float(name != "gold") for name in doc["candidate_ids"]]
    return {"nll": own, "raw": [-score for score in own], "shortest": own}


def test_the_dry_run_prints_every_command_and_runs_none(capsys, monkeypatch):
    monkeypatch.setattr(reproduce_paper.subprocess, "run", lambda *_, **__: pytest.fail("ran"))
    extra = """--metadata '{"dataset_path": "my data"}'"""
    assert reproduce_paper.main(["--dry-run", "-o", "out", "--lm-eval", extra]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(commands) == 8
    for command, hub in zip(commands, HUBS, strict=False):
        assert command[:4] == ["lm_eval", "run", "--model", "hf"]
        assert f"pretrained={hub},dtype=bfloat16" in command
        assert "researchbench_energy" in command
    assert commands[-1][3:6] == ["openai-chat-completions", "--model_args", "model=gpt-5"]
    assert all("--log_samples" in command for command in commands)
    assert all(json.loads(command[-1]) == {"dataset_path": "my data"} for command in commands)


def test_without_folders_the_commands_are_run_and_compared(tmp_path, capsys, monkeypatch):
    ran = []

    def run(command: list[str], check: bool) -> None:
        assert check
        ran.append(command)
        if "hf" in command:
            hub = command[command.index("--model_args") + 1].split(",")[0].partition("=")[2]
            write_energy(tmp_path, hub, scores=gold_first)

    monkeypatch.setattr(reproduce_paper.subprocess, "run", run)
    assert reproduce_paper.main(["-o", str(tmp_path)]) == 0
    assert [command[1:4] for command in ran] == [["-m", "lm_eval", "run"]] * 8
    out = capsys.readouterr().out
    assert "**8 papers were run, 1323 were published: this is no reproduction.**" in out
    assert "Not run: GPT-5." in out
    assert "| nll | Phi-4 | all | hit@1 | 1.000 [1.000, 1.000] | 0.327 | +0.673 | **no** |" in out
    assert "| raw | All models | Law | hit@5 | 0.000 [0.000, 0.000] | 0.603 | -0.603 |" in out
    assert "gold first under nll: 8 of 8 papers (100.0%); published 167 of 1323 (12.6%)" in out


def test_every_published_cell_has_its_place(tmp_path):
    """Seven models and the judge give each cell of the tables once, and nothing else."""
    docs = documents(24)
    for number, doc in enumerate(docs):
        doc["discipline"] = list(PUBLISHED["by_discipline"])[number % 12]
    for hub in HUBS:
        write_energy(tmp_path, hub, docs=docs)
    judged = [doc | {"candidates": doc["candidates"]} for doc in docs]
    write_judge(tmp_path, gold_at(0), "gpt-5", docs=judged)
    runs = read_runs([tmp_path])
    papers = reproduce_paper.study_papers(runs, reproduce_paper.names(runs))
    table = reproduce_paper.compare(papers, PUBLISHED, Settings(resamples=50))
    overall = sum(len(row) for rows in PUBLISHED["overall"].values() for row in rows.values())
    rates = sum(len(rows) for rows in PUBLISHED["win_rate"].values())
    assert len(table) == overall + rates + 12 * 2 * 3
    keys = ["scorer", "model", "discipline", "metric"]
    assert not table.duplicated(keys).any()
    cells = table.set_index(keys)
    assert cells.loc[("raw", "Gemma 2 2B", "", "mrr"), "published"] == 0.26
    assert cells.loc[("nll", "All models", "", "hit@2"), "published"] == 0.441
    assert cells.loc[("raw", "All models", "Law", "hit@1"), "published"] == 0.328
    assert cells.loc[("prompted", "GPT-5", "Math", "hit@5"), "published"] == 0.422
    assert cells.loc[("prompted", "GPT-5", "", "win_rate"), "published"] == 0.374
    assert table["difference"].to_numpy() == pytest.approx(
        (table["value"] - table["published"]).to_numpy()
    )
    inside = (table["low"] <= table["published"]) & (table["published"] <= table["high"])
    assert (table["covered"] == inside).all()
    assert 0 < inside.sum() < len(table)


def test_a_part_of_the_study_has_no_pooled_rows(tmp_path):
    write_energy(tmp_path, "models/PHI-4/")
    text = reproduce_paper.report(read_runs([tmp_path]), PUBLISHED, Settings(50))
    assert "| nll | Phi-4 | all |" in text
    assert "All models" not in text
    assert "Not run: Llama 3.2 1B, Llama 3.2 3B, Gemma 2 2B" in text


def test_other_tasks_of_a_model_are_no_part_of_its_cells(tmp_path):
    """Only the task that the study ran, and that once."""
    write_energy(tmp_path, HUBS[5], scores=gold_first)
    last = {"nll": 1.0, "raw": 1.0, "shortest": 1.0}
    write_energy(
        tmp_path,
        HUBS[5],
        scores=lambda doc: {
            name: [value * (label == "gold") for label in doc["candidate_ids"]]
            for name, value in last.items()
        },
        task="researchbench_energy_scores",
    )
    write_judge(tmp_path, gold_at(0), "gpt-5")
    text = reproduce_paper.report(read_runs([tmp_path]), PUBLISHED, Settings(50))
    assert "| nll | Phi-4 | all | hit@1 | 1.000" in text
    again = write_judge(tmp_path, gold_at(5), "gpt-5", date="2026-02-01T00-00-00")

    def more_room(results: dict[str, Any]) -> None:
        results["configs"]["researchbench_judge"]["generation_kwargs"] = {"max_gen_toks": 9}

    edit(again, more_room)
    with pytest.raises(ReportError, match=r"gpt-5: .*max_gen_toks=9"):
        reproduce_paper.report(read_runs([tmp_path]), PUBLISHED, Settings(50))


def test_nothing_but_the_studys_models_on_its_tasks_stands_beside_its_numbers(tmp_path):
    """Of all models on all tasks: no study model as a judge, no judge asked in another way."""

    def table(*folders: Path) -> pd.DataFrame:
        runs = read_runs(folders)
        papers = reproduce_paper.study_papers(runs, reproduce_paper.names(runs))
        found = reproduce_paper.compare(papers, PUBLISHED, Settings(20))
        return found.set_index(["scorer", "model", "discipline", "metric"]).sort_index()

    study, others = tmp_path / "study", tmp_path / "others"
    write_energy(study, HUBS[5], scores=gold_first)
    write_judge(study, gold_at(0), "gpt-5")
    for model in (*HUBS, "gpt-5"):
        options = {} if model in HUBS else {"metadata": {"order": "gold_first"}}
        write_judge(others, gold_at(5), model, **options)
        write_psc(others, lambda doc, order: gold_at(5)(doc), model)
        write_pairwise(others, lambda doc, other, first: first, model)
        if model not in HUBS:
            write_energy(others / "energy", model)
    pd.testing.assert_frame_equal(table(study, others), table(study))
    text = reproduce_paper.report(read_runs([study, others]), PUBLISHED, Settings(20))
    said = "Left out, for the study asked otherwise: gpt-5 on researchbench_judge "
    assert f"{said}(order=gold_first)." in text


@pytest.mark.parametrize("model", ["gpt-5", "microsoft/phi-4"])
def test_a_lone_run_that_was_asked_otherwise_is_not_compared(tmp_path, model):
    if model == "gpt-5":
        write_judge(tmp_path, gold_at(0), model, metadata={"order": "gold_first"})
    else:
        write_energy(tmp_path, model, metadata={"layout": "block"})
    said = r"no run of the study's models .*Left out, .* on researchbench_.*(=gold_first|=block)"
    with pytest.raises(ReportError, match=said):
        reproduce_paper.report(read_runs([tmp_path]), PUBLISHED, Settings(20))


def test_a_scorer_that_stands_under_another_task_is_the_studys_too(tmp_path):
    """As it does where more models ran that one, with the same numbers."""
    scores = "researchbench_energy_scores"
    for model, task in ((HUBS[5], reproduce_paper.ENERGY_TASK), (HUBS[5], scores), ("a/b", scores)):
        write_energy(tmp_path, model, scores=gold_first, task=task)
    text = reproduce_paper.report(read_runs([tmp_path]), PUBLISHED, Settings(50))
    assert "| nll | Phi-4 | all | hit@1 | 1.000" in text


def test_the_judge_by_the_studys_rules(tmp_path):
    """Over all replies: unranked golds are beaten by all, unreadable replies are misses."""
    places = [0, 4, 5, 6, 0, 0, 5, 6]
    docs = documents(shown=1)
    at = {doc["paper_id"]: place for doc, place in zip(docs, places, strict=True)}
    write_judge(tmp_path, lambda doc: gold_at(at[doc["paper_id"]])(doc), "gpt-5", docs=docs)
    runs = read_runs([tmp_path])
    papers = reproduce_paper.study_papers(runs, reproduce_paper.names(runs))
    table = reproduce_paper.compare(papers, PUBLISHED, Settings(50)).set_index("metric")
    whole = table[table["discipline"] == ""]["value"]
    assert whole["hit@1"] == pytest.approx(3 / 8)
    assert whole["hit@5"] == pytest.approx(4 / 8)
    assert whole["win_rate"] == pytest.approx(np.mean([1, 11 / 15, 0, 0, 1, 1, 0, 0]))
    assert "mrr" not in whole


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    write_energy(tmp_path / "a", "acme/Lark-1B")
    with pytest.raises(ReportError, match=r"no run of the study's models .*gemma-2-2b"):
        reproduce_paper.report(read_runs([tmp_path / "a"]), PUBLISHED, Settings(50))
    assert reproduce_paper.main([str(tmp_path / "a")]) == 2
    assert "no run of the study's models" in capsys.readouterr().err

    write_energy(tmp_path / "b", "microsoft/phi-4", model_args={"dtype": "float32"})
    write_energy(tmp_path / "b", "other/phi-4", model_args={"dtype": "bfloat16"})
    with pytest.raises(ReportError, match="are all Phi-4"):
        reproduce_paper.report(read_runs([tmp_path / "b"]), PUBLISHED, Settings(50))
    assert reproduce_paper.main([str(Path(tmp_path / "nothing"))]) == 2
