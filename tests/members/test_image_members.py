"""Runs with image classifiers among the members, bad images, and what counts as another image."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.checkpoints import image_reference, make_checkpoint, make_image_checkpoint
from tests.images import KINDS, make_image
from tests.project import LABELS, Project

pytestmark = pytest.mark.usefixtures("warm")
THEIRS = ["tie", "winner_a", "winner_b"]  # not the config's order


def member(name: str = "eyes", **keys: Any) -> dict[str, Any]:
    return {
        "name": name,
        "task_type": "image_cls",
        "model_name_or_path": f"models/{name}",
        "image_column": "image",
        **keys,
    }


def make_project(project: Project, cells: list[str], **models: str) -> None:
    """A table that names images, and a config with these members by name and architecture."""
    for number, (name, architecture) in enumerate((models or {"eyes": "vit"}).items()):
        make_image_checkpoint(project.folder / "models" / name, architecture, THEIRS, seed=number)
    project.ids = [f"r{number}" for number in range(len(cells))]
    project.write_csv(
        "data/test.csv", ["id", "image"], [list(row) for row in zip(project.ids, cells, strict=True)]
    )
    config = project.config(
        data={"path": "data/test.csv", "id_column": "id"},
        models=[member(name) for name in models or ("eyes",)],
        defaults=None,
        submission=None,
    )
    project.write_config(config)


def probabilities(project: Project, name: str) -> dict[str, list[float]]:
    header, rows = project.read(f"runs/first/predictions/{name}.csv")
    assert header == ["id", *LABELS]
    return {row[0]: [float(cell) for cell in row[1:]] for row in rows}


def expected(project: Project, name: str, paths: list[Path]) -> np.ndarray:
    values = image_reference(project.folder / "models" / name, paths)
    return values[:, [THEIRS.index(label) for label in LABELS]]


def test_images_of_every_kind_get_the_numbers_of_the_pipeline(project: Project) -> None:
    (project.folder / "data").mkdir()
    paths = []
    for number, (file, mode) in enumerate(KINDS.items()):
        size = (60, 44) if number % 2 else (44, 70)
        paths.append(make_image(project.folder / "data" / "images" / file, mode, number, size))
    paths.append(make_image(project.folder / "elsewhere" / "absolute.png", seed=99))
    cells = [f"images/{file}" for file in KINDS] + [str(paths[-1])]
    make_project(project, cells, eyes="vit", folds="resnet", wide="convnext")
    checked = project.ensemble("validate", "config.yaml")
    assert checked.returncode == 0, checked.stderr
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    for name in ("eyes", "folds", "wide"):
        actual = np.array(list(probabilities(project, name).values()))
        reference = expected(project, name, paths)
        assert reference.std(axis=0).max() > 0.02, "they are told apart"
        np.testing.assert_allclose(actual, reference, atol=2e-6)
    before = {name: probabilities(project, name) for name in ("eyes", "wide")}
    # One image at a time, and many devices: the same numbers.
    again = project.ensemble(
        *("run", "config.yaml", "--set", "output_dir=runs/alone", "--set", "models.eyes.batch_size=1"),
        *("--set", "models.eyes.replicas=2", "--set", "models.wide.batch_size=5"),
    )
    assert again.returncode == 0, again.stderr
    for name, values in before.items():
        _, rows = project.read(f"runs/alone/predictions/{name}.csv")
        alone = {row[0]: [float(cell) for cell in row[1:]] for row in rows}
        for row, numbers in values.items():
            np.testing.assert_allclose(alone[row], numbers, atol=1e-6)


@pytest.mark.long
def test_a_changed_image_is_computed_again_and_no_other(project: Project) -> None:
    cells = [f"{number}.png" for number in range(6)]
    paths = [make_image(project.folder / "data" / cell, seed=seed) for seed, cell in enumerate(cells)]
    make_project(project, cells)
    assert project.ensemble("run", "config.yaml").returncode == 0
    make_image(paths[2], seed=77)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert "rows that are as" in done.stdout
    assert project.run_json()["members"][0]["reused_rows"] == 5
    actual = np.array(list(probabilities(project, "eyes").values()))
    np.testing.assert_allclose(actual, expected(project, "eyes", paths), atol=2e-6)
    processor = project.folder / "models/eyes/preprocessor_config.json"
    processor.write_text(processor.read_text().replace("{", '{"do_normalize": false, ', 1))
    done = project.ensemble("run", "config.yaml")
    assert "eyes: processor changed since" in done.stdout
    actual = np.array(list(probabilities(project, "eyes").values()))
    np.testing.assert_allclose(actual, expected(project, "eyes", paths), atol=2e-6)


def bomb(path: Path) -> None:
    """A PNG of a few bytes that says it has 40,000 by 40,000 pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


def test_images_that_cannot_be_read_are_bad_rows(project: Project) -> None:
    folder = project.folder / "data"
    good = [make_image(folder / f"{number}.jpg", seed=number) for number in range(3)]
    (folder / "cut short.jpg").write_bytes(good[0].read_bytes()[:-200])
    (folder / "text.jpg").write_text("no image at all")
    (folder / "empty.png").write_bytes(b"")
    bomb(folder / "bomb.png")
    bad = [
        "cut short.jpg",
        "text.jpg",
        "empty.png",
        "bomb.png",
        "gone.jpg",
        "",
        ".",
        "https://example.org/a.jpg",
    ]
    cells = ["0.jpg", *bad, "1.jpg", "2.jpg"]
    make_project(project, cells)
    checked = project.ensemble("validate", "config.yaml")
    assert checked.returncode == 0, checked.stderr
    shown = " ".join((checked.stdout + checked.stderr).split())
    assert "models[0].image_column: 4 of 11 files looked at are missing" in shown
    failed = project.ensemble("run", "config.yaml")
    assert failed.returncode == 1, "on_bad_row: fail is the default"
    assert "8 rows of the table" in failed.stderr + failed.stdout
    done = project.ensemble("run", "config.yaml", "--set", "on_bad_row=uniform")
    assert done.returncode == 0, done.stderr
    reasons = project.run_json()["members"][0]["bad_rows"]
    messages = [reasons[str(number)] for number in range(1, 9)]
    for cell, reason in zip(bad[:5], messages, strict=False):
        assert str(folder / cell) in reason
    assert "truncated" in messages[0]
    assert "UnidentifiedImageError" in messages[1]
    assert "UnidentifiedImageError" in messages[2]
    assert "DecompressionBombError" in messages[3]
    assert "no such file" in messages[4]
    assert messages[5] == "its cell in 'image' is empty"
    assert "no such file" in messages[6], "it is a folder"
    assert messages[7] == "https://example.org/a.jpg is on the web; download it"
    result = probabilities(project, "eyes")
    np.testing.assert_allclose(result["r3"], 1 / 3)
    reference = expected(project, "eyes", good)
    np.testing.assert_allclose([result[row] for row in ("r0", "r9", "r10")], reference, atol=2e-6)


def test_mistakes_are_named_before_a_model_loads(project: Project) -> None:
    make_image(project.folder / "pictures" / "7.png")
    (project.folder / "data").mkdir()
    make_project(project, ["7", "8"])

    def problems(**keys: Any) -> str:
        model = keys.get("only") or member(**keys)
        config = project.config(data={"path": "data/test.csv"}, models=[model], defaults=None)
        project.write_config({key: value for key, value in config.items() if key != "submission"})
        done = project.ensemble("validate", "config.yaml")
        return " ".join((done.stdout + done.stderr).split()) if done.returncode == 2 else "0"

    messages = problems()
    assert (
        "models[0].image_column: 2 of 2 files looked at are missing; row 1 (id 'r0'): no such file:"
        in messages
    )
    assert "relative paths start at image_folder, by default at the table's folder" in messages
    assert "there is no folder" in problems(image_folder="picture")
    assert "7.png.png (did you mean '7.png'?)" in problems(image_folder="pictures", image_suffix=".png.png")
    right = {"image_folder": "pictures", "image_suffix": ".png"}
    assert problems(**right) == "0", "one of them is there"
    assert "column 'picture'" in problems(**right, image_column="picture")
    assert "required, for example image_column: image" in problems(**right, image_column=None)
    assert "unknown key; use image_folder" in problems(image_dir="pictures")
    assert "image classifiers load no adapters; merge it" in problems(**right, adapter_name_or_path="lora")
    assert "image_cls; seq_cls, pooled_cls, causal_lm have it (docs/reference/config.md)" in problems(
        **right, max_length=4
    )
    reader = {"name": "eyes", "model_name_or_path": "models/eyes", "text_column": "image"}
    assert "for this task; task_type: image_cls runs its " in problems(only=reader)
    make_checkpoint(project.folder / "text", "bert", THEIRS)
    assert "for this task; task_type: seq_cls runs its " in problems(**right, model_name_or_path="text")
    (project.folder / "models/eyes/preprocessor_config.json").unlink()
    assert "cannot make its image processor of its files" in problems(**right)


def test_init_guesses_the_column_that_names_the_images(project: Project) -> None:
    (project.folder / "data").mkdir()
    make_project(project, [f"leaf {seed}" for seed in range(3)])
    (project.folder / "config.yaml").unlink()
    done = project.ensemble("init", "data/test.csv", "models/eyes")
    text = (project.folder / "config.yaml").read_text(encoding="utf-8")
    written = yaml.safe_load(text)
    assert written["models"] == [
        {
            "name": "eyes",
            "task_type": "image_cls",
            "model_name_or_path": "models/eyes",
            "image_column": "image",
        }
    ]
    assert (
        "# GUESS: eyes.image_column: the column that names the files; image_folder and image_suffix say where"
        in text
    )
    assert "guess: eyes.image_column: the column that names the files" in done.stdout
    assert written["labels"] == THEIRS
    assert "defaults" not in written
    # Where the ids are the names.
    project.write_csv("data/ids.csv", ["image_id", "number"], [[f"leaf {seed}", "1"] for seed in range(3)])
    project.ensemble("init", "data/ids.csv", "models/eyes", "--force")
    written = yaml.safe_load((project.folder / "config.yaml").read_text(encoding="utf-8"))
    assert written["models"][0]["image_column"] == "image_id"
