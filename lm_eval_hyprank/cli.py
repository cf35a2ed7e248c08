"""The `hyprank` command: checks data, writes tasks, makes reports, runs lm-eval with the plugin."""

from __future__ import annotations

import argparse
import contextlib
import copy
import glob
import io
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lm_eval_hyprank import task_files
from lm_eval_hyprank.datasets.facts import LONGER, Facts, describe
from lm_eval_hyprank.datasets.findings import DatasetError, Finding
from lm_eval_hyprank.datasets.researchbench import locate
from lm_eval_hyprank.datasets.texts import printable
from lm_eval_hyprank.datasets.validation import check_folder, layout_findings

_TASK = "researchbench_energy"
_PACKAGES = ("lm_eval_hyprank", "lm_eval", "torch", "transformers", "datasets", "huggingface_hub")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        The exit code: 0 all is well, 1 something was found, 2 the command could not be done.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character must not end the command.
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if arguments[:1] == ["run"]:  # all that follows is lm-eval's
            return _run(arguments[1:])
        if arguments[:1] == ["new"]:
            return _new(arguments[1:])
        parser = _parser()
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        options = parser.parse_args(arguments)
        if options.command == "validate":
            return _validate(options.folder, options.revision)
        if options.command == "report":
            return _report(options)
        if options.command == "cost":
            return _cost(options)
        return _doctor()
    except DatasetError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hyprank", description="Hypothesis ranking for lm-evaluation-harness."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    validate = commands.add_parser(
        "validate",
        help="check a ResearchBench folder and describe its data",
        description="Checks a ResearchBench folder and describes its data. "
        "Exit code 1: something is wrong with the data; 2: there is no data.",
    )
    validate.add_argument(
        "folder",
        nargs="?",
        metavar="DIR",
        help="folder with ranking/ranking.jsonl and papers/papers.jsonl (default: the hub's copy)",
    )
    validate.add_argument("--revision", help="branch, tag or commit of the hub's copy")
    commands.add_parser(
        "new", help="write the task of a ranking data set of your own", add_help=False
    )
    cost = commands.add_parser(
        "cost",
        help="say how many tokens a judge's run takes",
        description="Counts the requests and tokens of judge tasks. Nothing is asked.",
    )
    cost.add_argument("tasks", nargs="+", metavar="TASK", help="such as researchbench_judge")
    cost.add_argument(
        "--tokenizer",
        default="o200k_base",
        metavar="NAME",
        help="OpenAI model or encoding, or a Hugging Face tokenizer's folder or owner/name "
        "(default: o200k_base)",
    )
    cost.add_argument(
        "--metadata",
        type=_json_object,
        default={},
        metavar="JSON",
        help="""as lm_eval's, in JSON: '{"dataset_path": "DIR"}'""",
    )
    cost.add_argument("--limit", type=_at_least(1), metavar="N", help="only the first N papers")
    cost.add_argument(
        "--max_gen_toks", type=_at_least(1), metavar="N", help="tokens a reply may have, if changed"
    )
    report = commands.add_parser(
        "report",
        help="statistics, tables, figures and a page from lm-eval's output folders",
        description="Makes statistics, tables, figures and a page from the folders that lm_eval "
        "wrote with --output_path and --log_samples. No model is run.",
    )
    report.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN_DIR", help="searched at any depth"
    )
    report.add_argument(
        "-o", "--output", required=True, type=Path, metavar="OUT", help="folder for the report"
    )
    report.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="NAME",
        help="only this task and its controls (may be repeated; default: all, of one paper set)",
    )
    report.add_argument(
        "--seed", type=_at_least(0), default=0, help="of the resampling (default: 0)"
    )
    report.add_argument(
        "--resamples", type=_at_least(1), default=2000, help="of the bootstrap (default: 2000)"
    )
    report.add_argument(
        "--interval",
        choices=("percentile", "bca"),
        default="percentile",
        help="kind of bootstrap interval (default: percentile)",
    )
    report.add_argument(
        "--no-text",
        action="store_true",
        help="leave out titles, prompts and candidates, which ResearchBench's licence forbids to "
        "pass on",
    )
    commands.add_parser(
        "doctor",
        help="say what is installed and whether lm-eval finds the tasks",
        description="Says what is installed and whether lm-eval finds the tasks. "
        "Exit code 1: it does not.",
    )
    commands.add_parser(
        "run",
        help="`lm_eval run` with the plugin loaded and the data checked before the model",
        add_help=False,
    )
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return whole_number


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"""{text!r} is no JSON object; write '{{"dataset_path": "DIR"}}'"""
        )
    return value


def _console() -> Console:
    # Data and paths are shown as they are: no markup, no emoji codes, no colouring of numbers.
    return Console(file=sys.stdout, markup=False, emoji=False, highlight=False)


def _line(console: Console, text: str) -> None:
    """Prints a text on one line, however long: paths stay whole for copying."""
    console.print(printable(text), soft_wrap=True)


# --- hyprank validate -----------------------------------------------------------------------


def _validate(folder: str | None, revision: str | None) -> int:
    if folder is not None and revision is not None:
        raise DatasetError("--revision is for the hub's copy; leave it out, or leave out DIR")
    path = locate(None, revision) if folder is None else Path(folder).expanduser()
    if not path.is_dir():
        raise DatasetError(str(layout_findings(path)[0]))
    papers, findings = check_folder(path)
    console = _console()
    _line(console, f"Data: {path}")
    if findings:
        _print_findings(console, findings)
        _line(console, f"{len(findings)} problem(s) found, {len(papers)} papers are without one.")
    else:
        _line(console, f"No problems found in {len(papers)} papers.")
    if papers:
        _print_facts(console, describe(papers))
    return 1 if findings else 0


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for file in dict.fromkeys(finding.file for finding in findings):
        table = _table(printable(file))
        table.add_column("row", justify="right", no_wrap=True)
        table.add_column("sample_id and field", ratio=2, overflow="fold")
        table.add_column("problem and remedy", ratio=3, overflow="fold")
        for finding in (one for one in findings if one.file == file):
            place = [printable(word) for word in (finding.sample_id, finding.field) if word]
            table.add_row(
                str(finding.row or ""),
                "\n".join(place),
                f"{printable(finding.problem)}.\n{printable(finding.remedy)}.",
            )
        console.print(table)
        _line(console, "")


def _print_facts(console: Console, facts: Facts) -> None:
    disciplines = _table("Papers per discipline")
    disciplines.add_column("discipline")
    disciplines.add_column("papers", justify="right")
    for name, count in facts.by_discipline.items():
        disciplines.add_row(name, str(count))
    console.print(disciplines)
    _line(console, "")

    chance = f"by chance {1 / 16:.2%}"
    rows = [
        ("usable papers (rows)", f"{facts.papers}"),
        ("distinct DOIs", f"{facts.dois}"),
        ("rows that share their DOI with another row", f"{facts.sharing_doi}"),
        ("rows without a DOI", f"{facts.without_doi}"),
        ("characters of a negative / of its gold, median", f"{facts.length_ratio:.2f}"),
        (f"negatives more than {LONGER} times as long as the gold", f"{facts.longer:.2%}"),
        (f"gold is the shortest of the 16 ({chance})", f"{facts.gold_shortest:.2%}"),
        (f"gold is the longest of the 16 ({chance})", f"{facts.gold_longest:.2%}"),
        ('golds that say "the paper", "the authors", "the study"', f"{facts.self_reference:.2%}"),
    ]
    about = _table("What to know of the data")
    about.add_column("fact")
    about.add_column("value", justify="right")
    for label, value in rows:
        about.add_row(label, value)
    console.print(about)
    _line(console, "")
    _line(console, "Rows that share a DOI are not independent papers. Where the gold is often the")
    _line(console, "shortest, length alone ranks well: compare every score with row `shortest`.")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)


# --- hyprank new ----------------------------------------------------------------------------


def _new(arguments: list[str]) -> int:
    from lm_eval_hyprank import new_task  # here, for it takes its time to load

    console = _console()
    for line in new_task.create(new_task.parser().parse_args(arguments)):
        _line(console, line)
    return 0


# --- hyprank report --------------------------------------------------------------------------

_REPORT_PACKAGES = {"statsmodels", "matplotlib"}


def _report(options: argparse.Namespace) -> int:
    try:  # here, for these take their time to load and need not be installed
        from lm_eval_hyprank.report.build import build_report
        from lm_eval_hyprank.report.found import ReportError
        from lm_eval_hyprank.report.intervals import Settings
        from lm_eval_hyprank.report.runs import read_runs
        from lm_eval_hyprank.report.write import prepare, write_report
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _REPORT_PACKAGES:
            raise
        print(
            f"hyprank report needs {error.name}, which is not installed: "
            "pip install 'lm_eval_hyprank[report]'",
            file=sys.stderr,
        )
        return 2
    try:
        prepare(options.output)
        runs = read_runs(options.folders, options.task)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    settings = Settings(options.resamples, options.seed, options.interval)
    report = build_report(runs, settings, text=not options.no_text)
    write_report(report, options.output)
    console = _console()
    models = {system["model"] for system in report["systems"] if system["kind"] != "trivial"}
    _line(
        console,
        f"{report['paper_set']['papers']} papers, {len(models)} model(s), "
        f"{len(report['systems'])} systems.",
    )
    for title, status in (("Superseded", "superseded"), ("Left out", "left_out")):
        for entry in runs.files[status]:
            _line(console, f"{title}: {entry['file']}: {entry['why']}")
    for note in report["notes"]:
        _line(console, note)
    for name in ("index.html", "report.md", "report.json"):
        _line(console, str(options.output / name))
    return 0


# --- hyprank cost ---------------------------------------------------------------------------


def _cost(options: argparse.Namespace) -> int:
    from lm_eval_hyprank.judge.cost import CostError, estimate, token_counter

    table = _table("Tokens")
    for heading in ("task", "requests", "prompts", "longest prompt", "replies at most"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    try:
        count = token_counter(options.tokenizer)
        for name, task in _load_tasks(options.tasks, options.metadata).items():
            cost = estimate(task, count, options.limit, options.max_gen_toks)
            numbers = (cost.requests, cost.prompt_tokens, cost.longest_prompt, cost.reply_tokens)
            table.add_row(name, *(f"{number:,}" for number in numbers))
    except CostError as error:
        print(error, file=sys.stderr)
        return 2
    console = _console()
    # Never cut to the terminal: names are for copying, and folded numbers are misread.
    console.width = 10_000
    console.print(table)
    _line(console, "")
    _line(
        console, f"Counted with {options.tokenizer}. A chat template adds a few tokens a request;"
    )
    _line(console, "a reply is mostly short, unless the model reasons, which is paid for as well.")
    return 0


def _load_tasks(names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    import lm_eval_hyprank.tasks  # noqa: F401  # the YAMLs name its functions
    from lm_eval_hyprank.judge.cost import CostError

    with _silence():
        manager = TaskManager(
            include_path=task_files.folder(), include_defaults=False, metadata=options
        )
        known = manager.all_tasks
        if unknown := [name for name in names if name not in known]:
            judges = ", ".join(n for n in known if "judge" in n or "pairwise" in n)
            raise CostError(f"there is no task {unknown[0]}; a judge is asked by: {judges}")
        for name in sorted(_our_tasks(names, manager.task_index)):
            if manager.task_index[name].cfg["output_type"] != "generate_until":
                raise CostError(f"{name} asks no judge: its model runs here and has no price")
        tasks: dict[str, Any] = manager.load(list(names))["tasks"]
    return tasks


# --- hyprank doctor -------------------------------------------------------------------------


def _doctor() -> int:
    console = _console()
    _line(console, f"Python           {platform.python_version()}")
    for package in _PACKAGES:
        _line(console, f"{package:<16} {_version(package)}")
    import lm_eval

    import lm_eval_hyprank

    above_package = Path(lm_eval_hyprank.__path__[0]).parent
    if lm_eval.__file__ is None:
        # An editable lm-eval installed through an import hook loses against the folder that this
        # package's wheel made: Python takes `lm_eval/tasks/hyprank` for a package of that name.
        _line(console, "")
        _line(console, f"NOT WELL: {next(iter(lm_eval.__path__))} hides the real lm_eval.")
        _line(console, "It holds only this package's tasks. Install your clone of lm-eval again:")
        _line(console, "    pip install -e CLONE --config-settings editable_mode=compat")
        return 1
    tasks = task_files.installed()
    _line(console, f"lm_eval is in    {Path(lm_eval.__file__).parent}")
    _line(console, f"its task folder  {tasks} ({'exists' if tasks.is_dir() else 'does not exist'})")
    if _finds_task(None):
        _line(console, "")
        _line(console, f"All is well: `lm_eval --tasks {_TASK}` works.")
        return 0
    _line(console, "")
    _line(console, f"NOT WELL: lm_eval does not find {_TASK}.")
    for folder in (above_package / "task_configs", above_package / "lm_eval" / "tasks" / "hyprank"):
        if folder.is_dir() and _finds_task(folder):
            _line(console, "Either install this package beside lm_eval (pip install), or add:")
            _line(console, f"    --include_path {folder}")
            return 1
    _line(console, "The task files are not here either: install this package again.")
    return 1


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _finds_task(folder: Path | None) -> bool:
    """Says whether lm-eval finds the task by itself, or in the folder alone."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    return _TASK in manager.all_tasks


# --- hyprank run ----------------------------------------------------------------------------


def _run(arguments: list[str]) -> int:
    """Does what `lm_eval run` does, with the plugin known and our data checked at its start."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import setup_logging

    import lm_eval_hyprank.tasks  # noqa: F401  (registers the models, filters and metrics)

    setup_logging()
    with _process_arguments(["lm_eval", "run", *arguments]):
        harness = HarnessCLI()
        options = harness.parse_args()
        with _silence():  # lm-eval says all of it again in a moment
            config = EvaluatorConfig.from_cli(copy.deepcopy(options))
        _check_data(config)
        # Of several processes the first alone writes.
        output = Path(config.output_path) if config.output_path and _is_first() else None
        before: set[Path] = set()
        if output is not None:
            _check_output(output)
            before = _results(output)
        harness.execute(options)
    if output is not None and _results(output) == before:
        # lm-eval logs what it could not write, and ends as if it had.
        print(f"{output}: the results were not written; the log says why", file=sys.stderr)
        return 1
    return 0


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _check_output(path: Path) -> None:
    """Refuses an output path that cannot be written to, before hours of work for it.

    Raises:
        DatasetError: It cannot.
    """
    folder = path.parent if path.suffix == ".json" else path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DatasetError(
            f"--output_path {path}: results cannot be written there ({error.strerror}); give "
            "another one"
        ) from error


def _results(path: Path) -> set[Path]:
    """The results files that lm-eval has written for an output path."""
    if path.suffix == ".json":
        return set(path.parent.glob(f"{glob.escape(path.stem)}_*.json"))
    return set(path.glob("*/results_*.json"))


@contextlib.contextmanager
def _process_arguments(arguments: list[str]) -> Iterator[None]:
    """Lets lm-eval, which reads nothing else, find the arguments in `sys.argv`."""
    before = sys.argv
    sys.argv = arguments
    try:
        yield
    finally:
        sys.argv = before


def _check_data(config: Any) -> None:
    """Loads the data of the requested tasks that are ours, so that an error comes at once.

    Raises:
        DatasetError: The data cannot be used.
    """
    from lm_eval.tasks import TaskManager

    with _silence():
        # Not lm-eval's own thousands of tasks: indexing them takes seconds.
        folders = [task_files.folder()]
        if config.include_path:
            folders.append(Path(config.include_path))
        manager = TaskManager(
            include_path=folders, include_defaults=False, metadata=config.metadata
        )
        given = [config.tasks] if isinstance(config.tasks, str) else config.tasks
        names = [name for names in given for name in names.split(",")]
        ours = _our_tasks(manager.match_tasks(names), manager.task_index)
        manager.load(sorted(ours))


def _our_tasks(names: Iterable[Any], index: dict[str, Any]) -> set[str]:
    """Returns the tasks with our data among the names and within the named groups and tags.

    Args:
        names: Task, group or tag names, or a group's members as its YAML gives them.
        index: lm-eval's index, name to entry.
    """
    from lm_eval.tasks._index import Kind

    ours: set[str] = set()
    for name in names:
        if isinstance(name, dict):
            members = name.get("task", name.get("group"))
            ours |= _our_tasks(members if isinstance(members, list) else [members], index)
        elif (entry := index.get(name)) is None:
            continue
        elif entry.kind is Kind.GROUP:
            ours |= _our_tasks(entry.cfg["task"], index)
        elif entry.kind is Kind.TAG:
            ours |= _our_tasks(entry.tags, index)
        # An unresolved function is the YAML's folder and the dotted name, joined as a path.
        elif Path(str(entry.cfg.get("custom_dataset"))).name.startswith("lm_eval_hyprank."):
            ours.add(name)
    return ours


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps lm-eval from logging and printing."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with open(os.devnull, "w", encoding="utf-8") as null, contextlib.redirect_stdout(null):
            yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
