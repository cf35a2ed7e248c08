"""Run by `accelerate launch`: an evaluation on real ranks, as lm-eval's hf has them on GPUs.

Arguments: the model's folder, the folder for results, then NAME=VALUE: limit=N, fail=RANK,
invalid=RANK, tokens=1.
"""

import json
import math
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

import lm_eval_hyprank.tasks  # noqa: F401
from lm_eval_hyprank.models.hf import EnergyHFLM, engine_of
from tests.conftest import TASK_CONFIGS

folder, output = sys.argv[1:3]
options = {name: int(value) for name, _, value in (arg.partition("=") for arg in sys.argv[3:])}


class Ranked(EnergyHFLM):
    """What `HFLM` does with several GPUs, on CPUs, where it leaves every process at rank 0."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self._rank = self.accelerator.local_process_index
        self._world_size = self.accelerator.num_processes

    def loglikelihood(self, requests, disable_tqdm=False):
        if options.get("fail") == self.rank:
            engine = engine_of(self, [])
            engine.check, engine.score_whole = str, fail
        scores = super().loglikelihood(requests, disable_tqdm)
        if options.get("invalid") == self.rank:
            for score in scores:
                score.nll_sum = math.nan
        return scores


def fail(*args):
    raise RuntimeError("out of memory, say")


lm = Ranked(pretrained=folder, device="cpu", dtype="float32", batch_size=8)
results = lm_eval.simple_evaluate(
    model=lm,
    tasks=["hyprank_demo_energy"],
    limit=options.get("limit"),
    task_manager=TaskManager(
        include_path=str(TASK_CONFIGS),
        include_defaults=False,
        metadata={"token_scores": str(Path(output, "tokens"))} if "tokens" in options else {},
    ),
)
if results is not None:
    kept = {
        "results": results["results"],
        "papers": [
            sample["doc"]["paper_id"] for sample in results["samples"]["hyprank_demo_energy"]
        ],
        "hits": [
            sample["hit@1"]
            for sample in results["samples"]["hyprank_demo_energy"]
            if sample["filter"] == "nll" and "hit@1" in sample
        ],
    }
    Path(output, "results.json").write_text(json.dumps(kept), encoding="utf-8")
