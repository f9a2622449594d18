"""Whether two checkouts of this project write the same bytes: ``python scripts/same_outputs.py OLD NEW``.

Runs the demo and configs of many kinds, with tiny models, with the code of both, and compares ``ensemble.csv`` and
the members' predictions.  For changes that should move no number.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.checkpoints import make_adapter, make_base, make_checkpoint, make_texts

LABELS = ["winner_a", "winner_b", "tie"]
TURNED = ["tie", "winner_a", "winner_b"]
ARCHITECTURES = ("gemma2", "gemma3", "llama", "gpt2", "bert", "roberta", "deberta-v2", "fnet")
PROMPT = "You will read an answer. Say who has won.\n\nAnswer: {{ text | upper }} Truth: {{ label }}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    different = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for case, config in cases():
            (folder / f"{case}.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            old, new = (run(folder, f"{case}.yaml", side) for side in (arguments.old, arguments.new))
            different += report(case, old, new)
        demo = [run(folder, f"{side}/configs/demo.yaml", side) for side in (arguments.old, arguments.new)]
        different += report("demo", *demo)
    sys.exit(f"not the same: {', '.join(different)}" if different else 0)


def report(case: str, old: dict[str, bytes], new: dict[str, bytes]) -> list[str]:
    same = bool(old) and old == new
    print(f"{'same     ' if same else 'DIFFERENT'}  {case} ({len(old)} and {len(new)} files)", flush=True)
    return [] if same else [case]


def run(folder: Path, config: str, checkout: Path) -> dict[str, bytes]:
    """The results' bytes, by name; none where the run failed."""
    target = folder / "runs" / f"{Path(config).stem}-{hash(checkout)}"
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ensemble", "run", config, "--quiet", "--set", f"output_dir={target}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(done.stderr.strip(), flush=True)
        return {}
    return {str(path.relative_to(target)): path.read_bytes() for path in sorted(target.rglob("*.csv"))}


def make_inputs(folder: Path) -> None:
    """Tables in three formats, a sample submission, and tiny checkpoints."""
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pa_parquet

    chooser = random.Random(0)
    ids = [f"{index:04d}" for index in range(300)]
    chooser.shuffle(ids)
    columns = {
        "id": ids,
        "text": make_texts(300),
        "other": make_texts(300, seed=1),
        "label": [chooser.choice(LABELS) for _ in ids],
    }
    table = pa.table(columns)
    pa_csv.write_csv(table, folder / "test.csv")
    pa_parquet.write_table(table, folder / "test.parquet")
    lines = (json.dumps(row) + "\n" for row in table.to_pylist())
    (folder / "test.jsonl").write_text("".join(lines), encoding="utf-8")
    sample = pa.table({"id": sorted(ids), **{label: [0.5] * len(ids) for label in TURNED}})
    pa_csv.write_csv(sample, folder / "sample.csv")
    for architecture in ARCHITECTURES:
        make_checkpoint(folder / architecture, architecture, TURNED, seed=1)
    make_checkpoint(folder / "no-pad", "llama", LABELS, seed=2, pad=None)
    make_checkpoint(folder / "left", "llama", LABELS, seed=3, side="left")
    make_checkpoint(folder / "half", "llama", LABELS, seed=4, dtype="bfloat16")
    make_checkpoint(folder / "sigmoid", "bert", LABELS, problem_type="multi_label_classification")
    make_checkpoint(folder / "number", "bert", ["score"], problem_type="regression")
    base = make_base(folder / "base", "llama", seed=5)
    make_adapter(folder / "adapter", base, 3)


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    def config(*members: dict[str, Any], **changes: Any) -> dict[str, Any]:
        document: dict[str, Any] = {
            "data": {"path": "test.csv", "id_column": "id", "label_column": "label"},
            "labels": LABELS,
            "models": [{"text_column": "text", **member} for member in members],
            "output_dir": "replaced",
        }
        return {key: value for key, value in {**document, **changes}.items() if value is not None}

    def member(name: str, **keys: Any) -> dict[str, Any]:
        return {"name": name, "model_name_or_path": name, **keys}

    gemma, llama = member("gemma2", weight=0.6), member("no-pad", weight=0.4)
    map_labels = {"label_map": {f"LABEL_{index}": label for index, label in enumerate(LABELS)}}
    submission = {"sample": "sample.csv", "path": "submission.csv"}
    prompt = {"text_column": None, "prompt_template": PROMPT}
    four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    yield "families", config(*(member(name, max_length=100) for name in ARCHITECTURES))
    yield "weights", config(gemma, llama, submission=submission)
    yield "prompts", config({**gemma, **prompt}, {**llama, **prompt, "truncation_side": "left"})
    yield "cut", config({**gemma, "max_length": 8}, {**llama, "max_length": 5, "add_special_tokens": False})
    yield "pairs", config(member("bert", text_column=["text", "other"]), member("roberta", max_length=60))
    yield "half", config(member("half"), member("left", dtype="bfloat16"))
    yield "batches", config({**gemma, "batch_size": 3}, {**llama, "max_num_batched_tokens": 200})
    yield "replicas", config({**gemma, "replicas": 2}, llama, seed=7)
    yield "4-bit", config(member("llama", quantization_config=four_bits))
    adapted = {"model_name_or_path": "base", "adapter_name_or_path": "adapter", **map_labels}
    yield "adapters", config(member("a", **adapted), member("b", **adapted, merge_adapter=True))
    yield "sigmoid", config(member("sigmoid"), llama | {"problem_type": "multi_label_classification"})
    data = {"path": "test.csv", "id_column": "id"}
    yield "regression", config(member("number"), labels=["score"], data=data)
    for ending in ("jsonl", "parquet"):
        table = {"path": f"test.{ending}", "id_column": "id", "label_column": "label"}
        yield ending, config(gemma, llama, data=table, submission=submission)
    yield "limit", config(gemma, llama, limit=50)
    yield "time", config(gemma, llama, time_limit="10m", submission=submission, fill="prior")


if __name__ == "__main__":
    main()
