"""Files on their way to nodes that lack them, and nodes that come while a run goes on."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_adapter, make_base, make_image_checkpoint
from tests.faults.chunky import chunky_config, ids_of, results, write_chunky_table
from tests.faults.inject import Fault, Injected
from tests.faults.test_workers import is_gone
from tests.images import make_image
from tests.members.pooled_cls.test_pooled_cls import linear, make_backbone, save_head
from tests.nvml.sim import Gpu, NvmlSim, gpu_uuid
from tests.pipeline.test_fingerprint import commit_to
from tests.project import LABELS, Project
from tests.ray.nodes import Nodes, agents, background, on_cluster, run
from tests.waiting import wait_until

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.usefixtures("warm")
# The GPUs of the nodes other than the head.
ELSEWHERE = [gpu_uuid(1), gpu_uuid(3)]


def with_own_model(project: Project, **changes: Any) -> Path:
    """Have the chunky project's model in its own folder; returns where its models are."""
    folder = project.folder / "models"
    if not folder.exists():
        shutil.copytree(project.models / "llama", folder / "llama")
    config = chunky_config(project, **{"devices": ELSEWHERE, **changes})
    config["models"][0]["model_name_or_path"] = "models/llama"
    project.write_config(config)
    return folder


@pytest.mark.long
@pytest.mark.fresh  # a process that is forked does not have the node's mounts
def test_a_model_goes_to_nodes_that_lack_it(
    chunky: Project, nodes: Nodes, undisturbed: dict[str, bytes]
) -> None:
    folder = with_own_model(chunky, launcher=on_cluster(nodes))
    with nodes.mounted(["second", "third"], folder):
        code, printed = run(chunky)
        assert code == 2
        assert f"llama: {folder}/llama/config.json is not on node" in printed
        with_own_model(chunky, launcher=on_cluster(nodes, ship_models=True))
        code, printed = run(chunky)
        assert code == 0, printed
    assert results(chunky) == undisturbed
    used = {worker["devices"][0] for worker in chunky.run_json()["members"][0]["workers"]}
    assert used <= set(ELSEWHERE)
    wait_until(lambda: not agents(), "nothing of a run stays")


@pytest.mark.fault(39)
@pytest.mark.long
def test_another_file_of_the_same_name(chunky: Project, nodes: Nodes, tmp_path: Path) -> None:
    folder = with_own_model(chunky, launcher=on_cluster(nodes, ship_models=True))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = other / "llama" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with nodes.mounted(["third"], folder, "--bind", str(other)):
        code, printed = run(chunky)
    assert code == 2
    assert f"llama: {folder}/llama/model.safetensors on node" in printed
    assert "the file that is here" in printed
    wait_until(lambda: not agents(), "nothing of a run stays")


@pytest.mark.fault(39)
@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("size=64k", "are to go to"),
        # There is room, as far as the node can tell, until there is none.
        ("nr_inodes=5", "(No space left on device"),
    ],
)
def test_a_node_without_room_for_the_table(chunky: Project, nodes: Nodes, limit: str, words: str) -> None:
    chunky.write_config(chunky_config(chunky, launcher=on_cluster(nodes)))
    folder = nodes.folder / "third"
    with nodes.mounted(["third"], folder, "-t", "tmpfs", "-o", limit, "small"):
        code, printed = run(chunky)
    assert code == 2, printed
    assert words in printed
    assert f"{folder}/ensemble-node-" in printed
    wait_until(lambda: not agents(), "nothing of a run stays")


@pytest.mark.fault(39)
@pytest.mark.long
def test_nodes_that_come_and_go_while_it_runs(
    chunky: Project, nodes: Nodes, tmp_path: Path, nvml_sim: NvmlSim
) -> None:
    write_chunky_table(chunky, rows=20)
    folder = with_own_model(chunky, devices=None, output_dir="runs/here")
    nvml_sim.write([Gpu(gpu_uuid(9))])
    here = chunky.ensemble("run", "config.yaml", environment=nvml_sim.environment())
    assert here.returncode == 0, here.stderr
    # Each of the four workers holds a chunk that does not end, and nobody has the fifth.
    waits = [Fault("wait", ids_of(chunky, row), times=1) for row in range(2, 20, 4)]
    injected = Injected(tmp_path, *waits)
    nodes.add("leaving", gpus=1)
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})
    with_own_model(chunky, devices=None, launcher=launcher)
    with background(chunky) as process:
        for number in range(5):
            injected.wait_for(number)
        nodes.kill("leaving")
        nodes.add("empty", gpus=1, hidden=[folder])
        nodes.add("late", gpus=1)
        shards = chunky.folder / "runs/first/work"
        wait_until(lambda: [*shards.rglob("*.csv")], "only the node that has come can compute the fifth")
        for number in range(5):
            injected.let_go(number)
        printed = process.communicate(timeout=200)[0]
    nodes.kill("empty")
    nodes.kill("late")
    assert process.returncode == 0, printed
    for name in ("ensemble.csv", "predictions/llama.csv"):
        assert (chunky.folder / "runs/first" / name).read_bytes() == (
            chunky.folder / "runs/here" / name
        ).read_bytes()
    printed = " ".join(printed.split())
    assert f"stays out: llama: {folder}/llama/config.json is" in printed
    assert "has joined the cluster, and takes part" in printed
    (member,) = chunky.run_json()["members"]
    chunks = {worker["devices"][0]: worker["counters"]["chunks"] for worker in member["workers"]}
    (leaving,), (empty,), (late,) = (nodes.gpus[name] for name in ("leaving", "empty", "late"))
    assert (chunks[leaving], chunks[late]) == (0, 1)
    assert empty not in chunks
    (fault,) = member["faults"]
    assert fault["kind"] == "lost"
    assert "was lost" in fault["message"]


CODE = """
import numpy as np
from helper import offset

def setup(context):
    with open(context.kwargs["numbers"]) as file:
        return float(file.read()) + float((context.model / "deep/number.txt").read_text())

def predict(frame, context):
    lengths = frame["text"].str.len().to_numpy(dtype=float)
    values = np.stack([lengths, lengths + offset(), lengths * 0 + context.state], axis=1)
    return values / values.sum(axis=1, keepdims=True)
"""
PROGRAM = """
import sys
import pandas as pd

numbers, rows, out = sys.argv[1:]
with open(numbers.removeprefix("--numbers=")) as file:
    third = float(file.read())
frame = pd.read_csv(rows, dtype=str, keep_default_na=False)
frame["winner_a"] = frame["text"].str.len() + 1
frame["winner_b"], frame["tie"] = frame["winner_a"] + 1, third
values = frame[["winner_a", "winner_b", "tie"]]
pd.concat([frame["id"], values.div(values.sum(axis=1), axis=0)], axis=1).to_csv(out, index=False)
"""
ROWS = 40


def write_members_of_every_kind(project: Project) -> list[dict[str, Any]]:
    """All that they are made of is below the project's folder, by relative paths."""
    folder, models = project.folder, project.folder / "models"
    project.write_table(ROWS)
    images = [f"images/{row}.png" for row in range(ROWS)]
    for row, name in enumerate(images):
        make_image(folder / name, seed=row)
    columns = (project.ids, project.texts, project.texts[::-1], images, project.truth)
    rows = [list(row) for row in zip(*columns, strict=True)]
    project.write_csv("test.csv", ["id", "text", "other", "image", "label"], rows)
    mate = [[row_id, "0.2", "0.3", "0.5"] for row_id in project.ids]
    project.write_csv("mate.csv", ["id", *LABELS], mate)
    for name in ("gemma", "llama"):
        shutil.copytree(project.models / name, models / name)
    make_adapter(models / "adapter", make_base(models / "base", "llama"), 3)
    make_adapter(folder / "fold1", models / "base", 3, seed=1)
    make_backbone(models / "backbone", "bert")
    make_backbone(folder / "backbone1", "bert", seed=1)
    save_head(models / "head.safetensors", linear())
    make_image_checkpoint(models / "eyes", "vit", LABELS)
    (folder / "code").mkdir()
    (folder / "code" / "mine.py").write_text(CODE)
    (folder / "code" / "infer.py").write_text(PROGRAM)
    (folder / "code" / "helper.py").write_text("def offset():\n    return 1\n")
    (folder / "numbers.txt").write_text("3")
    (models / "mine/deep").mkdir(parents=True)
    (models / "mine/deep/number.txt").write_text("0.5")
    swap = {"columns": ["text", "other"], "labels": ["winner_a", "winner_b"]}
    views = [{"name": "as_is"}, {"name": "swapped", "swap": swap, "when": {"share": 0.5}}]
    of_base = {"label_map": {"LABEL_0": "tie", "LABEL_1": "winner_a", "LABEL_2": "winner_b"}}
    text = {"text_column": "text", "max_length": 64}
    both = {"prompt_template": "{{ text }} or {{ other }}", "max_length": 64}
    return [
        {"name": "gemma", "model_name_or_path": "models/gemma", "views": views, **both},
        {
            "name": "lora",
            "model_name_or_path": "models/base",
            "adapter_name_or_path": "models/adapter",
            "views": [
                {"name": "own"},
                {"name": "fold1", "adapter_name_or_path": "fold1"},
                {"name": "mean", "adapters": {"average": ["fold1", "models/adapter"]}},
            ],
            **of_base,
            **text,
        },
        {
            **{"name": "pooled", "task_type": "pooled_cls", "model_name_or_path": "models/backbone"},
            **{"head": "models/head.safetensors", "pooling_mode": "mean"},
            "views": [
                {"name": "own"},
                {"name": "other", "model_name_or_path": "models/gemma"},
                {"name": "soup", "checkpoints": {"average": ["models/backbone", "backbone1"]}},
            ],
            **text,
        },
        {
            **{"name": "eyes", "task_type": "image_cls", "model_name_or_path": "models/eyes"},
            "image_column": "image",
        },
        {
            **{"name": "mine", "task_type": "python", "predict": "code/mine.py:predict", "setup": "setup"},
            **{"columns": ["text"], "kwargs": {"numbers": "numbers.txt"}, "depends_on": ["numbers.txt"]},
            **{"model": "models/mine", "num_gpus": 0},
        },
        {
            **{"name": "script", "task_type": "command", "columns": ["text"], "rows_per_call": 15},
            "command": ["python", "code/infer.py", "--numbers=numbers.txt", "{rows}", "{out}"],
        },
        {"name": "mate", "task_type": "csv", "path": "mate.csv"},
        {
            **{"name": "llama", "model_name_or_path": "models/llama", "when": {"margin_below": 0.15}, **text},
            **{"num_gpus": 0, "offload_folder": "disk", "max_memory": {"cpu": "40KB"}},
        },
    ]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.long
def test_members_of_every_kind_on_nodes_that_have_no_file_of_them(
    project: Project, nodes: Nodes, nvml_sim: NvmlSim
) -> None:
    pytest.importorskip("peft")
    members = write_members_of_every_kind(project)
    rules = [{"when": "{{ text | length > 150 }}", "set": {"tie": 0.9}}]
    config = project.config(models=members, rules=rules, defaults=None, submission=None)
    nvml_sim.write([Gpu(gpu_uuid(9))])
    project.write_config({**config, "output_dir": "runs/here"})
    here = project.ensemble("run", "config.yaml", environment=nvml_sim.environment())
    assert here.returncode == 0, here.stderr
    launcher = on_cluster(nodes, ship_models=True)
    project.write_config({**config, "launcher": launcher, "devices": ELSEWHERE})
    with nodes.mounted(["head", "second", "third"], project.folder):
        code, printed = run(project)
    assert code == 0, printed
    own, other = project.folder / "runs/here", project.folder / "runs/first"
    names = ["ensemble.csv", *(f"predictions/{member['name']}.csv" for member in members)]
    for name in names:
        assert (own / name).read_bytes() == (other / name).read_bytes(), name
    computed = {member["name"]: member["counters"]["rows"] for member in project.run_json()["members"]}
    assert 0 < computed["llama"] < ROWS, "some rows, as the others doubt"
    assert computed["gemma"] == ROWS + ROWS // 2, "the closest calls in its second view"
    assert "on the disk" in printed
    assert not [*(project.folder / "disk").iterdir()]


@pytest.mark.long
def test_a_run_of_this_machine_goes_on_over_one_node_and_over_two(
    chunky: Project, nodes: Nodes, tmp_path: Path, nvml_sim: NvmlSim, undisturbed: dict[str, bytes]
) -> None:
    injected = Injected(tmp_path, *(Fault("wait", ids_of(chunky, row), times=1) for row in (6, 10)))
    nvml_sim.write([Gpu(gpu_uuid(9))])
    launcher = on_cluster(nodes, runtime_env={"env_vars": injected.environment})

    def kill_at(number: int) -> None:
        with background(chunky, environment={**nvml_sim.environment(), **injected.environment}) as process:
            injected.wait_for(number)
            work = chunky.folder / "runs/first/work"
            wait_until(lambda: len([*work.rglob("*.csv")]) > number, "the chunks before are sealed")
            process.kill()
            process.communicate()
        (pid,) = injected.pids(number)
        wait_until(lambda: is_gone(pid), "no worker outlives the parent")

    kill_at(0)
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=ELSEWHERE[:1]))
    kill_at(1)
    chunky.write_config(chunky_config(chunky, launcher=launcher, devices=ELSEWHERE))
    code, printed = run(chunky)
    assert code == 0, printed
    assert results(chunky) == undisturbed
    assert chunky.run_json()["members"][0]["reused_rows"] == 8


@pytest.mark.long
def test_a_model_of_the_hub_is_of_the_same_commit_on_each_node(
    chunky: Project, tmp_path: Path, nodes: Nodes, undisturbed: dict[str, bytes]
) -> None:
    """Each node has its own cache of the hub, in which the branch may have moved on, or which may be empty."""
    own, theirs = chunky.folder / "own cache", chunky.folder / "their cache"
    first, second = "1" * 40, "2" * 40
    llama = [*(chunky.models / "llama").iterdir()]
    commit_to(own, "people/llama", first, llama)
    commit_to(theirs, "people/llama", first, llama)
    snapshot = commit_to(theirs, "people/llama", second, llama)
    weights = snapshot / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-400] + bytes(400))
    launcher = on_cluster(nodes, runtime_env={"env_vars": {"HF_HUB_CACHE": str(theirs)}})
    config = chunky_config(chunky, launcher=launcher, devices=ELSEWHERE[:1])
    config["models"][0]["model_name_or_path"] = "people/llama"
    chunky.write_config(config)
    environment = {"HF_HUB_CACHE": str(own), "HF_HUB_OFFLINE": "1"}
    (theirs / "models--people--llama").rename(tmp_path / "aside")
    done = chunky.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 2, done.stdout
    printed = " ".join(done.stderr.split())
    assert len(re.findall(r"llama: people/llama is not in the hub's cache on node \S+,", printed)) == 3, (
        printed
    )
    assert "run hf download people/llama there" in printed
    (tmp_path / "aside").rename(theirs / "models--people--llama")
    done = chunky.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(chunky) == undisturbed
