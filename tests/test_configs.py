"""Every file in configs/ is validated and run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bench.shapes import GEMMA_2_9B, LLAMA_3_8B, make_full_size
from tests.checkpoints import reference
from tests.kaggle import LABELS, lay_out
from tests.nvml.sim import GIB, Gpu, Memory, NvmlSim, gpu_uuid
from tests.project import ROOT, Project

pytestmark = pytest.mark.usefixtures("warm")


def test_no_config_goes_untested() -> None:
    assert {path.name for path in (ROOT / "configs").glob("*.yaml")} == {"demo.yaml", "kaggle.yaml"}


def read_demo(name: str) -> list[list[str]]:
    with (ROOT / "demo" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_the_demo_ensemble_beats_each_of_its_members(project: Project) -> None:
    config = str(ROOT / "configs" / "demo.yaml")
    done = project.ensemble("run", config)
    assert done.returncode == 0, done.stderr
    report = project.run_json("runs/demo")
    assert done.stdout.endswith("report page: runs/demo/report.html\n")
    assert "could not be made" not in (project.folder / "runs/demo/report.html").read_text(encoding="utf-8")
    scores = {name: score["log_loss"] for name, score in report["scores"].items()}
    truth = [row[2] for row in read_demo("test.csv")[1:]]
    shares = np.unique(truth, return_counts=True)[1] / len(truth)
    prior = -(shares * np.log(shares)).sum()
    assert max(scores["gemma2"], scores["llama"]) < 0.6 * prior
    assert scores["ensemble"] < min(scores["gemma2"], scores["llama"])
    for score in scores.values():
        assert f"{score:.4f}" in done.stdout
    for member in report["members"]:
        assert member["real_token_share"] > 0.95
    header, rows = project.read("runs/demo/submission.csv")
    sample = read_demo("sample_submission.csv")
    assert header == sample[0]
    assert [row[0] for row in rows] == [row[0] for row in sample[1:]]


@pytest.fixture
def kaggle(project: Project) -> Project:
    """The folders that configs/kaggle.yaml reads, with small stand-ins of the same architectures."""
    pytest.importorskip("bitsandbytes")
    root = project.folder / "kaggle"
    lay_out(root)
    text = (ROOT / "configs" / "kaggle.yaml").read_text(encoding="utf-8")
    assert text.count("/kaggle/") >= 6
    (project.folder / "kaggle.yaml").write_text(text.replace("/kaggle/", f"{root}/"), encoding="utf-8")
    return project


def test_the_kaggle_config_with_stand_ins(kaggle: Project) -> None:
    assert kaggle.ensemble("validate", "kaggle.yaml").returncode == 0
    done = kaggle.ensemble("run", "kaggle.yaml")
    assert done.returncode == 0, done.stderr
    header, rows = kaggle.read("kaggle/working/submission.csv")
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == [str(136060 + index) for index in range(40)]
    values = np.array([[float(cell) for cell in row[1:]] for row in rows])
    np.testing.assert_allclose(values.sum(axis=1), 1, atol=1e-8)
    assert values.std(axis=0).min() > 0.01
    _check_labels_are_not_mixed_up(kaggle, values)
    report = kaggle.run_json("kaggle/working/run")
    # [text, null] in a JSON list: one null a row in response_a
    assert report["null_texts"]["response_a"] >= 40
    done = kaggle.ensemble("plan", "kaggle.yaml")
    assert done.returncode == 0, done.stderr
    assert "the whole run takes about " in done.stdout, "by the speeds of the run before"


def test_the_kaggle_config_fits_two_t4(kaggle: Project, nvml_sim: NvmlSim) -> None:
    """With checkpoints of the real size, of which only the headers are there."""
    names = {"gemma-2-9b-lmsys": GEMMA_2_9B, "llama-3-8b-lmsys": LLAMA_3_8B}
    for name, shape in names.items():
        make_full_size(kaggle.folder / "kaggle/input" / name, shape, ["LABEL_0", "LABEL_1", "LABEL_2"])
    nvml_sim.write(
        [Gpu(gpu_uuid(index), "Tesla T4", (0, 1 + index, 0), memory=Memory(15 * GIB)) for index in range(2)]
    )
    done = kaggle.ensemble("plan", "kaggle.yaml", environment=nvml_sim.environment())
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert " 9.24 B " in lines["gemma2"]
    assert " 7.50 B " in lines["llama3"]
    assert "float16, eager attention" in lines["gemma2:"]
    assert "float16, sdpa attention" in lines["llama3:"]
    assert all("1 replica on GPU 0 or 1" in lines[name] for name in ("gemma2:", "llama3:"))
    assert "tight" not in done.stdout
    done = kaggle.ensemble(
        "plan",
        "kaggle.yaml",
        "--set",
        "defaults.quantization_config=null",
        environment=nvml_sim.environment(),
    )
    assert done.stdout.count("for one GPU, so a replica takes 2") == 2
    assert "17.2 GiB" in done.stdout
    nvml_sim.write([Gpu(gpu_uuid(0), memory=Memory(4 * GIB))])
    for command in ("plan", "run"):
        done = kaggle.ensemble(command, "kaggle.yaml", environment=nvml_sim.environment())
        assert done.returncode == 2
        assert "models[0] (gemma2): its weights take " in done.stderr
        assert "models[1] (llama3): its weights take " in done.stderr
    assert not (kaggle.folder / "kaggle/working/run").exists()


def _check_labels_are_not_mixed_up(kaggle: Project, values: np.ndarray) -> None:
    """Each column must follow the same label of the models in the same four bits, and no other."""
    import torch
    from transformers import BitsAndBytesConfig

    _, rows = kaggle.read("kaggle/input/lmsys-chatbot-arena/test.csv")
    prompts = []
    for row in rows:
        turns = ["\n".join(turn or "" for turn in json.loads(cell)) for cell in row[1:]]
        prompt, first, second = (turn.replace("\ud83d", "\ufffd") for turn in turns)
        prompts.append(f"<prompt>: {prompt}\n\n<response_a>: {first}\n\n<response_b>: {second}")
    models = kaggle.folder / "kaggle" / "input"
    settings = yaml.safe_load((kaggle.folder / "kaggle.yaml").read_text())["defaults"]["quantization_config"]
    bits = BitsAndBytesConfig(**settings, llm_int8_skip_modules=["score"])
    options: dict[str, Any] = {"quantization_config": bits, "device_map": {"": "cpu"}, "dtype": torch.float32}
    expected = 0.6 * reference(models / "gemma-2-9b-lmsys", prompts, max_length=2048, **options)
    expected += 0.4 * reference(models / "llama-3-8b-lmsys", prompts, max_length=2048, **options)
    likeness = np.corrcoef(values.T, expected.T)[:3, 3:]
    assert likeness.argmax(axis=1).tolist() == [0, 1, 2], likeness
    assert likeness.diagonal().min() > 0.99, likeness


def test_one_broken_json_cell_is_found_before_any_model_loads(kaggle: Project) -> None:
    path = "kaggle/input/lmsys-chatbot-arena/test.csv"
    header, rows = kaggle.read(path)
    rows[33][2] = '["cut off'
    kaggle.write_csv(path, header, rows)
    done = kaggle.ensemble("run", "kaggle.yaml")
    assert done.returncode == 2
    assert "row 34 (id '136093')" in done.stderr
    assert "response_a" in done.stderr
    assert not (kaggle.folder / "kaggle/working/run").exists()


def test_the_readme_shows_a_config_that_is_valid(tmp_path: Path) -> None:
    from ensemble.pipeline.load import load as load_config

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = [block.split("```")[0] for block in readme.split("```yaml\n")[1:]]
    assert examples
    whole = [example for example in examples if "models:" in example and "data:" in example]
    assert whole
    for example in whole:
        (tmp_path / "c.yaml").write_text(example, encoding="utf-8")
        assert load_config(tmp_path / "c.yaml").config.models
        assert yaml.safe_load(example)["output_dir"]
