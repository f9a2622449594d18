"""The message loop, in this process: what each fault in a chunk is answered with, and that it goes on after it."""

from __future__ import annotations

import base64
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    Closed,
    Command,
    CommonSpec,
    Counters,
    Event,
    Failed,
    Finish,
    Load,
    Predict,
    Progress,
    Ready,
    Start,
    Started,
    Stop,
    WorkerSpec,
)
from ensemble.members.huggingface.spec import ModelSpec
from ensemble.members.predictor import Report, Runner
from ensemble.worker.channel import HeartbeatThread
from ensemble.worker.session import serve
from tests.checkpoints import make_checkpoint, make_texts, reference
from tests.members.huggingface.broken import BREAKING
from tests.members.huggingface.scoring.test_compute import read_shard
from tests.members.huggingface.scoring.test_predict import LABELS, start, worker_spec

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("breaking"), "llama", LABELS)


def publish(folder: Path, columns: Mapping[str, list[Any]], order: list[int] | None = None) -> dict[str, str]:
    """A table, its order and an empty folder for parts, as the parent leaves them; their places in a spec."""
    folder.mkdir(exist_ok=True)
    table = pa.table(dict(columns))
    table = table.replace_schema_metadata({"ensemble.rows": str(table.num_rows)})
    with pa.ipc.new_file(folder / "table.arrow", table.schema) as file:
        file.write_table(table)
    np.save(folder / "order.npy", np.array(order if order is not None else range(table.num_rows), dtype=int))
    (folder / "shards").mkdir()
    places = {"table_path": "table.arrow", "order_path": "order.npy", "shards_dir": "shards"}
    return {key: str(folder / name) for key, name in places.items()}


class Heartbeat(HeartbeatThread):
    """Not started; by its clock every part takes seven seconds, and nothing else takes any time."""

    def __init__(self, send: Callable[[Event], None], step: Callable[[], None]) -> None:
        super().__init__(send)
        numbers = count()
        self.clock = lambda: 7.0 * next(numbers)
        self.on_step = step

    def step(self) -> None:
        self.on_step()


def served(spec: ModelSpec, *commands: Command, step: Callable[[], None] = lambda: None) -> tuple[int, Any]:
    """The exit code and the events, without progress."""
    events: list[Event] = []
    heartbeat = Heartbeat(events.append, step)
    code = serve([start(spec), Load(), *commands], events.append, heartbeat, time.monotonic())
    return code, [event for event in events if not isinstance(event, Progress)]


@pytest.mark.fault(4)
def test_an_error_of_an_unknown_row_ends_the_chunk_and_nothing_else(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer

    from tests.members.huggingface.broken import BreakingToken

    texts = make_texts(40)
    texts[25] = f"any {BREAKING} thing"
    token = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).token_to_id(BREAKING)
    assert token is not None
    spec = worker_spec(checkpoint, **publish(tmp_path, {"text": texts}))
    steps: list[None] = []
    with BreakingToken(token):
        code, events = served(
            spec, Predict(3, 20, 40), Predict(0, 0, 20), Stop(), step=lambda: steps.append(None)
        )
    assert code == 0
    started, ready, failed, done, closed = events
    assert isinstance(started, Started)
    assert isinstance(ready, Ready)
    assert isinstance(closed, Closed)
    assert isinstance(failed, ChunkFailed)
    assert (failed.chunk, failed.error_type) == (3, "IndexError")
    assert "out of range" in failed.message
    assert "in predict" in failed.traceback
    assert failed.traceback in capsys.readouterr().err
    assert isinstance(done, ChunkDone)
    assert (done.chunk, done.counters.rows, done.bad_rows, done.counters.predict_seconds) == (0, 20, (), 7.0)
    got = read_shard(tmp_path / "shards", done.shard)
    np.testing.assert_array_equal(got[:, 0], np.arange(20))
    np.testing.assert_allclose(got[:, 1:], reference(checkpoint, texts[:20]), atol=1e-5)
    assert len(steps) >= done.counters.batches + 2, "after loading, for each block of tokens and each batch"


def test_rows_that_cannot_be_rendered_are_named_and_the_others_done(checkpoint: Path, tmp_path: Path) -> None:
    texts = make_texts(30)
    cells = [f'["{text}"]' for text in texts]
    cells[4], cells[11] = "[1", "{}"
    order = list(range(30))[::-1]
    places = publish(tmp_path, {"turns": cells}, order)
    template = "{{ (turns | fromjson)[0] }}"
    spec = worker_spec(checkpoint, prompt_template=template, text_columns=(), **places)
    # Places 18 to 25 of the order hold rows 11 to 4; place 25 alone only row 4.
    code, events = served(spec, Predict(0, 18, 26), Predict(1, 25, 26), Stop())
    assert code == 0
    _, _, done, alone, _ = events
    assert (done.counters.rows, done.bad_rows) == (8, (4, 11))
    assert done.bad_row_reasons[0].startswith("prompt_template: line 1: ")
    assert done.bad_row_reasons[1].startswith("prompt_template: line 1: UndefinedError")
    assert (alone.counters.rows, alone.bad_rows, alone.counters.batches, alone.counters.tokens) == (
        1,
        (4,),
        0,
        0,
    )
    assert (tmp_path / "shards" / alone.shard).read_text() == '"row","p0","p1","p2"\n'
    (tmp_path / "shards" / alone.shard).unlink()
    got = read_shard(tmp_path / "shards", done.shard)
    np.testing.assert_array_equal(got[:, 0], np.arange(10, 4, -1))
    np.testing.assert_allclose(got[:, 1:], reference(checkpoint, texts[5:11])[::-1], atol=1e-5)


def test_blocks_of_tokens_are_put_together_in_the_rows_order(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.members.huggingface.scoring import encode as prompt

    cells = [f'["{text}"]' for text in make_texts(40)]
    cells[7], cells[30] = "[", "["
    cells[20:24] = ["["] * 4
    spec = worker_spec(
        checkpoint, prompt_template="{{ (turns | fromjson)[0] }}", text_columns=(), max_length=12
    )
    from ensemble.members.huggingface.loading.tokenizer import load_tokenizer

    rows = [{"turns": cell} for cell in cells]
    encoder = prompt.Prompt(spec, load_tokenizer(spec), 12)
    whole = encoder.encode(rows)
    monkeypatch.setattr(prompt, "BLOCK_ROWS", 4)  # one block holds nothing but problems
    steps: list[None] = []
    blocks = encoder.encode(rows, lambda: steps.append(None))
    assert len(steps) == 10
    assert blocks.problems == whole.problems
    assert list(blocks.problems) == [7, 20, 21, 22, 23, 30]
    assert blocks.truncated_rows == whole.truncated_rows > 0
    np.testing.assert_array_equal(blocks.lengths, whole.lengths)
    assert set(np.flatnonzero(blocks.lengths == 0)) == set(blocks.problems)
    for row_id, other in zip(blocks.inputs["input_ids"], whole.inputs["input_ids"], strict=True):
        np.testing.assert_array_equal(row_id, other)


def test_a_shard_that_cannot_be_written_ends_the_worker(checkpoint: Path, tmp_path: Path) -> None:
    places = publish(tmp_path, {"text": make_texts(10)})
    shutil.rmtree(tmp_path / "shards")
    code, events = served(worker_spec(checkpoint, **places), Predict(0, 0, 5), Predict(1, 5, 10), Stop())
    assert code == 1
    assert isinstance(events[-1], Failed)
    assert (events[-1].error_type, events[-1].chunk, events[-1].can_retry) == ("WriteError", 0, False)
    assert "make room there" in events[-1].message


@pytest.mark.fault(7)
def test_an_error_that_poisons_the_process_ends_it_and_can_be_retried(
    checkpoint: Path, tmp_path: Path
) -> None:
    import torch

    from tests.members.huggingface.broken import FailingPass

    spec = worker_spec(checkpoint, **publish(tmp_path, {"text": make_texts(10)}))
    poison = getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: device-side assert triggered")
    with FailingPass(poison):  # a pass belongs to loading: does the model bear padding
        code, events = served(spec, Predict(0, 0, 5))
    assert (code, events[-1].chunk, events[-1].can_retry) == (1, None, True)
    with FailingPass(poison, after=1000) as passes:
        served(spec, Stop())
    with FailingPass(poison, after=passes.passed):
        code, events = served(spec, Predict(6, 0, 5), Predict(7, 5, 10))
    assert code == 1
    assert isinstance(events[-1], Failed)
    assert (events[-1].chunk, events[-1].can_retry) == (6, True)
    assert events[-1].message == "CUDA error: device-side assert triggered"


def test_a_model_that_cannot_be_loaded_is_not_tried_again(tmp_path: Path) -> None:
    code, events = served(worker_spec(tmp_path), Predict(0, 0, 1))
    assert code == 1
    assert [type(event) for event in events] == [Started, Failed]
    assert (events[1].chunk, events[1].can_retry) == (None, False)
    assert events[1].traceback


def test_jobs_without_rows_are_done_by_number_and_leave_no_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[int] = []

    class Numbers(Runner):
        def load(self) -> Ready:
            return Ready()

        def run(self, job: int, report: Report) -> Counters:
            jobs.append(job)
            return Counters(tokens=5)

    module = ModuleType("numbers_without_table")
    vars(module).update(import_libraries=dict, make_predictor=lambda common, settings, table: Numbers())
    monkeypatch.setitem(sys.modules, module.__name__, module)
    common = CommonSpec(
        labels=("a", "b"),
        activation="none",
        gpus=0,
        memory_limit_bytes=None,
        seed=0,
        table_path="",
        order_path="",
        shards_dir="",
    )
    events: list[Event] = []
    heartbeat = Heartbeat(events.append, lambda: None)
    commands: list[Command] = [
        Start(WorkerSpec(common, module.__name__, {})),
        Load(),
        Predict(4, 2, 3, job=2),
        Stop(),
    ]
    assert serve(commands, events.append, heartbeat, time.monotonic()) == 0
    assert jobs == [2]
    (done,) = [event for event in events if isinstance(event, ChunkDone)]
    assert (done.chunk, done.shard, done.counters.rows, done.counters.tokens) == (4, "", 1, 5)


def test_a_stopped_run_keeps_the_batches_that_are_done_and_goes_on_to_the_same_numbers(
    checkpoint: Path, tmp_path: Path
) -> None:
    spec = worker_spec(checkpoint, batch_size=8, **publish(tmp_path, {"text": make_texts(40)}))
    _, (*_, whole, _) = served(spec, Predict(0, 0, 40), Stop())
    undisturbed = read_shard(tmp_path / "shards", whole.shard)
    events: list[Event] = []
    heartbeat = Heartbeat(events.append, lambda: None)

    def commands() -> Iterator[Command]:
        yield from (start(spec), Load())
        heartbeat.is_stopped = True  # as when Finish comes behind the next command
        yield from (Predict(0, 0, 40), Finish())

    assert serve(commands(), events.append, heartbeat, time.monotonic()) == 0
    (done,) = [event for event in events if isinstance(event, ChunkDone)]
    assert (done.counters.rows, done.counters.batches, done.bad_rows) == (8, 1, ())
    assert done.shard.startswith("000000000-000000008."), "by which status counts rows"
    (tmp_path / "shards" / whole.shard).unlink()
    kept = read_shard(tmp_path / "shards", done.shard)
    (tmp_path / "shards" / done.shard).unlink()
    left = [row for row in range(40) if row not in kept[:, 0]]
    rows = base64.b64encode(np.array(left, "<i4").tobytes()).decode()
    _, (*_, rest, _) = served(spec, Predict(1, 0, len(left), rows), Stop())
    both = np.concatenate([kept, read_shard(tmp_path / "shards", rest.shard)])
    np.testing.assert_array_equal(both[np.argsort(both[:, 0])], undisturbed)
