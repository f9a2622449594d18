"""Merge methods, a section of the report and a format, as the pages on extending have them: installed and run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from pyarrow import feather
from scipy import stats

from bench.merge_files import label_names, make_files, member_names
from ensemble.common.protocol import Counters
from tests.cli.reports import member, report
from tests.packages import lay_out, pip_install
from tests.page import blocks, lay_out_package
from tests.project import ROOT, Project, python_path

ROWS, LABELS, MEMBERS = 700, label_names(3), member_names(4)


# A method that must see all rows before it merges the first.
STANDARD_SCORES = """
import numpy as np

from ensemble.merging.methods.base import MergeMethod


class StandardScores(MergeMethod):
    needs_first_pass = True
    gives_probabilities = False

    def __init__(self, settings, members):
        super().__init__(settings, members)
        shape = len(members.names), len(members.labels)
        self.rows, self.sums, self.squares = np.zeros((shape[0], 1)), np.zeros(shape), np.zeros(shape)

    def look(self, block):
        self.rows += block.is_present.sum(axis=1)[:, None]
        self.sums += np.nansum(block.probabilities, axis=1)
        self.squares += np.nansum(block.probabilities**2, axis=1)

    def merge(self, block, weights):
        with np.errstate(invalid="ignore", divide="ignore"):  # rows that nobody has become NaN
            means = self.sums / self.rows
            deviations = np.sqrt(self.squares / self.rows - means**2)
            scores = (block.probabilities - means[:, None]) / deviations[:, None]
            shares = np.broadcast_to(weights * block.is_present[:, :, None], scores.shape)
            return np.where(shares > 0, shares * scores, 0.0).sum(axis=0) / shares.sum(axis=0)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the pages' packages, and another one's method is laid out."""
    source, site = tmp_path_factory.mktemp("ensemble robust"), tmp_path_factory.mktemp("site")
    packages = [lay_out_package(source, name) for name in ("ensemble-robust", "ensemble-extras")]
    pip_install(site, *packages)
    entries = {"standard_scores": "standard_scores:StandardScores"}
    lay_out(site, "standard-scores", "ensemble.merge_methods", entries, standard_scores=STANDARD_SCORES)
    return site


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A table and four members' predictions, as a run leaves them."""
    folder = tmp_path_factory.mktemp("made")
    make_files(folder, ROWS, len(MEMBERS), len(LABELS))
    return Project(folder, folder)


def read(path: Path) -> np.ndarray:
    return np.asarray(pd.read_csv(path, dtype={"id": str}).set_index("id"))


def merged(made: Project, site: Path, ensemble: dict[str, object]) -> np.ndarray:
    """Run the command; weights are equal, so that what is expected can be said in few words."""
    weights = [f"--set=models.{name}.weight=2" for name in MEMBERS]
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    done = made.ensemble(
        "run", "ours.yaml", f"--set=ensemble={json.dumps(ensemble)}", *weights, environment=environment
    )
    assert done.returncode == 0, done.stderr
    assert f"merge method: {ensemble['method']}" in done.stdout
    assert done.stdout.count("earlier run, reused") == len(MEMBERS)
    assert made.run_json("ours")["ensemble"].items() >= ensemble.items()
    return read(made.folder / "ours/ensemble.csv")


@pytest.mark.long
def test_the_trimmed_mean(made: Project, site: Path) -> None:
    ensemble = yaml.safe_load(blocks()["trimmed.yaml"])["ensemble"]
    assert ensemble == {"method": "trimmed_mean", "scale": False}
    values = np.array([read(made.folder / f"ours/predictions/{name}.csv") for name in MEMBERS])
    expected = stats.trim_mean(values, 1 / len(MEMBERS), axis=0)
    np.testing.assert_allclose(merged(made, site, ensemble), expected, rtol=1e-12)
    scaled = merged(made, site, {"method": "trimmed_mean"})
    np.testing.assert_allclose(scaled, expected / expected.sum(axis=1, keepdims=True), rtol=1e-12)
    done = made.ensemble(
        *("validate", "ours.yaml", "--set=ensemble={method: trimmed_mean, scael: 1}"),
        environment={"PYTHONPATH": python_path(ROOT, site)},
    )
    assert "did you mean scale?" in done.stderr
    done = made.ensemble(
        *(
            "validate",
            "ours.yaml",
            "--set=ensemble.method=trimmed_mean",
            f"--set=models.{MEMBERS[0]}.weight=3",
        ),
        environment={"PYTHONPATH": python_path(ROOT, site)},
    )
    assert "trimmed_mean counts all members alike" in done.stderr


def test_the_mean_of_standard_scores(made: Project, site: Path) -> None:
    values = [pd.read_csv(made.folder / f"ours/predictions/{name}.csv")[LABELS] for name in MEMBERS]
    expected = sum(stats.zscore(frame) for frame in values) / len(MEMBERS)
    np.testing.assert_allclose(
        merged(made, site, {"method": "standard_scores"}), expected, rtol=1e-9, atol=1e-12
    )


@pytest.mark.long
def test_the_section_of_the_report(made: Project, site: Path, tmp_path: Path) -> None:
    ran = report(
        member(counters=Counters(rows=9), seconds=3.0),
        member("other", counters=Counters(rows=9), seconds=9.0),
    )
    ran.write(tmp_path / "run.json")
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    done = made.ensemble("report", str(tmp_path), environment=environment)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<p>The dearest is <b>other</b>.</p>" in page
    assert re.search(r"<td[^>]*>other</td>\s*<td[^>]*>1000.00</td>", page)
    assert page.count('<section id="cost">') == 1


def test_without_the_package_the_method_is_unknown(made: Project) -> None:
    done = made.ensemble("validate", "ours.yaml", "--set", "ensemble.method=trimmed_mean")
    assert done.returncode == 2
    assert "--set ensemble.method=trimmed_mean: unknown method; " in done.stderr


@pytest.mark.long
def test_the_format(made: Project, tmp_path: Path) -> None:
    copy = tmp_path / "ensemble"
    shutil.copytree(ROOT / "ensemble", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (reader_path,) = [name for name in blocks() if name.endswith("/feather.py")]
    (tmp_path / reader_path).write_text(blocks()[reader_path])
    formats = (tmp_path / reader_path).with_name("formats.py")
    (change,) = [text for name, text in blocks().items() if name.endswith("/formats.py")]
    imported, known, line = change.splitlines()
    content = formats.read_text()
    assert content.count(f"\n{known[1:]}\n") == 1
    content = content.replace("\nfrom ensemble.", f"\n{imported[1:]}\nfrom ensemble.", 1)
    formats.write_text(content.replace(known[1:], f"{known[1:]}\n{line[1:]}"))

    table = pa.Table.from_pandas(pd.read_csv(made.folder / "table.csv", dtype=str))
    feather.write_feather(table, made.folder / "table.feather")
    with_it = {"PYTHONPATH": str(tmp_path)}
    results = []
    for path in ("table.csv", "table.feather"):  # predictions are of the same rows, and are reused
        options = ["--set", f"data.path={path}"]
        done = made.ensemble("run", "ours_in_full.yaml", *options, environment=with_it)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("earlier run, reused") == len(MEMBERS)
        results.append((made.folder / "ours_in_full/ensemble.csv").read_bytes())
    assert results[0] == results[1]

    (made.folder / "table.arrow").write_bytes(b"no Arrow file")
    done = made.ensemble("validate", "ours.yaml", "--set", "data.path=table.arrow", environment=with_it)
    assert "table.arrow: cannot be read as Feather (" in done.stderr
    done = made.ensemble("validate", "ours.yaml", "--set", "data.path=table.xlsx", environment=with_it)
    assert (
        "cannot read files of type .xlsx; use .feather, .arrow, .csv, .tsv (each also with .gz)"
        in done.stderr
    )
    done = made.ensemble("validate", "ours.yaml", "--set", "data.path=table.feather")
    assert "cannot read files of type .feather; use .csv, .tsv (each also with .gz)" in done.stderr
