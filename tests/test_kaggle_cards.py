"""Kaggle's four machines: what the notebook chooses there, what fits, and the P100, which its torch cannot use."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.shapes import GEMMA_2_9B, LLAMA_3_8B, make_full_size
from tests.kaggle import COMPETITION, NOTEBOOK, lay_out
from tests.nvml.sim import GIB, Gpu, Memory, NvmlSim, gpu_uuid
from tests.project import ROOT, Project
from tests.torch_stand_in import CUDA_126, CUDA_128, stand_in

ROWS = 1000


def machine(name: str, count: int, capability: tuple[int, int], gib: float) -> list[Gpu]:
    memory = Memory(int(gib * GIB))
    return [
        Gpu(gpu_uuid(index), name, (0, 1 + index, 0), compute_capability=capability, memory=memory)
        for index in range(count)
    ]


T4 = machine("Tesla T4", 2, (7, 5), 15)
L4 = machine("NVIDIA L4", 4, (8, 9), 22.5)
RTX_PRO_6000 = machine("NVIDIA RTX PRO 6000 Blackwell Server Edition", 1, (12, 0), 95)
P100 = machine("Tesla P100-PCIE-16GB", 1, (6, 0), 16)
REFUSAL = (
    f"{P100[0].name} ({P100[0].uuid}): torch has no code for capability 6.0, only for "
    f"{CUDA_128.replace(' ', ', ')}; "
)
ON_KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "HF_HUB_OFFLINE": "1"}


class Kaggle:
    """The competition's folders with checkpoints of full size and long rows; torch is as in Kaggle's image."""

    def __init__(self, project: Project, sim: NvmlSim, torch: Path) -> None:
        self.project, self.sim, self.root = project, sim, project.folder / "kaggle"
        lay_out(self.root)
        for name, shape in {"gemma-2-9b-lmsys": GEMMA_2_9B, "llama-3-8b-lmsys": LLAMA_3_8B}.items():
            make_full_size(self.root / "input" / name, shape, ["LABEL_0", "LABEL_1", "LABEL_2"])
        answer = json.dumps(["word " * 700])
        for name, cells in (("test", [answer] * 3), ("sample_submission", ["0.33", "0.33", "0.34"])):
            path = self.root / "input" / COMPETITION / f"{name}.csv"
            with path.open(encoding="utf-8") as file:
                header = next(csv.reader(file))
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([header, *([str(row), *cells] for row in range(ROWS))])
        for path in (ROOT / "configs").glob("kaggle*.yaml"):
            text = path.read_text(encoding="utf-8").replace("/kaggle/", f"{self.root}/")
            (project.folder / path.name).write_text(text, encoding="utf-8")
        self.torch = torch

    def __call__(
        self, command: str, gpus: Sequence[Gpu], *arguments: str, **environment: str
    ) -> tuple[int, str]:
        """A command on a machine; its exit code, and all that it prints, without the ends of lines."""
        self.sim.write(gpus, driver="580.95.05", cuda=13000)
        seen = {**self.sim.environment(), "ENSEMBLE_SIMULATED_GPUS": "", **environment}
        paths = {"PYTHONPATH": f"{self.torch}:{ROOT}"}
        done = self.project.ensemble(command, "kaggle.yaml", *arguments, environment={**seen, **paths})
        return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def kaggle(project: Project, nvml_sim: NvmlSim, tmp_path: Path) -> Kaggle:
    pytest.importorskip("bitsandbytes")
    return Kaggle(project, nvml_sim, Path(stand_in(tmp_path / "image", CUDA_128)))


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [
        (T4, "config.yaml"),
        (L4, "config.yaml l4.yaml"),
        (RTX_PRO_6000, "config.yaml rtx6000.yaml"),
        (P100, "config.yaml"),
        (machine("Simulated V100", 1, (7, 0), 32), "config.yaml"),
        (machine("Simulated A100", 1, (8, 0), 80), "config.yaml l4.yaml"),
        ([], "config.yaml"),
    ],
    ids=["T4", "L4", "RTX Pro 6000", "P100", "V100", "A100", "none"],
)
def test_the_notebook_chooses_by_what_nvml_says(gpus: list[Gpu], chosen: str, nvml_sim: NvmlSim) -> None:
    nvml_sim.write(gpus)
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]}
    done = subprocess.run(
        [sys.executable, "-c", f"{cells['card']}\n{cells['chosen']}"],
        env=nvml_sim.environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == chosen


def test_two_t4_take_four_bits(kaggle: Kaggle) -> None:
    code, text = kaggle("plan", T4)
    assert code == 0, text
    both = "1 replica on GPUs 0, 1, and 1 more when GPUs are free; nf4 weights, float16"
    assert f"gemma2: {both}, capped_blocks attention" in text
    assert f"llama3: {both}, sdpa attention" in text
    assert "tight" not in text


def test_four_l4_take_the_weights_in_bfloat16(kaggle: Kaggle) -> None:
    code, text = kaggle("plan", L4, "kaggle_l4.yaml")
    assert code == 0, text
    for member in ("gemma2", "llama3"):
        assert f"{member}: 1 replica on GPUs 0, 1, 2, 3, and 3 more when GPUs are free; bfloat16, " in text
    assert "9.24 B 17.2 GiB" in text
    assert "rows of up to 2,048 tokens" in text
    assert "tight" not in text, "the longest row has room beside the weights"


def test_both_models_share_an_rtx_pro_6000(kaggle: Kaggle) -> None:
    code, text = kaggle("plan", RTX_PRO_6000, "kaggle_rtx6000.yaml")
    assert code == 0, text
    for member in ("gemma2", "llama3"):
        assert f"{member}: 1 replica on GPU 0; bfloat16, " in text
    assert text.count(" 16,384 ") == 2, "with batches as large as on a GPU of its own"
    assert text.count(" 45.1 GiB") == 2, "half of it, without the reserve"
    # With less room than that they run one after the other, each with all of it.
    code, text = kaggle("plan", machine("Simulated A6000", 1, (8, 6), 40), "kaggle_rtx6000.yaml")
    assert code == 0, text
    assert text.count(" 38.0 GiB") == 2


@pytest.mark.parametrize("command", ["validate", pytest.param("plan", marks=pytest.mark.long), "run"])
def test_a_p100_is_refused_before_anything_loads(kaggle: Kaggle, command: str) -> None:
    code, text = kaggle(command, P100, **ON_KAGGLE)
    assert code == 2, text
    assert f"error: {REFUSAL}choose T4 x 2 as the notebook's accelerator" in text
    assert text.count("no code for capability") == 1, "once, for both members"
    assert not (kaggle.root / "working" / "run").exists()


@pytest.mark.long
def test_doctor_says_the_same_of_a_p100(kaggle: Kaggle) -> None:
    # Test processes only see that this package is no torch.
    (kaggle.torch / "torch" / "__init__.py").write_text("raise ImportError('stands for torch')")
    code, text = kaggle("doctor", P100, **ON_KAGGLE)
    assert code == 2, text
    assert f"problem {REFUSAL.removesuffix('; ')} -> choose T4 x 2 as the notebook's accelerator" in text


@pytest.mark.long
def test_elsewhere_the_advice_is_another_gpu_or_build(kaggle: Kaggle, tmp_path: Path) -> None:
    code, text = kaggle("validate", P100)
    assert code == 2
    assert f"{REFUSAL}choose another GPU (devices), or a build of torch that has sm_60" in text
    kaggle.torch = Path(stand_in(tmp_path / "other", CUDA_126))
    code, text = kaggle("validate", P100)
    assert code == 0, text


@pytest.mark.long
def test_a_p100_beside_other_gpus_is_left_out(kaggle: Kaggle) -> None:
    code, text = kaggle("plan", [*P100, T4[1]], **ON_KAGGLE)
    assert code == 0, text
    assert f"gemma2 does not run on {REFUSAL}" in text
    assert "gemma2: 1 replica on GPU 1; nf4 weights, float16, capped_blocks attention" in text
    (kaggle.torch / "torch" / "__init__.py").write_text("raise ImportError('stands for torch')")
    code, text = kaggle("doctor", [*P100, T4[1]], **ON_KAGGLE)
    assert f"note {REFUSAL.removesuffix('; ')} -> choose T4 x 2 as the notebook's accelerator" in text
    assert f"problem {T4[1].name} ({T4[1].uuid}): torch cannot be imported" in text, "it alone is tried"


@pytest.mark.long
def test_members_that_need_no_torch_may_have_a_p100(kaggle: Kaggle) -> None:
    """A program has an environment of its own, and a member on the CPU takes no GPU."""
    on_cpu = ["--set", "models.llama3.num_gpus=0"]
    command = {"name": "gemma2", "task_type": "command", "command": ["true", "{rows}", "{out}"]}
    text = (kaggle.project.folder / "kaggle.yaml").read_text(encoding="utf-8")
    first = text[text.index("  - name: gemma2") : text.index("  - name: llama3")]
    changed = text.replace(first, f"  - {json.dumps(command)}\n")
    (kaggle.project.folder / "kaggle.yaml").write_text(changed, encoding="utf-8")
    code, told = kaggle("plan", P100, *on_cpu)
    assert code == 0, told
    assert "gemma2: 1 replica on GPU 0" in told
    assert "no code" not in told
