"""The judge against a real server on loopback, with a real model too small to judge anything.

What is looked at is the way there and back: what a server takes, and what becomes of its replies.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

import lm_eval_hyprank.tasks  # noqa: F401
from scripts.small_models import MODELS
from tests.conftest import ROOT, TASK_CONFIGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="needs the package xllamacpp"
    ),
]

# The prompts of the package, with the beginnings of the texts: long ones take a minute each here.
LISTWISE = """{{ background[:80] }} {{ question }}
{% for candidate in candidates %}[{{ loop.index0 }}] {{ candidate[:40] }}
{% endfor %}Answer with JSON: {"ranking": [five numbers]}"""
PAIRWISE = """{{ background[:80] }} {{ question }}
{% for candidate in candidates %}Hypothesis {{ loop.index }}: {{ candidate[:80] }}
{% endfor %}Answer with JSON: {"better": 1 or 2}"""


def schema(**properties: Any) -> dict[str, Any]:
    """A response_format that holds a server to the form of the answer."""
    form = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}


RANKING = schema(
    ranking={
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 15},
        "minItems": 5,
        "maxItems": 5,
    }
)
VERDICT = schema(better={"type": "integer", "enum": [1, 2]})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the server."""
    gguf = ROOT / ".models" / MODELS["smollm2"].gguf
    if not gguf.is_file():
        pytest.skip(f"no {gguf}; `make models` gets it")
    log = tmp_path_factory.mktemp("server") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "judge_server.py"), str(gguf)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), log.read_text()
        yield address
        process.terminate()


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("templates")
    paths = {"listwise": folder / "listwise.jinja", "pairwise": folder / "pairwise.jinja"}
    paths["listwise"].write_text(LISTWISE, encoding="utf-8")
    paths["pairwise"].write_text(PAIRWISE, encoding="utf-8")
    return {name: str(path) for name, path in paths.items()}


def run(address: str, task: str, template: str, limit: int, lm: str = "chat", **gen_kwargs: Any):
    """Runs the task with four requests at a time."""
    chat = lm == "chat"
    return lm_eval.simple_evaluate(
        model="local-chat-completions" if chat else "local-completions",
        model_args={
            "model": "smollm2",
            "base_url": f"{address}/v1/{'chat/' if chat else ''}completions",
            "num_concurrent": 4,
            "tokenizer_backend": None,
            "tokenized_requests": False,
        },
        tasks=[task],
        task_manager=TaskManager(
            include_path=str(TASK_CONFIGS), include_defaults=False, metadata={"template": template}
        ),
        apply_chat_template=chat,
        gen_kwargs=gen_kwargs,
        limit=limit,
        bootstrap_iters=0,
    )


def test_listwise_with_a_json_schema(server, templates):
    task = "hyprank_demo_judge"
    results = run(server, task, templates["listwise"], 4, max_gen_toks=100, response_format=RANKING)
    found = results["hyprank"]["judge"][task]
    assert found["replies"] == len(results["samples"][task]) == 4
    # The schema makes the form certain, though not that the five differ.
    assert set(found["invalid"]) <= {"duplicate"}
    assert found["valid"] > 0
    for sample in results["samples"][task]:
        reply = json.loads(sample["resps"][0][0])
        if sample["judge"]["ranking"] is not None:
            shown = sample["doc"]["candidate_ids"]
            assert sample["judge"]["ranking"] == [shown[n] for n in reply["ranking"]]


def test_listwise_without_one_ends_in_rankings_or_reasons(server, templates):
    task = "hyprank_demo_judge"
    results = run(server, task, templates["listwise"], 4, max_gen_toks=40)
    found = results["hyprank"]["judge"][task]
    assert found["replies"] == found["valid"] + sum(found["invalid"].values()) == 4
    for sample in results["samples"][task]:
        assert sample["resps"][0][0].strip()
        assert (sample["judge"]["ranking"] is None) != (sample["judge"]["invalid"] is None)


def test_a_budget_that_is_too_small_is_reported_as_such(server, templates):
    task = "hyprank_demo_judge"
    results = run(server, task, templates["listwise"], 2, max_gen_toks=6, response_format=RANKING)
    reasons = [sample["judge"]["invalid"] for sample in results["samples"][task]]
    assert reasons == ["cut off: the token budget was spent"] * 2


def test_a_completion_server_takes_bare_text(server, templates):
    task = "hyprank_demo_judge"
    results = run(server, task, templates["listwise"], 2, "text", max_gen_toks=20)
    assert results["hyprank"]["judge"][task]["replies"] == 2
    assert all(sample["resps"][0][0] for sample in results["samples"][task])


def test_pairwise(server, templates):
    task = "hyprank_demo_pairwise"
    results = run(server, task, templates["pairwise"], 1, max_gen_toks=20, response_format=VERDICT)
    row = results["results"][task]
    assert results["hyprank"]["judge"][task] == {"replies": 30, "valid": 30, "invalid": {}}
    assert row["parse_rate,judge"] == 1
    assert row["both_correct,judge"] + row["contradiction,judge"] + row[
        "both_wrong,judge"
    ] == pytest.approx(1)
    for sample in results["samples"][task]:
        for verdict, (reply,) in zip(sample["judge"]["verdicts"], sample["resps"], strict=True):
            first = json.loads(reply)["better"] == 1
            assert verdict["winner"] == ("gold" if first == verdict["gold_first"] else "other")


def test_several_orders(server, templates):
    task = "hyprank_demo_judge_psc"
    results = run(server, task, templates["listwise"], 1, max_gen_toks=100, response_format=RANKING)
    assert results["hyprank"]["judge"][task]["replies"] == 5
    (sample,) = results["samples"][task]
    assert len({tuple(order["candidate_ids"]) for order in sample["judge"]["orders"]}) == 5


def test_the_command_writes_what_the_judge_said(server, templates, tmp_path):
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions"]
    command += ["--model_args", f"model=smollm2,base_url={server}/v1/chat/completions"]
    command += ["--tasks", "hyprank_demo_judge", "--include_path", str(TASK_CONFIGS)]
    command += ["--apply_chat_template", "--log_samples", "--limit", "2"]
    command += ["--metadata", json.dumps({"template": templates["listwise"]})]
    command += ["--gen_kwargs", json.dumps({"max_gen_toks": 100, "response_format": RANKING})]
    command += ["--output_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|hyprank_demo_judge|" in done.stdout
    assert "parse_rate" in done.stdout
    (samples,) = Path(tmp_path).rglob("samples_*.jsonl")
    for line in samples.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        assert set(sample["judge"]) == {"ranking", "invalid"}
        assert sample["doc"]["order"] == "seed:0"
    (saved,) = Path(tmp_path).rglob("results_*.json")
    figures = json.loads(saved.read_text(encoding="utf-8"))["hyprank"]["judge"]
    assert figures["hyprank_demo_judge"]["replies"] == 2
