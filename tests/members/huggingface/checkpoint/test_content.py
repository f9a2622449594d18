"""Digests of checkpoints' files: what a model that was trained again changes, and where samples look."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from ensemble.common.digests import FileDigests
from ensemble.common.errors import CheckpointError
from ensemble.members.huggingface.checkpoint.digests import (
    tokenizer_digest,
    weight_samples,
    weights_digest,
)
from ensemble.members.huggingface.checkpoint.tokenizer_files import TOKENIZER_FILES

MIB = 1 << 20
TENSORS = 14


def random_bytes(count: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 28 MiB that the real library wrote: large tensors, and a tiny one behind each."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    tensors = {f"{n:02d}.weight": random_bytes(2 * MIB, n) for n in range(TENSORS)}
    tensors |= {f"{n:02d}.bias": random_bytes(100, n) for n in range(TENSORS)}
    save_file(tensors, path)
    return path


def digest(path: Path, whole: bool = False) -> str:
    return FileDigests(whole).digest(path, weight_samples(path))


def spans(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes lie in the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }


@contextmanager
def overwritten(path: Path, start: int, stop: int) -> Iterator[None]:
    """Every byte of a span is another one within the block."""
    with path.open("r+b") as file:
        file.seek(start)
        before = file.read(stop - start)
        file.seek(start)
        file.write((~np.frombuffer(before, np.uint8)).tobytes())
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(before)


def test_every_tensor_that_was_trained_again_is_seen(large: Path) -> None:
    before = digest(large)
    for name, (start, stop) in spans(large).items():
        with overwritten(large, start, stop):
            assert digest(large) != before, name
    assert digest(large) == before


def test_a_model_trained_again_is_seen_though_its_edges_are_the_same(large: Path) -> None:
    before = digest(large)
    with overwritten(large, 2 * MIB, large.stat().st_size - 2 * MIB):
        assert digest(large) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "broken.safetensors"])
def test_files_without_a_header_are_sampled_evenly(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(random_bytes(12 * MIB, 1).tobytes())
    before = digest(path)
    # A 64th of what lies between the edges is 160 KiB: no span of that length goes unseen.
    for start in range(MIB, 11 * MIB - 164 * 1024, 1_111_111):
        with overwritten(path, start, start + 164 * 1024):
            assert digest(path) != before


def test_the_first_and_the_last_byte_and_the_header_count(large: Path) -> None:
    before = digest(large)
    size = large.stat().st_size
    for place in (0, 8, size - MIB, size - 1):
        with overwritten(large, place, place + 1):
            assert digest(large) != before


def test_a_few_bytes_between_samples_are_seen_only_where_all_are_read(large: Path) -> None:
    start, _ = spans(large)["07.weight"]
    sampled, whole = digest(large), digest(large, whole=True)
    assert sampled != whole
    edits = range(start, start + 2 * MIB, 300_007)
    unseen = 0
    for place in edits:
        with overwritten(large, place, place + 4):
            unseen += digest(large) == sampled
            assert digest(large, whole=True) != whole
    assert unseen > len(edits) // 2


def test_a_header_counts_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"{n}.{'x' * 4000}": random_bytes(10_000, n) for n in range(500)}, path)
    content = bytearray(path.read_bytes())
    before = digest(path)
    for name in ("3", "250", "499"):
        place = content.index(f'"{name}.x'.encode()) + 2000
        content[place : place + 1] = b"y"
        path.write_bytes(content)
        after = digest(path)
        assert after != before
        before = after


def test_the_size_counts_where_all_samples_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    digests = set()
    for size in (10 * MIB, 10 * MIB + 1, 11 * MIB):
        with path.open("wb") as file:
            file.truncate(size)
        digests.add(digest(path))
    assert len(digests) == 3


@pytest.mark.parametrize("size", [0, 1, 5_000, 2 * MIB + 100_000])
def test_small_files_are_read_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(random_bytes(size, 2).tobytes())
    before = digest(path)
    for place in {0, size // 2, size - 1} if size else ():
        with overwritten(path, place, place + 1):
            assert digest(path) != before
    with path.open("ab") as file:
        file.write(b"x")
    assert digest(path) != before


def test_a_file_is_read_once_and_one_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a")
    files = FileDigests(whole=False)
    before = files.digest(path, weight_samples(path))
    assert files.for_another().digest(path, weight_samples(path)) == before
    path.write_bytes(b"b")
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while the run started"):
        files.digest(path, weight_samples(path))
    assert digest(path) != before
    with pytest.raises(CheckpointError, match=r"none\.safetensors cannot be read"):
        files.digest(tmp_path / "none.safetensors", weight_samples(path))


def test_every_file_that_a_tokenizer_of_transformers_reads_counts(tmp_path: Path) -> None:
    result = importlib.util.find_spec("transformers")
    assert result is not None
    assert result.origin is not None
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    names |= {"chat_template.jinja", "additional_chat_templates/tool.jinja", "tokenizer.model.v3"}
    for source in Path(result.origin).parent.glob("models/*/tokenization_*.py"):
        for table in re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", source.read_text(encoding="utf-8"), re.S):
            names |= set(re.findall(r': "([^"]+)"', table))
    assert len(names) > 25
    for name in names:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in TOKENIZER_FILES), name
    for name in (
        "config.json",
        "model.safetensors",
        "README.md",
        "generation_config.json",
        "training_args.bin",
    ):
        assert not any(fnmatch.fnmatch(name, pattern) for pattern in TOKENIZER_FILES), name


def weights_of(folder: Path, *, runs_code: bool = False, **model_kwargs: object) -> str:
    return weights_digest(folder, model_kwargs, runs_code, FileDigests(whole=False))


def test_files_that_the_settings_choose_count(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder in (tmp_path, inner):
        for name in ("config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json"):
            (folder / name).write_text("before")
    own = tmp_path.parent / "own.json"
    own.write_text("before")

    def digests() -> dict[str, str]:
        kwargs = {"subfolder": "inner", "tokenizer_file": str(own), "other": "\0" + "x" * 300}
        return {
            "plain": weights_of(tmp_path),
            "subfolder": weights_of(tmp_path, subfolder="inner"),
            "pickles": weights_of(tmp_path, use_safetensors=False),
            "tokenizer": tokenizer_digest(tmp_path, {}, FileDigests(whole=False)),
            "tokenizer by settings": tokenizer_digest(tmp_path, kwargs, FileDigests(whole=False)),
        }

    def changed_by(path: Path) -> set[str]:
        before = digests()
        path.write_text("after")
        return {name for name, result in digests().items() if result != before[name]}

    assert changed_by(tmp_path / "pytorch_model.bin") == {"pickles"}
    assert changed_by(inner / "model.safetensors") == {"subfolder"}
    assert changed_by(inner / "config.json") == {"subfolder"}
    assert changed_by(inner / "tokenizer.json") == {"tokenizer by settings"}
    assert changed_by(own) == {"tokenizer by settings"}
    assert changed_by(tmp_path / "tokenizer.json") == {"tokenizer", "tokenizer by settings"}
    assert changed_by(tmp_path / "model.safetensors") == {"plain", "subfolder", "pickles"}


def test_code_counts_where_it_runs(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("weights")
    plain, trusted = weights_of(tmp_path), weights_of(tmp_path, runs_code=True)
    (tmp_path / "modeling_own.py").write_text("scale = 2\n")
    assert weights_of(tmp_path) == plain
    assert weights_of(tmp_path, runs_code=True) != trusted


def test_a_copied_folder_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for name in ("config.json", "a.safetensors", "b.safetensors", "tokenizer.json"):
        (tmp_path / "one" / name).write_text(name)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    assert weights_of(tmp_path / "one") == weights_of(tmp_path / "other")
    results = [tokenizer_digest(tmp_path / name, {}, FileDigests(whole=False)) for name in ("one", "other")]
    assert results[0] == results[1]
    (tmp_path / "other" / "b.safetensors").rename(tmp_path / "other" / "c.safetensors")
    assert weights_of(tmp_path / "one") != weights_of(tmp_path / "other")
