"""The worker of image classifiers: blocks read in the background, images of several sizes, too little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ensemble.common.protocol import CommonSpec, Counters
from ensemble.data.published_table import PublishedTable
from ensemble.data.table import InputTable
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.predictor import load_child
from tests.checkpoints import image_reference, make_image_checkpoint
from tests.images import make_image

LABELS = ("a", "b", "c")


def make_member(folder: Path, paths: list[Path], gpus: int = 0, **keys: Any) -> Any:
    """The predictor of a checkpoint in ``folder`` over these images, loaded."""
    from ensemble.members.image_cls.parent import ImageClassification, ImageClassifierSettings

    settings = {"name": "eyes", "model_name_or_path": str(folder), "image_column": "image", **keys}
    kind = ImageClassification(ImageClassifierSettings.model_validate(settings))
    inspected = kind.inspect(OutputColumns("id", LABELS, folder))
    assigned = Assigned(gpus, dtype="float32", attention="eager")
    cells = pa.table({"image": [str(path) for path in paths]})
    ids = pa.chunked_array([[str(number) for number in range(len(paths))]])
    InputTable(cells, ids, None, {}).publish(folder / "table.arrow")
    common = CommonSpec(
        labels=LABELS,
        activation=inspected.activation,
        gpus=gpus,
        memory_limit_bytes=None,
        seed=0,
        table_path=str(folder / "table.arrow"),
        order_path="",
        shards_dir="",
    )
    table = PublishedTable(folder / "table.arrow")
    member = load_child(kind.child).make_predictor(
        common, kind.worker_settings(inspected, assigned, None), table
    )
    member.load()
    return member


def predict(member: Any, rows: range) -> tuple[np.ndarray, dict[int, str], Counters]:
    reported = []
    predictions = member.predict(
        np.array(rows), lambda rows, tokens=0, padded_tokens=0: reported.append(rows)
    )
    assert reported == sorted(reported), "it goes on from block to block"
    assert reported[-1] == len(rows) - len(predictions.bad_rows)
    return predictions.values, dict(predictions.bad_rows), predictions.counters


def test_blocks_are_read_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_image_checkpoint(tmp_path / "vit", "vit", LABELS)
    paths = [make_image(tmp_path / f"{number}.png", seed=number) for number in range(17)]
    expected = image_reference(folder, paths)
    import ensemble.members.image_cls.predictor as module

    monkeypatch.setattr(module, "_MAX_BLOCK_ROWS", 3)
    monkeypatch.setenv("ENSEMBLE_SIMULATED_GPUS", "1")
    member = make_member(folder, paths, gpus=1)  # torch has none: only the reading goes by it
    for rows in (range(10), range(10, 17), range(5, 7)):
        values, bad_rows, counters = predict(member, rows)
        np.testing.assert_allclose(values, expected[rows.start : rows.stop], atol=2e-6)
        assert not bad_rows
        assert (counters.rows, counters.tokens, counters.padded_tokens) == (len(rows), 0, 0)


def test_a_stopped_run_keeps_the_blocks_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_image_checkpoint(tmp_path / "vit", "vit", LABELS)
    paths = [make_image(tmp_path / f"{number}.png", seed=number) for number in range(8)]
    expected = image_reference(folder, paths)
    paths[1].unlink()
    paths[6].unlink()
    import ensemble.members.image_cls.predictor as module

    monkeypatch.setattr(module, "_MAX_BLOCK_ROWS", 3)
    member = make_member(folder, paths)
    stopped = member.predict(np.arange(8), lambda rows, tokens=0, padded_tokens=0: False)
    assert stopped.is_partial
    assert [*stopped.bad_rows] == [1], "nothing is said of rows that are not done"
    np.testing.assert_allclose(stopped.values[[0, 2]], expected[[0, 2]], atol=2e-6)
    assert np.isnan(stopped.values[3:]).all()
    rest = member.predict(np.arange(3, 8), lambda rows, tokens=0, padded_tokens=0: None)
    assert [*rest.bad_rows] == [3]
    np.testing.assert_allclose(rest.values[[0, 1, 2, 4]], expected[[3, 4, 5, 7]], atol=2e-6)


def test_images_that_stay_of_different_sizes(tmp_path: Path) -> None:
    folder = make_image_checkpoint(tmp_path / "resnet", "resnet", LABELS)
    processor = '{"image_processor_type": "ViTImageProcessor", "do_resize": false}'
    (folder / "preprocessor_config.json").write_text(processor)
    sizes = [(64, 32), (32, 64), (64, 32), (48, 48), (32, 64), (100, 40), (32, 64)]
    paths = [make_image(tmp_path / f"{n}.png", seed=n, size=size) for n, size in enumerate(sizes)]
    values, _, counters = predict(make_member(folder, paths), range(len(paths)))
    np.testing.assert_allclose(values, image_reference(folder, paths), atol=2e-6)
    assert counters.batches == 3, "by how many pixels they have"


def test_too_little_memory_halves_batches(tmp_path: Path) -> None:
    from tests.oom.limit import AllocatorLimit

    folder = make_image_checkpoint(tmp_path / "vit", "vit", LABELS)
    paths = [make_image(tmp_path / f"{number}.png", seed=number) for number in range(12)]
    # Less than the first four images take, which it tries once it is loaded.
    with AllocatorLimit(largest_bytes=30_000) as limit:
        member = make_member(folder, paths)
    assert limit.refused
    with AllocatorLimit(largest_bytes=20_000) as limit:
        values, bad_rows, counters = predict(member, range(12))
    assert limit.refused == counters.oom_events > 0
    assert not bad_rows
    np.testing.assert_allclose(values, image_reference(folder, paths), atol=2e-6)
    with AllocatorLimit(largest_bytes=3_000):
        predictions = member.predict(np.arange(2), lambda rows, tokens=0, padded_tokens=0: None)
    assert set(predictions.bad_rows) == {0, 1}
    assert (
        "its image of 32 x 32 pixels does not fit into the memory of cpu even alone"
        in predictions.bad_rows[0]
    )


def test_images_of_more_than_eight_bits_are_counted_and_read_as_transformers_reads_them(
    tmp_path: Path,
) -> None:
    from PIL import Image

    folder = make_image_checkpoint(tmp_path / "vit", "vit", LABELS)
    numbers = np.random.default_rng(0)
    deep: dict[str, np.ndarray] = {
        "whole.png": numbers.integers(0, 65_536, (32, 32), dtype=np.uint16),
        "float.tif": numbers.random((32, 32), dtype=np.float32),
        "usual.png": numbers.integers(0, 256, (32, 32), dtype=np.uint8),
    }
    for name, pixels in deep.items():
        Image.fromarray(pixels).save(tmp_path / name)
    paths = [tmp_path / name for name in deep]
    values, bad_rows, counters = predict(make_member(folder, paths), range(3))
    assert (counters.clipped_images, bad_rows) == (2, {})
    np.testing.assert_allclose(values, image_reference(folder, paths), atol=2e-6)
