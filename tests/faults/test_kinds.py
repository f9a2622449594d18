"""What a run promises holds for every kind that runs in a worker; a new kind joins with an entry in EXAMPLES."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.members.huggingface.spec import BACKBONE
from ensemble.members.registry import KINDS
from tests.checkpoints import make_checkpoint, make_language_model, prime
from tests.faults.chunky import chunky_config, kill_after_shards, word, write_chunky_table
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected, token_ids
from tests.members.endpoint.serving import STUB
from tests.project import LABELS, Project

RESULTS = ("ensemble.csv", "predictions/m.csv")
# Rows; none of them is among the first, which some kinds try their model with.
KILLED, CRASHES, RAISES, NO_NUMBERS = 5, 6, 7, 11
WITH_WORKERS = [name for name in KINDS.built_in if KINDS.load(name).needs_worker]


@dataclass(frozen=True)
class Example:
    """A member of a kind, and how a fault finds a row of its table.

    Args:
        make: writes what it is made of into an empty folder; gives its keys beside ``name`` and ``task_type``.
        changed: keys that change its numbers, with other values.
        harmless: keys that change none, such as the size of its batches.
        ids: by which ``Fault`` finds a row, by the folder and the row's number: token ids that no other row holds,
            where embeddings are looked up.
        write_table: of equally long rows, in three chunks or more.
        later: a row of a chunk that is neither the first nor the last, and in which no process ends.
        uses_torch: whether torch can run out of memory.
        seeks_rows: whether rows that crash a process or raise an error are looked for; else they fail the member.
    """

    make: Callable[[Path], dict[str, Any]]
    changed: Mapping[str, Any]
    harmless: Mapping[str, Any]
    ids: Callable[[Path, int], tuple[int, ...]] = lambda folder, row: token_ids(folder / "model", word(row))
    write_table: Callable[[Project], None] = write_chunky_table
    later: int = 9
    uses_torch: bool = True
    seeks_rows: bool = True


def classifier(folder: Path) -> dict[str, Any]:
    model = make_checkpoint(folder / "model", "llama", LABELS, seed=2, pad=None)
    return {"model_name_or_path": str(model), "text_column": "text", "max_length": 16}


def language_model(folder: Path) -> dict[str, Any]:
    model = make_language_model(folder / "model", "llama", pad=None)
    return {
        "model_name_or_path": str(model),
        "text_column": "text",
        "max_length": 16,
        "truncation_side": "right",
        "label_tokens": {"winner_a": " plants", "winner_b": " food", "tie": " animal"},
    }


def backbone(folder: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    model = prime(make_language_model(folder / "model", "llama", pad=None), BACKBONE)
    torch.manual_seed(3)
    layer = torch.nn.Linear(64, len(LABELS))
    save_file(
        {f"fc.{name}": tensor.detach() for name, tensor in layer.named_parameters()},
        folder / "head.safetensors",
    )
    return {
        "model_name_or_path": str(model),
        "text_column": "text",
        "max_length": 16,
        "head": str(folder / "head.safetensors"),
        "pooling_mode": "mean",
    }


def image_classifier(folder: Path) -> dict[str, Any]:
    import torch
    import transformers

    names = dict(enumerate(LABELS))
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 64}
    torch.manual_seed(4)
    config = transformers.ViTConfig(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        id2label=names,
        label2id={label: number for number, label in names.items()},
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder / "model")
    halves = [0.5, 0.5, 0.5]
    processor = {
        "image_processor_type": "ViTImageProcessor",
        **{
            "do_resize": True,
            "size": {"height": 16, "width": 16},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
        },
        **{"do_normalize": True, "image_mean": halves, "image_std": halves},
    }
    (folder / "model/preprocessor_config.json").write_text(json.dumps(processor))
    return {"model_name_or_path": str(folder / "model"), "image_column": "image"}


def endpoint(folder: Path) -> dict[str, Any]:
    """The server is the worker's own, so that it dies with the fault."""
    (folder / "toy").mkdir()
    return {
        "server": {"command": [*STUB, "--port", "{port}", str(folder / "toy")]},
        "model": "tiny",
        "prompt_template": "{{ text }}",
        "label_tokens": {"winner_a": "plants", "winner_b": "food", "tie": "animal"},
        "top_logprobs": 5,
        "max_concurrency": 1,
    }


def write_short_texts(project: Project) -> None:
    """In chunks of 16 rows for each request at a time; the digits are the row's number."""
    project.ids = [f"{row:03d}" for row in range(64)]
    rows = [[name, f"row {name} of all", LABELS[row % 3]] for row, name in enumerate(project.ids)]
    project.write_csv("test.csv", ["id", "text", "label"], rows)
    sample = [[name, "0.3", "0.3", "0.4"] for name in project.ids]
    project.write_csv("sample.csv", ["id", "tie", "winner_a", "winner_b"], sample)


def write_images(project: Project) -> None:
    """Of one colour each, in chunks of 80 rows; the red is the row's number."""
    from PIL import Image

    project.ids = [f"{row:03d}" for row in range(200)]
    (project.folder / "images").mkdir()
    for row, name in enumerate(project.ids):
        image = Image.new("RGB", (8, 8), (row, 91 * row % 256, 57 * row % 256))
        image.save(project.folder / f"images/{name}.png")
    rows = [[name, f"images/{name}.png", LABELS[row % 3]] for row, name in enumerate(project.ids)]
    project.write_csv("test.csv", ["id", "image", "label"], rows)
    project.write_csv(
        "sample.csv",
        ["id", "tie", "winner_a", "winner_b"],
        [[name, "0.3", "0.3", "0.4"] for name in project.ids],
    )


# The faults happen where it gets its rows, and find them by the letters of their word.
FUNCTION = """
import numpy as np

from tests.faults import faulty

def predict(frame, context):
    letters = [[ord(letter) for letter in text[:40]] for text in frame["text"]]
    scores = np.array([[sum(row) % 7, sum(row) % 11, row[-1] % 5] for row in letters], dtype=float)
    values = np.exp(scores * context.kwargs["scale"])
    faulty.happen(letters, values)
    return values / values.sum(axis=1, keepdims=True)
"""


def function(folder: Path) -> dict[str, Any]:
    (folder / "mine.py").write_text(FUNCTION, encoding="utf-8")
    return {"predict": f"{folder}/mine.py:predict", "columns": ["text"], "kwargs": {"scale": 0.3}}


PROGRAM = """
import sys

import numpy as np
import pandas as pd

from tests.faults import faulty

_, rows, out = sys.argv
frame = pd.read_csv(rows, dtype=str)
letters = [[ord(letter) for letter in text[:40]] for text in frame["text"]]
scores = np.array([[sum(row) % 7, sum(row) % 11, row[-1] % 5] for row in letters], dtype=float)
values = np.exp(scores * 0.3)
faulty.happen(letters, values)
values /= values.sum(axis=1, keepdims=True)
pd.DataFrame(values, index=frame["id"], columns=["winner_a", "winner_b", "tie"]).to_csv(out)
"""


def program(folder: Path) -> dict[str, Any]:
    (folder / "mine.py").write_text(PROGRAM, encoding="utf-8")
    words = [sys.executable, f"{folder}/mine.py", "{rows}", "{out}"]
    return {"command": words, "columns": ["text"], "rows_per_call": 4}


BATCHES = {"batch_size": 3, "replicas": 2}
EXAMPLES: dict[str, Example] = {
    "seq_cls": Example(classifier, changed={"max_length": 12}, harmless=BATCHES),
    "causal_lm": Example(language_model, changed={"length_normalize": "tokens"}, harmless=BATCHES),
    "pooled_cls": Example(backbone, changed={"pooling_mode": "lasttoken"}, harmless=BATCHES),
    "image_cls": Example(
        image_classifier,
        changed={"processor_kwargs": {"do_normalize": False}},
        harmless=BATCHES,
        ids=lambda folder, row: (row,),
        write_table=write_images,
        later=100,
    ),
    "python": Example(
        function,
        changed={"kwargs": {"scale": 0.4}},
        harmless=BATCHES,
        ids=lambda folder, row: tuple(map(ord, word(row))),
        uses_torch=False,
    ),
    "command": Example(
        program,
        changed={"out_columns": {"winner_a": "winner_b", "winner_b": "winner_a"}},
        harmless={"rows_per_call": 3, "replicas": 2},
        ids=lambda folder, row: tuple(map(ord, word(row))),
        uses_torch=False,
        seeks_rows=False,
    ),
    "endpoint": Example(
        endpoint,
        changed={"length_normalize": "bytes"},
        harmless={"max_concurrency": 2, "replicas": 2},
        ids=lambda folder, row: tuple(map(ord, f"{row:03d}")),
        write_table=write_short_texts,
        later=20,
        uses_torch=False,
    ),
}


@dataclass(frozen=True)
class Made:
    """An example, what its member is made of, and a run of it that nothing has disturbed."""

    example: Example
    folder: Path
    member: Mapping[str, Any]
    undisturbed: Project

    def config(self, *models: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        """Of these members, or of the only one."""
        return chunky_config(self.undisturbed, models=[*(models or [self.member])], defaults=None, **changes)

    def project(self, folder: Path) -> Project:
        """The same table in another folder, which is to be made."""
        folder.mkdir()
        project = Project(folder, self.undisturbed.models)
        self.example.write_table(project)
        project.write_config(self.config())
        return project

    def fault(self, deed: Any, row: int, **keys: Any) -> Fault:
        return Fault(deed, self.example.ids(self.folder, row), **keys)


@pytest.fixture(scope="session")
def examples(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: Path, forked: ForkedRuns
) -> Callable[[str], Made]:
    """Makes what a test asks for, once."""

    @functools.cache
    def make(kind: str) -> Made:
        if kind not in EXAMPLES:
            pytest.fail(f"the kind {kind} has no entry in EXAMPLES of {__file__}", pytrace=False)
        folder = tmp_path_factory.mktemp(kind)
        example = EXAMPLES[kind]
        member = {"name": "m", "task_type": kind, **example.make(folder)}
        undisturbed = Made(example, folder, member, Project(folder, tiny_models)).project(folder / "table")
        assert forked.run(undisturbed.folder) == 0, forked.printed
        return Made(example, folder, member, undisturbed)

    return make


# The same road as causal_lm, images with a reader of their own; seq_cls is the member of most tests of faults, and
# functions have tests of their own for these.
_LONG = ("seq_cls", "pooled_cls", "image_cls", "python", "endpoint")


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.long) if kind in _LONG else kind for kind in WITH_WORKERS]
)
def made(request: pytest.FixtureRequest, examples: Callable[[str], Made]) -> Made:
    return examples(request.param)


def results(project: Project) -> dict[str, bytes]:
    return {name: (project.folder / "runs/first" / name).read_bytes() for name in RESULTS}


def values(project: Project, name: str = "m") -> np.ndarray:
    ids, rows = zip(
        *((row[0], row[1:]) for row in project.read(f"runs/first/predictions/{name}.csv")[1]), strict=True
    )
    assert list(ids) == project.ids
    return np.array(rows, dtype=float)


def members(project: Project) -> list[dict[str, Any]]:
    report: list[dict[str, Any]] = project.run_json()["members"]
    return report


@pytest.mark.fault(1, 12)
def test_its_worker_is_killed_and_then_the_run(made: Made, forked: ForkedRuns, tmp_path: Path) -> None:
    """The worker's chunk is computed again, and what was computed before the run's end is not."""
    project = made.project(tmp_path / "table")
    injected = Injected(tmp_path, made.fault("kill", KILLED, times=1))
    assert forked.run(project.folder, judge=kill_after_shards(2), faults=injected) == -9
    assert "signal 9 (SIGKILL)" in forked.printed
    assert len(injected.pids()) == 1
    shards = project.folder.glob("runs/first/work/m.*/*.csv")
    done = sum(len(shard.read_text().splitlines()) - 1 for shard in shards)
    assert 0 < done < len(project.ids)
    assert forked.run(project.folder) == 0, forked.printed
    (member,) = members(project)
    assert (member["reused_rows"], member["counters"]["rows"]) == (done, len(project.ids) - done)
    assert results(project) == results(made.undisturbed)


@pytest.mark.fault(2, 4, 6, 9, 10)
def test_rows_that_it_does_not_bear_in_other_batches_by_two_replicas(
    made: Made, forked: ForkedRuns, tmp_path: Path
) -> None:
    """One crashes its process, one raises an error, one becomes NaN; the others keep their numbers.

    Where torch computes, memory runs out at one of the others.
    """
    project = made.project(tmp_path / "table")
    model = {**made.member, **made.example.harmless}
    project.write_config(made.config(model, on_bad_row="uniform", retries=0))
    faults, bad = [made.fault("nan", NO_NUMBERS)], [NO_NUMBERS]
    if made.example.seeks_rows:
        raises = made.fault("raise", RAISES, error="LookupError", text="an odd row")
        faults = [made.fault("segfault", CRASHES), raises, *faults]
        bad = [CRASHES, RAISES, NO_NUMBERS]
    if made.example.uses_torch:
        memory = {"error": "torch.OutOfMemoryError", "text": "CUDA out of memory."}
        faults.append(made.fault("raise", made.example.later, times=1, **memory))
    injected = Injected(tmp_path, *faults)
    assert forked.run(project.folder, faults=injected) == 0, forked.printed
    (member,) = members(project)
    assert sorted(member["bad_rows"], key=int) == [*map(str, bad)]
    if made.example.seeks_rows:
        assert "signal 11 (SIGSEGV)" in member["bad_rows"][str(CRASHES)]
        assert "LookupError: an odd row" in member["bad_rows"][str(RAISES)]
    assert "NaN" in member["bad_rows"][str(NO_NUMBERS)]
    for row in bad:
        assert f"row {row + 1}" in forked.printed
    out_of_memory = sum(worker["counters"]["oom_events"] or 0 for worker in member["workers"])
    if made.example.uses_torch:
        (ran_out,) = injected.pids(3)
        # One that crashed in its next chunk may not have written this one, which nobody then counts.
        assert out_of_memory == 1 or ran_out in injected.pids(0)
    expected = values(made.undisturbed)
    expected[bad] = 1 / len(LABELS)
    np.testing.assert_allclose(values(project), expected, atol=1e-5)


@pytest.mark.fault(18, 19)
def test_what_changes_its_numbers_and_what_does_not(made: Made, forked: ForkedRuns, tmp_path: Path) -> None:
    project = made.project(tmp_path / "table")
    shutil.copytree(made.undisturbed.folder / "runs", project.folder / "runs")
    same = {**made.member, **made.example.harmless, "weight": 3.0}
    other = {**made.member, **made.example.changed, "name": "other"}
    # Under another name, too, what has the same numbers would be taken over.
    project.write_config(made.config(same, other, time_limit="1h", hang_timeout="5m"))
    assert forked.run(project.folder) == 0, forked.printed
    rows = len(project.ids)
    assert [(item["reused_rows"], item["counters"]["rows"]) for item in members(project)] == [
        (rows, 0),
        (0, rows),
    ]
    np.testing.assert_array_equal(values(project), values(made.undisturbed))
    assert np.abs(values(project, "other") - values(project)).max() > 1e-3
