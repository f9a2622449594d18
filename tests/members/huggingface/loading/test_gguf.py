"""Weights from a GGUF file, against the same weights from safetensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ensemble.common.errors import CheckpointError
from tests.checkpoints import (
    adapter_reference,
    inspect_folder,
    make_adapter,
    make_base,
    make_checkpoint,
    make_gguf,
    make_texts,
)
from tests.members.huggingface.scoring.test_predict import LABELS, compute, worker_spec

pytest.importorskip("gguf")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
]
TEXTS = make_texts(15, longest=25)
ROWS = [{"text": text} for text in TEXTS]
LABEL_MAP = {f"LABEL_{index}": label for index, label in enumerate(LABELS)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("bases") / "llama", "llama")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "lora", llama, 3)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """A folder with a GGUF file and nothing else."""
    folder = tmp_path_factory.mktemp("a gguf")
    make_gguf(folder / "tiny.gguf", llama)
    return folder


@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_probabilities_equal_those_of_the_same_weights(
    own_tokenizer: bool, llama: Path, lora: Path, packed: Path, tmp_path: Path
) -> None:
    folder = packed
    if own_tokenizer:
        folder = Path(shutil.copytree(packed, tmp_path / "with tokenizer"))
        for file in llama.glob("tokenizer*"):
            shutil.copy(file, folder)
    spec = worker_spec(folder, gguf_file="tiny.gguf", adapter_name_or_path=str(lora))
    np.testing.assert_allclose(compute(spec, ROWS), adapter_reference(llama, lora, TEXTS, 3), atol=1e-5)


def test_a_file_without_a_head_is_refused_by_the_worker_too(packed: Path) -> None:
    from ensemble.members.huggingface.loading.load import load

    with pytest.raises(ValueError, match=r"no weights for score\.weight; they would be random"):
        load(worker_spec(packed, gguf_file="tiny.gguf"))


def test_what_is_known_before_loading(packed: Path, lora: Path, tmp_path: Path) -> None:
    def inspect(file: str, adapter: Path | None = lora, folder: Path = packed) -> tuple[int, ...]:
        name = None if adapter is None else str(adapter)
        return inspect_folder(
            folder, LABELS, LABEL_MAP, adapter_name_or_path=name, gguf_file=file
        ).label_order

    assert inspect("tiny.gguf") == (0, 1, 2)
    with pytest.raises(CheckpointError, match=r"has no file tinny\.gguf; did you mean tiny\.gguf\?"):
        inspect("tinny.gguf")
    with pytest.raises(CheckpointError, match=r"a GGUF file holds no classification head; name an adapter"):
        inspect("tiny.gguf", None)
    base = make_checkpoint(tmp_path / "base", "llama", LABELS)
    headless = make_adapter(tmp_path / "h", base, 3, task_type=None, target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match=r"a GGUF file holds no classification head; name an adapter"):
        inspect("tiny.gguf", headless)
    (tmp_path / "broken.gguf").write_bytes(b"GGML....")
    with pytest.raises(CheckpointError, match=r"broken\.gguf is not a GGUF file; copy it again"):
        inspect("broken.gguf", lora, tmp_path)
