"""What a user must know of a ranking data set before reading a score on it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lm_eval_hyprank.datasets.validation import Paper

# A negative this much longer than the gold gives the gold away to whoever counts characters.
LONGER = 1.33

# A gold that speaks of its own paper is told from negatives that do not.
_SELF_REFERENCE = re.compile(r"\b(?:the|this|these)\s+(?:paper|authors?|study)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Facts:
    """Counts and shares over a set of papers; shares lie between 0 and 1.

    Attributes:
        papers: Number of papers.
        by_discipline: Papers per discipline, by name.
        dois: Number of distinct DOIs (letter case aside).
        sharing_doi: Papers whose DOI another paper has too.
        without_doi: Papers without a DOI.
        length_ratio: Median of a negative's characters over its gold's.
        longer: Share of negatives with more than `LONGER` times the gold's characters.
        gold_shortest: How often the gold is the shortest of its 16; of k equals it counts 1/k.
        gold_longest: The same for the longest.
        self_reference: Share of golds that say "the paper", "the authors" or "the study".
    """

    papers: int
    by_discipline: dict[str, int]
    dois: int
    sharing_doi: int
    without_doi: int
    length_ratio: float
    longer: float
    gold_shortest: float
    gold_longest: float
    self_reference: float


def describe(papers: Sequence[Paper]) -> Facts:
    """Computes the facts.

    Args:
        papers: At least one paper.

    Returns:
        The facts, lengths counted in characters of the clean texts.

    Raises:
        ValueError: There is no paper.
    """
    if not papers:
        raise ValueError("there is no paper to describe")
    dois = Counter(paper.doi.lower() for paper in papers if paper.doi)
    lengths = [(len(p.gold), [len(text) for text in p.fakes + p.models]) for p in papers]
    ratios = [negative / gold for gold, negatives in lengths for negative in negatives]
    return Facts(
        papers=len(papers),
        by_discipline=dict(sorted(Counter(paper.discipline for paper in papers).items())),
        dois=len(dois),
        sharing_doi=sum(count for count in dois.values() if count > 1),
        without_doi=sum(not paper.doi for paper in papers),
        length_ratio=median(ratios),
        longer=fmean(ratio > LONGER for ratio in ratios),
        gold_shortest=fmean(_first(gold, negatives) for gold, negatives in lengths),
        gold_longest=fmean(_first(-gold, [-n for n in negatives]) for gold, negatives in lengths),
        self_reference=fmean(bool(_SELF_REFERENCE.search(paper.gold)) for paper in papers),
    )


def _first(gold: int, negatives: list[int]) -> float:
    """Returns the chance that the gold comes first in ascending order, ties broken at random."""
    return 0.0 if min(negatives) < gold else 1 / (1 + negatives.count(gold))
