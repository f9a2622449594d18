"""Files that may not be read, links to nothing, JSON that is none: a sentence each, by validate."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble.common.errors import CheckpointError
from ensemble.common.files import dangling_link, unreadable
from ensemble.members.huggingface.checkpoint.hub import find_file
from tests.project import ROOT, Project, python_path
from tests.sampling import one_in
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("warm")

_DROP_A_RIGHT = 24  # PR_CAPBSET_DROP (linux/prctl.h)
_ABOVE_RIGHTS = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH (linux/capability.h)


def without_roots_rights() -> None:
    """From the next exec on root is held to the rights of files like anybody else."""
    libc = ctypes.CDLL(None)
    for capability in _ABOVE_RIGHTS:
        libc.prctl(_DROP_A_RIGHT, capability, 0, 0, 0)


def validate(project: Project) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ensemble", "validate", "config.yaml"],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        preexec_fn=without_roots_rights,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def own(project: Project) -> Project:
    """A project whose llama is a copy that may be spoilt."""
    shutil.copytree(project.models / "llama", project.folder / "llama")
    config = project.config()
    config["models"][1]["model_name_or_path"] = "llama"
    project.write_config(config)
    return project


@pytest.mark.parametrize(
    "name",
    one_in(
        4,
        [
            *("config.yaml", "test.csv", "sample.csv", "llama"),
            *("llama/model.safetensors", "llama/config.json", "llama/tokenizer.json"),
        ],
    ),
)
def test_what_may_not_be_read_is_said_with_the_remedy(name: str, own: Project) -> None:
    path = own.folder / name
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        output = validate(own)
    finally:
        path.chmod(mode)
    right = "rx" if path.is_dir() else "r"
    assert f"{name} cannot be read (Permission denied for user " in output
    assert f"chmod a+{right} " in output


@pytest.mark.long
def test_a_folder_in_between_that_may_not_be_entered_is_named(own: Project) -> None:
    inner = own.folder / "closed" / "within"
    inner.mkdir(parents=True)
    shutil.copytree(own.folder / "llama", inner / "llama")
    config = own.config()
    config["models"][1]["model_name_or_path"] = "closed/within/llama"
    own.write_config(config)
    (own.folder / "closed").chmod(0)
    try:
        output = validate(own)
    finally:
        (own.folder / "closed").chmod(0o755)
    assert f"chmod a+rx {own.folder / 'closed'}," in output


@pytest.mark.parametrize("name", one_in(4, ["config.json", "", "model.safetensors", "tokenizer.json"]))
def test_links_to_nothing(name: str, own: Project) -> None:
    path = own.folder / "llama" / name
    path.rename(own.folder / "away")
    path.symlink_to("../../blobs/0123abcd")
    output = validate(own)
    assert f"{Path('llama') / name} is a link to ../../blobs/0123abcd, which is not there" in output
    assert "cp -rL" in output


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.parametrize(
    ("spoil", "words"),
    one_in(
        3,
        [
            (cut, "is not JSON ("),
            (lambda path: path.write_bytes(b""), "is empty"),
            (
                lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
                "is only a git-lfs pointer",
            ),
        ],
    ),
)
def test_a_tokenizer_that_is_not_json(spoil: Callable[[Path], object], words: str, own: Project) -> None:
    spoil(own.folder / "llama/tokenizer.json")
    output = validate(own)
    assert f"llama/tokenizer.json {words}" in output
    assert "copy it again" in output


def test_json_that_is_no_tokenizer_is_refused_in_a_sentence(own: Project) -> None:
    (own.folder / "llama/tokenizer.json").write_text('{"version": "1.0"}')
    output = validate(own)
    assert "cannot be made of its files (" in output
    assert "copy tokenizer.json and tokenizer_config.json again" in output


def test_a_name_of_the_hub_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match=r"HF_HUB_OFFLINE is set.*hf download some/model --local-dir FOLDER"
    ):
        find_file("some/model", "config.json")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    with pytest.raises(CheckpointError, match="add the model to the notebook"):
        find_file("some/model", "config.json")


def test_other_errors_keep_their_own_words(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert dangling_link(path) is None
    assert unreadable(path, OSError(5, "Input/output error")) == (
        f"{path} cannot be read (Input/output error); copy it again"
    )
