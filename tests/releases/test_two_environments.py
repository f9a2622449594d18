"""Two scripts in environments with different releases of transformers, and a classifier, in one run."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.checkpoints import reference
from tests.project import GEMMA_LABELS, LABELS, Project

SCRIPT = """\
import sys

import pandas as pd
import torch
import transformers

_, folder, rows, out = sys.argv
print("with transformers", transformers.__version__)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForSequenceClassification.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
).eval()
table, values = pd.read_csv(rows, dtype=str, keep_default_na=False), []
for text in table["text"]:
    with torch.inference_mode():
        logits = model(**tokenizer(text, truncation=True, max_length=128, return_tensors="pt")).logits
    values += logits.softmax(-1).tolist()
labels = [model.config.id2label[number] for number in range(model.config.num_labels)]
pd.DataFrame(values, index=table["id"], columns=labels).to_csv(out)
"""


def other_python() -> Path:
    """The Python that an overlay of ``environments.py`` lies over."""
    below = Path(sysconfig.get_path("purelib"), "below.pth")
    if not below.is_file():
        pytest.skip("this Python is no overlay of another one")
    return Path(below.read_text(encoding="utf-8").strip()).parents[2] / "bin" / "python"


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # other releases deprecate other things
def test_two_scripts_with_other_releases_beside_a_classifier(project: Project) -> None:
    pythons = {"here": Path(sys.executable), "below": other_python()}
    project.write_table(40)
    (project.folder / "infer.py").write_text(SCRIPT, encoding="utf-8")
    models = [
        {
            "name": name,
            "task_type": "command",
            "command": [str(python), "infer.py", str(project.models / "gemma"), "{rows}", "{out}"],
            "columns": ["text"],
        }
        for name, python in pythons.items()
    ]
    classifier = {"name": "llama", "model_name_or_path": str(project.models / "llama"), "text_column": "text"}
    project.write_config(project.config(models=[*models, classifier], defaults={"max_length": 128}))
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr

    report = project.run_json()
    logs = "".join(
        path.read_text(encoding="utf-8") for path in (project.folder / "runs/first/logs").rglob("*.log")
    )
    releases = {line.split()[-1] for line in logs.splitlines() if line.startswith("with transformers ")}
    assert len(releases) == 2, logs
    assert report["status"] == "complete"
    for name, model, labels in (
        ("here", "gemma", GEMMA_LABELS),
        ("below", "gemma", GEMMA_LABELS),
        ("llama", "llama", LABELS),
    ):
        table = pd.read_csv(
            project.folder / f"runs/first/predictions/{name}.csv", index_col="id", dtype={"id": str}
        )
        expected = reference(project.models / model, project.texts, max_length=128)
        np.testing.assert_allclose(table.loc[project.ids, labels], expected, atol=1e-5, err_msg=name)
