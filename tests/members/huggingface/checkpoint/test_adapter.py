"""What is known of an adapter before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ensemble.common.errors import CheckpointError
from ensemble.members.huggingface.checkpoint.adapter_files import inspect_adapter
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
from ensemble.members.seq_cls.parent import SequenceClassification, SequenceClassifierSettings
from tests.checkpoints import inspect_folder, make_adapter, make_base, make_checkpoint

pytest.importorskip("peft")
pytestmark = [  # both peft's
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]
LABELS = ["a", "b", "c"]
PLAIN = {"LABEL_0": "a", "LABEL_1": "b", "LABEL_2": "c"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("bases") / "llama", "llama")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "lora", llama, 3)


def inspect(
    base: Path, adapter: Path, label_map: Mapping[str, str] = PLAIN, labels: Sequence[str] = LABELS
) -> Checkpoint:
    return inspect_folder(base, labels, label_map, adapter_name_or_path=str(adapter))


def test_a_head_says_how_many_labels_there_are(llama: Path, lora: Path) -> None:
    adapter = inspect_adapter(str(lora))
    assert (adapter.head_rows, adapter.brings_head, adapter.base) == (3, True, str(llama))
    checkpoint = inspect(llama, lora, {"LABEL_0": "c", "LABEL_1": "a", "LABEL_2": "b"})
    assert checkpoint.label_order == (1, 2, 0)
    assert checkpoint.activation == "softmax"
    assert checkpoint.warnings == (), "the base has no head, but the adapter has"
    with pytest.raises(CheckpointError, match=r"lora has 3 labels .LABEL_0.*, the config has 2"):
        inspect(llama, lora, {}, ["a", "b"])
    with pytest.raises(CheckpointError, match=r"the labels of .*lora are LABEL_0.*label_map"):
        inspect(llama, lora, {})


def test_the_bases_names_stand_where_it_has_as_many(lora: Path, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", ["c", "b", "a"])
    assert inspect(base, lora, {}).label_order == (2, 1, 0)


def test_without_a_head_of_its_own_the_bases_labels_stand(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", LABELS)
    # LoRA beside the head is no head.
    adapter = make_adapter(tmp_path / "adapter", base, 3, task_type=None, target_modules=["q_proj", "score"])
    assert inspect_adapter(str(adapter)).brings_head is False
    assert inspect(base, adapter, {}).label_order == (0, 1, 2)
    headless = make_base(tmp_path / "headless", "llama")
    with pytest.raises(CheckpointError, match="has no classification head, and not each of its views"):
        inspect(headless, adapter)


def test_an_adapter_that_names_another_base_is_pointed_at(tmp_path: Path) -> None:
    base = make_base(tmp_path / "llama-3-8b", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, 3)
    assert inspect(base, adapter).warnings == ()
    other = base.rename(tmp_path / "llama-3-8b-instruct")
    assert inspect(other, adapter).warnings == (), "a copy may well be called more than the original"
    (warning,) = inspect(base := other.rename(tmp_path / "gemma"), adapter).warnings
    assert f"says that it was trained on {tmp_path / 'llama-3-8b'}, and runs on {base} here" in warning


def inspect_views(base: Path, *views: dict[str, object], **keys: Any) -> Checkpoint:
    named = [{"name": f"v{number}", **view} for number, view in enumerate(views)]
    return inspect_folder(base, LABELS, PLAIN, views=named, **keys)


def test_adapters_of_views_have_the_same_labels(llama: Path, lora: Path, tmp_path: Path) -> None:
    other = make_adapter(tmp_path / "other", llama, 3, seed=1, r=2)
    checkpoint = inspect_views(
        llama, {"adapter_name_or_path": str(lora)}, {"adapter_name_or_path": str(other)}
    )
    assert checkpoint.label_order == (0, 1, 2)
    five = make_adapter(tmp_path / "five", llama, 5)
    with pytest.raises(
        CheckpointError, match=r"different numbers of labels \(that of .*lora has 3, that of .*five has 5\)"
    ):
        inspect_views(llama, {"adapter_name_or_path": str(lora)}, {"adapter_name_or_path": str(five)})
    with pytest.raises(CheckpointError, match="has no classification head"):
        inspect_views(llama, {"adapter_name_or_path": str(lora)}, {})
    base = make_checkpoint(tmp_path / "base", "llama", ["x", "y"])
    with pytest.raises(CheckpointError, match=r"that of .*base has 2, that of .*lora has 3"):
        inspect_views(base, {"adapter_name_or_path": str(lora)}, {})
    # The member's own adapter is that of views without any.
    assert inspect_views(llama, {}, {"adapter_name_or_path": str(other)}, adapter_name_or_path=str(lora))
    checkpoint = inspect_views(
        llama, {"adapter_name_or_path": "none here", "weight": 0.0}, {}, **{"adapter_name_or_path": str(lora)}
    )
    assert checkpoint.label_order == (0, 1, 2), "a view without a weight is not computed"


def test_adapters_that_cannot_take_turns(llama: Path, lora: Path, tmp_path: Path) -> None:
    def changed(name: str, **keys: object) -> Path:
        folder = Path(shutil.copytree(lora, tmp_path / name))
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
        return folder

    cases = {
        changed(
            "biased", bias="all"
        ): r"biased was trained with bias: all, which changes the base that the other",
        changed(
            "pissa", init_lora_weights="pissa_niter_4"
        ): r"pissa was trained with init_lora_weights: pissa_niter",
    }
    for adapter, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            inspect_views(llama, {"adapter_name_or_path": str(lora)}, {"adapter_name_or_path": str(adapter)})


def test_adapters_that_are_averaged(llama: Path, lora: Path, tmp_path: Path) -> None:
    def inspect_mean(*adapters: Path, combination_type: str = "cat") -> Checkpoint:
        mean = {"average": [*map(str, adapters)], "combination_type": combination_type}
        return inspect_folder(llama, LABELS, PLAIN, adapters=mean)

    other = make_adapter(tmp_path / "other", llama, 3, seed=1, r=2)
    assert inspect_mean(lora, other).label_order == (0, 1, 2)
    rank = (
        r"adapters\.average: .*lora_A\.weight is \[4, 128\] in .* and \[2, 128\] in .*other; combination_type"
    )
    with pytest.raises(CheckpointError, match=rank):
        inspect_mean(lora, other, combination_type="linear")
    five = make_adapter(tmp_path / "five", llama, 5)
    with pytest.raises(
        CheckpointError, match=r"score\.weight is \[3, 64\] in .* and \[5, 64\] in .*five; take"
    ):
        inspect_mean(lora, five)
    wider = make_base(tmp_path / "wider", "llama", width=32)
    with pytest.raises(CheckpointError, match=r"is \[4, 128\] in .*lora and \[4, 64\] in .*of one base"):
        inspect_mean(lora, make_adapter(tmp_path / "of wider", wider, 3))
    headless = make_adapter(tmp_path / "headless", llama, 0)
    with pytest.raises(
        CheckpointError, match=r"score\.weight is \[3, 64\] in .*lora and not in .*headless; take"
    ):
        inspect_mean(lora, headless)
    with pytest.raises(CheckpointError, match="dora has use_dora, and only plain LoRA can be averaged"):
        inspect_mean(lora, make_adapter(tmp_path / "dora", llama, 3, use_dora=True))


@pytest.mark.parametrize("architecture", ["bert", "roberta", "gpt2", "gemma3", "deberta-v2"])
def test_heads_and_layers_of_other_families(architecture: str, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", architecture, ["x", "y"])
    adapter = make_adapter(tmp_path / "adapter", base, 3)
    assert inspect_adapter(str(adapter)).head_rows == 3
    assert inspect(base, adapter).label_order == (0, 1, 2)


def test_files_that_are_missing_or_cut_short(llama: Path, lora: Path, tmp_path: Path) -> None:
    def changed(name: str) -> Path:
        return Path(shutil.copytree(lora, tmp_path / name))

    short = changed("short") / "adapter_model.safetensors"
    short.write_bytes(short.read_bytes()[:-10])
    (changed("gone") / "adapter_model.safetensors").unlink()
    pickled = changed("pickled") / "adapter_model.safetensors"
    pickled.rename(pickled.with_suffix(".bin"))
    (changed("no json") / "adapter_config.json").write_text("{")
    (changed("no kind") / "adapter_config.json").write_text("{}")
    (changed("prompts") / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}')
    cases = {
        "short": r"short/adapter_model\.safetensors has .* bytes and should have .*; copy it again",
        "gone": r"gone has an adapter_config\.json but no adapter_model\.safetensors; copy it too",
        "pickled": r"pickled/adapter_model\.bin is a pickle.*set allow_pickle: true",
        "no json": r"adapter_config\.json is not JSON",
        "no kind": r"names no peft_type",
        "prompts": r"is a PREFIX_TUNING adapter.*use LoRA",
        "lorra": r"lorra: no such folder",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            inspect(llama, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        inspect(llama, llama)
    with pytest.raises(
        CheckpointError, match=r"no config\.json.*it holds an adapter: name it with adapter_name"
    ):
        inspect_folder(lora, LABELS)


def test_a_name_on_the_hub_that_cannot_be_had(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        CheckpointError, match=r"org/lora: no such folder.*cannot be reached.*--local-dir FOLDER"
    ):
        inspect(llama, Path("org/lora"))


def test_an_adapter_that_a_training_left_without_the_name_of_its_base_says_so(tmp_path: Path) -> None:
    member = {"name": "m", "text_column": "text", "train": {"command": ["python", "{train}", "{out}"]}}
    kind = SequenceClassification(SequenceClassifierSettings.model_validate(member))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": null}')
    with pytest.raises(CheckpointError, match="base_model_name_or_path is null"):
        kind.trained_settings(tmp_path)
