"""Every name that a report has is explained, and no other."""

import re
from pathlib import Path

from lm_eval_hyprank.report.build import PAIRWISE_METRICS
from lm_eval_hyprank.report.controls import PMI
from lm_eval_hyprank.report.definitions import definitions, definitions_markdown
from lm_eval_hyprank.report.intervals import METRICS

SHIPPED = Path(__file__).parents[2] / "task_configs"


def test_every_score_and_metric_of_ours_has_a_meaning():
    """So that none is added without one."""
    texts = [path.read_text("utf-8") for path in SHIPPED.rglob("*.yaml")]
    scorers = {name for text in texts for name in re.findall(r"- name: (\w+)", text)} | {*PMI}
    assert {"nll", "cosine", "judge", "chance", "free_energy_t2"} < scorers
    metrics = [*METRICS, "win_rate_terminal", *PAIRWISE_METRICS, "chose_shown_first"]
    everything = {
        "paper_set": {"dois": 1},
        "systems": [{"scorer": name, "metrics": dict.fromkeys(metrics)} for name in scorers],
    }
    scores, meanings = definitions(everything)
    assert scores[2].keys() == scorers
    assert meanings[2].keys() == {re.sub(r"^hit@\d$", "hit@k", name) for name in metrics}
    assert all({*scores[2].values(), *meanings[2].values()})


def test_names_that_a_report_lacks_are_not_explained(report):
    scores, metrics = definitions(report)
    assert list(scores[2]) == [*("nll", "raw", "nll_sum", "judge", "shortest", "pmi", "dc_pmi")]
    assert {"hit@k", "mrr", "win_rate_terminal", "both_wrong"} < metrics[2].keys()
    only = {**report, "systems": [one for one in report["systems"] if one["scorer"] == "nll"]}
    scores, metrics = definitions(only)
    assert list(scores[2]) == ["nll"]
    assert list(metrics[2]) == ["hit@k", "mrr", "win_rate"]
    own = {**only, "systems": [{**only["systems"][0], "scorer": "free_energy_t`2`|"}]}
    assert "- **free\\_energy\\_t\\`2\\`\\|**: −T" in definitions_markdown(own)
    own["systems"][0]["scorer"] = "worst"  # a scorer of one's own
    assert "## Names\n\nMetrics." in definitions_markdown(own)
