"""Time and memory of scoring candidates, against stock lm-eval in the same run.

``python -m benchmarks.scoring --model DIR [--data DIR] [--papers N]`` scores the same papers with
lm-eval's own ``hf`` and with this package's engine in alternation, and prints:

* the speed-up: stock's wall time over ours, stock at the batch size that serves it best;
* the share of the practical floor: the time of one plain forward pass over the paper's distinct
  tokens (no cache, logits for the candidates' tokens only), over our time;
* the memory ratio: our peak above the loaded model over stock's, each in a process of its own;
* how time per distinct token changes with the prefix's length and the number of candidates.

Without ``--data`` the embedded demo papers are used. Only ratios are printed: seconds belong to a
machine.
"""

from __future__ import annotations

import argparse
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
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lm_eval_hyprank.models.hf import EnergyHFLM, _engine, encode
from lm_eval_hyprank.prefix import Row
from lm_eval_hyprank.tasks import continuations, demo, researchbench

Paper = list[Row]
STOCK_BATCH_SIZES = (1, 4, 16)


def load(model: str, device: str, dtype: str, batch_size: int) -> EnergyHFLM:
    """Loads the model; both ways of scoring are tried on this one object."""
    return EnergyHFLM(pretrained=model, device=device, dtype=dtype, batch_size=batch_size)


def papers_of(lm: HFLM, data: str | None, count: int) -> list[Paper]:
    """Real prompts: one list of rows a paper."""
    split = (researchbench(dataset_path=data) if data else demo())["test"]
    chosen = random.Random(0).sample(range(len(split)), min(count, len(split)))
    return [
        encode(lm, [(doc["context"], text) for text in continuations(doc)])
        for doc in (split[index] for index in chosen)
    ]


def paper_of_shape(lm: HFLM, prefix: int, candidates: int, seed: int) -> Paper:
    """A paper of random tokens, candidates as long as real ones (mean 138 tokens)."""
    generator = random.Random(seed)

    def tokens(size: int) -> tuple[int, ...]:
        return tuple(generator.randrange(100, lm.tokenizer.vocab_size) for _ in range(size))

    context = tokens(prefix)
    sizes = [generator.randint(40, 236) for _ in range(candidates)]
    return [Row(context, tokens(size)) for size in sizes]


def distinct_tokens(paper: Paper) -> int:
    """Tokens of the prefix, once, and of the candidates."""
    return len(paper[0].prefix) + sum(len(row.continuation) for row in paper)


def run_stock(lm: HFLM, paper: Paper, batch_size: int) -> None:
    """lm-eval's own scoring."""
    lm.batch_size_per_gpu = batch_size
    requests = [(("", ""), list(row.prefix), list(row.continuation)) for row in paper]
    HFLM._loglikelihood_tokens(lm, requests, disable_tqdm=True)


def run_ours(lm: HFLM, paper: Paper) -> None:
    """This package's engine."""
    for _ in _engine(lm, paper).score(paper):
        pass


def run_floor(lm: HFLM, paper: Paper) -> None:
    """One plain forward pass over as many tokens, with logits where a candidate is predicted."""
    ids = [*paper[0].prefix, *(token for row in paper for token in row.continuation)]
    keep = sum(len(row.continuation) for row in paper)
    with torch.no_grad():
        lm.model(torch.tensor([ids], device=lm.device), use_cache=False, logits_to_keep=keep)


def seconds(work: Callable[..., None], lm: HFLM, *arguments: Any) -> float:
    """Wall time of ``work(lm, *arguments)``, the device's queue drained."""
    synchronize = torch.cuda.synchronize if lm.device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    work(lm, *arguments)
    synchronize()
    return time.perf_counter() - start


def alternate(lm: HFLM, papers: Sequence[Paper], batch_size: int) -> tuple[float, float]:
    """Speed-up over stock and share of the floor, as medians over papers timed in turn."""
    speed_ups, shares = [], []
    for paper in papers:
        ours = seconds(run_ours, lm, paper)
        stock = seconds(run_stock, lm, paper, batch_size)
        floor = seconds(run_floor, lm, paper)
        again = seconds(run_ours, lm, paper)
        # Ours before and after: a machine that slows down meanwhile favours neither.
        ours = (ours + again) / 2
        speed_ups.append(stock / ours)
        shares.append(floor / ours)
    return statistics.median(speed_ups), statistics.median(shares)


def best_stock_batch_size(lm: HFLM, paper: Paper) -> int:
    """The batch size at which stock is fastest on this paper."""
    run_stock(
        lm, paper, STOCK_BATCH_SIZES[0]
    )  # the first pass warms up and would be held against it
    return min(STOCK_BATCH_SIZES, key=lambda size: seconds(run_stock, lm, paper, size))


def peak_memory(way: str, options: argparse.Namespace) -> int:
    """Bytes above the loaded model at the peak of scoring, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scoring", "--model", options.model]
    command += ["--device", options.device, "--dtype", options.dtype, "--memory-of", way]
    command += ["--papers", "2"] + (["--data", options.data] if options.data else [])
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def measure_memory(options: argparse.Namespace) -> None:
    """Prints what `peak_memory` reads; the other end of its pipe."""
    lm = load(options.model, options.device, options.dtype, 16)
    papers = papers_of(lm, options.data, options.papers)
    cuda = lm.device.type == "cuda"

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before = resident("VmRSS")
    for paper in papers:
        run_ours(lm, paper) if options.memory_of == "ours" else run_stock(lm, paper, 16)
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    print(json.dumps(peak - before))


def main() -> None:
    """Runs the measurements named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or hub id of the model")
    parser.add_argument("--data", help="folder with ResearchBench (default: the demo papers)")
    parser.add_argument("--papers", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-shapes", action="store_true", help="real prompts and memory only")
    parser.add_argument("--memory-of", choices=["ours", "stock"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        measure_memory(options)
        return

    console = Console()
    lm = load(options.model, options.device, options.dtype, 16)
    papers = papers_of(lm, options.data, options.papers)
    batch_size = best_stock_batch_size(lm, papers[0])
    speed_up, share = alternate(lm, papers, batch_size)
    ours, stock = peak_memory("ours", options), peak_memory("stock", options)
    console.print(
        f"{Path(options.model).name}, {options.dtype}, {options.device}, "
        f"{torch.get_num_threads()} threads; {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {version('transformers')}, lm_eval {version('lm_eval')}; "
        f"{time.strftime('%Y-%m-%d')}"
    )
    table = Table("measure", "value")
    table.add_row("papers", str(len(papers)))
    table.add_row("distinct tokens a paper", f"{statistics.mean(map(distinct_tokens, papers)):.0f}")
    table.add_row("stock's best batch size", str(batch_size))
    table.add_row("speed-up over stock", f"{speed_up:.2f}")
    table.add_row("share of the practical floor", f"{share:.2f}")
    table.add_row("peak memory / stock's at batch size 16", f"{ours / stock:.3f}")
    table.add_row("peak memory above the model", f"{ours / 2**30:.2f} GiB")
    console.print(table)
    if options.no_shapes:
        return

    table = Table("prefix", "candidates", "speed-up", "share of floor", "time a token (relative)")
    shapes = [(450, 4), (450, 16), (450, 64), (100, 16), (1500, 16)]
    base = None
    for prefix, candidates in track(shapes, console=console, transient=True):
        paper = paper_of_shape(lm, prefix, candidates, seed=prefix + candidates)
        size = best_stock_batch_size(lm, paper)
        speed_up, share = alternate(lm, [paper], size)
        rate = seconds(run_ours, lm, paper) / distinct_tokens(paper)
        base = base or rate
        table.add_row(
            str(prefix), str(candidates), f"{speed_up:.2f}", f"{share:.2f}", f"{rate / base:.2f}"
        )
    console.print(table)


if __name__ == "__main__":
    main()
