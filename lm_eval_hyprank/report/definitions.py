"""What the names of a report's scores and metrics mean."""

from __future__ import annotations

from lm_eval_hyprank.report.runs import PARADIGMS
from lm_eval_hyprank.report.tables import Report, escaped, units

_SCORES = {
    "nll": "logsumexp(z) − z[x]: the negative log-likelihood",
    "raw": "−z[x]: the raw target-logit energy",
    "logz": "−logsumexp(z): all that raw adds to nll; it never looks at the observed token",
    "nll_sum": "the sum of nll over the tokens",
    "raw_sum": "the sum of raw over the tokens",
    "logz_sum": "the sum of logz over the tokens",
    "raw_precap": "raw before the model's final soft-capping; raw itself in models without it",
    "nll_byte": "the sum of nll by the candidate's bytes",
    "nll_zlib": "the sum of nll by the bytes that zlib leaves of the candidate",
    "zlib_ratio": "nll, the mean, by the bytes that zlib leaves: it favours long candidates",
    "nll_first": "nll of the first tokens alone",
    "min_k": "nll of the least likely tokens alone (Min-K%)",
    "min_k_plus": "minus the log-probability of the least likely tokens, standardised by its mean "
    "and deviation under the model's own prediction (Min-K%++)",
    "free_energy_t": "−T · logsumexp(z / T): the free energy at the temperature T in its name",
    "pmi": "nll after the whole prompt minus nll after “Hypothesis:” alone: minus the pointwise "
    "mutual information with the context, per token",
    "dc_pmi": "nll_sum after the whole prompt minus nll_sum after “Hypothesis:” alone: minus the "
    "domain-conditional PMI",
    "cosine": "minus the cosine between the embeddings of prompt and candidate",
    "judge": "a prompted model's answer: its best five in order, or a verdict on each pair",
    "shortest": "the candidate's bytes; no model",
    "chance": "the same for all candidates; no model",
}
_METRICS = {
    "hit@k": "share of {units} with the gold among the first k",
    "mrr": "mean of 1 / rank of the gold",
    "win_rate": "share of the other candidates that the gold is ahead of, a tie counting one half",
    "win_rate_terminal": "the same where a gold that a judge did not rank is ahead of none",
    "accuracy": "pairwise judges: share of readable verdicts that are for the gold",
    "accuracy_all": "share of all verdicts that are for the gold, one that cannot be read is not",
    "accuracy_gold_first": "accuracy where the gold was shown first",
    "accuracy_gold_second": "accuracy where the gold was shown second",
    "both_correct": "share of pairs with the gold preferred in both orders",
    "contradiction": "share of pairs with the gold preferred in one of the two orders",
    "both_wrong": "share of pairs with the gold preferred in neither order",
    "beats_majority_gold_first": "share of {units} whose gold, shown first, is preferred to more "
    "than half of the other candidates",
    "beats_majority_gold_second": "the same of the gold shown second",
    "chose_shown_first": "how often a judge put first, or preferred, what it was shown first",
}


def definitions(report: Report) -> list[tuple[str, str, dict[str, str]]]:
    """What the names of a report's scores and metrics mean, those that it has.

    Returns:
        Of scores and of metrics: a title, what holds for them all, and the meaning of each name.
        A scorer that is none of this package's has no meaning here.
    """
    systems = report["systems"]
    names = dict.fromkeys(name for system in systems for name in system.get("metrics", {}))
    metrics = dict.fromkeys("hit@k" if name.startswith("hit@") else name for name in names)
    free = "free_energy_t"
    scores = {
        scorer: _SCORES.get(free if scorer.startswith(free) else scorer)
        for scorer in dict.fromkeys(system["scorer"] for system in systems)
    }
    return [
        (
            "Scores",
            "With z the logits that predict a token x of the candidate, means over its tokens; "
            "lower is better.",
            {
                # Tables have the name for display, pages and samples the scorer's own.
                scorer: f"{PARADIGMS[scorer]}, {meaning}" if scorer in PARADIGMS else meaning
                for scorer, meaning in scores.items()
                if meaning
            },
        ),
        ("Metrics", "", {name: _METRICS[name].format(units=units(report)) for name in metrics}),
    ]


def definitions_markdown(report: Report) -> str:
    """The same as Markdown."""
    lines = ["## Names", ""]
    for title, common, meanings in definitions(report):
        if meanings:
            lines += [f"{title}. {common}".strip(), ""]
            lines += [f"- **{escaped(name)}**: {escaped(own)}" for name, own in meanings.items()]
            lines.append("")
    return "\n".join(lines)
