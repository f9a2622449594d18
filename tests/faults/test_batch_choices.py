"""A run that is killed and goes on makes its batches as it began, whatever its new workers would choose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ensemble.members.huggingface.memory import cuda_context_bytes
from tests.checkpoints import WORDS, make_checkpoint
from tests.faults.chunky import chunky_config, ids_of, results, word
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected, token_ids
from tests.faults.steps import Step
from tests.faults.test_write_steps import kill_at
from tests.nvml.sim import Gpu, Memory, NvmlSim, gpu_uuid
from tests.project import LABELS, Project

# A row with this digit, which is a token of its own, overflows float16.
OVERFLOWS = "7"
ROWS, ROWS_PER_CHUNK = 48, 16


def make_overflowing(folder: Path) -> None:
    """A float16 checkpoint with a direction that only one token has, and that its feed-forward layers blow up."""
    import torch
    import transformers

    make_checkpoint(folder, "llama", LABELS, dtype="float16")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float16)
    token = token_ids(folder, OVERFLOWS)[-1]
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 0] = 0
        embeddings[token] = 0
        embeddings[token, 0] = 1000
        for name, parameter in model.named_parameters():
            if "gate_proj" in name or "up_proj" in name:
                parameter[:, 0] = 100
            if "o_proj" in name or "down_proj" in name:
                parameter[0] = 0
            if "down_proj" in name:
                parameter.mul_(1e-3)
    model.save_pretrained(folder)


def write_table(project: Project) -> None:
    """Three chunks, in each of which 12 of 16 rows overflow."""
    texts = []
    for row in range(ROWS):
        start = f"{OVERFLOWS if row % 4 else 'person'} {WORDS[row % len(WORDS)]} {word(row)} "
        texts.append((start + "person " * 1000)[:4000])
    rows = [[f"{row:03d}", text, LABELS[row % 3]] for row, text in enumerate(texts)]
    project.ids = [row_id for row_id, _, _ in rows]
    project.write_csv("test.csv", ["id", "text", "label"], rows)
    sample = [[row_id, "0.3", "0.3", "0.4"] for row_id in project.ids]
    project.write_csv("sample.csv", ["id", "tie", "winner_a", "winner_b"], sample)


def is_shard(step: Step, chunk: int) -> bool:
    """Whether a step gives a chunk's shard its name."""
    start = f"/{chunk * ROWS_PER_CHUNK:09d}-"
    return step.call.startswith("rename") and start in step.paths[1]


@pytest.mark.fault(42)
def test_chunks_go_on_in_float32(project: Project, tmp_path: Path, forked: ForkedRuns) -> None:
    """Killed before and after the first chunk's shard is there, and before the second's."""
    write_table(project)
    make_overflowing(tmp_path / "overflowing")
    model = {"name": "llama", "model_name_or_path": str(tmp_path / "overflowing"), "dtype": "float16"}
    project.write_config(chunky_config(project, models=[model], cpu_workers=1))
    assert forked.run(project.folder) == 0, forked.printed
    expected = results(project)
    assert float32_rows(project) == (48, 32, 12)
    steps = list(forked.steps)
    first, second = (
        next(place for place, step in enumerate(steps) if is_shard(step, chunk)) for chunk in (0, 1)
    )
    for number, computed in ((first, (48, 32, 12)), (first + 1, (32, 32, 0)), (second, (32, 32, 0))):
        for name in ("runs", "out"):
            shutil.rmtree(project.folder / name)
        assert forked.run(project.folder, judge=kill_at(number, lambda step: True)) == -9
        assert forked.run(project.folder) == 0, forked.printed
        assert float32_rows(project) == computed
        assert results(project) == expected


def float32_rows(project: Project) -> tuple[int, int, int]:
    """How many rows the last run computed, how many at once in float32, and how many again."""
    (member,) = project.run_json()["members"]
    (worker,) = member["workers"]
    return (
        worker["counters"]["rows"],
        worker["counters"]["float32_rows"],
        worker["counters"]["recomputed_rows"],
    )


def killed_in_second_chunk(project: Project, folder: Path, environment: dict[str, str]) -> None:
    injected = Injected(folder, Fault("wait", ids_of(project, ROWS_PER_CHUNK + 2), times=1))
    environment = {**environment, **injected.environment, "TEST_FORK_SERVER": ""}
    with project.start("run", "config.yaml", environment=environment) as process:
        injected.wait_for()
        process.kill()
        process.wait()  # else the worker could end its chunk first
        injected.let_go()
        process.communicate()
    assert process.returncode == -9


def batches(project: Project, folder: str = "runs/first") -> tuple[int, int, str]:
    """How many rows and batches the worker computed, and its last note."""
    (member,) = project.run_json(folder)["members"]
    (worker,) = member["workers"]
    return worker["counters"]["rows"], worker["counters"]["batches"], worker["ready"]["notes"][-1]


@pytest.mark.long
@pytest.mark.fault(42)
def test_batches_keep_the_room_that_the_run_began_with(
    project: Project, tmp_path: Path, nvml_sim: NvmlSim
) -> None:
    """A GPU whose memory limits the batches: the run goes on when there is more of it, or less."""
    write_table(project)
    (model,) = project.config()["models"][1:]
    model |= {"dtype": "float32", "replicas": 1}
    project.write_config(chunky_config(project, models=[model], max_workers_per_gpu=2))
    # Of each of two workers: what CUDA takes, the weights, and the room for batches.
    total = 2 * (cuda_context_bytes((7, 5)) + 4 * 97_216 + 605_000)

    def others_use(size: int) -> None:
        nvml_sim.write([Gpu(gpu_uuid(0xA), memory=Memory(total, used=size))])

    def run(*options: str) -> None:
        done = project.ensemble("run", "config.yaml", *options, environment=nvml_sim.environment())
        assert done.returncode == 0, done.stdout + done.stderr

    def kept() -> list[int]:
        (path,) = project.folder.glob("runs/first/work/llama.*/choices.json")
        rooms: dict[str, int] = json.loads(path.read_text())["rooms"]
        assert list(rooms) == [f"Simulated T4 ({total} bytes)"]
        return list(rooms.values())

    others_use(800_000)
    run()
    expected, (rows, count, _) = results(project), batches(project)
    shutil.rmtree(project.folder / "runs")
    (tmp_path / "more").mkdir()
    killed_in_second_chunk(project, tmp_path / "more", nvml_sim.environment())
    assert kept() == [196_608]
    others_use(0)
    run()
    assert batches(project)[:2] == (rows * 2 // 3, count * 2 // 3)
    assert results(project) == expected
    run("--set", "output_dir=runs/more")
    assert batches(project, "runs/more")[1] < count

    shutil.rmtree(project.folder / "runs")
    (tmp_path / "less").mkdir()
    killed_in_second_chunk(project, tmp_path / "less", nvml_sim.environment())
    assert kept() == [589_824]
    others_use(800_000)
    run()
    assert batches(project)[:2] == (rows * 2 // 3, count * 2 // 3)
    assert "more than is free now" in batches(project)[2]
