"""Time and memory of scoring candidates, against stock lm-eval in the same run.

``python -m benchmarks.scoring --model DIR [--data DIR] [--papers N]`` scores the same papers with
lm-eval's own ``hf`` and with this package's engine in alternation, and prints as Markdown:

* the speed-up: stock's wall time over ours, stock at that of the batch sizes 1, 4 and 16 that
  serves it best on the first paper, and at the largest of them that fits in memory, beside the
  token ratio: the tokens stock computes, padding left out, over the distinct ones;
* the share of the practical floor: the time of one plain forward pass over the paper's distinct
  tokens (no cache, logits for the candidates' tokens only), over our time;
* the memory ratio: our peak above the loaded model over stock's, on two papers, each in a process
  of its own;
* how time per distinct token changes with the prefix's length, the number of candidates and the
  size of the vocabulary (the model's shape with random weights);
* what the values of single tokens cost that `docs/scores.md` names, over the sums alone;
* exactness: how far scores lie from those of the same weights in float32, ours and those of plain
  passes in the model's own dtype, and how many pairs of candidates change places;
* the speed-up on ordinary multiple choice: many short questions of four short answers.

Without ``--data`` the embedded demo papers are used. Only ratios are printed: seconds belong to a
machine.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from lm_eval_hyprank.energy import TokenScores
from lm_eval_hyprank.extras import Extras
from lm_eval_hyprank.models.hf import EnergyHFLM, engine_of
from lm_eval_hyprank.models.tokens import encode
from lm_eval_hyprank.prefix import Row
from lm_eval_hyprank.tasks import continuations, demo, researchbench

Paper = list[Row]
STOCK_BATCH_SIZES = (1, 4, 16)
LARGEST_SIZE_PAPERS = 3
"""Papers on which stock is also timed at its largest batch size, which serves it worse."""
SHAPES = [(450, 4), (450, 16), (450, 64), (100, 16), (1500, 16)]
"""Prefix tokens and candidates of the papers made of random tokens."""
EXTRAS = {
    "head": Extras(precap=True),
    "moments": Extras(moments=True),
    "a temperature": Extras(temperatures=frozenset({2.0})),
    "all of it": Extras(precap=True, moments=True, temperatures=frozenset({2.0})),
}
VOCABULARIES = (32_768, 65_536, 131_072, 262_144)


def load(model: str, device: str, dtype: str) -> EnergyHFLM:
    """Loads the model; both ways of scoring are tried on this one object."""
    return EnergyHFLM(pretrained=model, device=device, dtype=dtype, batch_size=16)


def with_tokenizer_of(lm: HFLM, model: Any) -> EnergyHFLM:
    """Another model with the same tokenizer."""
    return EnergyHFLM(pretrained=model, tokenizer=lm.tokenizer, batch_size=16)


def papers_of(lm: HFLM, data: str | None, count: int) -> list[Paper]:
    """Real prompts: one list of rows a paper."""
    split = (researchbench(dataset_path=data) if data else demo())["test"]
    chosen = random.Random(0).sample(range(len(split)), min(count, len(split)))
    return [
        encode(lm, [(doc["context"], text) for text in continuations(doc)])
        for doc in (split[index] for index in chosen)
    ]


def paper_of_shape(prefix: int, candidates: int, seed: int) -> Paper:
    """A paper of random tokens, candidates as long as real ones: 40 to 236 tokens, mean 138."""
    generator = random.Random(seed)

    def tokens(size: int) -> tuple[int, ...]:
        return tuple(generator.randrange(100, 30_000) for _ in range(size))

    context = tokens(prefix)
    # Spread evenly, so that the mean is no matter of the seed.
    sizes = [40 + round(196 * index / (candidates - 1)) for index in range(candidates)]
    generator.shuffle(sizes)
    return [Row(context, tokens(size)) for size in sizes]


def multiple_choice(questions: int) -> list[Instance]:
    """Requests of short questions of 20 to 60 words with four answers of 1 to 8 words."""
    generator = random.Random(0)
    words = ["plant", "light", "water", "a", "the", "of", "makes", "which", "salt", "in", "sugar"]

    def text(least: int, most: int) -> str:
        return " ".join(generator.choices(words, k=generator.randint(least, most)))

    requests = []
    for number in range(questions):
        question = f"Question {number}: {text(20, 60)}?\nAnswer:"
        for choice in range(4):
            pair = (question, f" {text(1, 8)}")
            requests.append(Instance("loglikelihood", {}, pair, choice, metadata=("mc", number, 1)))
    return requests


def distinct_tokens(paper: Paper) -> int:
    """Tokens of the prefix, once, and of the candidates."""
    return len(paper[0].prefix) + sum(len(row.continuation) for row in paper)


def token_ratio(paper: Paper) -> float:
    """Tokens of all sequences over distinct tokens: what reuse alone can save, padding aside."""
    return sum(len(row.prefix) + len(row.continuation) for row in paper) / distinct_tokens(paper)


def run_stock(lm: HFLM, paper: Paper, batch_size: int) -> None:
    """lm-eval's own scoring."""
    lm.batch_size_per_gpu = batch_size
    requests = [(("", ""), list(row.prefix), list(row.continuation)) for row in paper]
    HFLM._loglikelihood_tokens(lm, requests, disable_tqdm=True)


def run_ours(lm: HFLM, paper: Paper, extras: Extras | None = None) -> None:
    """This package's engine."""
    for _ in engine_of(lm, paper).score(paper, extras):
        pass


def run_floor(lm: HFLM, paper: Paper) -> None:
    """One plain forward pass over as many tokens, with logits where a candidate is predicted."""
    ids = [*paper[0].prefix, *(token for row in paper for token in row.continuation)]
    keep = sum(len(row.continuation) for row in paper)
    with torch.no_grad():
        lm.model(torch.tensor([ids], device=lm.device), use_cache=False, logits_to_keep=keep)


def seconds(lm: HFLM, work: Callable[..., Any], *arguments: Any) -> float:
    """Wall time of ``work(*arguments)``, the device's queue drained."""
    synchronize = torch.cuda.synchronize if lm.device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    work(*arguments)
    synchronize()
    return time.perf_counter() - start


def alternate(lm: HFLM, papers: Sequence[Paper], size: int) -> dict[str, float]:
    """Medians over papers, all ways timed in turn: speed-up over stock at a size, floor's share."""
    found: dict[str, list[float]] = {}
    engine_of(lm, [row for paper in papers for row in paper])  # its self-check, once and for all
    for paper in track(papers, transient=True):
        ours, stock = seconds(lm, run_ours, lm, paper), seconds(lm, run_stock, lm, paper, size)
        floor = seconds(lm, run_floor, lm, paper)
        values = {
            f"speed-up over stock at batch size {size}": stock / ours,
            "token ratio": token_ratio(paper),
            "share of the practical floor": floor / ours,
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def largest_stock_batch_size(lm: HFLM, papers: Sequence[Paper]) -> int:
    """The largest batch size whose logits, and their log-softmax, stock can hold in memory."""
    if lm.device.type == "cuda":
        free = torch.cuda.mem_get_info(lm.device)[0]
    else:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    longest = max(len(row.prefix) + len(row.continuation) for paper in papers for row in paper)
    row_bytes = longest * lm.config.get_text_config().vocab_size * lm.model.dtype.itemsize
    # Two copies and room for the rest: a killed process would take others with it.
    return max(size for size in STOCK_BATCH_SIZES if size == 1 or 3 * size * row_bytes < free)


def best_stock_batch_size(lm: HFLM, paper: Paper, largest: int) -> int:
    """The batch size at which stock is fastest on this paper."""
    run_ours(lm, paper)  # what runs first warms up, and it shall not be held against any size
    sizes = [size for size in STOCK_BATCH_SIZES if size <= largest]
    return min(sizes, key=lambda size: seconds(lm, run_stock, lm, paper, size))


def fastest(lm: HFLM, times: int, work: Callable[..., Any], *arguments: Any) -> float:
    """The least wall time of several: what else the machine does only adds to it."""
    return min(seconds(lm, work, *arguments) for _ in range(times))


def attention_share(lm: HFLM, paper: Paper) -> float | None:
    """Share of our time that attention takes, which grows with the length of what is attended.

    None for a model that does not call torch's attention.
    """
    cuda = lm.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        seconds(lm, run_ours, lm, paper)
    kind = "device" if cuda else "cpu"
    calls = profiler.key_averages()
    total = sum(getattr(call, f"self_{kind}_time_total") for call in calls)
    attention = [
        getattr(call, f"{kind}_time_total")
        for call in calls
        if call.key == "aten::scaled_dot_product_attention"
    ]
    return sum(attention) / total if attention else None


def peak_memory(way: str, batch_size: int, options: argparse.Namespace) -> int:
    """Bytes above the loaded model at the peak of scoring, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scoring", "--model", options.model]
    command += ["--device", options.device, "--dtype", options.dtype, "--memory-of", way]
    command += ["--papers", "2", "--stock-batch-size", str(batch_size)]
    command += ["--data", options.data] if options.data else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def measure_memory(options: argparse.Namespace) -> None:
    """Prints what `peak_memory` reads; the other end of its pipe."""
    lm = load(options.model, options.device, options.dtype)
    papers = papers_of(lm, options.data, options.papers)
    cuda = lm.device.type == "cuda"

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        for parameter in lm.model.parameters():
            parameter.sum()  # weights mapped from a file count only once they are touched
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before = resident("VmRSS")
    for paper in papers:
        if options.memory_of == "ours":
            run_ours(lm, paper)
        else:
            run_stock(lm, paper, options.stock_batch_size)
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    print(json.dumps(peak - before))


def print_real(console: Console, lm: HFLM, options: argparse.Namespace) -> None:
    """Real prompts: speed, the floor and memory."""
    papers = papers_of(lm, options.data, options.papers)
    largest = largest_stock_batch_size(lm, papers)
    best = best_stock_batch_size(lm, papers[0], largest)
    ours, stock = (peak_memory(way, largest, options) for way in ("ours", "stock"))
    table = Table("real prompts", "value", box=box.MARKDOWN)
    table.add_row("papers", str(len(papers)))
    table.add_row("distinct tokens a paper", f"{statistics.mean(map(distinct_tokens, papers)):.0f}")
    table.add_row("stock's best batch size", str(best))
    for name, value in alternate(lm, papers, best).items():
        table.add_row(name, f"{value:.2f}")
    if largest != best:
        some = papers[:LARGEST_SIZE_PAPERS]
        name = f"speed-up over stock at batch size {largest}"
        table.add_row(f"{name} ({len(some)} papers)", f"{alternate(lm, some, largest)[name]:.2f}")
    table.add_row(f"peak memory / stock's at batch size {largest}", f"{ours / stock:.3f}")
    table.add_row("peak memory above the model", f"{ours / 2**30:.2f} GiB")
    console.print(table)


def print_shapes(console: Console, lm: HFLM) -> None:
    """How speed and cost change with the prefix and the number of candidates."""
    papers = [paper_of_shape(*shape, seed=sum(shape)) for shape in SHAPES]
    largest = largest_stock_batch_size(lm, papers)
    names = ["prefix x candidates", "stock's best batch size", "speed-up over it"]
    names += [f"over stock at {largest}", "token ratio", "share of floor"]
    names += ["time a token (relative)", "without attention"]
    table = Table(*names, box=box.MARKDOWN)
    base = base_aside = None
    for shape, paper in track(
        list(zip(SHAPES, papers, strict=True)), console=console, transient=True
    ):
        ours = fastest(lm, 2, run_ours, lm, paper)
        stock = {
            size: fastest(lm, 2, run_stock, lm, paper, size)
            for size in STOCK_BATCH_SIZES
            if size <= largest
        }
        best = min(stock, key=lambda size: stock[size])
        floor = fastest(lm, 2, run_floor, lm, paper)
        a_token = ours / distinct_tokens(paper)
        base = base or a_token
        values = [stock[best] / ours, stock[largest] / ours, token_ratio(paper), floor / ours]
        values.append(a_token / base)
        if (share := attention_share(lm, paper)) is not None:
            aside = a_token * (1 - share)
            base_aside = base_aside or aside
            values.append(aside / base_aside)
        numbers = (f"{value:.2f}" for value in values)
        table.add_row(f"{shape[0]} x {shape[1]}", str(best), *numbers)
    console.print(table)


def print_vocabularies(console: Console, lm: HFLM) -> None:
    """How cost changes with the vocabulary, the rest of the model's shape alike."""
    table = Table("vocabulary", "share of floor", "time (relative)", box=box.MARKDOWN)
    paper = paper_of_shape(450, 16, seed=0)
    base = None
    for vocabulary in track(VOCABULARIES, console=console, transient=True):
        config = copy.deepcopy(lm.config)
        config.get_text_config().vocab_size = vocabulary
        model = AutoModelForCausalLM.from_config(config).to(lm.device, lm.model.dtype).eval()
        other = with_tokenizer_of(lm, model)
        ours = fastest(other, 2, run_ours, other, paper)
        floor = fastest(other, 2, run_floor, other, paper)
        base = base or ours
        table.add_row(f"{vocabulary:,}", f"{floor / ours:.2f}", f"{ours / base:.2f}")
    console.print(table)


def print_extras(console: Console, lm: HFLM, papers: Sequence[Paper]) -> None:
    """What further values of every token cost, in the time of a paper's sums."""
    table = Table("what is computed", "time (relative)", box=box.MARKDOWN)
    run_ours(lm, papers[0], EXTRAS["all of it"])  # warms up, and finds where the head's output is
    ratios: dict[str, list[float]] = {name: [] for name in EXTRAS}
    for paper in track(papers, console=console, transient=True):
        for name, extras in EXTRAS.items():
            before = seconds(lm, run_ours, lm, paper)
            between = seconds(lm, run_ours, lm, paper, extras)
            after = seconds(lm, run_ours, lm, paper)
            ratios[name].append(between / ((before + after) / 2))
    for name, values in ratios.items():
        table.add_row(name, f"{statistics.median(values):.2f}")
    console.print(table)


def plain_scores(lm: HFLM, row: Row) -> TokenScores:
    """One plain pass over the row alone, statistics in float64."""
    ids = torch.tensor([[*row.prefix, *row.continuation]], device=lm.device)
    with torch.no_grad():
        logits = lm.model(ids, use_cache=False).logits[0, len(row.prefix) - 1 : -1].cpu().double()
    targets = torch.tensor(row.continuation)
    raw, greedy = -logits.gather(1, targets[:, None])[:, 0], logits.argmax(dim=1) == targets
    return TokenScores(raw, logits.logsumexp(dim=1), greedy)


class Departure(NamedTuple):
    """How mean scores of papers' candidates differ from exact ones, lower ranking first.

    Attributes:
        largest: The largest difference of a score, in nats.
        swapped: Pairs of one paper's candidates that change places.
        pairs: All pairs.
        gap: The largest exact difference of a pair that changes places, in nats.
        ties: Pairs that are equal, and exactly are not.
    """

    largest: float
    swapped: int
    pairs: int
    gap: float
    ties: int


def departure(exact: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> Departure:
    """Compares scores, a sequence for each paper."""
    papers = list(zip(exact, found, strict=True))
    largest = max(abs(a - b) for paper in papers for a, b in zip(*paper, strict=True))
    pairs = [
        (right[0] - left[0], right[1] - left[1])
        for paper in papers
        for left, right in itertools.combinations(zip(*paper, strict=True), 2)
    ]
    gaps = [abs(exactly) for exactly, here in pairs if exactly * here < 0]
    ties = sum(here == 0 != exactly for exactly, here in pairs)
    return Departure(largest, len(gaps), len(pairs), max(gaps, default=0.0), ties)


def print_exactness(console: Console, lm: EnergyHFLM, papers: Sequence[Paper]) -> None:
    """How far a candidate's mean scores lie from those of the same weights in float32."""
    exact_lm = with_tokenizer_of(lm, copy.deepcopy(lm.model).float())
    found: dict[str, list[list[TokenScores]]] = {"exact": [], "ours": [], "plain passes": []}
    for paper in track(papers, console=console, transient=True):
        found["exact"].append([plain_scores(exact_lm, row) for row in paper])
        found["plain passes"].append([plain_scores(lm, row) for row in paper])
        scored = (pair for part in engine_of(lm, paper).score(paper) for pair in part)
        found["ours"].append([scores for _, scores in sorted(scored, key=lambda pair: pair[0])])
    columns = ["score", "by", "largest difference", "pairs that change places", "their largest gap"]
    table = Table(*columns, "new ties", box=box.MARKDOWN)
    for score in ("nll", "raw"):
        means = {
            way: [[float(getattr(each, score).mean()) for each in paper] for paper in scores]
            for way, scores in found.items()
        }
        for way in ("ours", "plain passes"):
            off = departure(means["exact"], means[way])
            swapped, gap = f"{off.swapped} of {off.pairs}", f"{off.gap:.1e}" if off.swapped else ""
            table.add_row(score, way, f"{off.largest:.1e}", swapped, gap, str(off.ties))
    console.print(table)


def print_multiple_choice(console: Console, lm: EnergyHFLM) -> None:
    """Speed on what stock tasks ask, stock at its best batch size."""
    requests = multiple_choice(questions=48)

    def stock(size: int) -> None:
        lm.batch_size_per_gpu = size
        HFLM.loglikelihood(lm, requests, disable_tqdm=True)

    def ours() -> None:
        lm.loglikelihood(requests, disable_tqdm=True)

    ours()
    best = min(STOCK_BATCH_SIZES, key=lambda size: seconds(lm, stock, size))
    ratios = []
    for _ in range(3):
        before = seconds(lm, ours)
        between = seconds(lm, stock, best)
        ratios.append(between / ((before + seconds(lm, ours)) / 2))
    table = Table("ordinary multiple choice", "value", box=box.MARKDOWN)
    table.add_row("stock's best batch size", str(best))
    table.add_row("speed-up over stock", f"{statistics.median(ratios):.2f}")
    console.print(table)


def main() -> None:
    """Runs the measurements named on the command line."""
    parts = ["real", "multiple-choice", "shapes", "vocabularies", "extras", "exactness"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or hub id of the model")
    parser.add_argument("--data", help="folder with ResearchBench (default: the demo papers)")
    parser.add_argument("--papers", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--stock-batch-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", choices=["ours", "stock"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        measure_memory(options)
        return

    console = Console(width=180, highlight=False)
    lm = load(options.model, options.device, options.dtype)
    console.print(
        f"{Path(options.model).name}, {options.dtype}, {options.device}, "
        f"{torch.get_num_threads()} thread(s); {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {version('transformers')}, lm_eval {version('lm_eval')}; "
        f"{time.strftime('%Y-%m-%d')}\n",
        soft_wrap=True,
    )
    if "real" in options.parts:
        print_real(console, lm, options)
    if "multiple-choice" in options.parts:
        print_multiple_choice(console, lm)
    if "shapes" in options.parts:
        print_shapes(console, lm)
    if "vocabularies" in options.parts:
        print_vocabularies(console, lm)
    if "extras" in options.parts:
        print_extras(console, lm, papers_of(lm, options.data, options.papers))
    if "exactness" in options.parts:
        print_exactness(console, lm, papers_of(lm, options.data, options.papers))


if __name__ == "__main__":
    main()
