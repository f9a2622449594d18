"""Checkpoints that are averaged while they are loaded, against a checkpoint that was averaged by hand and saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.members.huggingface.spec import BACKBONE, CLASSIFIER, IMAGE_CLASSIFIER, LANGUAGE_MODEL
from tests.checkpoints import make_adapter, make_checkpoint, make_language_model, make_texts
from tests.members.huggingface.scoring.test_predict import LABELS, compute, worker_spec
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = make_texts(8, longest=20)
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BY_HAND = {
    **{"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"},
    **{"model.norm": "cpu", "model.rotary_emb": "cpu", "score": "cpu"},
}

CODE = """
import torch
from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel

class Config(LlamaConfig):
    model_type = "mine"

class Model(LlamaPreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
"""


def make_folds(folder: Path, architecture: str, count: int = 3) -> list[Path]:
    """Fine-tuned checkpoints of one model, as different trainings save them: in shards, in another precision."""
    folds = [folder / str(number) for number in range(count)]
    for number, fold in enumerate(folds):
        dtype = "bfloat16" if number == 1 else "float32"
        make_checkpoint(fold, architecture, LABELS, seed=number, dtype=dtype)
    in_shards(folds[-1])
    return folds


def in_shards(folder: Path) -> None:
    """Put the weights into two files and an index, the last names first."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors, reverse=True)
    index: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    document = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(document, encoding="utf-8")


def by_hand(folds: Sequence[Path], folder: Path) -> Path:
    """The mean of checkpoints as a checkpoint."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folds[0], folder)
    contents = [
        {name: tensor for path in fold.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for fold in folds
    ]
    means = {}
    for name, tensor in contents[0].items():
        means[name] = tensor
        if tensor.is_floating_point():
            total = sum((content[name].float() for content in contents[1:]), tensor.float())
            means[name] = total / len(folds)
            if tensor.dim() > 1:
                stacked = torch.stack([content[name].float() for content in contents])
                assert torch.equal(means[name], stacked.mean(0))
    save_file(means, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def averaged(folds: Sequence[Path], **changes: Any) -> Any:
    return worker_spec(folds[0], averaged_checkpoints=tuple(map(str, folds)), **changes)


def weights(spec: Any) -> dict[str, Any]:
    from ensemble.members.huggingface.loading.load import load_on_devices

    loaded = load_on_devices(spec)
    assert ("mean of 3 checkpoints" in loaded.notes) == bool(spec.averaged_checkpoints)
    return {"class": type(loaded.model), **loaded.model.state_dict()}


def assert_same_weights(folds: Sequence[Path], expected: Path, **changes: Any) -> None:
    import torch

    ours, theirs = weights(averaged(folds, **changes)), weights(worker_spec(expected, **changes))
    assert ours.keys() == theirs.keys()
    assert ours.pop("class") is theirs.pop("class")
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_bit_is_that_of_a_mean_by_hand(dtype: str, tmp_path: Path) -> None:
    folds = make_folds(tmp_path, "llama")
    assert_same_weights(folds, by_hand(folds, tmp_path / "mean"), dtype=dtype)


@pytest.mark.parametrize(
    "architecture", one_in(3, ["gemma3", "deberta-v2", "gpt2", "roberta", "gemma2", "mistral"])
)
def test_architectures_whose_names_and_parts_transformers_changes(architecture: str, tmp_path: Path) -> None:
    folds = make_folds(tmp_path, architecture)
    expected = by_hand(folds, tmp_path / "mean")
    assert_same_weights(folds, expected, dtype="float32")
    # A classifier's checkpoint without its head.
    assert_same_weights(folds, expected, dtype="bfloat16", auto_class=BACKBONE)
    rows = [{"text": text} for text in TEXTS]
    plain = compute(worker_spec(expected), rows)
    np.testing.assert_array_equal(compute(averaged(folds), rows), plain)


def test_a_mixture_whose_experts_become_one_tensor(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, MixtralConfig

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        pad_token_id=0,
        num_labels=3,
    )
    folds = [tmp_path / str(number) for number in range(3)]
    for number, fold in enumerate(folds):
        torch.manual_seed(number)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(fold)
    assert_same_weights(folds, by_hand(folds, tmp_path / "mean"), dtype="float32", auto_class=CLASSIFIER)


def test_a_language_model_whose_head_is_its_embeddings(tmp_path: Path) -> None:
    folds = [
        make_language_model(tmp_path / str(number), "qwen2", seed=number, tie_word_embeddings=True)
        for number in range(3)
    ]
    expected = by_hand(folds, tmp_path / "mean")
    assert_same_weights(folds, expected, dtype="float32", auto_class=LANGUAGE_MODEL)


def test_an_image_classifier_counts_batches_as_the_first_did(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForImageClassification, ResNetConfig

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    folds = [tmp_path / str(number) for number in range(3)]
    for number, fold in enumerate(folds):
        torch.manual_seed(number)
        model = AutoModelForImageClassification.from_config(config)
        for name, buffer in model.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer.fill_(10 + number)
        model.save_pretrained(fold)
    expected = by_hand(folds, tmp_path / "mean")
    assert_same_weights(folds, expected, dtype="float32", auto_class=IMAGE_CLASSIFIER)
    counts = [
        value
        for name, value in weights(averaged(folds, dtype="float32", auto_class=IMAGE_CLASSIFIER)).items()
        if name.endswith("num_batches_tracked")
    ]
    assert {int(count) for count in counts} == {10}


@pytest.mark.parametrize("settings", [FOUR_BITS, {"load_in_8bit": True}], ids=["nf4", "int8"])
def test_the_mean_is_quantized_and_not_its_parts(settings: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folds = make_folds(tmp_path, "llama")
    assert_same_weights(folds, by_hand(folds, tmp_path / "mean"), quantization_config=settings)


def test_weights_on_the_disk(tmp_path: Path) -> None:
    folds, rows = make_folds(tmp_path, "llama"), [{"text": text} for text in TEXTS]
    plain = compute(worker_spec(by_hand(folds, tmp_path / "mean")), rows)
    placement = {"device_map": BY_HAND, "offload_folder": str(tmp_path / "disk")}
    np.testing.assert_allclose(compute(averaged(folds, **placement), rows), plain, atol=1e-6)


def test_keys_of_the_config_and_dropout_in_model_kwargs(tmp_path: Path) -> None:
    folds = make_folds(tmp_path, "llama")
    rows = [{"text": text} for text in TEXTS]
    expected = by_hand(folds, tmp_path / "mean")
    changed = {"model_kwargs": {"rms_norm_eps": 0.5, "low_cpu_mem_usage": True}}
    plain = compute(worker_spec(expected, **changed), rows)
    np.testing.assert_array_equal(compute(averaged(folds, **changed), rows), plain)
    assert np.abs(plain - compute(worker_spec(expected), rows)).max() > 1e-3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
@pytest.mark.parametrize("merge", [False, True], ids=["beside", "merged"])
def test_an_adapter_over_averaged_checkpoints(merge: bool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folds = make_folds(tmp_path, "llama")
    expected = by_hand(folds, tmp_path / "mean")
    adapter = make_adapter(tmp_path / "adapter", folds[0], 3, seed=5)
    changes = {"adapter_name_or_path": str(adapter), "merge_adapter": merge, "dtype": "float32"}
    rows = [{"text": text} for text in TEXTS]
    plain = compute(worker_spec(expected, **changes), rows)
    np.testing.assert_array_equal(compute(averaged(folds, **changes), rows), plain)
    assert np.abs(plain - compute(averaged(folds), rows)).max() > 1e-3


def test_code_of_the_checkpoint(tmp_path: Path) -> None:
    folds = make_folds(tmp_path, "llama")
    for fold in folds:
        (fold / "mine.py").write_text(CODE, encoding="utf-8")
        config = json.loads((fold / "config.json").read_text(encoding="utf-8"))
        config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", CLASSIFIER: "mine.Model"}}
        (fold / "config.json").write_text(json.dumps(config), encoding="utf-8")
    expected = by_hand(folds, tmp_path / "mean")
    import torch

    ours, theirs = (
        weights(spec)
        for spec in (
            averaged(folds, trust_remote_code=True, dtype="float32"),
            worker_spec(expected, trust_remote_code=True, dtype="float32"),
        )
    )
    assert ours.pop("class").__name__ == theirs.pop("class").__name__ == "Model"
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
