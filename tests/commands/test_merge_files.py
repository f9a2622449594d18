"""``merge``: CSVs of predictions into one, against pandas and scikit-learn's metrics of what is asked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyarrow.csv import write_csv

import ensemble
from ensemble.analysis.predictions import read_files
from ensemble.common.errors import EnsembleError
from ensemble.pipeline.prediction_files import ROWS_ADVICE
from tests.project import ROOT, python_path
from tests.sampling import one_in
from tests.waiting import wait_until

LABELS = ["neg", "neu", "pos"]
ROWS = 40_000  # two blocks
Write = Callable[..., pd.DataFrame]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merge files")


@pytest.fixture(scope="module")
def frames(folder: Path) -> dict[str, pd.DataFrame]:
    """Three files, the second in another order of rows and columns, the third with quotes and CRLF."""
    chooser = np.random.default_rng(0)
    ids = [f"{number:05d}" for number in range(ROWS - 2)] + ['say "x", y', "ü"]
    made = {}
    for number, name in enumerate(("a", "b", "c.oof")):
        frame = pd.DataFrame(chooser.dirichlet(np.ones(3), ROWS), columns=LABELS)
        frame.insert(number % 2, "id", ids)
        made[name] = frame.set_index("id")
        if name == "b":
            frame = frame.sample(frac=1, random_state=1)[["pos", "id", "neg", "neu"]]
        ending = {"lineterminator": "\r\n", "quoting": 1} if name == "c.oof" else {}
        frame.to_csv(folder / f"{name}.csv", index=False, **ending)
    return made


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"id": str}, keep_default_na=False).set_index("id")


def paths(folder: Path, *names: str) -> list[Path]:
    return [folder / f"{name}.csv" for name in names]


def test_files_in_any_order_by_weights(frames: dict[str, pd.DataFrame], folder: Path) -> None:
    out = folder / "new" / "out.csv"
    weights = {"a": 0.5, "b": 1.5, "c.oof": 3}
    assert ensemble.merge(paths(folder, *frames), out, weights=weights) == out
    values_read = read(out)
    expected = sum(weight * frames[name] for name, weight in weights.items()) / 5
    pd.testing.assert_frame_equal(values_read, expected, rtol=1e-12)
    assert [*out.parent.iterdir()] == [out], "nothing is left beside it"
    # By a path that names what the file's own name cannot.
    again = folder / "again.csv"
    ensemble.merge({"a": folder / "a.csv", "before": out}, again, {"ensemble.power": 2}, method="power_mean")
    both = np.sqrt((frames["a"] ** 2 + values_read**2) / 2)
    pd.testing.assert_frame_equal(read(again), both.div(both.sum(axis=1), axis=0), rtol=1e-12)


def test_parquet_by_the_name_of_the_file(frames: dict[str, pd.DataFrame], folder: Path) -> None:
    for name in ("merged.csv", "merged.parquet", "merged.PQ"):
        ensemble.merge(paths(folder, *frames), folder / name)
    expected = sum(frames.values()) / 3
    merged = parquet.read_table(folder / "merged.parquet")
    assert merged.schema.names == ["id", *LABELS]
    assert {merged.schema.field(name).type for name in LABELS} == {pa.float64()}
    frame = pd.read_parquet(folder / "merged.PQ").set_index("id")
    assert frame.index.tolist() == expected.index.tolist(), "ids with a zero first, quotes and an umlaut"
    np.testing.assert_allclose(frame, expected, rtol=1e-12)
    np.testing.assert_array_equal(frame, read(folder / "merged.csv"))
    ensemble.merge({"a": folder / "merged.parquet", "b": folder / "merged.csv"}, folder / "again.csv")
    np.testing.assert_allclose(read(folder / "again.csv"), expected, rtol=1e-12)


@pytest.mark.long
def test_a_file_of_weights_and_what_comes_after_it(frames: dict[str, pd.DataFrame], folder: Path) -> None:
    (folder / "weights.yaml").write_text(
        "models:\n"
        "  - {name: a, weight: 0.25, calibration: {temperature: 2}}\n"
        "  - {name: b, weight: {neg: 1, neu: 0, pos: 0.5}}\n"
        "ensemble: {method: geometric_mean}\n"
    )
    out = folder / "weighted.csv"
    ensemble.merge(paths(folder, "a", "b"), out, weights=folder / "weights.yaml")
    calm = np.sqrt(frames["a"])
    logs = np.log(calm.div(calm.sum(axis=1), axis=0))
    own = np.array([1, 0, 0.5])
    merged = np.exp((0.25 * logs + own * np.log(frames["b"])) / (0.25 + own))
    pd.testing.assert_frame_equal(read(out), merged.div(merged.sum(axis=1), axis=0), rtol=1e-12)
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    command = [
        sys.executable,
        "-m",
        "ensemble",
        "merge",
        "a.csv",
        "b.csv",
        "-o",
        "cli.csv",
        "--weights",
        "weights.yaml",
    ]
    more = ["--method", "mean", "--weight", "a=1", "--weight", "b=3", "--set", "models.a.calibration=null"]
    done = subprocess.run([*command, *more], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "merge method: mean" in done.stdout
    assert done.stdout.splitlines()[3].split() == ["b", f"{ROWS:,}", "3"]
    pd.testing.assert_frame_equal(read(folder / "cli.csv"), (frames["a"] + 3 * frames["b"]) / 4, rtol=1e-12)
    done = subprocess.run(
        [*command[:-1], "gone.yaml"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("error:")) == (2, 1), done.stderr


@pytest.mark.long
def test_files_that_lack_rows(frames: dict[str, pd.DataFrame], folder: Path) -> None:
    chooser = np.random.default_rng(2)
    some = {}
    for name, frame in frames.items():
        some[name] = frame[chooser.random(ROWS) < 0.6]
        rows = some[name].sample(frac=1, random_state=3) if name == "b" else some[name]
        rows.reset_index().to_csv(folder / f"some {name}.csv", index=False)
    given = {name: folder / f"some {name}.csv" for name in frames}
    out = folder / "some.csv"
    weights = {"a": 1, "b": 2, "c.oof": 0.5}
    for method in ("mean", "rank_mean"):
        ensemble.merge(given, out, method=method, weights=weights, partial=True)
        order = list(dict.fromkeys(name for frame in some.values() for name in frame.index))
        # Of the second file's own order only its rows that the first lacks tell anything.
        values_read = read(out)
        assert len(values_read) == len(order)
        assert set(values_read.index) == set(order)
        assert list(values_read.index[: len(some["a"])]) == list(some["a"].index)
        values = {
            name: frame if method == "mean" else (frame.rank() - 0.5) / len(frame)
            for name, frame in some.items()
        }
        stacked = np.ma.masked_invalid(np.stack([values[name].reindex(values_read.index) for name in frames]))
        expected = np.ma.average(stacked, axis=0, weights=[*weights.values()])
        # pandas before 3 reads small numbers to fewer digits
        np.testing.assert_allclose(values_read, expected, rtol=1e-12, atol=1e-15)
    # Only b may lack rows.
    ensemble.merge(
        {"a": folder / "a.csv", "b": given["b"]}, out, {"models.b.partial": True}, weights={"a": 1, "b": 1}
    )
    expected = (frames["a"] + some["b"].reindex(frames["a"].index).fillna(frames["a"])) / 2
    pd.testing.assert_frame_equal(read(out), expected, rtol=1e-12)


@pytest.mark.parametrize("is_in_order", one_in(2, [False, True]))
def test_a_row_of_empty_cells_is_merged_from_the_others(
    frames: dict[str, pd.DataFrame], folder: Path, is_in_order: bool
) -> None:
    hollow = frames["b"].copy()
    hollow.iloc[::3] = np.nan
    rows = hollow if is_in_order else hollow.sample(frac=1, random_state=3)
    rows.to_csv(folder / "hollow.csv")
    files = {"a": folder / "a.csv", "b": folder / "hollow.csv"}
    out = folder / "merged.csv"
    ensemble.merge(files, out, {"models.b.partial": True}, weights={"a": 1, "b": 1})
    expected = (frames["a"] + hollow.reindex(frames["a"].index).fillna(frames["a"])) / 2
    pd.testing.assert_frame_equal(read(out), expected, rtol=1e-12)
    (problem,) = refused(files, out, weights={"a": 1, "b": 1})
    assert "is no number" in problem
    # A row that is empty in part is a mistake, and so it is named.
    lines = (folder / "hollow.csv").read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if line.endswith(",,"))
    lines[place] += "1"
    (folder / "hollow.csv").write_text("\n".join(lines))
    (problem,) = refused(files, out, overrides={"models.b.partial": True}, weights={"a": 1, "b": 1})
    assert f"hollow.csv: row {place}: nothing in column" in problem


def test_other_values_columns_and_a_single_label(folder: Path) -> None:
    raw = pd.DataFrame({"key": ["x", "y"], "score": [3.5, -1.0], "fold": ["one", "two"]})
    raw.to_csv(folder / "raw1.csv", index=False)
    raw.assign(score=[0.5, 2.0]).rename(columns={"fold": "set"}).to_csv(folder / "raw2.csv", index=False)
    files = paths(folder, "raw1", "raw2")
    ensemble.merge(files, folder / "raw.csv", id_column="key", labels=["score"], activation="none")
    assert (folder / "raw.csv").read_text() == "key,score\nx,2\ny,0.5\n"
    # Where nobody names the ids' column it is id, else the first, in each file by itself.
    pd.DataFrame({"score": [1.0, 3.0], "id": ["y", "x"]}).to_csv(folder / "raw2.csv", index=False)
    ensemble.merge(files, folder / "raw.csv", labels=["score"], activation="none")
    assert (folder / "raw.csv").read_text() == "key,score\nx,3.25\ny,0\n"


@pytest.mark.parametrize(("scores", "activation"), [([0.25, 0.75], "sigmoid"), ([3.5, -1.0], "none")])
def test_files_of_one_column_are_merged_as_fit_and_compare_read_them(
    scores: list[float], activation: str, tmp_path: Path
) -> None:
    first = pd.DataFrame({"id": ["x", "y"], "score": scores})
    first.to_csv(tmp_path / "first.csv", index=False)
    first.assign(score=[0.5, 0.5]).to_csv(tmp_path / "second.csv", index=False)
    files = paths(tmp_path, "first", "second")
    ensemble.merge(files, tmp_path / "merged.csv", quiet=True)
    expected = (first.score + 0.5) / 2
    np.testing.assert_allclose(read(tmp_path / "merged.csv").score, expected, rtol=1e-12)
    assert read_files(files).activation == activation


def test_columns_beside_the_labels_are_left_out_by_merge_and_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = pd.DataFrame({"id": ["x", "y"], "no": [0.25, 0.5], "yes": [0.75, 0.5]})
    second = first.assign(no=[0.75, 0.5], yes=[0.25, 0.5])
    first.assign(fold=[0, 1]).to_csv(tmp_path / "first.csv", index=False)
    second.assign(Target=[1, 1]).to_csv(tmp_path / "second.csv", index=False)
    files = paths(tmp_path, "first", "second")
    ensemble.merge(files, tmp_path / "merged.csv")
    assert (tmp_path / "merged.csv").read_text() == "id,no,yes\nx,0.5,0.5\ny,0.5,0.5\n"
    assert "'fold', 'Target'" in capsys.readouterr().out
    first[["id"]].assign(label=["yes", "no"]).to_csv(tmp_path / "truth.csv", index=False)
    compared = ensemble.compare(
        files[0], files[1], labels=tmp_path / "truth.csv", metrics=["accuracy"], quiet=True
    )
    assert (compared.metrics[0].first.value, compared.metrics[0].second.value) == (1, 0.5)
    assert any("'fold'" in remark for remark in compared.remarks)


def test_a_fold_beside_a_row_that_lacks_its_labels(tmp_path: Path) -> None:
    first = pd.DataFrame({"id": ["x", "y"], "no": [0.25, None], "yes": [0.75, None], "fold": [0, 1]})
    first.to_csv(tmp_path / "first.csv", index=False)
    first.assign(no=0.5, yes=0.5).to_csv(tmp_path / "second.csv", index=False)
    ensemble.merge(paths(tmp_path, "first", "second"), tmp_path / "merged.csv", partial=True, quiet=True)
    assert (tmp_path / "merged.csv").read_text() == "id,no,yes\nx,0.375,0.625\ny,0.5,0.5\n"


def test_a_label_named_target_that_one_file_has_as_votes(tmp_path: Path) -> None:
    shares = pd.DataFrame({"id": ["x", "y"], "target": [0.25, 0.5], "insult": [0.5, 0.25]})
    shares.to_csv(tmp_path / "first.csv", index=False)
    shares.assign(target=[0, 1]).to_csv(tmp_path / "second.csv", index=False)
    files = paths(tmp_path, "first", "second")
    ensemble.merge(files, tmp_path / "merged.csv", activation="sigmoid", quiet=True)
    assert read(tmp_path / "merged.csv").target.tolist() == [0.125, 0.75]


def refused(files: Any, output: Path, **keys: Any) -> list[str]:
    before = sorted(output.parent.iterdir()) if output.parent.is_dir() else None
    with pytest.raises(EnsembleError) as caught:
        ensemble.merge(files, output, **keys)
    assert caught.value.exit_code == 2
    after = sorted(output.parent.iterdir()) if output.parent.is_dir() else None
    assert after == before, "nothing is written"
    return [problem.replace(f"{output.parent}/", "") for problem in caught.value.problems]


@pytest.mark.long
def test_what_is_wrong_is_said_in_a_sentence_each(frames: dict[str, pd.DataFrame], folder: Path) -> None:
    out, good = folder / "never.csv", folder / "a.csv"
    whole = frames["a"].reset_index()

    def file(name: str, frame: pd.DataFrame) -> Path:
        frame.to_csv(folder / f"{name}.csv", index=False)
        return folder / f"{name}.csv"

    def message_of(second: Path, **keys: Any) -> str:
        (problem,) = refused([good, second], out, **keys)
        return problem

    assert message_of(file("less", whole[5:])) == (
        "less.csv: 5 ids of a.csv missing ('00000', '00001', '00002', ...); --partial merges rows that some files "
        "lack from the others"
    )
    more = file("more", pd.concat([whole, whole[:1].assign(id="other")]))
    assert message_of(more).startswith("more.csv: 1 id not in a.csv ('other'); --partial merges")
    twice = file("twice", pd.concat([whole, whole[7:8]]))
    assert re.match(r"twice\.csv: 1 id more .*'00007'", message_of(twice))
    (problem,) = refused([twice, good], out)
    assert problem == message_of(twice)
    assert "twice.csv: 1 id more" in message_of(twice, partial=True)
    sums = file("sums", whole.assign(pos=whole.pos.where(whole.index != 35_000, 0.0)))
    cells = ", ".join(f"'{name}' is {pd.read_csv(sums).loc[35_000, name]:g}" for name in LABELS)
    assert message_of(sums) == (
        f"sums.csv: 1 row with values that do not sum to 1, the first is id 35000 ({cells}); {ROWS_ADVICE}"
    )
    assert "cannot write to" in refused([good], Path("/proc/none/never.csv"))[0]
    assert message_of(file("other", whole.rename(columns={"neu": "mid"}))) == (
        "other.csv: has other label columns than a.csv: only a.csv has 'neu', only other.csv has 'mid'; name those "
        "to take, such as --label neg"
    )
    text = message_of(file("text", whole.assign(pos=["high", *whole.pos[1:].astype(str)])))
    assert text == "text.csv: row 1: 'high' in column 'pos' is no number; write a number in every row"
    assert message_of(folder / "gone.csv").startswith("gone.csv: no such file")
    assert "no id column 'key'" in refused([good, folder / "b.csv"], out, id_column="key")[0]
    empty = file("empty", whole[:0])
    assert refused([empty], out) == ["empty.csv: there are no rows; nothing to merge"]
    assert message_of(good) == "a.csv: has the same name as a.csv; name it yourself, as in a=a.csv"
    assert "'ensemble' cannot be a name" in message_of(file("ensemble", whole))
    assert refused([good, folder / "b.csv"], good) == [
        "a.csv: is one of the files that are read; choose another name"
    ]
    assert "is a directory" in refused([good], folder)[0]
    both = [good, folder / "b.csv"]
    assert refused(both, out, weights={"a": 1, "d": 2}) == [
        "--weight: no file is named 'd'; the files are 'a', 'b'",
        "--weight: nothing for 'b'; give a weight for each file",
    ]
    assert "weights are all 0" in refused(both, out, weights={"a": 0, "b": 0})[0]
    assert refused(both, out, weights={"a": {"neg": 1}, "b": 1})[0].startswith("--set models.a.weight=")
    assert "did you mean median?" in refused(both, out, method="medain")[0]
    assert refused(both, out, method="logit_mean")[0].endswith(
        "; use geometric_mean, which is the same there"
    )
    assert "weights by length bin need the texts" in " ".join(
        refused(both, out, overrides={"ensemble.length_bins": [9]}, weights={"a": [0, 1], "b": 1})
    )
    assert refused(both, out, labels="neg") == ["labels: give a list of names, such as ['neg']"]
    for override in (
        "limit=5",
        "models.b.when.share=0.4",
        "output_dir=x",
        "models.a.path=b.csv",
        "models.a.id_column=x",
        "data.label_column=x",
    ):
        (problem,) = refused(both, out, overrides=[override])
        assert problem.startswith(f"--set {override}: ")
        assert "a merge of files has no such key; it has ensemble.*, and" in problem
    (folder / "odd.yaml").write_text("models: [{name: a, weight: 1, path: b.csv}, {name: b}]\nlimit: 3\n")
    assert [item.partition(": a merge")[0] for item in refused(both, out, weights=folder / "odd.yaml")] == [
        "models[0].path (odd.yaml, line 1)",
        "limit (odd.yaml, line 2)",
    ]
    (folder / "odd.yaml").write_text("models: [{name: a, weight: 1}, {name: bb}]\n")
    assert refused(both, out, weights=folder / "odd.yaml") == [
        "odd.yaml: models: no file is named 'bb' (did you mean 'b'?); the files are 'a', 'b'",
        "odd.yaml: models: nothing for 'b'; give a weight for each file",
    ]
    assert refused(both, out, weights={"a": 1, "b": 0}, method="mean", overrides={"models.a.partial": 3})
    lacking = file("lacking", whole[9:])
    needed = refused({"a": lacking, "b": good}, out, partial=True, weights={"a": 1, "b": 0})
    assert needed == ["no file with a weight above 0 has the id '00000'; add one that does"]


def test_what_is_there_is_replaced_where_it_is_a_file_of_no_other_use(
    frames: dict[str, pd.DataFrame], folder: Path
) -> None:
    both = paths(folder, "a", "b")
    other = folder / "targets"
    other.mkdir()
    pipe, link, loop = other / "pipe.csv", other / "link.csv", other / "loop.csv"
    os.mkfifo(pipe)
    loop.symlink_to(loop.name)
    (other / "to_pipe.csv").symlink_to(pipe)
    for target in (pipe, other / "to_pipe.csv", loop):
        assert refused(both, target)[0].endswith("; choose another name")
    assert pipe.is_fifo()
    own = other / "weights.yaml"
    own.write_text("models: [{name: a, weight: 1}, {name: b, weight: 2}]\n")
    (other / "own.csv").symlink_to(own)
    (other / "hard.csv").hardlink_to(both[1])
    for name, weights in (("weights.yaml", own), ("own.csv", own), ("hard.csv", None)):
        assert "that are read" in refused(both, other / name, weights=weights)[0]
    assert own.read_text().startswith("models:")
    # The file behind a link is replaced, and the link stays.
    (other / "behind.csv").write_text("of an earlier merge")
    link.symlink_to("behind.csv")
    assert ensemble.merge(both, link) == link
    assert link.is_symlink()
    assert not (other / "behind.csv").is_symlink()
    pd.testing.assert_frame_equal(read(other / "behind.csv"), (frames["a"] + frames["b"]) / 2, rtol=1e-12)


def names(problems: Sequence[str]) -> list[str]:
    return [problem.partition(":")[0] for problem in problems]


def test_all_broken_files_are_named_at_once(folder: Path, frames: dict[str, pd.DataFrame]) -> None:
    (folder / "blank.csv").write_text("")
    problems = refused([folder / "gone1.csv", folder / "a.csv", folder / "blank.csv"], folder / "never.csv")
    assert names(problems) == ["gone1.csv", "blank.csv"]


def test_files_of_every_format_and_logits_that_are_asked_for(tmp_path: Path) -> None:
    a = pd.DataFrame({"neg": [0.25, 0.5, 1.0], "pos": [0.75, 0.5, 0.0]}, pd.Index(["1", "2", "3"], name="id"))
    b = pd.DataFrame({"pos": [0.1, 0.7], "neg": [0.9, 0.3]}, pd.Index(["3", "1"], name="id"))
    a.reset_index().to_parquet(tmp_path / "a.parquet", index=False)
    a.to_csv(tmp_path / "a2.csv.gz")
    b.reset_index().to_json(tmp_path / "b.jsonl", orient="records", lines=True)
    np.log(b).to_csv(tmp_path / "c.tsv", sep="\t")
    out = tmp_path / "out.csv"
    expected = (a.loc[["1", "3"]] + b) / 2
    files = [tmp_path / "a.parquet", tmp_path / "b.jsonl"]
    ensemble.merge(files, out, partial=True)
    pd.testing.assert_frame_equal(read(out).loc[["1", "3"]], expected.loc[["1", "3"]][["neg", "pos"]])
    assert read(out).loc["2"].tolist() == [0.5, 0.5]
    ensemble.merge([files[0], tmp_path / "a2.csv.gz"], out)
    pd.testing.assert_frame_equal(read(out), a)
    logits = {"models.c.values": "logits"}
    ensemble.merge([files[0], tmp_path / "c.tsv"], out, logits, partial=True)
    pd.testing.assert_frame_equal(read(out).loc[["1", "3"]], expected.loc[["1", "3"]][["neg", "pos"]])
    with pytest.raises(EnsembleError, match=r"a\.parquet: 1 id of .*b\.jsonl missing|1 id not in"):
        ensemble.merge([tmp_path / "b.jsonl", files[0]], out)
    with pytest.raises(EnsembleError, match=r"out\.jsonl: a plain CSV or Parquet is written; choose a name"):
        ensemble.merge(files, tmp_path / "out.jsonl")


@pytest.fixture(scope="module")
def many(folder: Path) -> Path:
    """A file of so many rows that a signal comes while they are written."""
    rows = 2_000_000
    constants = {name: pa.repeat(value, rows) for name, value in (("a", 0.25), ("b", 0.75))}
    path = folder / "many.csv"
    write_csv(pa.table({"id": np.arange(rows), **constants}), path)
    return path


@pytest.mark.long
@pytest.mark.parametrize("number", one_in(2, [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP]))
def test_a_signal_leaves_no_temporary_file(folder: Path, many: Path, number: signal.Signals) -> None:
    """Sent while the first of many rows are written; what SIGKILL leaves, the next merge removes."""
    beside = folder / f"signal {number}"
    beside.mkdir()
    out = beside / "out.csv"
    command = [sys.executable, "-m", "ensemble", "merge", f"x={many}", f"y={many}", "-o", str(out)]
    variables = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: [*beside.glob(".out.csv.tmp-*")], "it writes")
        process.send_signal(number)
        _, errors = process.communicate()
    if number == signal.SIGKILL:
        assert [*beside.glob(".out.csv.tmp-*")]
        ensemble.merge({"x": many}, out)
        assert [*beside.iterdir()] == [out]
        return
    assert process.returncode == 128 + number, errors
    assert b"run the same command again" in errors
    assert [*beside.iterdir()] == []
