"""Results for other places: a model's page on the Hugging Face hub, and "Every Eval Ever".

Formats: https://huggingface.co/docs/hub/eval-results and version 0.3.0 of
https://github.com/evaleval/every_eval_ever (eval.schema.json). Neither holds any text of the data.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from lm_eval_hyprank.report.intervals import LEVEL, METRICS

Report = Mapping[str, Any]

SCHEMA_VERSION = "0.3.0"
"""Version of the "Every Eval Ever" schema that is written."""

_HEADLINE = "hit@1"
_HOW = ("generation", "chat_template", "system_instruction")
LOWER_IS_BETTER = ("chose_shown_first", "contradiction", "both_wrong")
"""The metrics, all of judges, that are better when lower; as the YAML of their tasks says."""
_ENGINES = {"hf": "transformers", "hf-energy": "transformers", "vllm": "vllm"}


def exports(report: Report) -> dict[str, str]:
    """Makes all files, from their paths below the export folder to their texts.

    A run with ``--limit`` is no result to publish and has none; so has a system without a model.
    The hub's file exists for runs on the hub's own copy of the data only, asked as the task is by
    itself: there its number stands beside those of others. Elsewhere the options stand beside it.
    """
    files: dict[str, str] = {}
    by_model: dict[str, list[EvalResultEntry]] = {}
    for run in report["models"]:
        systems = [
            system
            for system in report["systems"]
            if (system["model"], system["task"]) == (run["model"], run["task"])
            and not system.get("control")
            and _HEADLINE in system["metrics"]
        ]
        if run["papers"] < run["task_papers"] or not systems:
            continue
        record = _record(report, run, systems)
        files[_record_path(record, run)] = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        if "dataset" in run and "options" not in run:
            entries = by_model.setdefault(run["model"], [])
            entries += [_hub_entry(report, run, system) for system in systems]
    for model, entries in by_model.items():
        text = yaml.safe_dump(
            eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True, width=100
        )
        files[f"hub/{_file_name(model)}/.eval_results/hyprank.yaml"] = text
    return files


def _file_name(name: str) -> str:
    """A name of letters that any file system takes; names that differ stay different."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "model"
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _interval_method(report: Report) -> str:
    units = "DOIs" if report["paper_set"]["dois"] else "items"
    return f"{report['settings']['interval']} bootstrap over {units}"


def _has_interval(cell: Mapping[str, Any]) -> bool:
    """Whether there is an interval, and one that says something."""
    return "low" in cell and "high" in cell and cell["low"] < cell["high"]


def _hub_entry(report: Report, run: Report, system: Report) -> EvalResultEntry:
    cell = system["metrics"][_HEADLINE]
    notes = [f"Hit@1 of scorer {system['scorer']}, {system['papers']} papers"]
    if _has_interval(cell):
        notes.append(
            f"95 % interval {cell['low']:.4f} to {cell['high']:.4f} ({_interval_method(report)}, "
            f"{report['settings']['resamples']} resamples)"
        )
    if system["invalid"]:
        notes.append(f"{system['invalid']} papers invalid")
    notes += [f"{name.replace('_', ' ')} {run[name]}" for name in _HOW if name in run]
    notes.append(f"lm_eval_hyprank {report['version']}")
    return EvalResultEntry(
        dataset_id=run["dataset"],
        task_id=run["name"],
        value=round(cell["value"], 6),
        dataset_revision=run.get("dataset_revision"),
        date=_date(run),
        notes=", ".join(notes),
    )


def _date(run: Report) -> str | None:
    if "date" not in run:
        return None
    return datetime.fromtimestamp(run["date"], timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _record(report: Report, run: Report, systems: list[Report]) -> dict[str, Any]:
    """One model on one task in the "Every Eval Ever" schema."""
    # The time of the run, not of the export: equal input gives equal files.
    time = str(int(run.get("date", 0)))
    developer = {"developer": run["pretrained"].split("/")[0]} if "/" in run["pretrained"] else {}
    engine = {}
    if run["source"] in _ENGINES:
        engine = {"inference_engine": {"name": _ENGINES[run["source"]]}}
        if "transformers_version" in run and engine["inference_engine"]["name"] == "transformers":
            engine["inference_engine"]["version"] = run["transformers_version"]
    own = ("num_parameters", "dtype", "revision", "sha", "fingerprint")
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": f"{run['task']}/{run['pretrained'] or run['model']}/{time}",
        "evaluation_timestamp": time,
        "retrieved_timestamp": time,
        "source_metadata": {
            "source_name": "lm_eval_hyprank",
            "source_type": "evaluation_run",
            "source_organization_name": "unknown",
            "evaluator_relationship": "other",
        },
        "eval_library": {
            "name": "lm_eval",
            "version": run.get("lm_eval_version", "unknown"),
            "additional_details": {"lm_eval_hyprank": report["version"]},
        },
        "model_info": {
            "name": run["model"],
            "id": run["pretrained"] or run["model"],
            **developer,
            **engine,
            "additional_details": {
                "deployment_type": "self_deployed" if engine else "unknown",
                "model_availability": "unknown",
                **{key: run[key] for key in own if key in run},
            },
        },
        "evaluation_results": list(_results(report, run, systems)),
    }


def _results(report: Report, run: Report, systems: list[Report]) -> Iterator[dict[str, Any]]:
    source: dict[str, Any] = {"dataset_name": run["name"], "source_type": "other"}
    if "dataset" in run:
        source |= {
            "source_type": "hf_dataset",
            "hf_repo": run["dataset"],
            "samples_number": run["papers"],
        }
    for system in systems:
        for metric, cell in system["metrics"].items():
            number = re.fullmatch(r"hit@(\d+)", metric)
            # A judge of pairs has verdicts on papers that it does not rank.
            counted = system["kind"] != "pairwise" or metric in METRICS
            uncertainty: dict[str, Any] = {"num_samples": system["papers"]} if counted else {}
            if _has_interval(cell):
                uncertainty |= {
                    "num_bootstrap_samples": report["settings"]["resamples"],
                    "confidence_interval": {
                        "lower": cell["low"],
                        "upper": cell["high"],
                        "confidence_level": LEVEL,
                        "method": _interval_method(report),
                    },
                }
            details = {"scorer": system["scorer"], "invalid": str(system["invalid"])}
            details |= {name: run[name] for name in ("options", *_HOW) if name in run}
            if "parse_rate" in system:
                details["parse_rate"] = repr(system["parse_rate"])
            yield {
                "evaluation_result_id": f"{run['task']}.{system['scorer']}.{metric}",
                "evaluation_name": f"{run['task']}.{system['scorer']}",
                "source_data": source,
                "metric_config": {
                    "metric_id": f"hyprank.{metric}",
                    "metric_name": metric,
                    "metric_kind": "hit_rate" if number else metric,
                    "metric_unit": "proportion",
                    "metric_parameters": {"k": int(number[1])} if number else {},
                    "lower_is_better": metric in LOWER_IS_BETTER,
                    "score_type": "continuous",
                    "min_score": 0.0,
                    "max_score": 1.0,
                },
                "score_details": {
                    "score": cell["value"],
                    "details": details,
                    "uncertainty": uncertainty,
                },
            }


def _record_path(record: Mapping[str, Any], run: Report) -> str:
    """Where the schema's repository keeps a record: developer, model, and a random-looking name."""
    content = json.dumps(record, sort_keys=True).encode()
    name = uuid.UUID(bytes=hashlib.sha256(content).digest()[:16], version=4)
    developer = _file_name(record["model_info"].get("developer", "unknown"))
    model = _file_name(run["model"])
    return f"every_eval_ever/data/{_file_name(run['name'])}/{developer}/{model}/{name}.json"
