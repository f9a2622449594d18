"""Runs of members whose views have adapters of their own, held against plain peft."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.checkpoints import adapter_reference, make_adapter, make_base
from tests.project import GEMMA_LABELS, LABELS, Project

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft on transformers 5
]
ROWS = 24
SWAP = {"columns": ["a", "b"], "labels": ["winner_a", "winner_b"]}
OF_HEAD = {"LABEL_0": "tie", "LABEL_1": "winner_a", "LABEL_2": "winner_b"}


@pytest.fixture
def folds(project: Project) -> Project:
    """A table of two texts a row, a base, and the adapters of two folds."""
    project.write_pairs(ROWS)
    base = make_base(project.folder / "base", "llama")
    for number in range(2):
        make_adapter(project.folder / f"fold{number}", base, 3, seed=number, r=2 + number)
    return project


def run(project: Project, *views: dict[str, Any], command: str = "run", code: int = 0, **keys: Any) -> str:
    member = {
        "name": "lora",
        "model_name_or_path": "base",
        "prompt_template": "one {{ a }} other {{ b }}",
        "label_map": OF_HEAD,
        "max_length": 128,
        "views": [*views] or None,
        **keys,
    }
    data = {"path": "test.csv"}
    project.write_config(project.config(data=data, models=[member], defaults=None, submission=None))
    done = project.ensemble(command, "config.yaml")
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def values(project: Project, name: str = "lora") -> npt.NDArray[np.float64]:
    path = f"runs/first/predictions/{name}.csv"
    assert project.read(path)[0] == ["id", *LABELS]
    return project.values(path)


def by_hand(project: Project, fold: str, is_swapped: bool = False) -> npt.NDArray[np.float64]:
    """Plain transformers and peft, row by row, in the order of the config's labels."""
    first, second = project.texts[:ROWS], project.texts[ROWS:]
    pairs = zip(second, first, strict=True) if is_swapped else zip(first, second, strict=True)
    texts = [f"one {a} other {b}" for a, b in pairs]
    expected = adapter_reference(project.folder / "base", project.folder / fold, texts, 3, max_length=128)
    expected = expected[:, [GEMMA_LABELS.index(label) for label in LABELS]]
    return expected[:, [1, 0, 2]] if is_swapped else expected


def computed(project: Project) -> int:
    return int(sum(worker["counters"]["rows"] for worker in project.run_json()["members"][0]["workers"]))


@pytest.mark.long
def test_each_adapter_has_its_predictions_and_is_computed_again_when_it_changes(folds: Project) -> None:
    views = [{"name": f"fold{n}", "adapter_name_or_path": f"fold{n}"} for n in range(2)]
    swapped = {"name": "swapped", "adapter_name_or_path": "fold0", "swap": SWAP}
    run(folds, adapter_name_or_path="fold1")
    assert computed(folds) == ROWS

    run(folds, *views, swapped)
    assert computed(folds) == 2 * ROWS, "the member without views had one of these adapters"
    parts = [by_hand(folds, "fold0"), by_hand(folds, "fold1"), by_hand(folds, "fold0", is_swapped=True)]
    for name, part in zip(("fold0", "fold1", "swapped"), parts, strict=True):
        np.testing.assert_allclose(values(folds, f"lora@{name}"), part, atol=2e-5)
    np.testing.assert_allclose(values(folds), np.mean(parts, axis=0), atol=2e-5)
    assert "earlier run, reused" in run(folds, *views, swapped)

    make_adapter(folds.folder / "fold1", folds.folder / "base", 3, seed=5)
    run(folds, *views, swapped)
    assert computed(folds) == ROWS, "only the view with the adapter that changed"
    parts[1] = by_hand(folds, "fold1")
    np.testing.assert_allclose(values(folds, "lora@fold1"), parts[1], atol=2e-5)
    np.testing.assert_allclose(values(folds), np.mean(parts, axis=0), atol=2e-5)

    run(folds, views[0], {**views[1], "when": {"margin_below": 0.4}})
    ordered = np.sort(parts[0], axis=1)
    is_close = ordered[:, -1] - ordered[:, -2] < 0.4
    assert 0 < is_close.sum() < ROWS
    expected = np.where(is_close[:, None], (parts[0] + parts[1]) / 2, parts[0])
    np.testing.assert_allclose(values(folds), expected, atol=2e-5)

    run(folds, {**views[0], "adapter_name_or_path": "fold1"}, {**views[1], "adapter_name_or_path": "fold0"})
    assert computed(folds) == 0, "adapters that change places"
    np.testing.assert_allclose(values(folds, "lora@fold0"), parts[1], atol=2e-5)


@pytest.mark.long
def test_a_mean_of_adapters_takes_one_pass(folds: Project) -> None:
    run(folds, adapters={"average": ["fold0", "fold1"]}, replicas=2)
    assert computed(folds) == ROWS
    cat = values(folds)
    notes = " ".join(
        note for worker in folds.run_json()["members"][0]["workers"] for note in worker["ready"]["notes"]
    )
    assert "LoRA adapter mean (cat) of" in notes
    assert "rank 5, over 14 modules, unmerged" in notes
    mean = (by_hand(folds, "fold0") + by_hand(folds, "fold1")) / 2
    assert np.abs(cat - mean).max() > 1e-3, "the mean of weights is not that of probabilities"
    output = run(folds, adapters={"average": ["fold0", "fold1"], "combination_type": "linear"}, code=2)
    assert "combination_type: linear needs equal ranks, so take cat" in output


def test_mistakes_are_named(folds: Project) -> None:
    make_adapter(folds.folder / "five", folds.folder / "base", 5)
    views = [{"name": name, "adapter_name_or_path": name} for name in ("fold0", "five", "fold9")]
    output = run(folds, *views, command="validate", code=2)
    assert "models[0] (lora): fold9: no such folder" in output
    output = run(folds, *views[:2], command="validate", code=2)
    assert "(that of fold0 has 3, that of five has 5); make a member of each" in output
    output = run(folds, views[0], {"name": "t", "prompt_template": "{{ c }}"}, code=2)
    assert "models[0].views[1].prompt_template" in output
    output = run(folds, views[0], prompt_template="{{ c }}", code=2)
    assert "models[0].prompt_template" in output, "an adapter's view has the member's template"
