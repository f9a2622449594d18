"""Out of memory, at any batch: the same rows again in halves, the same numbers in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint, make_texts
from tests.project import ROOT, Project
from tests.worker.test_predict import LABELS, worker_spec

pytestmark = pytest.mark.usefixtures("one_thread")
BUDGET = 512


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[Any, Any]:
    """A tiny Gemma-2 as the worker's classifier, and 150 rows of tokens."""
    from ensemble.worker.load import load
    from ensemble.worker.predict import Classifier
    from ensemble.worker.prompt import Prompt

    spec = worker_spec(make_checkpoint(tmp_path, "gemma2", LABELS))
    model = load(spec)
    rows = [{"text": text} for text in make_texts(150, longest=25)]
    encoded = Prompt(spec, model.tokenizer, model.max_length).encode(rows)
    return Classifier(model.model, model.pad_token_id), encoded


def run(classifier: Any, encoded: Any, limit: Any, batch_size: int | None = None) -> tuple[Any, Any]:
    from ensemble.worker.compute import BatchSizes, compute

    sizes = BatchSizes(BUDGET, batch_size)
    with limit:
        return compute(classifier, encoded, sizes, lambda *counts: None), sizes


def test_an_error_at_any_batch_changes_no_number(loaded: tuple[Any, Any]) -> None:
    from tests.oom.limit import AllocatorLimit

    classifier, encoded = loaded
    undisturbed, sizes = run(classifier, encoded, AllocatorLimit())
    assert undisturbed.oom_events == 0
    assert sizes.token_budget == BUDGET
    assert undisturbed.batches > 5
    for number in range(undisturbed.batches - 1):  # the last batch may hold one row, which cannot be halved
        computed, sizes = run(classifier, encoded, AllocatorLimit(fail_at=frozenset({number})))
        assert computed.oom_events == 1
        assert sizes.token_budget < BUDGET
        np.testing.assert_allclose(computed.logits.numpy(), undisturbed.logits.numpy(), atol=1e-6)


@pytest.mark.parametrize("batch_size", [None, 16])
def test_batches_shrink_until_they_fit_and_stay_so(loaded: tuple[Any, Any], batch_size: int | None) -> None:
    from tests.oom.limit import AllocatorLimit

    classifier, encoded = loaded
    undisturbed, _ = run(classifier, encoded, AllocatorLimit())
    longest = int(encoded.lengths.max())
    limit = AllocatorLimit(largest_bytes=4 * 4 * longest**2 * 2)  # attention of two of the longest rows
    computed, sizes = run(classifier, encoded, limit, batch_size)
    assert computed.oom_events == limit.refused > 0
    assert computed.oom_events < 8, "what was learnt is kept"
    np.testing.assert_allclose(computed.logits.numpy(), undisturbed.logits.numpy(), atol=1e-6)
    assert sizes.token_budget < BUDGET
    if batch_size:
        assert 1 <= sizes.batch_size < batch_size


def test_a_row_that_does_not_fit_alone_is_named(loaded: tuple[Any, Any]) -> None:
    from ensemble.worker.compute import RowTooLargeError
    from tests.oom.limit import AllocatorLimit

    classifier, encoded = loaded
    longest = int(encoded.lengths.max())
    with pytest.raises(RowTooLargeError) as caught:
        run(classifier, encoded, AllocatorLimit(largest_bytes=4 * 4 * longest**2 - 1))
    assert caught.value.row == int(encoded.lengths.argmax())
    assert caught.value.tokens == longest


def test_a_model_that_cannot_bear_padding_gets_none(tmp_path: Path) -> None:
    """FNet mixes all positions, padding included: only rows of equal length may share a batch."""
    import pyarrow as pa

    from ensemble.protocol import Predict
    from ensemble.worker.member import Member
    from tests.checkpoints import reference

    folder = make_checkpoint(tmp_path / "m", "fnet", LABELS)
    texts = make_texts(60, longest=12)
    table = pa.table({"text": texts})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema.with_metadata({b"ensemble.rows": b"60"})) as file:
        file.write_table(table)
    np.save(tmp_path / "o.npy", np.arange(60))
    (tmp_path / "parts").mkdir()
    places = {"table_path": "t.arrow", "order_path": "o.npy", "parts_dir": "parts"}
    member = Member(
        worker_spec(folder, max_length=128, **{key: str(tmp_path / name) for key, name in places.items()})
    )
    assert "only rows of equal length" in member.notes()[-1]
    work = member.predict_chunk(Predict(0, 0, 60), lambda *counts: None)
    assert work.padded_tokens == work.tokens
    assert work.batches < 60
    got = np.genfromtxt(tmp_path / "parts" / "000000.csv", delimiter=",", skip_header=1)
    np.testing.assert_allclose(got[:, 1:], reference(folder, texts, 128), atol=1e-5)


def test_a_budget_grows_back_but_not_to_what_failed() -> None:
    from ensemble.worker.compute import BatchSizes

    sizes = BatchSizes(1000, None)
    sizes.shrink(rows=10, padded_tokens=800)
    assert sizes.token_budget == 400
    grown = [sizes.token_budget for _ in range(200) if sizes.grow()]
    assert grown == [500, 625, 720]
    for _ in range(5):
        sizes.shrink(rows=1, padded_tokens=1)
    assert sizes.token_budget == 1


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
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'oom'}", **limit}
        options = ["--set", f"output_dir=runs/{name}"]
        done[name] = project.ensemble("run", "config.yaml", *options, environment=environment)
    assert done["free"].returncode == done["tight"].returncode == 0, done["tight"].stderr
    values = [
        np.array([row[1:] for row in project.read(f"runs/{name}/ensemble.csv")[1]], dtype=float)
        for name in ("free", "tight")
    ]
    np.testing.assert_allclose(values[1], values[0], atol=1e-6)
    events = [
        project.run_json(f"runs/{name}")["members"][0]["workers"][0]["oom_events"]
        for name in ("free", "tight")
    ]
    assert events[0] == 0 < events[1]
    assert f"{events[1]} batch" in done["tight"].stdout
