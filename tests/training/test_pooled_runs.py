"""The commands ``train`` and ``run`` with members whose heads are trained, against plain torch and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ensemble.pipeline.training_dir import Part, TrainingDir
from tests.members.pooled_cls.test_pooled_cls import make_backbone
from tests.project import LABELS, Project
from tests.training import folds
from tests.training.folds import FOLD_OF_ROW, FOLDS, NEW, ROWS, SWAP, TEMPLATE
from tests.training.test_pooled import head_of

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft's
    pytest.mark.long,
]


def by_hand(project: Project, folder: Path, mode: str, is_swapped: bool) -> npt.NDArray[np.float64]:
    """What the backbone and the head in a folder say of all rows."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    is_adapter = (folder / "adapter_config.json").is_file()
    is_whole = (folder / "config.json").is_file()
    base = folder if is_whole else project.folder / "base"
    model = AutoModel.from_pretrained(base, attn_implementation="eager")
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder))
    tokenizer, head = AutoTokenizer.from_pretrained(base), head_of(folder)
    count = ROWS + NEW
    first, second = project.texts[:count], project.texts[count:]
    rows = []
    for pair in zip(first, second, strict=True):
        a, b = reversed(pair) if is_swapped else pair
        inputs = tokenizer(f"one {a} other {b}", truncation=True, max_length=128, return_tensors="pt")
        with torch.no_grad():
            states = model.eval()(**inputs).last_hidden_state[0]
            pooled = {"mean": states.mean(0), "lasttoken": states[-1]}[mode]
            rows.append(head(pooled).double().softmax(-1).numpy())
    values = np.stack(rows)
    return values[:, [1, 0, 2]] if is_swapped else values


@pytest.mark.parametrize(
    ("train", "mode"),
    [
        ({"method": "full"}, "lasttoken"),
        ({"method": "lora", "predict_with": "refit"}, "lasttoken"),
        ({"method": "head"}, "mean"),
    ],
)
def test_each_fold_has_its_backbone_and_head(train: dict[str, Any], mode: str, project: Project) -> None:
    folds.write_tables(project)
    make_backbone(project.folder / "base", "granite", "AutoModelForCausalLM")
    own = {"effective_batch_size": 4, "training_arguments": {"learning_rate": 3e-3, "num_train_epochs": 3}}
    member = {
        **{"name": "pooled", "task_type": "pooled_cls", "pooling_mode": mode, "max_length": 128},
        **{"prompt_template": TEMPLATE, "views": [{"name": "as_is"}, {"name": "swapped", "swap": SWAP}]},
        "train": {"base_model": "base", **train, **({} if train["method"] == "head" else own)},
    }
    training = {"data": {"path": "train.csv", "label_column": "label"}, "folds": {"column": "fold"}}
    data = {"path": "test.csv"}
    config = project.config(data=data, models=[member], defaults=None, submission=None, training=training)
    project.write_config(config)
    for command in ("train", "run"):
        done = project.ensemble(command, "config.yaml")
        assert done.returncode == 0, done.stderr
    left = TrainingDir(project.folder / "runs/first").checkpoint("pooled", Part(0)).parent
    parts = [f"fold-{fold}" for fold in range(FOLDS)] + ([Part(None).name] if "predict_with" in train else [])
    both = {
        part: np.mean([by_hand(project, left / part, mode, swapped) for swapped in (False, True)], axis=0)
        for part in parts
    }
    of_folds = np.stack([both[f"fold-{fold}"] for fold in range(FOLDS)])
    header, rows = project.read("runs/first/oof/pooled.csv")
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == project.ids[:ROWS]
    expected = of_folds[FOLD_OF_ROW, np.arange(ROWS)]
    np.testing.assert_allclose(project.values("runs/first/oof/pooled.csv"), expected, atol=2e-5)

    _, rows = project.read("runs/first/predictions/pooled.csv")
    for name, *values in rows:
        row = project.ids.index(name)
        new = both[Part(None).name] if len(both) > FOLDS else of_folds.mean(axis=0)
        probabilities = new[row] if row >= ROWS else of_folds[FOLD_OF_ROW[row], row]
        np.testing.assert_allclose([float(value) for value in values], probabilities, atol=2e-5)
    again = project.ensemble("train", "config.yaml")
    assert again.returncode == 0, again.stderr
    assert "trained already" in again.stdout + again.stderr
