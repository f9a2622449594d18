"""What safetensors headers say, against what safetensors and transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ensemble.common.errors import CheckpointError
from ensemble.members.huggingface.checkpoint.weight_files import Tensor, read_tensors
from tests.checkpoints import make_checkpoint


def test_names_types_and_shapes_are_those_of_the_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", ["a", "b"], dtype="bfloat16")
    stored = load_file(folder / "model.safetensors")
    tensors = read_tensors(folder)
    assert tensors is not None
    assert {tensor.name: tensor.shape for tensor in tensors} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert {tensor.dtype for tensor in tensors} == {"BF16"}
    assert sum(tensor.stored_bytes for tensor in tensors) == sum(tensor.nbytes for tensor in stored.values())


def test_only_the_shards_of_the_index_count(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(2, 2)}, tmp_path / "model-2.safetensors")
    save_file({"b": torch.zeros(2, 2), "a": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_tensors(tmp_path) == (Tensor("a", "F32", (3,)), Tensor("b", "F32", (2, 2)))


@pytest.mark.fault(22)
def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors cannot be read"):
        read_tensors(tmp_path)


def test_pickles_and_empty_folders_say_nothing(tmp_path: Path) -> None:
    assert read_tensors(tmp_path) is None
    torch.save({"a": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    assert read_tensors(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        (4).to_bytes(8, "little") + b"{]{]",
        (2).to_bytes(8, "little") + b"[]",
        (23).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}  ',
        (90).to_bytes(8, "little") + b'{"a"',
    ],
)
@pytest.mark.fault(22)
def test_broken_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_tensors(tmp_path)


def test_a_type_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor a has the type F99"):
        read_tensors(tmp_path)
