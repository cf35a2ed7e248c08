"""Makes docs/sample_report: runs on the embedded demo papers, and the report on them.

``python scripts/sample_report.py MODELS RUNS OUT`` runs, through lm-eval's command line, the demo's
energy task and its control without context on the two small models that ``make models`` puts into
MODELS, and a prompted judge (the smaller one behind a local server, held to the answer's form).
It writes below RUNS and makes the report OUT. Runs that are there are left alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HYPRANK = [sys.executable, "-m", "lm_eval_hyprank.cli"]
LM_EVAL = [sys.executable, "-m", "lm_eval", "run"]
SERVER = Path(__file__).with_name("judge_server.py")
MODELS = ("SmolLM2-135M-Instruct", "gemma-3-270m")
JUDGE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A server that knows structured output cannot miss the form that the judge has to answer in.
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {
                "ranking": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0, "maximum": 15},
                    "minItems": 5,
                    "maxItems": 5,
                }
            },
            "required": ["ranking"],
        },
    },
}


def evaluate(output: Path, *arguments: str) -> None:
    """Runs lm-eval unless the folder has results."""
    if not any(output.rglob("results_*.json")):
        command = [*LM_EVAL, *arguments, "--output_path", str(output), "--log_samples"]
        subprocess.run(command, check=True)


def judge(gguf: Path, output: Path) -> None:
    """Has the served model judge the demo's papers."""
    with subprocess.Popen(
        [sys.executable, str(SERVER), str(gguf)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        url = f"{address}/v1/chat/completions"
        gen_kwargs = json.dumps({"max_gen_toks": 64, "response_format": FORM})
        evaluate(
            output,
            *("--model", "local-chat-completions"),
            *("--model_args", f"model={gguf.name},base_url={url},num_concurrent=2,timeout=600"),
            *("--tasks", "hyprank_demo_judge", "--apply_chat_template"),
            *("--gen_kwargs", gen_kwargs),
        )
        server.terminate()


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    for model in MODELS:
        evaluate(
            options.runs / model,
            *("--model", "hf", "--device", "cpu", "--batch_size", "16"),
            *("--model_args", f"pretrained={options.models / model},dtype=float32"),
            *("--tasks", "hyprank_demo_energy,hyprank_demo_energy_nocontext"),
        )
    judge(options.models / JUDGE, options.runs / "judge")
    subprocess.run([*HYPRANK, "report", str(options.runs), "-o", str(options.out)], check=True)


if __name__ == "__main__":
    main()
