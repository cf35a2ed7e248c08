"""Reads the samples of a run, and holds them against the numbers that lm-eval wrote."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval_hyprank.judge.replies import Reading
from lm_eval_hyprank.judge.scoring import borda, list_metrics, pairwise_results, with_valid
from lm_eval_hyprank.metrics import process_results
from lm_eval_hyprank.report.found import EXPERTS, JUDGES, Found, ReportError


class NoSingleGold(ReportError):
    """The run's items have no gold, or several, which a report has no place for."""


@dataclass
class Paper:
    """A paper as a run has it.

    Attributes:
        discipline: Its discipline.
        doi: Its DOI; empty if it has none.
        title: Its title.
        context: The prompt before the candidate.
        separator: What stands between the two.
        texts: From a candidate's id to its text, in the run's order.
        gold: Id of the gold.
        tokens: From a candidate's id to its tokens; empty if the run did not count them.
    """

    discipline: str
    doi: str
    title: str
    context: str
    separator: str
    texts: dict[str, str]
    gold: str
    tokens: dict[str, int]


@dataclass
class Loaded:
    """A run with its samples.

    Attributes:
        found: The run.
        papers: From id to paper, in the run's order.
        scores: Scorer (filter name) to paper to candidate to score, lower is better.
        judge: Scorer to paper to what a judge answered.
        pairwise: Of pairwise judges: scorer to paper to metric to value.
        truncated: Papers whose context was cut to fit the model.
    """

    found: Found
    papers: dict[str, Paper] = field(default_factory=dict)
    scores: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    judge: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    pairwise: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    truncated: list[str] = field(default_factory=list)

    def where(self) -> str:
        """Names the run in a message."""
        return f"{self.found.model} on {self.found.task_label} ({self.found.names()[0]})"


def load(found: Found) -> Loaded:
    """Reads a run's samples.

    Raises:
        NoSingleGold: An item has several golds, or experts' judgements in place of one.
        ReportError: There are none, they are damaged or malformed, or lm-eval's numbers do not
            follow from them; the text names file, line and field.
    """
    loaded = Loaded(found)
    for leaf in found.leaves:
        _load_leaf(loaded, leaf)
    return loaded


def _load_leaf(loaded: Loaded, leaf: str) -> None:
    found = loaded.found
    path = found.samples_file(leaf)
    if not path.is_file():
        raise ReportError(
            f"{found.results_file}: the run of {leaf} has no samples file ({path.name}); run it "
            "again with --log_samples, or delete the results file"
        )
    lines: dict[tuple[str, Any], int] = {}
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number, sample in _lines(path):
        where = f"{path}, line {number}"
        scorer = str(_get(sample, "filter", str, where))
        doc = _get(sample, "doc", dict, where)
        paper_id = str(_get(doc, "paper_id", str, f"{where}, doc"))
        key = (scorer, paper_id)
        if key in lines:
            raise ReportError(
                f"{where}: paper {paper_id} stands under filter {scorer!r} a second time (first on "
                f"line {lines[key]}); two runs wrote to one file, so run the evaluation again"
            )
        lines[key] = number
        paper = _paper(sample, doc, where)
        known = loaded.papers.get(paper_id)
        if known is None:
            loaded.papers[paper_id] = paper
            if sample.get("truncated"):
                loaded.truncated.append(paper_id)
        elif (known.texts, known.gold) != (paper.texts, paper.gold):
            raise ReportError(
                f"{where}: paper {paper_id} has other candidates than in a line above"
            )
        metrics: dict[str, float]
        if found.kind in JUDGES:
            reply = _get(sample, "judge", dict, where)
            loaded.judge.setdefault(scorer, {})[paper_id] = reply
        if found.kind == "pairwise":
            metrics = _pairwise_metrics(reply, doc, paper, where)
            loaded.pairwise.setdefault(scorer, {})[paper_id] = metrics
        elif found.kind in JUDGES:
            points = _points(reply, paper, where)
            metrics = _judge_metrics(points, paper)
            loaded.scores.setdefault(scorer, {})[paper_id] = {
                candidate: -points[candidate] if points else math.nan for candidate in paper.texts
            }
        else:
            scores = _scores(sample, paper, where)
            metrics = process_results(
                {"gold": list(scores).index(paper.gold)}, list(scores.values())
            )
            loaded.scores.setdefault(scorer, {})[paper_id] = scores
        for metric, value in metrics.items():
            values[metric, scorer].append(value)
    expected = {str(entry["name"]) for entry in found.config.get("filter_list") or []} or {"none"}
    effective = found.results["n-samples"][leaf]["effective"]
    counts = Counter(scorer for scorer, _ in lines)
    for scorer in sorted(expected | counts.keys()):
        if counts[scorer] != effective:
            raise ReportError(
                f"{path}: {counts[scorer]} papers under filter {scorer!r}, but lm-eval counted "
                f"{effective} in {found.results_file.name}; the writer was stopped or lines were "
                "lost, so run the evaluation again or delete both files"
            )
    _check_metrics(found, leaf, values)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                try:
                    sample = json.loads(line)
                except json.JSONDecodeError as error:
                    cut = "" if line.endswith("\n") else "; it is cut off: its writer was stopped"
                    raise ReportError(
                        f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})"
                        f"{cut}. Run the evaluation again, or delete the run's files"
                    ) from None
                if not isinstance(sample, dict):
                    raise ReportError(f"{path}, line {number}: not a JSON object")
                yield number, sample
        except UnicodeDecodeError as error:
            raise ReportError(f"{path}, after line {number}: not UTF-8 ({error.reason})") from None


def _get(holder: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = holder.get(key)
    if not isinstance(value, kind):
        state = "is missing" if value is None else f"is {type(value).__name__}"
        raise ReportError(
            f"{where}: {key!r} {state}, where {kind.__name__} is expected. The file was written by "
            "another program or an older version; run the evaluation again"
        )
    return value


def _paper(sample: Mapping[str, Any], doc: Mapping[str, Any], where: str) -> Paper:
    ids = [str(one) for one in _get(doc, "candidate_ids", list, f"{where}, doc")]
    texts = [str(one) for one in _get(doc, "candidates", list, f"{where}, doc")]
    if "judgements" in doc:
        raise NoSingleGold(EXPERTS)
    if isinstance(doc.get("gold"), list):
        raise NoSingleGold(
            f"{where}: the item has several golds, and a report is of one; lm-eval's own table has "
            "the metrics"
        )
    gold = _get(doc, "gold", int, f"{where}, doc")
    if len(ids) != len(texts) or len(set(ids)) != len(ids) or not 0 <= gold < len(ids):
        raise ReportError(
            f"{where}: {len(texts)} candidates, {len(set(ids))} distinct candidate_ids and gold "
            f"{gold} do not fit together"
        )
    tokens = sample.get("num_tokens")
    if tokens is not None and len(tokens) != len(ids):
        raise ReportError(f"{where}: {len(tokens)} num_tokens for {len(ids)} candidates")
    return Paper(
        discipline=str(doc.get("discipline") or ""),
        doi=str(doc.get("doi") or ""),
        title=str(doc.get("title") or ""),
        context=str(doc.get("context") or ""),
        separator=str(doc.get("separator") or ""),
        texts=dict(zip(ids, texts, strict=True)),
        gold=ids[gold],
        tokens={} if tokens is None else dict(zip(ids, map(int, tokens), strict=True)),
    )


def _scores(sample: Mapping[str, Any], paper: Paper, where: str) -> dict[str, float]:
    """One score a candidate; lm-eval writes numbers as text."""
    given = _get(sample, "filtered_resps", list, where)
    try:
        scores = [float(one) for one in given]
    except (TypeError, ValueError):
        raise ReportError(
            f"{where}: filtered_resps holds {str(given)[:60]}…, which is not one number a candidate"
        ) from None
    if len(scores) != len(paper.texts):
        raise ReportError(f"{where}: {len(scores)} scores for {len(paper.texts)} candidates")
    return dict(zip(paper.texts, scores, strict=True))


def _points(reply: Mapping[str, Any], paper: Paper, where: str) -> dict[str, int]:
    """Borda points of a listwise judge's rankings; empty if no reply has one."""
    ids = list(paper.texts)
    places = []
    for one in reply.get("orders", [reply]):
        if sorted(one.get("candidate_ids", ids)) != sorted(ids):
            raise ReportError(f"{where}: an order of the judge does not hold the candidates")
        ranking = one.get("ranking")
        if ranking is None:
            continue
        if set(ranking) - paper.texts.keys() or len(set(ranking)) != len(ranking):
            raise ReportError(f"{where}: the judge's ranking {ranking} is none of the candidates")
        places.append([ids.index(one) for one in ranking])
    return dict(zip(ids, borda(places, len(ids)), strict=True)) if places else {}


def _judge_metrics(points: Mapping[str, int], paper: Paper) -> dict[str, float]:
    """A paper's metrics over all papers, and over valid ones where it is one."""
    if not points:
        return with_valid(None)
    return with_valid(list_metrics(list(points.values()), list(points).index(paper.gold)))


def _pairwise_metrics(
    reply: Mapping[str, Any], doc: Mapping[str, Any], paper: Paper, where: str
) -> dict[str, float]:
    """A paper's metrics from its verdicts, each read again as the reply that gave it."""
    ids = list(paper.texts)
    gold = ids.index(paper.gold)
    orders, readings = [], []
    for verdict in _get(reply, "verdicts", list, f"{where}, judge"):
        if verdict["candidate_id"] not in paper.texts:
            raise ReportError(
                f"{where}: a verdict on {verdict['candidate_id']}, which is no candidate"
            )
        pair = [gold, ids.index(verdict["candidate_id"])]
        orders.append(pair if verdict["gold_first"] else pair[::-1])
        winner = verdict["winner"]
        first = None if winner is None else int((winner == "gold") != verdict["gold_first"])
        readings.append(Reading(first, verdict.get("invalid")))
    return pairwise_results({**doc, "gold": gold, "orders": orders}, readings)


def _check_metrics(
    found: Found, leaf: str, values: Mapping[tuple[str, str], Sequence[float]]
) -> None:
    """Compares lm-eval's numbers with those the samples give.

    Raises:
        ReportError: A number differs by more than rounding.
    """
    written = found.results["results"].get(leaf) or {}
    for (metric, scorer), items in values.items():
        said = written.get(f"{metric},{scorer}")
        own = math.fsum(items) / len(items)
        if isinstance(said, int | float) and not math.isclose(said, own, abs_tol=1e-9):
            raise ReportError(
                f"{found.results_file}: {metric} of filter {scorer!r} in {leaf} is {said}, but "
                f"{found.samples_file(leaf).name} gives {own}; one of the two files was changed or "
                "belongs to another run"
            )
