"""torch.compile: the numbers of eager row by row, and an error that names the key if compiling fails."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import image_reference, make_checkpoint, make_image_checkpoint, make_texts, reference
from tests.images import make_image
from tests.members.huggingface.scoring.test_compute import member_of, read_shard
from tests.members.huggingface.scoring.test_float32 import make_overflowing
from tests.members.huggingface.scoring.test_predict import LABELS
from tests.members.image_cls.test_image_cls import LABELS as OF_IMAGES
from tests.members.image_cls.test_image_cls import make_member, predict

pytestmark = [
    pytest.mark.usefixtures("one_thread", "compiler_of_its_own"),
    pytest.mark.filterwarnings("default"),  # torch's compiler is warned of what it calls itself
]
TEXTS = ["a", *make_texts(40), "food and drink " * 30]
NO_COMPILER = shutil.which("g++") is None or not Path(sysconfig.get_path("include"), "Python.h").is_file()
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="there is no g++, or no Python.h")


@pytest.fixture
def compiler_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With an empty cache, and nothing of it left in this process afterwards."""
    import torch

    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    yield
    torch.compiler.reset()


def check_rows(folder: Path, model: Path, dtype: str, within: float) -> Any:
    """A compiled member's probabilities against those of transformers, which runs each text alone."""
    _, predict = member_of(folder, model, TEXTS, torch_compile=True, dtype=dtype)
    work = predict()
    got = read_shard(folder / "shards", work.shard)
    np.testing.assert_allclose(got[:, 1:], reference(model, TEXTS, 128), atol=within)
    assert any((folder / "code").iterdir()), "it was compiled"
    return work


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gemma2", "bert"])
def test_rows_have_the_numbers_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", architecture, LABELS)
    assert check_rows(tmp_path, model, "float32", 1e-5).counters.batches > 3


@needs_compiler
@pytest.mark.long
def test_overflows_run_again_in_float32_and_not_in_what_was_compiled(tmp_path: Path) -> None:
    model = make_overflowing(tmp_path / "m", "llama")
    counters = check_rows(tmp_path, model, "float16", 2e-2).counters
    assert counters.recomputed_rows + counters.float32_rows > 0


@needs_compiler
@pytest.mark.long
def test_images(tmp_path: Path) -> None:
    model = make_image_checkpoint(tmp_path / "vit", "vit", OF_IMAGES)
    paths = [make_image(tmp_path / f"{number}.png", seed=number) for number in range(12)]
    member = make_member(model, paths, torch_compile=True)
    values, _, counters = predict(member, range(len(paths)))
    assert any((tmp_path / "code").iterdir()), "it was compiled"
    np.testing.assert_allclose(values, image_reference(model, paths), atol=2e-6)
    assert counters.batches > 0


@pytest.mark.long
def test_a_compiler_that_fails_is_an_error_that_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    missing = str(tmp_path / "missing")
    monkeypatch.setenv("CXX", missing)
    model = make_checkpoint(tmp_path / "m", "llama", LABELS)
    # Imported for an earlier test, torch's compiler has looked at the environment already.
    message = r"torch_compile: compiling failed \(.*; remove the key"
    with config.patch({"cpp.cxx": (None, missing)}), pytest.raises(ValueError, match=message):
        member_of(tmp_path, model, TEXTS, torch_compile=True)
