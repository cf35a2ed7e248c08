"""A report's tables in Markdown, CSV and LaTeX.

The first three have the shape of Tables II to IV of arXiv 2608.17270: overall, by discipline, and
how often the gold beats a candidate.
"""

from __future__ import annotations

import csv
import html
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval_hyprank.metrics import HIT_KS
from lm_eval_hyprank.ranking import chance_rank
from lm_eval_hyprank.report.found import JUDGES, LIST_JUDGES
from lm_eval_hyprank.report.intervals import METRICS

Report = Mapping[str, Any]
Value = str | int | Mapping[str, float] | None
"""Content of a cell: text, a count, a value with or without its interval, or nothing."""

NO_WIDTH = "†"
"""Stands in place of an interval without width."""

_TITLES = {
    "hit@1": "Hit@1",
    "hit@2": "Hit@2",
    "hit@3": "Hit@3",
    "hit@5": "Hit@5",
    "mrr": "MRR",
    "win_rate": "Win rate",
    "win_rate_terminal": "Win rate (terminal)",
}


@dataclass
class Table:
    """A table, whatever it is written as.

    Attributes:
        name: Base of the file name.
        caption: What it shows, in a sentence.
        header: Titles of the columns.
        rows: A section's title (empty for none) and the cells of one of its rows.
        percent: Whether values are shown in per cent with one digit, not with three digits.
        interval: Whether intervals are shown; CSV holds them always.
        bold: Groups of columns within which a row's highest value is set in bold.
        notes: Sentences below the table.
    """

    name: str
    caption: str
    header: list[str]
    rows: list[tuple[str, list[Value]]] = field(default_factory=list)
    percent: bool = False
    interval: bool = True
    bold: list[range] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tables(report: Report) -> list[Table]:
    """All tables of a report, those without a row left out."""
    made = [
        overall(report),
        disciplines(report),
        gold_beats(report),
        judges(report),
        positions(report),
        comparisons(report),
        length(report),
        energy(report),
        controls(report),
    ]
    for table in made:
        table.header = [title.replace("Papers", units(report).title()) for title in table.header]
        cells = [cell for _, row in table.rows for cell in row if isinstance(cell, Mapping)]
        shown = [_number(cell, table.percent, table.interval) for cell in cells]
        if any(NO_WIDTH in text for text in [*shown, *table.notes]):
            table.notes.append(
                f"{NO_WIDTH} All {units(report)}, or all resamples, have the same value: its "
                "interval has no width and says nothing."
            )
    return [table for table in made if table.rows]


# --- the tables ------------------------------------------------------------------------------


def overall(report: Report) -> Table:
    """Hit@k and MRR of every system, with intervals: the shape of the paper's Table II."""
    dois = report["paper_set"]["dois"]
    columns = _told(report, METRICS)
    table = Table(
        "overall",
        f"Hypothesis ranking over {_papers(report)} "
        f"({report['settings']['interval']} bootstrap over {'DOIs' if dois else 'items'}, "
        f"{report['settings']['resamples']:,} resamples, 95 % intervals).",
        ["Model", "Papers", "Tier", *(_TITLES[metric] for metric in columns)],
    )
    for section, systems, pooled in sections(report):
        for system in systems:
            cells = [system["metrics"].get(metric) for metric in columns]
            tier = str(system.get("tier", ""))
            table.rows.append((section, [system["model"], system["papers"], tier, *cells]))
        if pooled:
            cells = [pooled["metrics"].get(metric) for metric in columns]
            table.rows.append((section, ["All models", None, None, *cells]))
    table.notes += [
        "No system can be told apart from the best of its tier; see the table of comparisons.",
        f"Chance: {_chance(report)}." if "candidates" in report["paper_set"] else "",
    ]
    if any(system["kind"] in LIST_JUDGES for system in report["systems"]):
        table.notes.append(
            "A judge's unreadable reply counts as no hit. It names its first five only, so it has "
            "no MRR; its win rate takes the others as tied (half)."
        )
    if any("compared" in system for system in report["systems"]):
        unit = units(report).removesuffix("s")
        table.notes.append(
            f"An invalid {unit}, one whose scores are no numbers, is left out of a system's own "
            "numbers, and is a miss in tests, tiers and the best. Agreement between models is over "
            f"the {units(report)} that all of them rank; a model that would halve these is left "
            "out of it."
        )
    if any(system.get("diagnostic") for system in report["systems"]):
        table.notes.append(
            "A diagnostic never looks at the observed tokens; it is not among those the best is "
            "chosen from."
        )
    if best := report.get("best"):
        name = next(s for s in report["systems"] if s["id"] == best["system"])
        table.notes.append(
            f"The best of {best['of']} cells, {name['model']} with {name['paradigm']}, has "
            f"{_TITLES[best['metric']]} {_number(best['naive'], False, True)} over "
            f"{best['papers']:,} {units(report)}; corrected for having been picked as the best it "
            f"is {_number(best['corrected'], False, True)}."
        )
    table.notes += report["notes"]
    table.notes = [note for note in table.notes if note]
    return table


def disciplines(report: Report) -> Table:
    """Hit@1 and Hit@5 by discipline: the shape of the paper's Table III.

    A column is a scorer over all models where several were run, and each judge. No rows where
    there are no disciplines to tell apart.
    """
    columns = discipline_columns(report)
    metrics = _told(report, ("hit@1", "hit@5"))
    width = len(columns)
    table = Table(
        "disciplines",
        f"{' and '.join(_TITLES[m] for m in metrics)} by discipline; the highest of a row in bold.",
        ["Discipline", "Papers", *(f"{_TITLES[m]} {n}" for m in metrics for n, _ in columns)],
        interval=False,
        bold=[range(2 + i * width, 2 + (i + 1) * width) for i in range(len(metrics))],
        notes=[f"With few {units(report)} a discipline the intervals (in the CSV file) are wide."],
    )
    groups = report["paper_set"]["disciplines"]
    if len(groups) < 2:  # the overall table says it all
        return table
    for name, count in groups.items():
        cells = [fields.get(name, {}).get(metric) for metric in metrics for _, fields in columns]
        if any(cells):
            table.rows.append(("", [name or "(none given)", count, *cells]))
    return table


def discipline_columns(report: Report) -> list[tuple[str, Mapping[str, Any]]]:
    """What is shown by discipline: names, and from discipline to metrics."""
    columns: list[tuple[str, Mapping[str, Any]]] = []
    for title, systems, pooled in sections(report):
        if pooled:
            columns.append((title, pooled["disciplines"]))
        else:
            for system in systems:
                named = system["kind"] in JUDGES or len(systems) > 1
                name = title + (f" ({system['model']})" if named else "")
                columns.append((name, system.get("disciplines", {})))
    return [column for column in columns if column[1]]


def gold_beats(report: Report) -> Table:
    """Share of candidates the gold outranks, by their kind: the shape of the paper's Table IV."""
    kinds = list(
        dict.fromkeys(kind for system in report["systems"] for kind in system.get("gold_beats", {}))
    )
    table = Table(
        "gold_beats",
        "How often the gold outranks a candidate, ties counting one half (chance: 50 %).",
        ["Model", *("all candidates" if kind == "all" else f"{kind} candidates" for kind in kinds)],
        percent=True,
    )
    judged = False
    for section, systems, _ in sections(report):
        for system in systems:
            beats = system.get("gold_beats", {})
            if beats:
                table.rows.append((section, [system["model"], *(beats.get(k) for k in kinds)]))
                judged |= system["kind"] in LIST_JUDGES
    if {"fake", "model"} <= set(kinds):
        table.notes.append(
            "In ResearchBench's layout fake candidates are texts taken from elsewhere, and model "
            "candidates are hypotheses that language models wrote."
        )
    if judged:
        table.notes.append(
            "Judges: over readable replies; what a judge did not rank is tied. The table of judges "
            "has the other convention as well."
        )
    return table


def judges(report: Report) -> Table:
    """What judges answered: readable replies, both conventions of the win rate."""
    table = Table(
        "judges",
        "Prompted judges. half: what was not ranked is tied; terminal: a gold that was not ranked "
        "beats nobody, as the published study counts.",
        [
            *("Model", "Papers", "Readable replies", "Hit@1", "Hit@1 of readable", "Hit@5"),
            *("Win rate, half", "Win rate, terminal", "Win rate, half, of readable"),
            *("Win rate, terminal, of readable", "Both orders right", "Contradicts itself"),
            *("Both orders wrong", "Chose the first shown"),
        ],
        percent=True,
    )
    for section, systems, _ in sections(report):
        for system in systems:
            if system["kind"] not in JUDGES:
                continue
            own, valid = system["metrics"], system.get("metrics_valid", {})
            # A judge of pairs has verdicts on papers that it does not rank.
            unranked = system["invalid"] if system["kind"] == "pairwise" else 0
            cells: list[Value] = [
                system["model"],
                system["papers"] + unranked,
                {"value": system["parse_rate"]},
                *(own.get("hit@1"), valid.get("hit@1"), own.get("hit@5")),
                *(own.get("win_rate"), own.get("win_rate_terminal")),
                *(valid.get("win_rate"), valid.get("win_rate_terminal")),
                *(own.get("both_correct"), own.get("contradiction"), own.get("both_wrong")),
                own.get("chose_shown_first"),
            ]
            table.rows.append((section, cells))
    used = [
        0,
        *(i for i in range(1, len(table.header)) if any(r[i] is not None for _, r in table.rows)),
    ]
    table.header = [table.header[i] for i in used]
    table.rows = [(section, [row[i] for i in used]) for section, row in table.rows]
    return table


def positions(report: Report) -> Table:
    """Whether a listwise judge looks at the place where a candidate is shown."""
    table = Table(
        "positions",
        "Listwise judges by place in the list, over readable replies: how often what was shown "
        "there was put first, how often the gold was shown there, and its Hit@k then.",
        ["Place", "Put first", "Gold shown", "Hit@1 of the gold", "Hit@5 of the gold"],
        percent=True,
    )
    for title, systems, _ in sections(report):
        for system in systems:
            for place, row in enumerate(system.get("positions", []), start=1):
                hits = [{"value": row[key]} if key in row else None for key in _POSITION_HITS]
                cells: list[Value] = [str(place), row["first_choices"], row["gold_shown"], *hits]
                table.rows.append((f"{title} ({system['model']})", cells))
    table.notes.append(
        "Without position bias every place is put first equally often, and the gold's Hit@k does "
        "not depend on where it was shown."
    )
    return table


_POSITION_HITS = ("gold_hit@1", "gold_hit@5")


def comparisons(report: Report) -> Table:
    """Paired differences of Hit@1 between systems, with corrected p values."""
    systems = {system["id"]: system for system in report["systems"]}
    names = {name: f"{s['model']}, {s['paradigm']}" for name, s in systems.items()}
    wins: dict[str, int] = dict.fromkeys(names, 0)
    for pair in report["comparisons"]:
        wins[pair["a"]] += pair["difference"] > 0
    ranked = [name for name in names if not systems[name].get("diagnostic")] or list(names)
    first = max(ranked, key=lambda name: wins[name])

    def in_question(pair: Mapping[str, Any]) -> bool:
        """Whether a reader asks for it: the best against all others, NLL against Raw."""
        one, other = systems[pair["a"]], systems[pair["b"]]
        same = (one["model"], one["task"]) == (other["model"], other["task"])
        criteria = same and {one["scorer"], other["scorer"]} == {"nll", "raw"}
        return criteria or first in (pair["a"], pair["b"])

    shown = [pair for pair in report["comparisons"] if in_question(pair)]
    table = Table(
        "comparisons",
        "Paired differences of Hit@1: cluster sign-flip test, p corrected by Holm over all pairs; "
        "the smallest difference that a study of this size finds in 80 % of cases by one test at "
        "5 %, without the correction.",
        ["Better", "Worse", "Difference", "p", "p (Holm)", "Detectable at 80 % power", "Papers"],
    )
    for pair in sorted(shown, key=lambda pair: (pair["p_holm"], pair["p"])):
        smallest = {"value": pair["mde"]} if "mde" in pair else None
        cells: list[Value] = [names[pair["a"]], names[pair["b"]], _interval(pair, "difference")]
        cells += [{"value": pair["p"]}, {"value": pair["p_holm"]}, smallest, pair["papers"]]
        table.rows.append(("", cells))
    table.notes.append(
        "Shown: the first system against every other, and NLL against Raw of each model; "
        f"report.json has all {len(report['comparisons'])} pairs."
    )
    return table


def length(report: Report) -> Table:
    """What length alone explains."""
    table = Table(
        "length",
        "Length: Hit@1, the same among candidates of 0.75 to 1.33 times the gold's length, "
        "Spearman's correlation of score and length (positive: short is preferred), and the "
        "log-odds of being the gold per standard deviation of score, with and without length.",
        [
            *("Model", "Hit@1", "Hit@1, matched", "Chance, matched", "Papers matched"),
            *("Left out", "Correlation", "Score alone", "Score beside length", "Log length"),
        ],
    )
    fits = {row["system"]: row for row in report["audit"]["length"]["conditional_logit"]}
    for row in report["audit"]["length"]["baselines_bytes"]:
        if row["metric"] == "hit@1":
            cells: list[Value] = [f"{row['order']} first (bytes)", _interval(row, "value")]
            table.rows.append(("Length alone", cells + [None] * 8))
    for section, systems, _ in sections(report):
        for system in systems:
            matched, fit = system.get("matched", {}), fits.get(system["id"], {})
            if not matched and "length_correlation" not in system:
                continue
            cells = [system["model"], system["metrics"].get("hit@1"), matched.get("hit@1")]
            cells += [{"value": matched["chance"]} if "chance" in matched else None]
            cells += [matched.get("papers"), matched.get("left_out")]
            cells += [system.get("length_correlation")]
            cells += [{"value": fit["score_alone"]} if "score_alone" in fit else None]
            cells += [_interval(fit, "score", "score"), _interval(fit, "log_length", "log_length")]
            table.rows.append((section, cells))
    if fits:
        table.notes.append(
            "Score alone, Score beside length, Log length: log-odds of being the gold per standard "
            "deviation (of the score: towards better) in a conditional logit, first of the score "
            "alone, then of both together; 0 says nothing of the gold."
        )
    reasons = sorted({fit["reason"] for fit in fits.values() if fit.get("reason")})
    table.notes += [f"No coefficients beside length: {reason}." for reason in reasons]
    return table


def energy(report: Report) -> Table:
    """What raw target-logit energy is made of: NLL and log-partition."""
    table = Table(
        "energy",
        f"Raw = NLL − mean log-partition: how much of Raw's ranking within {units(report)} each "
        "part explains (share of covariance; Spearman's correlation with Raw).",
        ["Model", "Share of NLL", "Share of log-partition", "ρ with NLL", "ρ with log-partition"],
    )
    for row in report["audit"]["energy"]["shares"]:
        keys = ("share_nll", "share_logz", "rank_nll", "rank_logz")
        table.rows.append((row["task"], [row["model"], *(_interval(row, k, k) for k in keys)]))
    return table


def controls(report: Report) -> Table:
    """How much of Hit@k needs the context."""
    shares = report["controls"]["shares"]
    kinds = list(dict.fromkeys(row["control"] for row in shares))
    rows = {(row["system"], row["metric"], row["control"]): row for row in shares}
    titles = [kind.replace("_", " ") for kind in kinds]
    table = Table(
        "controls",
        "What the context is worth: the same candidates under prompts that lack a part of it, and "
        "what is lost (whole prompt minus control, paired).",
        [
            *("Model", "Scorer", "Papers", "Whole prompt"),
            *(name for title in titles for name in (title, f"lost: {title}")),
        ],
    )
    names = {system["id"]: system for system in report["systems"]}
    for metric in _told(report, ("hit@1", "hit@5")):
        for identifier in dict.fromkeys(row["system"] for row in shares):
            mine = [rows.get((identifier, metric, kind)) for kind in kinds]
            known = [row for row in mine if row]
            if not known:
                continue
            system = names[identifier]
            # A paper that is invalid in one control alone is in the others' rows.
            for papers, full in dict.fromkeys((row["papers"], row["full"]) for row in known):
                alike = [
                    row if row and (row["papers"], row["full"]) == (papers, full) else {}
                    for row in mine
                ]
                whole = next(row for row in alike if row)
                cells: list[Value] = [system["model"], system["paradigm"], papers]
                cells.append(_interval(whole, "full", "full"))
                for row in alike:
                    cells += [_interval(row, part, part) for part in ("without", "difference")]
                table.rows.append((_TITLES[metric], cells))
    return table


def sections(report: Report) -> Iterable[tuple[str, list[Report], Report | None]]:
    """The systems that are no controls by task and scorer, with the row pooled over models."""
    pooled = {(row["task"], row["scorer"]): row for row in report["pooled"]}
    groups: dict[tuple[str, str], list[Report]] = {}
    for system in report["systems"]:
        if not system.get("control"):
            groups.setdefault((system["task"], system["scorer"]), []).append(system)
    names = Counter(systems[0]["paradigm"] for systems in groups.values())
    with_options = {run["task"] for run in report["models"] if run["task"] != run["name"]}
    for (task, scorer), systems in groups.items():
        title = systems[0]["paradigm"]
        if names[title] > 1 or task in with_options:
            title += f" ({task})"
        if systems[0].get("diagnostic"):
            title += ", diagnostic"
        yield title, systems, pooled.get((task, scorer))


def _interval(row: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, float] | None:
    if key not in row:
        return None
    names = {end: f"{prefix}_{end}".lstrip("_") for end in ("low", "high", "degenerate")}
    return {"value": row[key], **{end: row[name] for end, name in names.items() if name in row}}


def _chance(report: Report) -> str:
    rank = chance_rank(report["paper_set"]["candidates"])
    hits = [f"Hit@{k} {rank.hit(k):.4f}" for k in HIT_KS if k < rank.candidates]
    return ", ".join([*hits, f"MRR {rank.reciprocal_rank:.4f}"])


def _told(report: Report, metrics: Sequence[str]) -> list[str]:
    """The metrics, without Hit@k that is 1 by its k: no item has more candidates."""
    papers = report["paper_set"]
    size = papers["candidates"] if "candidates" in papers else papers["candidates_range"][1]
    return [m for m in metrics if not m.startswith("hit@") or int(m[4:]) < size]


def units(report: Report) -> str:
    """What is ranked: papers, or items of other data, which have no DOI."""
    return "papers" if report["paper_set"]["dois"] else "items"


def _papers(report: Report) -> str:
    count = report["paper_set"]["papers"]
    return f"{count:,} {units(report).removesuffix('s') if count == 1 else units(report)}"


# --- writing ---------------------------------------------------------------------------------


def _number(cell: Mapping[str, float], percent: bool, interval: bool) -> str:
    def shown(number: float) -> str:
        text = f"{100 * number:.1f}" if percent else f"{number:.3f}"
        return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")

    if not percent and "low" not in cell and 0 < cell["value"] < 0.0005:
        return "< 0.001"  # a p value is never 0
    text = shown(cell["value"]) + (" %" if percent else "")
    low, high = (shown(cell[end]) if end in cell else "" for end in ("low", "high"))
    if interval and (cell.get("degenerate") or (low and low == high)):
        text += f" {NO_WIDTH}"
    elif interval and low and high:
        text += f" [{low}, {high}]"
    return text


def _shown(
    table: Table, row: Sequence[Value], escape: Callable[[str], str], bold: Callable[[str], str]
) -> list[str]:
    """A row's cells as text; nothing is a dash, never a number."""
    cells = []
    for cell in row:
        if cell is None or cell == "":
            cells.append("–")
        elif isinstance(cell, Mapping):
            cells.append(escape(_number(cell, table.percent, table.interval)))
        else:
            cells.append(escape(f"{cell:,}" if isinstance(cell, int) else cell))
    for columns in table.bold:
        values = {i: cell["value"] for i in columns if isinstance(cell := row[i], Mapping)}
        for i, value in values.items():
            if value == max(values.values()) > min(values.values()):
                cells[i] = bold(cells[i])
    return cells


def escaped(text: str) -> str:
    """For Markdown. Names come from models and data: no table bar, no markup, no line break."""
    text = html.escape(" ".join(text.split()), quote=False)
    for character in ("\\", "`", "*", "_", "|", "$", "~"):
        text = text.replace(character, f"\\{character}")
    return text.replace("](", "]\\(")


def markdown(made: Sequence[Table]) -> str:
    """All tables as one Markdown text."""
    parts = []
    for table in made:
        lines = [f"## {_HEADINGS[table.name]}", "", escaped(table.caption), ""]
        lines.append("| " + " | ".join(escaped(title) for title in table.header) + " |")
        lines.append(
            "|" + "|".join("---" if i == 0 else "--:" for i in range(len(table.header))) + "|"
        )
        section = ""
        for title, row in table.rows:
            if title != section:
                section = title
                lines.append(f"| **{escaped(title)}** |" + " |" * (len(table.header) - 1))
            shown = _shown(table, row, escaped, lambda text: f"**{text}**")
            lines.append("| " + " | ".join(shown) + " |")
        lines += ["", *(line for note in table.notes for line in (escaped(note), ""))]
        parts.append("\n".join(lines))
    return "\n".join(parts)


_HEADINGS = {
    "overall": "Overall",
    "disciplines": "By discipline",
    "gold_beats": "Gold against each candidate",
    "judges": "Judges",
    "positions": "Where judges look",
    "comparisons": "Comparisons",
    "length": "Length",
    "energy": "What Raw is made of",
    "controls": "Controls",
}


def to_csv(table: Table) -> str:
    """A table as CSV (RFC 4180 but for the line ends): numbers in full, limits in columns."""
    limits = [
        any(isinstance(row[i], Mapping) and "low" in row[i] for _, row in table.rows)  # type: ignore[operator]
        for i in range(len(table.header))
    ]
    head = ["Section"]
    for title, has in zip(table.header, limits, strict=True):
        head += [title, f"{title} low", f"{title} high"] if has else [title]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for section, row in table.rows:
        line: list[str] = [section]
        for cell, has in zip(row, limits, strict=True):
            if isinstance(cell, Mapping):
                ends = ("value", "low", "high") if has else ("value",)
                line += [repr(cell[end]) if end in cell else "" for end in ends]
            else:
                line += ["" if cell is None else str(cell), *(["", ""] if has else [])]
        writer.writerow(line)
    return text.getvalue()


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "−": "$-$",
    "–": "--",
    "ρ": r"$\rho$",
    "†": r"\textdagger{}",
    "¦": r"\textbar{}",
}


def latex(table: Table) -> str:
    """A table as a LaTeX float; the document needs the package booktabs."""

    def escape(text: str) -> str:
        return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))

    width = len(table.header)
    lines = [
        r"\begin{table*}[t]",
        r"\centering",
        rf"\caption{{{escape(table.caption)}}}",
        rf"\label{{tab:hyprank-{table.name.replace('_', '-')}}}",
        rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}",
        r"\toprule",
        " & ".join(escape(title) for title in table.header) + r" \\",
        r"\midrule",
    ]
    section = ""
    for title, row in table.rows:
        if title != section:
            if section:
                lines.append(r"\midrule")
            section = title
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\textit{{{escape(title)}}}}} \\")
        shown = _shown(table, row, escape, lambda text: rf"\textbf{{{text}}}")
        # A bracket behind a line end would be taken for its argument.
        lines.append(" & ".join("--" if text == "–" else text for text in shown) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {escape(note)}\par}}" for note in table.notes]
    lines += [r"\end{table*}", ""]
    return "\n".join(lines)
