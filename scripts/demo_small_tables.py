#!/usr/bin/env python3
"""Write demo/small/, the tables of configs/train_demo.yaml: glosses of topics that the demo's models never saw.

    apt-get install wordnet-base
    python scripts/demo_small_tables.py

The rows come from the same file as the demo's other tables, by the same rules, under eight smaller topics.  No
gloss of theirs is in a table of the demo's fourteen topics.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from demo_data import DEFAULT_DATA_NOUN, TOPICS, read_source

FOLDER = Path(__file__).resolve().parents[1] / "demo" / "small"
# By the numbers of lexnames(5WN).
SMALL_TOPICS = {
    "11": "event",
    "12": "feeling",
    "17": "object",
    "19": "phenomenon",
    "21": "possession",
    "22": "process",
    "23": "quantity",
    "28": "time",
}
TRAIN_ROWS, TEST_ROWS, SEED = 1200, 400, 22


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables below demo/small.")
    parser.add_argument("--data-noun", type=Path, default=DEFAULT_DATA_NOUN)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    # Glosses that occur under two topics, one of them among the fourteen, are left out.
    glosses, _ = read_source(options.data_noun, TOPICS | SMALL_TOPICS)
    glosses = sorted(
        (gloss for gloss in glosses if gloss.topic in SMALL_TOPICS.values()), key=lambda gloss: gloss.id
    )
    draw = random.Random(SEED)
    draw.shuffle(glosses)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [[gloss.id, gloss.text, gloss.topic] for gloss in glosses[: TRAIN_ROWS + TEST_ROWS]]
    write(options.output / "train.csv", ["id", "gloss", "label"], rows[:TRAIN_ROWS])
    test = [row[:2] for row in rows[TRAIN_ROWS:]]
    write(options.output / "test.csv", ["id", "gloss"], test)
    topics = sorted(SMALL_TOPICS.values())
    uniform = [f"{1 / len(topics):.6f}"] * len(topics)
    ids = [row[0] for row in test]
    draw.shuffle(ids)
    write(options.output / "sample_submission.csv", ["id", *topics], ([row_id, *uniform] for row_id in ids))


def write(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
