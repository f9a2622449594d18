"""The winners' config that trains in the notebook, run on its own data layout with tiny models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.checkpoints import make_checkpoint, make_texts
from tests.nvml.sim import GIB, Gpu, Memory, NvmlSim, gpu_uuid
from tests.project import Project
from tests.test_winners import T4, WINNERS, Kaggle, lay_out_jigsaw, numbered, write

NAMES = ("jigsaw_42nd.yaml", "jigsaw_42nd_train.yaml")


def lay_out_training_table(kaggle: Kaggle) -> None:
    texts = make_texts(300, seed=9)
    sides = [f"{side}_example_{number}" for side in ("positive", "negative") for number in (1, 2)]
    rows = [
        [index, texts[6 * index], "Be kind", f"sub{index % 5}", *texts[6 * index + 1 :][:4], index % 2]
        for index in range(40)
    ]
    columns = ["row_id", "body", "rule", "subreddit", *sides, "rule_violation"]
    write(
        kaggle.input / "jigsaw-agile-community-rules" / "train.csv",
        pd.DataFrame(rows, columns=columns),
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
def test_jigsaw_trains_and_predicts(project: Project, nvml_sim: NvmlSim) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    kaggle = Kaggle(project, project.folder / "kaggle")
    lay_out_jigsaw(kaggle)
    lay_out_training_table(kaggle)
    make_checkpoint(kaggle.input / "deberta-v3-base", "deberta-v2", numbered(2))
    for name in NAMES:
        text = (WINNERS / name).read_text(encoding="utf-8").replace("${CONFIG_DIR}", str(WINNERS))
        (project.folder / name).write_text(text.replace("/kaggle/", f"{kaggle.root}/"), encoding="utf-8")
    prepare = [sys.executable, str(WINNERS / "prepare_jigsaw.py")]
    subprocess.run([*prepare, kaggle.input / "jigsaw-agile-community-rules", kaggle.working], check=True)
    name, capability, gib, count = T4
    nvml_sim.write(
        [
            Gpu(gpu_uuid(index), name, (0, 1 + index, 0), capability, Memory(gib * GIB))
            for index in range(count)
        ]
    )
    sets = ("--set=models.gte.num_gpus=0", "--set=report=false")
    done = project.ensemble("run", *NAMES, *sets, environment=nvml_sim.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    training = Path(kaggle.working / "run/training/models")
    assert (training / "qwen3/all/adapter_model.safetensors").is_file()
    assert (training / "deberta/all/model.safetensors").is_file()
    submission = pd.read_csv(kaggle.working / "submission.csv", dtype=str)
    sample = pd.read_csv(kaggle.input / "jigsaw-agile-community-rules/sample_submission.csv", dtype=str)
    assert submission["row_id"].tolist() == sample["row_id"].tolist()
    assert submission["rule_violation"].nunique() > 10
