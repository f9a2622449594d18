"""Out of memory, at any batch: the same rows again in halves, the same numbers in the end.

A row that does not fit alone is left out, and the others lose nothing by it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint, make_texts
from tests.members.huggingface.scoring.test_predict import LABELS, make_session, worker_spec
from tests.project import ROOT, Project, python_path
from tests.sampling import one_in, shares

pytestmark = pytest.mark.usefixtures("one_thread")
BUDGET = 512


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[Any, Any]:
    """A tiny Gemma-2 as the worker's classifier, and 150 rows of tokens."""
    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.encode import Prompt

    spec = worker_spec(make_checkpoint(tmp_path, "gemma2", LABELS))
    model = load(spec)
    rows = [{"text": text} for text in make_texts(150, longest=25)]
    encoded = Prompt(spec, model.tokenizer, model.max_length).encode(rows)
    return Classifier(model.model, model.pad_token_id), encoded


def run(classifier: Any, encoded: Any, limit: Any, batch_size: int | None = None) -> tuple[Any, Any]:
    from ensemble.members.huggingface.scoring.forward import BatchSizes, compute

    sizes = BatchSizes(BUDGET, batch_size)
    with limit:
        return compute(classifier, encoded, sizes, lambda *counts: None), sizes


@pytest.mark.fault(6)
@pytest.mark.parametrize("share", shares(4))
def test_an_error_at_any_batch_changes_no_number(share: int, loaded: tuple[Any, Any]) -> None:
    from tests.oom.limit import AllocatorLimit

    classifier, encoded = loaded
    undisturbed, sizes = run(classifier, encoded, AllocatorLimit())
    assert undisturbed.counters.oom_events == 0
    assert sizes.tokens_at(1) == BUDGET
    assert undisturbed.counters.batches > 5
    # The last batch may hold one row, which cannot be halved.
    for number in range(share, undisturbed.counters.batches - 1, 4):
        computed, sizes = run(classifier, encoded, AllocatorLimit(fail_at=frozenset({number})))
        assert computed.counters.oom_events == 1
        assert sizes.tokens_at(1) < BUDGET
        np.testing.assert_allclose(computed.logits.numpy(), undisturbed.logits.numpy(), atol=1e-5)


@pytest.mark.parametrize("batch_size", one_in(2, [None, 16]))
@pytest.mark.fault(6)
def test_batches_shrink_until_they_fit_and_stay_so(loaded: tuple[Any, Any], batch_size: int | None) -> None:
    from tests.oom.limit import AllocatorLimit

    classifier, encoded = loaded
    undisturbed, _ = run(classifier, encoded, AllocatorLimit())
    longest = int(encoded.lengths.max())
    limit = AllocatorLimit(largest_bytes=4 * 4 * longest**2 * 2)  # attention of two of the longest rows
    computed, sizes = run(classifier, encoded, limit, batch_size)
    assert computed.counters.oom_events == limit.refused > 0
    assert computed.counters.oom_events < 8, "what was learnt is kept"
    np.testing.assert_allclose(computed.logits.numpy(), undisturbed.logits.numpy(), atol=1e-5)
    assert sizes.tokens_at(1) < BUDGET
    if batch_size:
        assert 1 <= sizes.batch_size < batch_size


@pytest.mark.parametrize("batch_size", [None, 16])
@pytest.mark.fault(6)
def test_rows_that_do_not_fit_alone_are_left_out(loaded: tuple[Any, Any], batch_size: int | None) -> None:
    from dataclasses import replace

    from tests.oom.limit import AllocatorLimit

    classifier, encoded = loaded
    undisturbed, _ = run(classifier, encoded, AllocatorLimit())
    ids, too_long = list(encoded.inputs["input_ids"]), {3: 250, 70: 240}
    for row, tokens in too_long.items():
        ids[row] = np.resize(np.concatenate(ids), tokens)
    lengths = np.array([len(array) for array in ids])
    others = np.setdiff1d(np.arange(len(ids)), list(too_long))
    largest_bytes = 4 * 4 * 16 * int(lengths[others].max()) ** 2  # attention of sixteen of the other rows
    assert largest_bytes < 4 * 4 * 240**2
    longer = replace(encoded, inputs={"input_ids": ids}, lengths=lengths, first=None)
    computed, sizes = run(classifier, longer, AllocatorLimit(largest_bytes), batch_size)
    assert computed.too_large == tuple(too_long)
    np.testing.assert_array_equal(computed.rows, others)
    np.testing.assert_allclose(computed.logits.numpy(), undisturbed.logits.numpy()[others], atol=1e-5)
    assert computed.counters.batches < len(others) / 2, "two rows must not make the others run alone"
    if batch_size:
        assert sizes.batch_size == batch_size


def test_a_chunk_of_which_no_row_fits(loaded: tuple[Any, Any]) -> None:
    from ensemble.members.huggingface.scoring.forward import BatchSizes, compute
    from tests.oom.limit import AllocatorLimit

    classifier, encoded = loaded
    limit = AllocatorLimit(fail_at=frozenset(range(10_000)))
    computed, _ = run(classifier, encoded, limit)
    assert computed.too_large == tuple(range(len(encoded.lengths)))
    assert len(computed.rows) == len(computed.logits) == 0
    steps: list[tuple[int, ...]] = []
    with AllocatorLimit(fail_at=frozenset(range(10_000))) as limit:
        compute(classifier, encoded, BatchSizes(BUDGET, None), lambda *counts: steps.append(counts))
    assert steps == [(0, 0, 0)] * limit.refused, "a pass that failed is a sign of life too"


def test_a_limit_never_grows_by_a_failure() -> None:
    """A row longer than the budget is a batch of its own; half of it may still be more than the budget."""
    from ensemble.members.huggingface.scoring.forward import BatchSizes

    sizes = BatchSizes(1000, None)
    sizes.shrink(rows=1, padded_tokens=41_000, width=41_000)
    assert sizes.tokens_at(1) == 1000


def member_of(folder: Path, model: Path, texts: list[str], **changes: Any) -> tuple[Any, Any]:
    """A member over the texts as its table, loaded, and what computes them as one chunk into ``folder``/shards."""
    import pyarrow as pa

    from ensemble.common.protocol import ChunkDone, Predict, Ready

    table = pa.table({"text": texts})
    schema = table.schema.with_metadata({b"ensemble.rows": str(len(texts)).encode()})
    with pa.ipc.new_file(folder / "t.arrow", schema) as file:
        file.write_table(table)
    np.save(folder / "o.npy", np.arange(len(texts)))
    (folder / "shards").mkdir()
    places = {"table_path": "t.arrow", "order_path": "o.npy", "shards_dir": "shards"}
    paths = {key: str(folder / name) for key, name in places.items()}
    events: list[Any] = []
    session = make_session(worker_spec(model, **{"max_length": 128, **paths, **changes}), events.append)
    session.load()
    ready = next(event for event in events if isinstance(event, Ready))

    def predict() -> Any:
        command = Predict(0, 0, len(texts))
        session.write(command, session.compute(command))
        assert isinstance(events[-1], ChunkDone)
        return events[-1]

    return ready, predict


def read_shard(parts: Path, name: str) -> np.ndarray:
    """A part's numbers, [rows, 1 + labels]; it holds what its name says, and is the only file there."""
    from ensemble.common.shards import read_shard

    assert [path.name for path in parts.iterdir()] == [name]
    content = read_shard(parts / name)
    assert content is not None
    header, *lines = (line.split(",") for line in content.decode().splitlines())
    assert header[:2] == ['"row"', '"p0"']
    return np.array(lines, dtype=float).reshape(len(lines), len(header))


def test_a_model_that_cannot_bear_padding_gets_none(tmp_path: Path) -> None:
    """FNet mixes all positions, padding included: only rows of equal length may share a batch."""
    from tests.checkpoints import reference

    folder = make_checkpoint(tmp_path / "m", "fnet", LABELS)
    texts = make_texts(60, longest=12)
    ready, predict = member_of(tmp_path, folder, texts)
    assert "only rows of equal length" in ready.notes[-1]
    work = predict()
    assert work.counters.padded_tokens == work.counters.tokens
    assert work.counters.batches < 60
    got = read_shard(tmp_path / "shards", work.shard)
    np.testing.assert_allclose(got[:, 1:], reference(folder, texts, 128), atol=1e-5)


def test_bytes_that_did_not_fit_are_halved_for_every_width() -> None:
    from ensemble.members.huggingface.scoring.batching import MemoryLimit
    from ensemble.members.huggingface.scoring.forward import BatchSizes

    sizes = BatchSizes(10_000, None, memory=MemoryLimit(1_000_000, 100.0, 10.0))
    assert [sizes.tokens_at(width) for width in (1, 90, 390)] == [9090, 1000, 250]
    sizes.shrink(rows=2, padded_tokens=200, width=100)  # took 220,000 bytes
    assert [sizes.tokens_at(width) for width in (1, 90, 390)] == [1000, 110, 27]
    assert sizes.for_float32().tokens_at(90) == 55


@pytest.mark.long
def test_a_limit_in_bytes_sets_the_batches_of_a_member(tmp_path: Path) -> None:
    """Eager attention of long rows is what this limit is for; the user's own numbers go before it."""
    from tests.checkpoints import reference

    folder = make_checkpoint(tmp_path / "m", "gemma2", LABELS)
    texts = make_texts(60)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    known = {"bytes_per_token": 500.0, "bytes_per_token_pair": 8.0, "memory_limit_bytes": weights + 100_000}
    work = {}
    for name, changes in {"free": {}, "known": known, "told": {**known, "token_budget": 700}}.items():
        (tmp_path / name).mkdir()
        ready, predict = member_of(tmp_path / name, folder, texts, **changes)
        work[name] = predict()
        got = read_shard(tmp_path / name / "shards", work[name].shard)
        np.testing.assert_allclose(got[:, 1:], reference(folder, texts, 128), atol=1e-5)
        expected = {"free": 2048, "known": 100_000 / (500 + 8 * 128), "told": 700}[name]
        assert ready.token_budget == pytest.approx(expected, abs=2)
    assert work["known"].counters.batches > work["told"].counters.batches > work["free"].counters.batches


@pytest.mark.fault(6)
@pytest.mark.long
def test_a_run_that_runs_out_of_memory_ends_with_the_same_csv(project: Project) -> None:
    config = project.config(models=project.config()["models"][:1])
    config["models"][0]["attn_implementation"] = "eager"
    project.write_config(config)
    limits = {
        "free": {},
        "tight": {"TEST_LARGEST_TENSOR_BYTES": "300000"},
    }
    done = {}
    for name, limit in limits.items():
        environment = {"PYTHONPATH": python_path(ROOT, ROOT / "tests" / "oom"), **limit}
        options = ["--set", f"output_dir=runs/{name}"]
        done[name] = project.ensemble("run", "config.yaml", *options, environment=environment)
    assert done["free"].returncode == done["tight"].returncode == 0, done["tight"].stderr
    values = [
        np.array([row[1:] for row in project.read(f"runs/{name}/ensemble.csv")[1]], dtype=float)
        for name in ("free", "tight")
    ]
    np.testing.assert_allclose(values[1], values[0], atol=1e-5)
    events = [
        project.run_json(f"runs/{name}")["members"][0]["workers"][0]["counters"]["oom_events"]
        for name in ("free", "tight")
    ]
    assert events[0] == 0 < events[1]
    assert f"{events[1]} batch" in done["tight"].stdout
