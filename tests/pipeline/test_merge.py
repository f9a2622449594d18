"""The merge as a run does it, from complete predictions and from shards, against pandas and numpy."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from scipy import stats

from bench.merge_files import label_names, make_files, member_names
from ensemble.common.errors import MergeError
from ensemble.common.shards import shard_name
from ensemble.merging.scoring import Score
from ensemble.pipeline.load import load as load_config
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.results import ResultWriter
from ensemble.pipeline.resume import find_works
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import Results
from ensemble.pipeline.selection import Selections
from tests.sampling import one_in

ROWS, MEMBERS = 33_000, 3  # two blocks
LABELS = label_names(3)
WEIGHTS = np.array([1.0, 2.0, 3.0])
REACHED = 20_000  # rows of which there are shards


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merge it")
    make_files(folder, ROWS, MEMBERS, len(LABELS))
    return folder


def merge(config: Path) -> Results:
    prepared = prepare(load_config(config))
    rundir = RunDir(prepared.config.output_dir)
    works = find_works(prepared, rundir, lambda text: None)
    writer = ResultWriter(prepared, rundir, works, Selections(prepared, rundir, works), Results())
    writer.merge(prepared.config.models)
    return writer.results


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"id": str}).set_index("id")


def predictions(made: Path) -> list[pd.DataFrame]:
    return [read(made / f"ours/predictions/{name}.csv") for name in member_names(MEMBERS)]


@pytest.mark.parametrize("name", one_in(2, ["ours_in_another_order", "ours_in_full"]))
def test_ensemble_scores_and_submission(made: Path, name: str) -> None:
    config = json.loads((made / f"{name}.yaml").read_text())
    target = made / f"handed in/{name}.csv"
    config["submission"]["path"] = str(target)
    path = made / f"{name}_and_path.yaml"
    path.write_text(json.dumps(config))
    results = merge(path)
    members = predictions(made)
    mean = sum(member * weight for member, weight in zip(members, WEIGHTS / 6, strict=True))
    merged = read(made / name / "ensemble.csv")
    pd.testing.assert_frame_equal(merged, mean, rtol=1e-14)
    sample = read(Path(config["submission"]["sample"]))
    assert list(sample.index) != list(merged.index) or name == "ours_in_full"
    submitted = read(target)
    pd.testing.assert_frame_equal(submitted, merged.loc[sample.index, sample.columns], check_exact=True)
    assert (made / name / "submission.csv").read_bytes() == target.read_bytes()

    truth = pd.read_csv(made / "table.csv", dtype=str)["label"].map(LABELS.index).to_numpy()
    for who, frame in [*zip(member_names(MEMBERS), members, strict=True), ("ensemble", merged)]:
        values = frame.to_numpy()
        score = results.scores[who]
        assert score.log_loss == pytest.approx(-np.log(values[np.arange(ROWS), truth]).mean(), rel=1e-9)
        assert score.accuracy == (values.argmax(axis=1) == truth).mean()
    losses = [results.scores[name].log_loss or 0.0 for name in member_names(MEMBERS)]
    best = int(np.argmin(losses))
    demand_gain(results, member_names(MEMBERS)[best], truth, members[best].to_numpy(), merged.to_numpy())
    assert results.merged_rows == dict.fromkeys(member_names(MEMBERS), ROWS)
    assert list(results.files.values()) == [str(made / name / "ensemble.csv"), str(target)]


@pytest.mark.parametrize("method", one_in(2, ["vote", "rank_mean"]))
def test_of_votes_and_ranks_the_accuracy_alone_is_said(made: Path, method: str, tmp_path: Path) -> None:
    config = json.loads((made / "ours_in_full.yaml").read_text())
    (tmp_path / "config.yaml").write_text(json.dumps(config | {"ensemble": {"method": method}}))
    results = merge(tmp_path / "config.yaml")
    truth = pd.read_csv(made / "table.csv", dtype=str)["label"].map(LABELS.index).to_numpy()
    merged = read(made / "ours_in_full/ensemble.csv").to_numpy()
    accuracy = (merged.argmax(axis=1) == truth).mean()
    assert results.scores["ensemble"] == Score(None, accuracy, ROWS, None, False)
    assert results.gain is None
    assert all(results.scores[name].log_loss is not None for name in member_names(MEMBERS))


def demand_gain(
    results: Results,
    name: str,
    truth: npt.NDArray[np.int64],
    best: npt.NDArray[Any],
    merged: npt.NDArray[Any],
) -> None:
    own, ours = (np.log(values[np.arange(ROWS), truth]) for values in (best, merged))
    low, high = stats.norm.interval(0.95, (ours - own).mean(), stats.sem(ours - own))
    assert (gain := results.gain) is not None
    assert (gain.best_member, gain.rows) == (name, ROWS)
    assert gain.gain == pytest.approx((ours - own).mean(), rel=1e-6)
    assert (gain.low, gain.high) == pytest.approx((low, high), abs=0.1 * (high - low))


@pytest.fixture
def unfinished(made: Path, tmp_path: Path) -> Path:
    """The config of a run under a time limit: of the last two members there are shards of the first rows alone."""
    config: dict[str, Any] = json.loads((made / "ours_in_full.yaml").read_text())
    shutil.copytree(made / "ours_in_full", tmp_path / "run", symlinks=True)
    config |= {"output_dir": str(tmp_path / "run"), "time_limit": "10m"}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    prepared = prepare(load_config(path))
    rundir = RunDir(prepared.config.output_dir)
    rundir.forget_results()
    works = find_works(prepared, rundir, lambda text: None)
    for name in member_names(MEMBERS)[1:]:
        values = read(rundir.predictions(name)).to_numpy()
        rows = np.random.default_rng(0).permutation(REACHED)
        works[name].predictions.shards_dir.mkdir()
        for each in np.array_split(rows, 3):
            columns = [pa.array(each), *(pa.array(column) for column in values[each].T)]
            content = io.BytesIO()
            pa_csv.write_csv(pa.table(columns, names=["row", "p0", "p1", "p2"]), content)
            place = shard_name(int(each[0]), int(each[0]) + len(each), content.getvalue())
            (works[name].predictions.shards_dir / place).write_bytes(content.getvalue())
        rundir.manifest(name).unlink()
        rundir.predictions(name).unlink()
    return path


def test_rows_that_some_members_did_not_reach(made: Path, unfinished: Path) -> None:
    results = merge(unfinished)
    values = [frame.to_numpy() for frame in predictions(made)]
    expected = sum(value * weight for value, weight in zip(values, WEIGHTS / 6, strict=True))
    expected[REACHED:] = values[0][REACHED:]
    np.testing.assert_allclose(read(unfinished.parent / "run/ensemble.csv").to_numpy(), expected, rtol=1e-12)
    names = member_names(MEMBERS)
    assert results.merged_rows == {names[0]: ROWS, names[1]: REACHED, names[2]: REACHED}
    assert sorted(results.scores) == ["ensemble", names[0]]
    truth = pd.read_csv(made / "table.csv", dtype=str)["label"].map(LABELS.index).to_numpy()
    demand_gain(results, names[0], truth, values[0], expected)  # of those that have all rows
    assert results.filled_rows == 0


@pytest.mark.long
@pytest.mark.fault(26)
@pytest.mark.parametrize("fill", ["uniform", "prior", "sample"])
def test_rows_that_no_member_reached(made: Path, unfinished: Path, fill: str) -> None:
    config = json.loads(unfinished.read_text())
    # The first member's weight is 0: its rows do not count.
    config["models"][0]["weight"] = 0.0
    sample = np.random.default_rng(3).dirichlet(np.ones(3), ROWS)
    given = read(made / "sample.csv")
    given.loc[:, LABELS] = sample
    given.to_csv(unfinished.parent / "sample.csv")
    config["submission"]["sample"] = str(unfinished.parent / "sample.csv")
    unfinished.write_text(json.dumps(config | {"fill": fill}))
    results = merge(unfinished)
    values = [frame.to_numpy() for frame in predictions(made)]
    expected: npt.NDArray[np.float64] = 0.4 * values[1] + 0.6 * values[2]
    rest = {
        "uniform": np.full(3, 1 / 3),
        "prior": expected[:REACHED].mean(axis=0),
        "sample": sample[REACHED:],
    }
    expected[REACHED:] = rest[fill]
    result = read(unfinished.parent / "run/ensemble.csv").to_numpy()
    # pandas before 3 reads small numbers to fewer digits
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-15)
    submitted = read(unfinished.parent / "run/submission.csv").to_numpy()
    assert submitted.tobytes() == result.tobytes()
    assert results.filled_rows == ROWS - REACHED
    truth = pd.read_csv(made / "table.csv", dtype=str)["label"].map(LABELS.index).to_numpy()
    losses = -np.log(expected[np.arange(ROWS), truth])
    assert results.scores["ensemble"].log_loss == pytest.approx(losses.mean(), rel=1e-12)
    assert results.gain is None  # rows that were filled in say nothing of the members


def test_without_a_time_limit_a_missing_row_ends_the_merge(unfinished: Path) -> None:
    config = json.loads(unfinished.read_text())
    config["models"][0]["weight"] = 0.0
    del config["time_limit"]
    unfinished.write_text(json.dumps(config))
    with pytest.raises(MergeError, match="has probabilities for 13,000 rows, the first is id"):
        merge(unfinished)
    run = unfinished.parent / "run"
    assert not (run / "ensemble.csv").exists()
    assert not (run / "submission.csv").exists()
    assert not list(run.rglob(".*.tmp-*"))
