"""What an agent does on its node, without a cluster: files that come in pieces, and workers that it starts."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ensemble.common.host import usable_cpus
from ensemble.common.protocol import CommonSpec, Start, WorkerSpec
from ensemble.scheduling.launchers.base import MemberFiles, WorkerStart
from ensemble.scheduling.launchers.local import LocalLauncher, LocalWorker
from ensemble.scheduling.launchers.ray.agent import Agent
from ensemble.scheduling.launchers.ray.copies import Copy, copies_of, packs, with_paths
from tests.waiting import wait_until


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    monkeypatch.setattr("tempfile.tempdir", None)
    # It would wait for the end of this process.
    monkeypatch.setattr(
        "ensemble.scheduling.launchers.ray.agent._remove_after_this_process", lambda folder: None
    )
    made = Agent({})
    yield made
    made.end()
    assert not [*(tmp_path / "node").iterdir()], "nothing stays"


def make_files(folder: Path) -> dict[str, Copy]:
    """A large one, small ones and an empty one."""
    (folder / "here").mkdir()
    sizes = {"large": 40_000, "a": 10, "b": 300, "empty": 0}
    for name, size in sizes.items():
        (folder / "here" / name).write_bytes(random.Random(size).randbytes(size))
    return copies_of(str(folder / "here" / name) for name in (*sizes, "missing", "a"))


def test_files_arrive_in_pieces(tmp_path: Path, agent: Agent) -> None:
    copies = make_files(tmp_path)
    assert len(copies) == 4
    made = [*packs(copies, 6_000)]
    assert len(made) == 8, "small files go together"
    assert [agent.write(pack) for pack in made] == [""] * len(made)
    for path in copies:
        assert Path(agent.local_path(path)).read_bytes() == Path(path).read_bytes()


def test_a_file_that_changes_while_it_is_sent(tmp_path: Path, agent: Agent) -> None:
    copies = make_files(tmp_path)
    path = str(tmp_path / "here" / "b")
    Path(path).write_bytes(b"x" * copies[path].size)
    (pack,) = packs({path: copies[path]}, 1 << 20)
    assert agent.write(pack).startswith(f"{path} is not in ")
    Path(path).write_bytes(b"x")
    with pytest.raises(OSError, match="became shorter"):
        [*packs({path: copies[path]}, 1 << 20)]


def test_a_node_says_which_files_it_lacks(tmp_path: Path, agent: Agent) -> None:
    copies = make_files(tmp_path)
    (tmp_path / "here" / "a").write_bytes(b"another")
    (tmp_path / "here" / "empty").unlink()
    names = {Path(path).name: what for path, what in agent.check(copies).items()}
    assert names == {"a": "another", "empty": "missing"}


def test_no_path_leads_out_of_its_folder(agent: Agent) -> None:
    root = os.path.realpath(agent.facts().folder)
    for path in ("/a/../../../etc/passwd", "/etc/passwd", "//etc/passwd"):
        assert os.path.realpath(agent.local_path(path)) == f"{root}/files/etc/passwd"


def test_only_texts_that_stand_for_files_are_changed() -> None:
    settings = {"folder": "text", "columns": ("text", "a"), "files": ["./text", "x"], "deep": {"a": "./text"}}
    paths = {"text": "/node/text", "./text": "/node/text"}
    assert with_paths(settings, paths) == {
        **{"folder": "/node/text", "columns": ["text", "a"], "files": ["/node/text", "x"]},
        "deep": {"a": "/node/text"},
    }


class _Kept(LocalLauncher):
    """Keeps what was started."""

    def start(self, start: WorkerStart) -> LocalWorker:
        self.last = start
        return super().start(start)


def worker_start(tmp_path: Path) -> WorkerStart:
    common = CommonSpec(
        labels=("a", "b"),
        activation="softmax",
        gpus=0,
        memory_limit_bytes=None,
        seed=0,
        table_path="/t",
        order_path="/o",
        shards_dir="/s",
    )
    spec = WorkerSpec(common, "ensemble.members.python.child", {})
    return WorkerStart(Start(spec), (), {}, tmp_path / "log", scratch=tmp_path / "scratch" / "one")


def test_threads_are_of_the_nodes_own_cpus(
    tmp_path: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")  # of the node, whatever the run's machine has
    half = max(1, usable_cpus() // 2)
    launcher = agent._launcher = _Kept({})
    for number, (share, threads) in enumerate({1.0: 6, 1 / 2: half, 1 / 1000: 1}.items()):
        start = replace(worker_start(tmp_path), cpu_share=share)
        agent.start(number, start, {}, ["/modules"])
        environment = Path(f"/proc/{agent._workers[number].process.pid}/environ")
        wait_until(environment.read_bytes, "the process has begun with what it was started with")
        variables = environment.read_bytes().split(b"\0")
        assert f"OMP_NUM_THREADS={threads}".encode() in variables
        assert launcher.last.environment["PYTHONPATH"].endswith(":/modules")
        assert (tmp_path / "scratch" / "one").is_dir()
        agent.close(number)
        assert not (tmp_path / "scratch" / "one").exists(), "it goes with its worker"


def test_a_worker_that_cannot_be_started_is_an_error(tmp_path: Path, agent: Agent) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        agent.start(7, replace(worker_start(tmp_path), scratch=tmp_path / "file" / "x"), {}, [])
    assert agent.poll(0.0, math.inf).workers == {}


def test_what_paths_of_the_runs_machine_are_on_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ensemble.scheduling.launchers.ray.supply import import_folders, paths_of

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "lib"), "elsewhere"]))
    for name in ("lib/pack/module.py", "models/one/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    module = str(tmp_path / "lib/pack/module.py")
    member = MemberFiles(
        worker_start(tmp_path).command.spec, ("models/one", module, "org/name"), str(tmp_path)
    )
    assert import_folders(member, "/node") == [f"/node{tmp_path}/lib"]
    assert import_folders(member, "") == [f"{tmp_path}/lib"], "where the node has it at the same place"
    paths = paths_of(member, "/node")
    assert paths["models/one"] == paths[f"{tmp_path}/models/one"] == f"/node{tmp_path}/models/one"
    assert paths["lib/pack/module.py"] == paths[module] == f"/node{module}"
    assert paths[str(tmp_path)] == f"/node{tmp_path}"
    assert "org/name" not in paths, "each node has it from the hub"
