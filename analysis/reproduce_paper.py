"""Runs the published study's models, and puts our numbers beside the published ones.

    python analysis/reproduce_paper.py --dry-run            # print the lm_eval commands
    python analysis/reproduce_paper.py -o results/paper     # run them, then compare
    python analysis/reproduce_paper.py RUN_DIR...           # compare what was run elsewhere

The comparison reads any of the models' runs that it finds, cell by cell: our value with its
interval, the published one, the difference, and whether our interval covers the published
value. It needs the ``report`` extra; the runs need the ResearchBench data (see the README) and,
for the larger models, a GPU with 80 GB.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lm_eval_hyprank.report.comparisons import agreement
from lm_eval_hyprank.report.found import ReportError
from lm_eval_hyprank.report.intervals import (
    METRICS,
    Settings,
    estimates,
    paper_metrics,
    with_misses,
)
from lm_eval_hyprank.report.runs import Run, Runs, read_runs

PUBLISHED = Path(__file__).with_name("published.json")

ENERGY_TASK = "researchbench_energy"
JUDGE_TASK = "researchbench_judge"
JUDGE = "GPT-5"
POOLED = "All models"


class Model(NamedTuple):
    """One of the study's models: its name in the tables, and its id on the Hugging Face hub."""

    name: str
    hub: str


# The study cites the checkpoints of the two Llamas; of the others it does not say whether they are
# base or instruction-tuned, and the base models of that name are taken.
MODELS = (
    Model("Llama 3.2 1B", "meta-llama/Llama-3.2-1B-Instruct"),
    Model("Llama 3.2 3B", "meta-llama/Llama-3.2-3B"),
    Model("Gemma 2 2B", "google/gemma-2-2b"),
    Model("Gemma 4 12B", "google/gemma-4-12B"),
    Model("Mistral 7B", "mistralai/Mistral-7B-v0.1"),
    Model("Phi-4", "microsoft/phi-4"),
    Model("GPT OSS 20B", "openai/gpt-oss-20b"),
)

# The study states no dtype. All but two checkpoints are stored in bfloat16; Gemma 2's are float32
# from bfloat16 training, and GPT OSS's 4-bit experts are computed in bfloat16.
DTYPE = "bfloat16"


def commands(output: Path, extra: Sequence[str] = ()) -> Iterator[list[str]]:
    """The lm_eval commands: seven models, and the judge.

    Args:
        output: Where the runs go, one folder a model.
        extra: More arguments of lm_eval, such as ``--metadata``.
    """
    shared = ["--output_path", str(output), "--log_samples", *extra]
    for model in MODELS:
        arguments = f"pretrained={model.hub},dtype={DTYPE}"
        yield ["lm_eval", "run", "--model", "hf", "--model_args", arguments,
               "--tasks", ENERGY_TASK, *shared]  # fmt: skip
    yield ["lm_eval", "run", "--model", "openai-chat-completions", "--model_args", "model=gpt-5",
           "--tasks", JUDGE_TASK, "--apply_chat_template", *shared]  # fmt: skip


def study_name(run: Run) -> str | None:
    """The study's name of a run's model, if the study ran that model on that task."""
    known = {model.hub.rpartition("/")[2].lower(): model.name for model in MODELS}
    known["gpt-5"] = JUDGE
    name = known.get(run.pretrained.rstrip("/").rpartition("/")[2].lower())
    return name if run.name == (JUDGE_TASK if name == JUDGE else ENERGY_TASK) else None


def asked_otherwise(run: Run) -> bool:
    """Whether the run has the task ask in another way than the study's."""
    return "options" in run.details


def names(runs: Runs) -> dict[str, str]:
    """The study's name of each model label that is one of its models, asked as the study asked.

    Raises:
        ReportError: Two of the models read are the same model of the study.
    """
    found = {}
    for run in runs.runs:
        name = study_name(run)
        if name and not asked_otherwise(run):
            found[run.model] = name
    for name, count in Counter(found.values()).items():
        if count > 1:
            labels = sorted(label for label, other in found.items() if other == name)
            raise ReportError(f"{', '.join(labels)} are all {name}; give the folders of one only")
    return found


def left_out(runs: Runs) -> str:
    """Names the runs of the study's models that asked in another way; empty if none did."""
    others = [run for run in runs.runs if study_name(run) and asked_otherwise(run)]
    listed = ", ".join(f"{run.model} on {run.task}" for run in others)
    return f"Left out, for the study asked otherwise: {listed}." if others else ""


def study_scores(runs: Runs, named: Mapping[str, str]) -> pd.DataFrame:
    """The rows of `Runs.scores` that are the study's systems.

    Raises:
        ReportError: A model was run on the study's task with several options.
    """
    systems = runs.systems[runs.systems["model"].isin(named) & (runs.systems["control"] == "")]
    otherwise = [place for place, run in enumerate(runs.runs) if asked_otherwise(run)]
    systems = systems[~systems["run"].isin(otherwise)]
    judge = systems["model"].map(named) == JUDGE
    energy = ~judge & (systems["kind"] == "energy") & systems["scorer"].isin(["nll", "raw"])
    systems = systems[energy | (judge & (systems["name"] == JUDGE_TASK))]
    # A scorer that tasks share may stand under another one.
    own = systems["name"].isin([ENERGY_TASK, JUDGE_TASK])
    systems = systems[own | ~own.groupby([systems["model"], systems["scorer"]]).transform("any")]
    for (model, _), tasks in systems.groupby(["model", "scorer"])["task"]:
        if len(tasks) > 1:
            raise ReportError(f"{model}: {', '.join(tasks)}; give the folders of one only")
    return runs.scores[runs.scores["system"].isin(systems["system"])]


def study_papers(runs: Runs, named: Mapping[str, str]) -> pd.DataFrame:
    """Per-paper values of the study's systems, ``model`` and ``scorer`` as in `published.json`."""
    papers = with_misses(paper_metrics(study_scores(runs, named)))
    judge = papers["kind"] == "judge"
    return papers.assign(
        model=papers["model"].map(named),
        scorer=papers["scorer"].where(~judge, "prompted"),
        # The study's rule for its judge: an unranked gold is beaten by all.
        win_rate=papers["win_rate_terminal"].where(judge, papers["win_rate"]),
    )


def compare(papers: pd.DataFrame, published: Mapping[str, Any], settings: Settings) -> pd.DataFrame:
    """Our cells beside the published ones.

    Args:
        papers: As :func:`study_papers` returns them.
        published: The content of `published.json`.
        settings: Resamples, seed and kind of our intervals.

    Returns:
        One row a cell: ``scorer``, ``model`` (or ``All models``), ``discipline`` (empty for all
        papers), ``metric``, ``value``, ``low``, ``high``, ``published``, ``difference`` (ours −
        published), ``covered`` (whether our interval holds the published value; None without an
        interval). Rows over all models only where all seven are there.
    """
    tables = [estimates(papers, METRICS, ("scorer", "model"), settings)]
    tables.append(
        estimates(
            papers[papers["scorer"] == "prompted"], METRICS, ("scorer", "model", "discipline"),
            settings,
        )
    )  # fmt: skip
    models = papers[papers["scorer"] != "prompted"]
    if models["model"].nunique() == len(MODELS):
        pooled = models.assign(model=POOLED)
        for by in (("scorer", "model"), ("scorer", "model", "discipline")):
            tables.append(estimates(pooled, METRICS, by, settings))
    rows = []
    for ours in pd.concat(tables).fillna({"discipline": ""}).to_dict("records"):
        theirs = published_value(published, ours)
        if theirs is not None:
            limits = pd.notna(ours["low"]) and pd.notna(ours["high"])
            rows.append(
                {
                    **{name: ours[name] for name in ("scorer", "model", "discipline", "metric")},
                    **{name: ours[name] for name in ("value", "low", "high")},
                    "published": theirs,
                    "difference": ours["value"] - theirs,
                    "covered": ours["low"] <= theirs <= ours["high"] if limits else None,
                }
            )
    return pd.DataFrame(rows)


def published_value(published: Mapping[str, Any], cell: Mapping[str, Any]) -> float | None:
    """The published value of one of our cells, None if the tables have no such cell."""
    scorer, model, metric = cell["scorer"], cell["model"], cell["metric"]
    if cell["discipline"]:
        column = JUDGE if scorer == "prompted" else scorer
        value = published["by_discipline"].get(cell["discipline"], {}).get(metric, {}).get(column)
    elif metric == "win_rate":
        value = published["win_rate"][scorer].get(model)
    else:
        value = published["overall"][scorer].get(model, {}).get(metric, {}).get("value")
    return None if value is None else float(value)


def report(runs: Runs, published: Mapping[str, Any], settings: Settings) -> str:
    """The comparison in Markdown.

    Raises:
        ReportError: None of the study's models is among the runs, or one is there twice.
    """
    named = names(runs)
    otherwise = left_out(runs)
    if not named:
        known = ", ".join(model.hub for model in MODELS)
        raise ReportError(
            f"no run of the study's models ({known}, gpt-5) in these folders. {otherwise}".rstrip()
        )
    papers = study_papers(runs, named)
    table = compare(papers, published, settings)
    count = papers["paper_id"].nunique()
    lines = ["# Our numbers beside the published ones", ""]
    if count != published["papers"]:
        lines += [
            f"**{count} papers were run, {published['papers']} were published: this is no "
            "reproduction.**",
            "",
        ]
    missing = [name for name in (*(m.name for m in MODELS), JUDGE) if name not in named.values()]
    if missing:
        lines += [f"Not run: {', '.join(missing)}.", ""]
    if otherwise:
        lines += [otherwise, ""]
    covered = table["covered"].dropna()
    lines += [
        f"{int(covered.sum())} of {len(covered)} intervals cover the published value.",
        "",
        "| scorer | model | papers of | metric | ours | published | difference | covered |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table.itertuples(index=False):
        ours = f"{row.value:.3f}"
        if row.covered is not None:
            ours += f" [{row.low:.3f}, {row.high:.3f}]"
        verdict = {True: "yes", False: "**no**", None: "–"}[row.covered]
        lines.append(
            f"| {row.scorer} | {row.model} | {row.discipline or 'all'} | {row.metric} | {ours} | "
            f"{row.published:.3f} | {row.difference:+.3f} | {verdict} |"
        )
    lines.append("")
    scores = study_scores(runs, named)
    for found in agreement(scores[scores["kind"] == "energy"], settings):
        if len(found.models) == len(MODELS):
            theirs = published["all_models_rank_gold_first"][found.scorer]
            lines.append(
                f"All seven models rank the gold first under {found.scorer}: {found.all_first} of "
                f"{found.papers} papers ({found.all_first / found.papers:.1%}); published "
                f"{theirs} of {published['papers']} ({theirs / published['papers']:.1%})."
            )
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints or runs the commands, or compares; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="RUN_DIR", help="runs to compare")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/paper"))
    parser.add_argument(
        "--lm-eval", default="", metavar="ARGS", help="more arguments of lm_eval, in one string"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the resampling")
    options = parser.parse_args(arguments)
    extra = shlex.split(options.lm_eval)
    if options.dry_run:
        for command in commands(options.output, extra):
            print(shlex.join(command))
        return 0
    if not options.folders:
        for command in commands(options.output, extra):
            print(shlex.join(command), flush=True)
            subprocess.run([sys.executable, "-m", *command], check=True)
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    try:
        runs = read_runs(options.folders or [options.output])
        print(report(runs, published, Settings(seed=options.seed)), end="")
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
