"""Folders of sentence-transformers' CrossEncoder as ``seq_cls`` members, against its own ``predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common.errors import CheckpointError
from tests.checkpoints import inspect_folder, make_checkpoint, make_texts
from tests.members.huggingface.scoring.test_predict import predictor, worker_spec
from tests.worker.test_session import publish

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = list(zip(make_texts(30, seed=1), make_texts(30, seed=2), strict=True))
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
# Of releases before 4.0, from 4.0 to 5.3, and since 5.4; each with another name of the activation.
TRANSFORMER = "sentence_transformers.base.modules.transformer"
TASK = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
STORED = (
    "sbert_ce_default_activation_function",
    "sentence_transformers",
    "config_sentence_transformers.json",
)


def store(folder: Path, where: str, activation: str | None) -> None:
    """The activation as the releases of a time have stored it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if where == STORED[2]:
        settings: dict[str, Any] = {
            "model_type": "CrossEncoder",
            "__version__": {},
            "prompts": {},
            "activation_fn": activation,
        }
        (folder / where).write_text(json.dumps(settings), encoding="utf-8")
        modules = [{"idx": 0, "name": "0", "path": "", "type": f"{TRANSFORMER}.Transformer"}]
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        (folder / "sentence_bert_config.json").write_text(json.dumps(TASK), encoding="utf-8")
        return
    version: dict[str, Any] = {"version": "4.1.0"}
    config[where] = (
        activation if where == STORED[0] else version | ({"activation_fn": activation} if activation else {})
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def scores(folder: Path, labels: list[str], **keys: Any) -> np.ndarray:
    """What a member makes of the pairs, by what its folder says of itself."""
    inspected = inspect_folder(folder, labels, text_column=("first", "second"), **keys)
    columns = {"first": [pair[0] for pair in PAIRS], "second": [pair[1] for pair in PAIRS]}
    places = publish(folder.parent / f"table {len(list(folder.parent.iterdir()))}", columns)
    spec = worker_spec(
        folder,
        labels=tuple(labels),
        label_order=inspected.label_order,
        activation=inspected.activation,
        text_columns=("first", "second"),
        token_budget=70,
        **places,
    )
    made = predictor(spec)
    made.load()
    return made.predict(np.arange(len(PAIRS)), lambda *_: None).values


@pytest.mark.filterwarnings("ignore")  # its own
@pytest.mark.parametrize(
    ("where", "activation", "labels"),
    [
        (STORED[2], SIGMOID, ["score"]),
        (STORED[2], IDENTITY, ["score"]),
        (STORED[1], None, ["score"]),
        (STORED[1], SIGMOID, ["a", "b", "c"]),
        (STORED[0], IDENTITY, ["score"]),
    ],
)
def test_scores_are_those_of_its_own_predict(
    where: str, activation: str | None, labels: list[str], tmp_path: Path
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = make_checkpoint(tmp_path / "model", "bert", labels)
    store(folder, where, activation)
    expected = sentence_transformers.CrossEncoder(str(folder), device="cpu").predict(PAIRS, batch_size=7)
    result = scores(folder, labels)
    np.testing.assert_allclose(result, expected.reshape(len(PAIRS), -1), atol=2e-5)
    assert result.std() > 0.01
    assert (result.min() < 0) == (activation == IDENTITY)


@pytest.mark.filterwarnings("ignore")
def test_what_it_saves_itself_is_read_and_several_scores_become_probabilities(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    labels = ["a", "b", "c"]
    encoder = sentence_transformers.CrossEncoder(
        str(make_checkpoint(tmp_path / "made", "bert", labels)), device="cpu", max_length=24
    )
    folder = tmp_path / "saved"
    encoder.save_pretrained(str(folder))
    expected = encoder.predict(PAIRS, apply_softmax=True)
    np.testing.assert_allclose(scores(folder, labels), expected, atol=2e-5)
    raw = encoder.predict(PAIRS)
    np.testing.assert_allclose(scores(folder, labels, problem_type="regression"), raw, atol=2e-5)


def test_the_config_goes_before_what_it_says(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "bert", ["score"])
    store(folder, STORED[2], "torch.nn.modules.activation.Tanh")
    with pytest.raises(
        CheckpointError, match=r"its logits through torch\.nn\.modules\.activation\.Tanh.*problem_type"
    ):
        inspect_folder(folder, ["score"])
    assert inspect_folder(folder, ["score"], problem_type="regression").activation == "none"
    store(folder, STORED[2], "my.Scale")
    (warning,) = inspect_folder(folder, ["score"]).warnings
    assert "its activation my.Scale is code of its own" in warning
    assert inspect_folder(folder, ["score"]).activation == "sigmoid"


def test_a_damaged_file_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "bert", ["score"])
    store(folder, STORED[2], SIGMOID)
    path = folder / "config_sentence_transformers.json"
    whole = path.read_text(encoding="utf-8")
    assert inspect_folder(folder, ["score"]).activation == "sigmoid"
    for damaged in (whole[:-20], "", "version https://git-lfs.github.com/spec/v1"):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(CheckpointError, match="is empty, or is not JSON; copy it again"):
            inspect_folder(folder, ["score"])
