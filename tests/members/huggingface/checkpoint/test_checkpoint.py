"""What is known of a checkpoint before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ensemble.common.errors import CheckpointError
from ensemble.members.huggingface.checkpoint import inspect
from ensemble.members.huggingface.checkpoint.facts import Facts
from ensemble.members.huggingface.checkpoint.labels import label_names, match_labels
from tests.checkpoints import inspect_folder, make_checkpoint

LABELS = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def nobody_has_described_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of these tests are of no model."""
    monkeypatch.setattr(inspect, "ask_facts", lambda question: Facts())


def write(folder: Path, **config: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return str(folder)


def test_order_comes_from_names() -> None:
    assert match_labels(["c", "a", "b"], LABELS, {}, "m") == (1, 2, 0)
    names = ["LABEL_0", "LABEL_1", "LABEL_2"]
    label_map = {"LABEL_0": "b", "LABEL_1": "c", "LABEL_2": "a"}
    assert match_labels(names, LABELS, label_map, "m") == (2, 0, 1)
    assert match_labels(["x", "b", "c"], LABELS, {"x": "a"}, "m") == (0, 1, 2)
    assert match_labels(["LABEL_0"], ["score"], {}, "m") == (0,)


@pytest.mark.parametrize(
    ("names", "label_map", "message"),
    [
        (["LABEL_0", "LABEL_1", "LABEL_2"], {}, r"label_map: \{LABEL_0: a\}"),
        (["a", "b"], {}, "has 2 labels .a, b., the config has 3"),
        (["a", "b", "C"], {}, "label 'C' of m is not in labels"),
        (["a", "b", "c"], {"d": "a"}, "label_map: 'd' is not a label of m"),
        (["a", "b", "x"], {"x": "a"}, "two labels of m would both become 'a'"),
    ],
)
def test_labels_that_do_not_match(names: list[str], label_map: dict[str, str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        match_labels(names, LABELS, label_map, "m")


def test_activation_follows_the_problem_type(tmp_path: Path) -> None:
    named = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    kinds = {
        None: "softmax",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
        "regression": "none",
    }
    for kind, activation in kinds.items():
        folder = write(tmp_path / str(kind), problem_type=kind, **named)
        assert inspect_folder(folder, LABELS).activation == activation
        assert inspect_folder(folder, LABELS, {}, "multi_label_classification").activation == "sigmoid"
    item = write(tmp_path / "one", id2label={"0": "LABEL_0"})
    assert inspect_folder(item, ["score"]).activation == "none"


def test_ids_are_sorted_as_numbers(tmp_path: Path) -> None:
    labels = [f"topic {index}" for index in range(12)]
    stored = {str(index): labels[index] for index in reversed(range(12))}
    folder = write(tmp_path / "m", id2label=stored)
    assert inspect_folder(folder, labels).label_order == tuple(range(12))


def test_without_stored_labels_transformers_has_two(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", model_type="bert")
    label_map = {"LABEL_0": "no", "LABEL_1": "yes"}
    assert inspect_folder(folder, ["yes", "no"], label_map, None).label_order == (1, 0)


def test_labels_without_numbers() -> None:
    with pytest.raises(CheckpointError, match="odd: the keys of id2label"):
        label_names({"id2label": {"zero": "a", "one": "b"}}, "odd")


def test_paths_that_hold_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "models" / "gemma" / "checkpoint-10")
    (tmp_path / "models" / "gemma" / "config.json").unlink(missing_ok=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    cases = {
        tmp_path / "models" / "gemma": "no config.json.*checkpoint-10",
        tmp_path / "models" / "gemmma": "no such folder; did you mean .*gemma",
        tmp_path / "file": "is a file",
        tmp_path / "broken": "not JSON",
    }
    for path, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            inspect_folder(path, LABELS)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", None, "no weights"),
        ("model.safetensors", b"", "cut short"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        ("model.safetensors", (9).to_bytes(8, "little") + b"not JSON!", "broken header"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"w": "a.safetensors"}}',
            "names a.safetensors, not there",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "is not an index of weight files"),
    ],
)
@pytest.mark.fault(22)
def test_files_that_are_missing_or_broken(
    file: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    folder = Path(write(tmp_path / "m", id2label={"0": "a", "1": "b", "2": "c"}))
    if content is None:
        (folder / file).unlink()
    else:
        if file.endswith("index.json"):  # which counts where no file is whole
            (folder / "model.safetensors").rename(folder / "b.safetensors")
        (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        inspect_folder(folder, LABELS)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors.index.json", '{"weight_map": {"w": "model-00001-of-00002.safetensors"}}'),
        ("model.safetensors.index.json", ""),
        ("consolidated.safetensors.index.json", '{"weight_map": {"w": "consolidated-1.safetensors"}}'),
        ("pytorch_model.bin.index.json", "{}"),
        ("consolidated.safetensors", "the beginning of a download"),
    ],
)
def test_files_that_transformers_does_not_read_refuse_no_whole_checkpoint(
    file: str, content: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    (folder / file).write_text(content)
    AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True)
    inspect_folder(folder, LABELS)


@pytest.mark.parametrize("beside", [(), ("config.json",)])
def test_gguf_files_are_told_by_what_they_are(beside: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for name in beside:
        (tmp_path / name).write_text('{"model_type": "llama"}')
    for path in (tmp_path, file):
        with pytest.raises(CheckpointError) as refused:
            inspect_folder(path, ["a", "b"])
        (problem,) = refused.value.problems
        assert problem.startswith(f"{file}: GGUF files are llama.cpp's and cannot be loaded; ")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as refused:
        inspect_folder(tmp_path, ["a", "b"])
    assert "GGUF" not in str(refused.value)


@pytest.mark.fault(22)
def test_a_cut_weight_file_is_named_with_its_sizes(tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "m", id2label={"0": "a", "1": "b", "2": "c"}))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"has {len(whole) - 1} bytes and should have {len(whole)}"):
        inspect_folder(folder, LABELS)


def test_odd_configs_are_no_stack_trace(tmp_path: Path) -> None:
    named = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    cases: list[dict[str, Any]] = [{"architectures": [None]}, {"architectures": "Foo"}, {"architectures": []}]
    for odd in cases:
        folder = write(tmp_path / "m", **named, **odd)
        assert inspect_folder(folder, LABELS).summary.startswith(", ")
    with pytest.raises(CheckpointError, match="num_labels"):
        inspect_folder(write(tmp_path / "n", num_labels="x"), LABELS)


def test_a_hub_id_that_cannot_be_had_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=r"org/model: no such folder.*cannot be reached.*download"):
        inspect_folder("org/model", LABELS)


def test_a_checkpoint_without_a_head_is_pointed_at(tmp_path: Path) -> None:
    named = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    folder = write(tmp_path / "m", architectures=["LlamaForCausalLM"], **named)
    with pytest.raises(CheckpointError, match=r"\(LlamaForCausalLM\) has no classification head"):
        inspect_folder(folder, LABELS)
