"""`hyprank new`: looks at a data file and writes the YAML of a task that ranks its candidates."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from lm_eval_hyprank import task_files
from lm_eval_hyprank.datasets import generic, rows
from lm_eval_hyprank.datasets.findings import SKIP_OPTION, DatasetError
from lm_eval_hyprank.datasets.prompt_template import written
from lm_eval_hyprank.experts import NDCG_KS
from lm_eval_hyprank.metrics import HIT_KS, process_results

DESCRIPTION = """Looks at a data file and writes the YAML of a task that ranks its candidates, with
the data where it is. What a column holds is guessed from its name and its values, unless an option
says it; docs/any_dataset.md has the rules. Nothing is written where the data has a fault."""

# Column names, lower case and letters only, that say what a column holds: exactly these, or
# these at the beginning (marked *). The first that fits is taken.
_ID = "id itemid sampleid questionid qid uid key nr number index"
_GOLD = (
    "gold* correct* right* best* answer target chosen positive truth reference response "
    "hypothesis completion"
)
_GOLD_INDEX = "label gold* correct* answer* target"
_NEGATIVES = "negative* neg wrong* incorrect* distractor* fake* rejected* decoy* foil*"
_CANDIDATES = "candidates choices options endings responses answers hypotheses"
_CANDIDATE = "candidate choice option answer response hypothesis description completion text"
_LABEL = "label gold* correct* iscorrect isgold istrue positive target"
_RELEVANCE = "relevance grade rating"
_EXPERTS = "expert* annotator* rater* curator* reviewer* rank*"
_GROUP = "group category topic discipline subject domain field"
_PROMPT = (
    "background* context* passage premise dialogue dialog turns history instruction* question* "
    "researchquestion query prompt input"
)

_COLUMN_OPTIONS = {
    "id": "column that identifies an item",
    "candidates": "list column (or columns) with all candidates",
    "gold": "column or columns with the gold text",
    "gold_index": "column with the gold's place in the list, from 0",
    "negatives": "column or columns with the other candidates",
    "candidate": "where each row is a candidate: the column with its text",
    "label": "where each row is a candidate: the column that says whether it is gold",
    "relevance": "column with grades, in place of a gold",
    "experts": "columns with the ranks that experts gave, in place of a gold",
    "group": "column that a report groups by",
}
_SEVERAL = {"candidates", "gold", "negatives", "experts"}
_OF_CANDIDATES = _COLUMN_OPTIONS.keys() - {"id", "group"}

_MOST_GROUPS = 50
_OFTEN_EMPTY = 0.2  # a column so often empty is meant to be; in fewer rows, a cell was forgotten


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="hyprank new", description=DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="the task's name: letters, digits, _ . -")
    parser.add_argument(
        "--data", required=True, help="a .jsonl, .json, .csv, .tsv or .parquet file, or owner/name"
    )
    parser.add_argument(
        "--output", default="hyprank_tasks", metavar="DIR", help="default: hyprank_tasks"
    )
    for name, text in _COLUMN_OPTIONS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            help=text,
            metavar="COLUMN",
            nargs="+" if name in _SEVERAL else None,
        )
    parser.add_argument("--prompt", help='Jinja template, for example "Q: {{ question }}\\nA:"')
    parser.add_argument("--split", help="the hub's split")
    parser.add_argument("--subset", help="the hub's subset")
    parser.add_argument(
        "--skip-invalid",
        action="store_true",
        help="leave out faulty items, naming their rows, here and at every run of the task",
    )
    parser.add_argument(
        "--per-group", action="store_true", help="also write a task for each value of the group"
    )
    return parser


def create(options: argparse.Namespace) -> list[str]:
    """Writes the task.

    Args:
        options: The parsed arguments.

    Returns:
        What to tell the user, line by line.

    Raises:
        DatasetError: The data cannot be used, its columns cannot be told, the name is taken, or
            a file is in the way.
    """
    name = options.name
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise DatasetError(f"the name {name!r} has other characters than letters, digits, _ . -")
    folder = Path(options.output).expanduser()
    source: dict[str, Any] = {
        key: value for key in ("data", "split", "subset") if (value := getattr(options, key))
    }
    if Path(options.data).expanduser().exists():
        source["data"] = Path(options.data).expanduser().absolute().as_posix()
    table = rows.read(**source)
    if not table.rows:
        raise DatasetError("\n".join([f"{table.source}: holds no row", *map(str, table.findings)]))

    stated = {key: value for key in _COLUMN_OPTIONS if (value := getattr(options, key))}
    columns = guess(table, stated)
    # A shell hands over the two characters \n that were typed.
    prompt = options.prompt.replace(r"\n", "\n") if options.prompt else None
    prompt = prompt or guess_prompt(table, columns)
    if options.skip_invalid:
        source["skip_invalid"] = True
    try:
        documents = generic.load(**source, **columns, prompt=prompt)["test"]
    except DatasetError as error:
        raise DatasetError(str(error).replace(SKIP_OPTION, "--skip-invalid")) from None

    files = {f"{name}.yaml": _task_yaml(name, source, columns, prompt)}
    runs = name
    if options.per_group:
        if "group" not in columns:
            raise DatasetError("--per-group needs a column to group by: add --group COLUMN")
        files |= _group_yamls(name, set(documents["discipline"]), "gold" in documents[0])
        runs = f"{name}_by_group"
    for file in files:
        if (task := file.removesuffix(".yaml")) in _known_names():
            raise DatasetError(
                f"lm-eval has a task, group or tag {task!r} already; choose another NAME"
            )
        if (folder / file).exists():
            raise DatasetError(f"{folder / file} exists; choose another NAME, or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    return [
        *_about(table, columns, stated, documents, prompt),
        "",
        *(f"Wrote {folder / file}" for file in files),
        "Look at it, and change what was guessed wrong. Then, MODEL being a local folder or a",
        "name on the Hugging Face hub:",
        "",
        "    lm_eval run --model hf --model_args pretrained=MODEL --batch_size auto "
        f"--tasks {shlex.quote(runs)} --include_path {shlex.quote(str(folder))} "
        "--output_path results --log_samples",
    ]


@cache
def _known_names() -> frozenset[str]:
    """The names that lm-eval has without --include_path, those of this package among them."""
    from lm_eval.tasks import TaskManager

    return frozenset(TaskManager().all_tasks)


# --- guessing -------------------------------------------------------------------------------


def guess(table: rows.Rows, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Says which column holds what.

    Args:
        table: The rows.
        stated: What the user said; not doubted, and no column in it is given a second role.

    Returns:
        Arguments of `generic.load`, the stated ones among them.

    Raises:
        DatasetError: The candidates are not to be found.
    """
    taken = _flat(stated)
    free = [column for column in table.columns if column not in taken]

    def named(patterns: str, fits: Callable[[list[Any]], bool]) -> list[str]:
        found = []
        for pattern in patterns.split():
            for column in free:
                if _is_named(column, pattern) and column not in found:
                    found += [column] if fits(_values(table, column)) else []
        return found

    columns = dict(stated)
    if not stated.keys() & _OF_CANDIDATES:
        columns |= _guess_candidates(named)
    elif columns.keys() & {"gold", "negatives"} == {"gold"} and "candidates" not in columns:
        columns["negatives"] = named(_NEGATIVES, _any_texts)
    free = [column for column in free if column not in _flat(columns)]
    long = "candidate" in columns
    if "id" not in columns:
        found = named(_ID, lambda v: _names(v) and (len(set(v)) == len(v)) is not long)
        found += [
            column
            for column in free
            if column.lower().endswith("id")
            and _names(values := _values(table, column))
            and (len(set(values)) == len(values)) is not long
        ]
        if long:
            found += [column for column in free if _repeats(_all(table, column))]
        columns |= {"id": found[0]} if found else {}
    free = [column for column in free if column not in _flat(columns)]
    if "group" not in columns:
        found = named(_GROUP, _groups)
        columns |= {"group": found[0]} if found else {}
    columns = {key: _single(value) for key, value in columns.items() if value}
    if not columns.keys() & (_OF_CANDIDATES - {"gold"}) or (long and "id" not in columns):
        raise DatasetError(
            f"It cannot be told from the columns of {table.source} where the candidates are. Say "
            "it: --gold and --negatives, or --candidates with --gold or --gold-index, or (a row "
            "for each candidate) --id, --candidate and --label; experts: --relevance or "
            f"--experts. The columns are:\n{_examples(table)}"
        )
    return columns


def _guess_candidates(
    named: Callable[[str, Callable[[list[Any]], bool]], list[str]],
) -> dict[str, Any]:
    """Tries the ways in which a file may say what its candidates are."""
    negatives = named(_NEGATIVES, _any_texts)
    gold = [column for column in named(_GOLD, _any_texts) if column not in negatives]
    if negatives and gold:
        return {"gold": gold[0], "negatives": negatives}
    lists = named(_CANDIDATES, _lists)
    if lists:
        index = named(_GOLD_INDEX, _whole)
        answers = [column for column in gold if column not in lists]
        if index:
            return {"candidates": lists[0], "gold_index": index[0]}
        if answers:
            return {"candidates": lists[0], "gold": answers[0]}
        if judged := _guess_judged(named, _lists):
            return {"candidates": lists[0], **judged}
    texts = named(_CANDIDATE, lambda v: _any_texts(v) and not _numbers(v))
    labels = named(_LABEL, _marks)
    if texts and labels:
        return {"candidate": texts[0], "label": labels[0]}
    if texts and (judged := _guess_judged(named, _numbers)):
        return {"candidate": texts[0], **judged}
    return {}


def _guess_judged(
    named: Callable[[str, Callable[[list[Any]], bool]], list[str]],
    fits: Callable[[list[Any]], bool],
) -> dict[str, list[str]]:
    """The experts' columns, or else the one with grades."""
    if experts := named(_EXPERTS, fits):
        return {"experts": experts}
    relevance = named(_RELEVANCE, fits)[:1]
    return {"relevance": relevance} if relevance else {}


def guess_prompt(table: rows.Rows, columns: Mapping[str, Any]) -> str:
    """Writes a prompt of the columns that are left, each on a line behind its name.

    Columns with a name that prompts are made of are taken where there are any, else all with
    texts but those with a name that answers have, and those that are often empty only where they
    are not; the last line names what is to follow.
    """
    used = _flat(columns)
    free = [c for c in table.columns if c not in used and _any_texts(_values(table, c))]
    free = [c for c in free if not _numbers(_values(table, c))]
    usual = [c for c in free if any(_is_named(c, pattern) for pattern in _PROMPT.split())]
    # What may be another gold would give the answer away.
    answers = " ".join((_GOLD, _NEGATIVES, _LABEL, _EXPERTS)).split()
    chosen = usual or [c for c in free if not any(_is_named(c, pattern) for pattern in answers)]
    if not chosen:
        but = f" but such as may hold an answer ({', '.join(free)})" if free else ""
        raise DatasetError(
            f"No column is left for a prompt{but}; write one: --prompt. The columns are:\n"
            f"{_examples(table)}"
        )
    lines = []
    for column in chosen:
        place = written(column)
        listed = any(isinstance(value, list) for value in _values(table, column))
        field = f"{{{{ {place} | join('\\n') }}}}" if listed else f"{{{{ {place} }}}}"
        # A prompt without its only column would be none.
        optional = len(chosen) > 1 and _gaps(table, column) >= _OFTEN_EMPTY * len(table.rows)
        line = f"{_title(column)}: {field}\n"
        lines.append(f"{_asks(place)}{line}{{% endif %}}" if optional else line)
    what = columns.get("candidate", columns.get("gold", "answer"))
    ending = _title(what if isinstance(what, str) else "answer")
    return "".join(lines) + f"{ending}:"


def _asks(place: str) -> str:
    return f"{{% if {place} %}}"


def _gaps(table: rows.Rows, column: str) -> int:
    return sum(value in (None, "", []) for value in _all(table, column))


def _is_named(column: str, pattern: str) -> bool:
    word = re.sub(r"[^a-z]", "", column.lower())
    return word.startswith(pattern[:-1]) if pattern.endswith("*") else word == pattern


def _title(column: str) -> str:
    words = " ".join(re.split(r"[\W_]+", column)).strip()
    return (words[:1].upper() + words[1:]) or "Text"


def _flat(columns: Mapping[str, Any]) -> set[str]:
    return {c for value in columns.values() for c in ([value] if isinstance(value, str) else value)}


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _all(table: rows.Rows, column: str) -> list[Any]:
    return [row.values.get(column) for row in table.rows]


def _values(table: rows.Rows, column: str) -> list[Any]:
    """The column's values, the missing ones left out."""
    return [value for value in _all(table, column) if value not in (None, "")]


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def _lists(values: list[Any]) -> bool:
    return bool(values) and all(_is_list(value) for value in values)


def _any_texts(values: list[Any]) -> bool:
    return any(isinstance(value, str | list) for value in values)


def _names(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, str | int) for value in values)


def _repeats(values: list[Any]) -> bool:
    """Whether every value stands in several rows, as an item's id does beside its candidates."""
    return _names(values) and len(set(values)) > 1 < min(Counter(values).values())


def _groups(values: list[Any]) -> bool:
    return _names(values) and 1 < len(set(values)) <= min(_MOST_GROUPS, len(values) - 1)


def _numbers(values: list[Any]) -> bool:
    try:
        return bool(values) and all(math.isfinite(float(value)) for value in values)
    except (TypeError, ValueError):
        return False


def _whole(values: list[Any]) -> bool:
    return _numbers(values) and all(float(value) == int(float(value)) >= 0 for value in values)


def _marks(values: list[Any]) -> bool:
    return bool(values) and all(
        str(value).strip().lower() in generic.TRUE | generic.FALSE for value in values
    )


# --- what is written and said ---------------------------------------------------------------


def _task_yaml(
    name: str, source: Mapping[str, Any], columns: Mapping[str, Any], prompt: str
) -> str:
    judged = columns.keys() & {"relevance", "experts"}
    name_of_template = "experts.yaml" if judged else "ranking.yaml"
    template = (task_files.folder() / "templates" / name_of_template).as_posix()
    values = {**source, **columns}
    comments = {
        "data": "read where it is, at every run",
        "gold": "the right candidate",
        "negatives": "the others",
        "group": "for a breakdown in reports",
        "skip_invalid": "faulty items are left out, and their rows named",
    }
    lines = [
        "# Written by `hyprank new`; all of it may be changed. The scorers and metrics come from:",
        f"include: {_quoted(template)}",
        f"task: {_quoted(name)}",
        "dataset_kwargs:",
    ]
    for key, value in values.items():
        comment = f"  # {comments[key]}" if key in comments else ""
        lines.append(f"  {key}: {_quoted(value)}{comment}")
    lines.append("  # What the model reads before each candidate: {{ column }} is filled in.")
    lines.append(f"  prompt: {_quoted(prompt)}")
    lines.append('  separator: " "  # between prompt and candidate')
    return "\n".join(lines) + "\n"


def _quoted(value: Any) -> str:
    """JSON, which is YAML too: no name or text is taken for anything but a text."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value):
        plain = value.lower() not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
        return value if plain else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)


def _group_yamls(name: str, groups: Iterable[str], ranked: bool) -> dict[str, str]:
    """A task for each group, and their group with size-weighted means."""
    whole = f"{name}_by_group"
    tasks = _group_tasks(name, groups, whole)
    files = {
        f"{task}.yaml": (
            f"include: {_quoted(f'{name}.yaml')}\ntask: {_quoted(task)}\n"
            # Not in dataset_kwargs: those given here would replace all of the included ones.
            f"metadata: {{version: 1.0, only: {json.dumps(group, ensure_ascii=False)}}}\n"
        )
        for group, task in tasks.items()
    }
    if ranked:
        metrics = [*(f"hit@{k}" for k in HIT_KS), "mrr", "win_rate", "tie_rate"]
    else:
        metrics = ["kendall_tau", "spearman", "top1", *(f"ndcg@{k}" for k in NDCG_KS)]
    lines = [f"group: {_quoted(whole)}", "task:"]
    lines += [f"  - {_quoted(task)}" for task in tasks.values()]
    lines += ["aggregate_metric_list:"]
    lines += [f"  - {{metric: {metric}, weight_by_size: true}}" for metric in [*metrics, "invalid"]]
    files[f"{whole}.yaml"] = "\n".join([*lines, "metadata:", "  version: 1.0", ""])
    return files


def _group_tasks(name: str, groups: Iterable[str], taken: str) -> dict[str, str]:
    """Names each group's task, in ASCII, as it also names files and folders."""
    tasks: dict[str, str] = {}
    # Those in ASCII first: they keep their names where another group would have the same one.
    for group in sorted(groups, key=lambda group: (not group.isascii(), group)):
        letters = unicodedata.normalize("NFKD", group).encode("ascii", "ignore").decode("ascii")
        slug = re.sub(r"\W+", "_", letters.lower()).strip("_") or "group"
        task, number = f"{name}_{slug}", 1
        while task in (taken, *tasks.values()):
            number += 1
            task = f"{name}_{slug}_{number}"
        tasks[group] = task
    return tasks


def _about(
    table: rows.Rows,
    columns: Mapping[str, Any],
    stated: Mapping[str, Any],
    documents: Any,
    prompt: str,
) -> list[str]:
    """What was found, and what the model will see of the first item."""
    sizes = [len(candidates) for candidates in documents["candidates"]]
    span = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    lines = [f"{table.source}: {len(sizes)} items with {span} candidates each."]
    if "gold" in documents[0]:
        chance = [process_results(d, [0.0] * len(d["candidates"])) for d in documents]
        hit1, hit5 = (fmean(one[f"hit@{k}"] for one in chance) for k in (1, 5))
        lines.append(f"A random ranking reaches hit@1 {hit1:.4f} and hit@5 {hit5:.4f}.")
    lines.append("")
    for key, value in columns.items():
        origin = "as you said" if key in stated else "guessed"
        lines.append(
            f"  {key + ':':<12} {value if isinstance(value, str) else ', '.join(value)} ({origin})"
        )
    if "id" not in columns:
        lines += _without_id(table, columns)
    lines += [
        f"  {column} is empty in {gaps} of {len(table.rows)} rows; the prompt leaves it out there."
        for column in table.columns
        if _asks(written(column)) in prompt and (gaps := _gaps(table, column))
    ]
    first = documents[0]
    lines += ["", "The first item, as the model will see it:", ""]
    lines += [f"  | {line}" for line in first["context"].splitlines()]
    lines += [
        f"  {label:>12}: {_short(text)}"
        for label, text in zip(first["candidate_ids"], first["candidates"], strict=True)
    ][:10]
    if len(first["candidates"]) > 10:
        lines.append(f"  ... and {len(first['candidates']) - 10} more")
    return lines


def _without_id(table: rows.Rows, columns: Mapping[str, Any]) -> list[str]:
    """Says why a column that is named like an id is none, and what stands in its place."""
    for column in table.columns:
        named = any(_is_named(column, pattern) for pattern in _ID.split())
        if column in _flat(columns) or not (named or column.lower().endswith("id")):
            continue
        first: dict[Any, int] = {}
        for row in table.rows:
            value = row.values.get(column)
            if value not in (None, "") and first.setdefault(str(value), row.number) != row.number:
                return [
                    f"  {column} would be the id, but {str(value)!r} occurs in rows "
                    f"{first[str(value)]} and {row.number}: the row's number is the id instead."
                ]
    return []


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _examples(table: rows.Rows) -> str:
    return "\n".join(
        f"  {column}: {_short((_values(table, column) or ['(empty)'])[0])}"
        for column in table.columns
    )
