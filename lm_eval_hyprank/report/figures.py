"""A report's figures, the same bytes for the same report.

Colours are those of Okabe and Ito (2008) and the map `cividis`, which readers with any kind of
colour vision can tell apart; markers differ as well.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MultipleLocator,
    NullFormatter,
    PercentFormatter,
)

from lm_eval_hyprank.ranking import chance_rank
from lm_eval_hyprank.report.found import JUDGES
from lm_eval_hyprank.report.intervals import HITS
from lm_eval_hyprank.report.tables import discipline_columns, sections, units

Report = Mapping[str, Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
_GREY = "#767676"


def figures(report: Report) -> dict[str, tuple[str, Figure]]:
    """Draws all figures that the report has the data for.

    Returns:
        From the base of a file's name to the figure's title and the figure.
    """
    with _style():
        drawn = {
            "hits": ("Hit@k by scorer and model", _hits(report)),
            "disciplines": ("Hit@1 and Hit@5 by discipline", _disciplines(report)),
            "ranks": ("Rank of the gold", _ranks(report)),
            "positions": ("First choices of judges by place in the list", _positions(report)),
            "length": ("Score against length", _length(report)),
            "agreement": ("Agreement between models", _agreement(report)),
        }
    return {name: (title, figure) for name, (title, figure) in drawn.items() if figure}


def render(figure: Figure, kind: str) -> bytes:
    """A figure as the bytes of an ``svg`` or ``png`` file, without date or version."""
    buffer = io.BytesIO()
    nameless = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}[kind]
    with _style():
        figure.savefig(buffer, format=kind, metadata=nameless, dpi=200)
    return buffer.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    """Settings of our own, whatever the user's are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.hashsalt": "hyprank",  # else ids in the file are random
                "text.parse_math": False,  # names may hold dollar signs
                "font.size": 8,
                "axes.titlesize": 9,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "axes.grid": False,
                "grid.color": "#E2E2E2",
                "grid.linewidth": 0.6,
                "legend.frameon": False,
                "figure.facecolor": "white",
                "figure.constrained_layout.use": True,
            }
        )
        yield


# --- Hit@k -----------------------------------------------------------------------------------


def _hits(report: Report) -> Figure | None:
    """Hit@k of every model and scorer with intervals: the paper's Fig. 3."""
    groups = [
        (title, measured)
        for title, systems, _ in sections(report)
        if (measured := [system for system in systems if "hit@1" in system["metrics"]])
    ]
    lines = [
        (f"{title} ({s['model']})" if s["kind"] != "trivial" else title, s)
        for title, systems in groups
        for s in systems
        if s["kind"] == "trivial" or s["kind"] in JUDGES
    ]
    drawn = "candidates" in report["paper_set"]  # chance is then a line of its own
    lines = [
        (name, system) for name, system in lines if not (drawn and system["scorer"] == "chance")
    ]
    scored = [
        (title, systems)
        for title, systems in groups
        if systems[0]["kind"] not in ("trivial", *JUDGES)
    ]
    models = list(dict.fromkeys(s["model"] for _, systems in scored for s in systems))
    if not scored:
        return None
    width = max(7.2, 2.2 + 0.19 * len(models) * (len(scored) + 1.5) * 2)
    figure = Figure(figsize=(min(width, 11), 5.6))
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    step = 0.8 / len(scored)
    for axes, metric in zip(grid.flat, HITS, strict=True):
        axes.set_title(f"Hit@{metric[-1]}", loc="left", fontweight="bold")
        axes.grid(axis="y", visible=True)
        for number, (title, systems) in enumerate(scored):
            offset = (number - (len(scored) - 1) / 2) * step
            points = [
                (models.index(s["model"]) + offset, s["metrics"][metric])
                for s in systems
                if metric in s["metrics"]
            ]
            values = [cell["value"] for _, cell in points]
            below = [cell["value"] - cell.get("low", cell["value"]) for _, cell in points]
            above = [cell.get("high", cell["value"]) - cell["value"] for _, cell in points]
            axes.errorbar(
                [x for x, _ in points],
                values,
                # A percentile interval need not hold the value itself.
                yerr=[[max(0.0, size) for size in side] for side in (below, above)],
                fmt=MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                markerfacecolor="white" if number >= len(COLOURS) else None,
                markersize=4.5,
                elinewidth=1.2,
                capsize=2,
                clip_on=False,
                zorder=3,
                label=title,
            )
        for number, (name, system) in enumerate(lines):
            if metric in system["metrics"]:
                axes.axhline(
                    system["metrics"][metric]["value"],
                    color=_GREY if system["kind"] == "trivial" else "#000000",
                    linestyle=("--", "-.", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))[number % 4],
                    linewidth=1,
                    label=name,
                )
        if size := report["paper_set"].get("candidates"):
            chance = chance_rank(size).hit(int(metric[-1]))
            axes.axhline(chance, color=_GREY, linestyle=":", linewidth=1, label="Chance")
        axes.set_xticks(range(len(models)), models, rotation=25 if len(models) > 2 else 0)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right" if len(models) > 2 else "center")
        axes.set_xlim(-0.6, len(models) - 0.4)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        for edge in range(len(models) - 1):
            axes.axvline(edge + 0.5, color="#E2E2E2", linewidth=0.6)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"Share of {units(report)}")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))
    return figure


# --- disciplines -----------------------------------------------------------------------------


def _disciplines(report: Report) -> Figure | None:
    names = list(report["paper_set"]["disciplines"])
    columns = discipline_columns(report)
    if not columns or len(names) < 2:
        return None
    labels = [f"{name} ({report['paper_set']['disciplines'][name]})" for name in names]
    # The slanted names below take their room, whatever the number of rows.
    height = 1.2 + 0.26 * len(names) + 0.035 * max(len(name) for name, _ in columns)
    figure = Figure(figsize=(3.0 + 1.1 * len(columns), height))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, metric in zip(panels, ("hit@1", "hit@5"), strict=True):
        values = [
            [fields.get(name, {}).get(metric, {}).get("value") for _, fields in columns]
            for name in names
        ]
        image = _heat(axes, values, 0.0, 1.0, "{:.0%}")
        axes.set_title(f"Hit@{metric[-1]}", loc="left", fontweight="bold")
        axes.set_xticks(range(len(columns)), [name for name, _ in columns], rotation=35, ha="right")
        axes.set_yticks(range(len(names)), labels)
    bar = figure.colorbar(image, ax=panels, shrink=0.8, pad=0.02)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1))
    bar.set_label(f"Share of {units(report)}")
    bar.outline.set_visible(False)
    return figure


def _heat(
    axes: Axes, values: Sequence[Sequence[float | None]], low: float, high: float, text: str
) -> Any:
    """A heat map with its numbers; a cell without a value is blank and has a dash."""
    numbers = [[float("nan") if value is None else value for value in row] for row in values]
    image = axes.imshow(numbers, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            dark = value is not None and (value - low) / (high - low) < 0.5
            axes.text(
                column,
                row,
                "–" if value is None else text.format(value).replace("-", "−"),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


# --- ranks -----------------------------------------------------------------------------------


def _ranks(report: Report) -> Figure | None:
    """How often the gold has each rank, a panel for each scorer."""
    panels = [
        (title, [s for s in systems if "rank_histogram" in s and s["scorer"] != "chance"])
        for title, systems, _ in sections(report)
    ]
    panels = [(title, systems) for title, systems in panels if systems]
    if not panels:
        return None
    models = list(dict.fromkeys(s["model"] for _, systems in panels for s in systems))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.7 * columns + 0.6, 1.9 * rows + 0.7))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    top = 0.0
    for axes, (title, systems) in zip(grid.flat, panels, strict=False):
        axes.set_title(title, loc="left", fontweight="bold")
        axes.grid(axis="y", visible=True)
        for system in systems:
            number = models.index(system["model"])
            shares = system["rank_histogram"]
            top = max(top, *shares)
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                color=_GREY if system["kind"] == "trivial" else COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=3,
                clip_on=False,
                linewidth=1.1,
                linestyle=("-", "--", ":")[number // len(COLOURS) % 3],
                label=system["model"],
            )
        if size := report["paper_set"].get("candidates"):
            axes.axhline(1 / size, color=_GREY, linestyle=":", linewidth=1, label="Chance")
        axes.xaxis.set_major_locator(MultipleLocator(5, offset=1))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.tick_params(labelbottom=True)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    grid.flat[0].set_ylim(0, 1.05 * top)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"Share of {units(report)}")
    for axes in list(grid.flat)[: len(panels)][-columns:]:
        axes.set_xlabel("Rank of the gold")
    known: dict[str, Any] = {}
    for axes in grid.flat:
        handles, labels = axes.get_legend_handles_labels()
        known |= {
            label: one for one, label in zip(handles, labels, strict=True) if label not in known
        }
    if "Chance" in known:  # the last of the legend
        known["Chance"] = known.pop("Chance")
    figure.legend(known.values(), known, loc="outside lower center", ncols=min(len(known), 4))
    return figure


# --- positions -------------------------------------------------------------------------------


def _positions(report: Report) -> Figure | None:
    """How often a listwise judge puts first what is shown at each place."""
    judges = [
        (f"{title} ({system['model']})", [row["first_choices"] for row in system["positions"]])
        for title, systems, _ in sections(report)
        for system in systems
        if "positions" in system
    ]
    judges = [(name, counts) for name, counts in judges if sum(counts)]
    if not judges:
        return None
    figure = Figure(figsize=(5.4, 2.4 + 0.15 * len(judges)))
    axes = figure.subplots()
    for number, (name, counts) in enumerate(judges):
        axes.plot(
            range(1, len(counts) + 1),
            [count / sum(counts) for count in counts],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            clip_on=False,
            linewidth=1.1,
            label=name,
        )
    for size in sorted({len(counts) for _, counts in judges}):
        axes.hlines(1 / size, 1, size, color=_GREY, linestyle=":", linewidth=1, label="No bias")
    axes.grid(axis="y", visible=True)
    axes.set_ylim(0, None)
    axes.xaxis.set_major_locator(MultipleLocator(5, offset=1))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("Place in the list")
    axes.set_ylabel("Share of first choices")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


# --- length ----------------------------------------------------------------------------------


def _length(report: Report) -> Figure | None:
    """Score against length of all candidates, the golds marked: NLL and Raw of every model."""
    chosen = [
        system
        for system in report["systems"]
        if system["scorer"] in ("nll", "raw") and system["metrics"] and not system.get("control")
    ]
    if not chosen:
        return None
    rows = list(dict.fromkeys((system["model"], system["task"]) for system in chosen))
    scorers = list(dict.fromkeys(system["scorer"] for system in chosen))
    figure = Figure(figsize=(0.4 + 3.4 * len(scorers), 0.6 + 1.9 * len(rows)))
    grid = figure.subplots(len(rows), len(scorers), sharex=True, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    candidates = [one for paper in report["papers"] for one in paper["candidates"]]
    sizes = np.array([one["bytes"] for one in candidates])
    gold = np.array([one["id"] == "gold" for one in candidates])
    scores = np.array([one["scores"] for one in candidates], dtype=float)  # null becomes NaN
    # Tens of thousands of points would make a file of many megabytes.
    many = len(chosen) * len(candidates) > 3000
    for place, system in enumerate(report["systems"]):
        if system not in chosen:
            continue
        axes = grid[rows.index((system["model"], system["task"])), scorers.index(system["scorer"])]
        axes.set_visible(True)
        for is_gold in (False, True):
            points = (gold == is_gold) & np.isfinite(scores[:, place])
            axes.scatter(
                sizes[points],
                scores[points, place],
                s=9 if is_gold else 5,
                marker="D" if is_gold else "o",
                color=COLOURS[1] if is_gold else "#9AA5B1",
                alpha=0.9 if is_gold else 0.45,
                linewidths=0,
                zorder=3 if is_gold else 2,
                label="Gold" if is_gold else "Other candidates",
                rasterized=many,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelbottom=True)
        axes.grid(visible=True)
        rho = system.get("length_correlation")
        said = f"ρ = {rho['value']:.2f}".replace("-", "−") if rho else ""
        axes.set_title(f"{system['model']}, {system['paradigm']}", loc="left", fontweight="bold")
        axes.set_title(said, loc="right")
        axes.set_ylabel("Score (nats, lower is better)")
    for axes in grid[-1]:
        axes.set_xlabel("Bytes of the candidate (log scale)")
    handles, labels = next(a for a in grid.flat if a.get_visible()).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, markerscale=1.6)
    return figure


# --- agreement -------------------------------------------------------------------------------


def _agreement(report: Report) -> Figure | None:
    """Kendall's τ and the share of papers with the same first choice, model by model.

    Of NLL and Raw, as the paper has it; the report holds those of the other scorers too.
    """
    found = [one for one in report["agreement"] if one["scorer"] in ("nll", "raw")]
    found = found or report["agreement"]
    if not found:
        return None
    several = len({one["task"] for one in found}) > 1
    largest = max(len(one["models"]) for one in found)
    side = 0.55 + 0.42 * largest
    figure = Figure(figsize=(2.0 + max(1.2, side) * len(found), 1.0 + 2 * max(0.9, side)))
    grid = figure.subplots(2, len(found), squeeze=False)
    titles = {
        (system["task"], system["scorer"]): system["paradigm"] for system in report["systems"]
    }
    for column, one in enumerate(found):
        models = one["models"]
        for row, (key, name, low) in enumerate(
            (("tau", "Kendall's τ", -1.0), ("top1", "same first choice", 0.0))
        ):
            axes = grid[row, column]
            # That a model agrees with itself is no finding.
            shown = [
                [None if across == down else value for across, value in enumerate(line)]
                for down, line in enumerate(one[key])
            ]
            _heat(axes, shown, low, 1.0, "{:.2f}" if key == "tau" else "{:.0%}")
            title = titles[one["task"], one["scorer"]] + (f" ({one['task']})" if several else "")
            axes.set_title(f"{title}\n{name}" if row == 0 else name, loc="left")
            numbers = [str(number) for number in range(1, len(models) + 1)]
            names = [f"{model}  {number}" for model, number in zip(models, numbers, strict=True)]
            axes.set_yticks(range(len(models)), names if column == 0 else numbers)
            axes.set_xticks(range(len(models)), numbers)
            axes.set_aspect("equal")
    return figure
