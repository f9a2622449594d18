"""What a merge starts from: tables, configs, and complete predictions as a run leaves them.

The models are a header each: a merge asks what kind of values they give and whether they are still the same.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa

from ensemble.common.digests import FileDigests
from ensemble.common.shards import file_sha256
from ensemble.data.csv_file import write_csv
from ensemble.jobs.work import find_work, write_manifest
from ensemble.pipeline.load import load as load_config
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.run_dir import RunDir, hold

_FULL = ("ours_in_full", "ours_in_another_order")
_SEED = 7


def label_names(labels: int) -> list[str]:
    return [f"label_{index}" for index in range(labels)]


def member_names(members: int) -> list[str]:
    return [f"member_{index}" for index in range(members)]


def make_files(folder: Path, rows: int, members: int, labels: int) -> int:
    """Put everything into ``folder``, the same run in a directory for each way to merge it.

    Returns:
        bytes of the members' predictions together.
    """
    random = np.random.default_rng(_SEED)
    ids = pa.array(random.permutation(rows) * 1571 + 10_000_000).cast(pa.string())
    names = label_names(labels)
    truth = pa.array(names).take(pa.array(random.integers(0, labels, rows)))
    write_csv(folder / "table.csv", ["id", "text", "label"], [[ids, ids, truth]])
    samples = {"sample.csv": ids, "sample_in_another_order.csv": ids.take(random.permutation(rows))}
    for name, column in samples.items():
        cells = [column, *[pa.array(np.full(rows, 1 / labels))] * labels]
        write_csv(folder / name, ["id", *names], [cells])
    _make_checkpoint(folder / "checkpoint", names)
    runs = {name: _prepared_run(folder, name, members, names) for name in ("ours", *_FULL)}
    written = 0  # bytes
    for index, name in enumerate(member_names(members)):
        values = random.dirichlet(np.ones(labels), rows)
        first = next(iter(runs.values()))[1].predictions(name)
        write_csv(first, ["id", *names], [[ids, *(pa.array(column) for column in values.T)]])
        del values
        written += first.stat().st_size
        for prepared, rundir in runs.values():
            if rundir.predictions(name) != first:
                os.link(first, rundir.predictions(name))
            plan = prepared.plan.models[index]
            fingerprint = prepared.causes(plan, plan.jobs[0], FileDigests(False))
            work = find_work(rundir, name, fingerprint, rows, keeps_bad_rows=False)
            work.is_done[:] = True
            write_manifest(rundir, work, file_sha256(first))
    return written


def _prepared_run(folder: Path, name: str, members: int, labels: list[str]) -> tuple[Prepared, RunDir]:
    data = {"path": str(folder / "table.csv"), "id_column": "id"}
    config: dict[str, object] = {
        "data": data,
        "labels": labels,
        "output_dir": str(folder / name),
        "report": False,
        "models": [
            {
                "name": member,
                "model_name_or_path": str(folder / "checkpoint"),
                "text_column": "text",
                "weight": 1.0 + index,
            }
            for index, member in enumerate(member_names(members))
        ],
    }
    if name in _FULL:
        order = "" if name == "ours_in_full" else "_in_another_order"
        data["label_column"] = "label"
        config["submission"] = {"sample": str(folder / f"sample{order}.csv")}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    rundir = RunDir(folder / name)
    prepared = prepare(load_config(path))
    rundir.create()
    rundir.tidy()
    with hold(rundir):  # its lock says that a run has made the directory
        return prepared, rundir


def _make_checkpoint(folder: Path, labels: list[str]) -> None:
    folder.mkdir()
    by_number = {str(index): label for index, label in enumerate(labels)}
    config = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 16,
        "max_position_embeddings": 16,
        "id2label": by_number,
        "label2id": {label: int(number) for number, label in by_number.items()},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    size = len(labels) * 8 * 4
    tensor = {"dtype": "F32", "shape": [len(labels), 8], "data_offsets": [0, size]}
    header = json.dumps({"classifier.weight": tensor}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(size)
    (folder / "model.safetensors").write_bytes(content)
    words = {"type": "WordLevel", "vocab": {"word": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": words}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
