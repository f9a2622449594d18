"""Files of a checkpoint are replaced while a run goes on: nothing is made of old and new ones together."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_adapter, make_checkpoint
from tests.faults.chunky import ROWS, ROWS_PER_CHUNK, chunky_config, ids_of, write_chunky_table
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected
from tests.faults.steps import Step, Verdict
from tests.project import LABELS, Project
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("warm")

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
CHANGED = "changed during the run"
A, B = "predictions/a.csv", "predictions/b.csv"


def by_rename(folder: Path, other: Path, name: str) -> None:
    shutil.copy(other / name, folder / "new")
    (folder / "new").replace(folder / name)


def in_place(folder: Path, other: Path, name: str) -> None:
    """As ``cp`` does: the same file gets other bytes."""
    before = (folder / name).stat().st_ino
    (folder / name).write_bytes((other / name).read_bytes())
    assert (folder / name).stat().st_ino == before


def renamed_and_back(folder: Path, other: Path, name: str) -> None:
    """Another one for a moment, then the first one again; a process that loads meanwhile gets either."""
    (folder / name).rename(folder / "away")
    by_rename(folder, other, name)
    (folder / "away").replace(folder / name)


def written_and_back(folder: Path, other: Path, name: str) -> None:
    """The same with ``cp -p``: what the times say is what they said."""
    old, times = (folder / name).read_bytes(), (folder / name).stat()
    in_place(folder, other, name)
    (folder / name).write_bytes(old)
    os.utime(folder / name, ns=(times.st_atime_ns, times.st_mtime_ns))


def removed(folder: Path, other: Path, name: str) -> None:
    (folder / name).unlink()


def put_there(folder: Path, other: Path, name: str) -> None:
    """A file that was not there."""
    assert not (folder / name).exists()
    (folder / name).write_text("{}")


Change = Callable[[Path, Path, str], None]
BACK = (renamed_and_back, written_and_back)


class Two:
    """A project of two members, of which "a" has a checkpoint that a test may change; ``other`` is another one."""

    def __init__(self, project: Project, folder: Path) -> None:
        self.project = project
        self.folder = shutil.copytree(project.models / "llama", folder / "a")
        self.other = make_checkpoint(folder / "other", "llama", LABELS, seed=7, pad=None)
        text = (self.other / TOKENIZER).read_text(encoding="utf-8")
        (self.other / TOKENIZER).write_text(text.replace('"NFC"', '"NFD"') + " ", encoding="utf-8")
        config = json.loads((self.other / "config.json").read_text(encoding="utf-8"))
        (self.other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
        self.members: list[dict[str, Any]] = [
            {"name": "a", "model_name_or_path": str(self.folder)},
            {"name": "b", "model_name_or_path": str(project.models / "llama"), "max_length": 12},
        ]
        self.write_config()

    def write_config(self, **changes: Any) -> None:
        config = {"models": self.members, "submission": None, **changes}
        self.project.write_config(chunky_config(self.project, **config))

    def files(self, output_dir: str = "runs/first") -> dict[str, bytes]:
        folder = self.project.folder / output_dir
        return {
            name: (folder / name).read_bytes() for name in (A, B, "ensemble.csv") if (folder / name).exists()
        }

    def failures(self) -> dict[str, str | None]:
        members = self.project.run_json()["members"]
        return {member["name"]: member["failure"] and member["failure"]["message"] for member in members}

    def reused(self) -> dict[str, int]:
        return {member["name"]: member["reused_rows"] for member in self.project.run_json()["members"]}


@pytest.fixture
def two(project: Project, tmp_path: Path) -> Two:
    write_chunky_table(project)
    return Two(project, tmp_path)


@contextmanager
def meanwhile(injected: Injected, change: Callable[[], object]) -> Iterator[None]:
    """Once the fault has happened the change is made, and then what waits is let go on."""

    def act() -> None:
        injected.wait_for()
        try:
            change()
        finally:
            injected.let_go()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()


def check_next_run(two: Two, forked: ForkedRuns, kept: int) -> None:
    """The same command again does "a" anew, with the files that are there, and "b" not at all."""
    assert forked.run(two.project.folder) == 0, forked.printed
    assert two.reused() == {"a": kept, "b": ROWS}
    after = two.files()
    two.write_config(output_dir="runs/fresh")
    assert forked.run(two.project.folder) == 0, forked.printed
    assert after == two.files("runs/fresh"), "as if there had never been any other files"


@pytest.mark.fault(27)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("change", "name"),
    one_in(
        8,
        [
            (by_rename, WEIGHTS),
            (in_place, WEIGHTS),
            (renamed_and_back, WEIGHTS),
            (written_and_back, WEIGHTS),
            (by_rename, TOKENIZER),
            (renamed_and_back, TOKENIZER),
            (by_rename, "config.json"),
            (put_there, "added_tokens.json"),
        ],
    ),
)
def test_a_file_replaced_while_chunks_are_computed(
    change: Change, name: str, two: Two, forked: ForkedRuns, tmp_path: Path
) -> None:
    """While the second of four chunks is computed."""
    injected = Injected(tmp_path, Fault("wait", ids_of(two.project, 5), times=1))
    with meanwhile(injected, lambda: change(two.folder, two.other, name)):
        code = forked.run(two.project.folder, faults=injected)
    assert code == 1, forked.printed
    message = two.failures()["a"] or ""
    assert f"{name} {CHANGED}" in message
    assert two.failures()["b"] is None
    assert [*two.files()] == [B], "the other one finishes; nothing of this one is complete"
    # Files that are back are the ones whose first chunk was done; where one is new, nothing tells since when.
    check_next_run(two, forked, ROWS_PER_CHUNK if change in BACK else 0)


@pytest.mark.fault(27)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
@pytest.mark.long
def test_an_adapter_replaced(two: Two, forked: ForkedRuns, tmp_path: Path) -> None:
    make_adapter(tmp_path / "adapter", two.folder, len(LABELS), seed=1)
    make_adapter(tmp_path / "new adapter", two.folder, len(LABELS), seed=2)
    two.members[0]["adapter_name_or_path"] = str(tmp_path / "adapter")
    two.write_config()
    injected = Injected(tmp_path, Fault("wait", ids_of(two.project, 9), times=1))
    name = "adapter_model.safetensors"
    with meanwhile(injected, lambda: by_rename(tmp_path / "adapter", tmp_path / "new adapter", name)):
        assert forked.run(two.project.folder, faults=injected) == 1, forked.printed
    assert f"{name} {CHANGED}" in (two.failures()["a"] or "")
    check_next_run(two, forked, 0)


@pytest.mark.long
@pytest.mark.fault(27)
@pytest.mark.timeout(300)
def test_weights_replaced_between_the_last_chunk_and_the_manifest(two: Two, forked: ForkedRuns) -> None:
    seen = 0

    def judge(step: Step) -> Verdict:
        nonlocal seen
        if step.call.startswith("rename") and "/work/a." in step.paths[1] and step.paths[1].endswith(".csv"):
            seen += 1
            if seen == ROWS // ROWS_PER_CHUNK:
                by_rename(two.folder, two.other, WEIGHTS)
        return Verdict.GO

    assert forked.run(two.project.folder, judge=judge) == 1, forked.printed
    assert f"{WEIGHTS} {CHANGED}" in (two.failures()["a"] or "")
    assert [*two.files()] == [B]
    check_next_run(two, forked, 0)


@pytest.mark.fault(27)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("change", "name"),
    one_in(
        6,
        [
            *((by_rename, WEIGHTS), (in_place, WEIGHTS), (renamed_and_back, WEIGHTS), (removed, WEIGHTS)),
            *((by_rename, TOKENIZER), (written_and_back, TOKENIZER)),
        ],
    ),
)
def test_a_file_replaced_while_its_member_waits_its_turn(
    change: Change, name: str, two: Two, forked: ForkedRuns, tmp_path: Path
) -> None:
    """The files of the second member, while the first one computes: nothing of it is loaded yet."""
    two.members.reverse()
    two.write_config()
    injected = Injected(tmp_path, Fault("wait", ids_of(two.project, 5), times=1))
    with meanwhile(injected, lambda: change(two.folder, two.other, name)):
        assert forked.run(two.project.folder, faults=injected) == 1, forked.printed
    assert f"{name} {CHANGED}" in (two.failures()["a"] or "")
    assert [*two.files()] == [B]
    if change is removed:
        shutil.copy(two.other / name, two.folder)
    check_next_run(two, forked, 0)


@pytest.mark.long
@pytest.mark.fault(27)
@pytest.mark.timeout(300)
def test_weights_replaced_between_the_loading_of_two_workers(
    two: Two, forked: ForkedRuns, tmp_path: Path
) -> None:
    """The first worker has loaded and computes; it dies, and the next one would load other weights."""
    injected = Injected(
        tmp_path,
        Fault("wait", ids_of(two.project, 5), times=1),
        Fault("kill", ids_of(two.project, 5), times=1),
    )
    with meanwhile(injected, lambda: by_rename(two.folder, two.other, WEIGHTS)):
        assert forked.run(two.project.folder, faults=injected) == 1, forked.printed
    assert len(injected.pids(1)) == 1
    assert f"{WEIGHTS} {CHANGED}" in (two.failures()["a"] or "")
    check_next_run(two, forked, 0)


@pytest.mark.fault(27)
@pytest.mark.timeout(300)
def test_the_table_replaced(chunky: Project, forked: ForkedRuns, tmp_path: Path) -> None:
    """Its rows are read once: the results are of those, all of them, and it is said that there are others now."""
    before = forked.run(chunky.folder, "--set", "output_dir=runs/before")
    assert before == 0, forked.printed
    header, rows = chunky.read("test.csv")
    rows[9][header.index("text")] = rows[9][header.index("text")].replace("person", "animal", 1)
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 5), times=1))
    with meanwhile(injected, lambda: chunky.write_csv("test.csv", header, rows)):
        assert forked.run(chunky.folder, faults=injected) == 0, forked.printed
    assert f"test.csv {CHANGED}; the results are of the rows as they were read at its start" in forked.printed
    folders = [chunky.folder / "runs" / name / "ensemble.csv" for name in ("before", "first")]
    assert folders[0].read_bytes() == folders[1].read_bytes()
    assert forked.run(chunky.folder) == 0, forked.printed
    (member,) = chunky.run_json()["members"]
    assert (member["reused_rows"], member["counters"]["rows"]) == (ROWS - 1, 1), "only the row that is new"
    assert CHANGED not in forked.printed
