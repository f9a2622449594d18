"""Read the test files of SemEval-2026 tasks 3, 5, 6, 9 and 10, and write what is submitted, for semeval_task*.yaml.

    python configs/winners/semeval.py read 3 eng_restaurant_test_task1.jsonl FOLDER
    python configs/winners/semeval.py write 3 FOLDER/submission.csv predictions.jsonl

`read` writes FOLDER/test.csv, a row for each prediction, and FOLDER/sample.csv. `write` takes what a run submits.
"""

import sys
from pathlib import Path

import pandas as pd

LABELS = [
    "stereotype",
    "vilification",
    "dehumanization",
    "extreme_language",
    "lack_of_empathy",
    "invalidation",
]
# What a run submits, beside the id.
COLUMNS = {
    "3": ["Valence", "Arousal"],
    "5": ["prediction"],
    "6": ["clarity_label"],
    "9": LABELS,
    "10": ["conspiracy"],
}


def read(task: str, file: str, folder: Path) -> None:
    if task == "3":  # a line for each text, with a list of its aspects
        table = (
            pd.read_json(file, lines=True)
            .explode("Aspect", ignore_index=True)
            .rename_axis("row")
            .reset_index()
        )
    elif task == "5":  # one object, of an object for each id
        table = pd.read_json(file, orient="index", dtype=False).rename_axis("id").reset_index()
    elif task == "6":  # of the data set QEvasion
        table = pd.read_parquet(file).rename_axis("row").reset_index()
    elif task == "9":
        table = pd.read_csv(file, dtype=str, keep_default_na=False)
    else:
        table = pd.read_json(file, lines=True, dtype=False)
    folder.mkdir(parents=True, exist_ok=True)
    table = table.drop(columns=COLUMNS[task], errors="ignore")
    table.to_csv(folder / "test.csv", index=False)
    table.iloc[:, :1].assign(**dict.fromkeys(COLUMNS[task], 0)).to_csv(folder / "sample.csv", index=False)


def write(task: str, submission: Path, out: str) -> None:
    made = pd.read_csv(submission, dtype=str if task in ("6", "10") else None)
    if task == "3":  # valence#arousal of each aspect, below the text's id
        table = pd.read_csv(submission.with_name("test.csv"), dtype=str, keep_default_na=False)
        values = made["Valence"].map("{:.2f}".format) + "#" + made["Arousal"].map("{:.2f}".format)
        pairs = pd.DataFrame({"ID": table["ID"], "Aspect": table["Aspect"], "VA": values})
        of_texts = pairs.groupby("ID", sort=False)[["Aspect", "VA"]]
        made = of_texts.apply(lambda rows: rows.to_dict("records")).rename("Aspect_VA").reset_index()
    if task == "6":  # a label on each line
        Path(out).write_text("".join(f"{label}\n" for label in made["clarity_label"]), encoding="utf-8")
    elif task == "9":
        made.to_csv(out, index=False)
    else:
        made.to_json(out, orient="records", lines=True, force_ascii=False)


if __name__ == "__main__":
    verb, task, first, second = sys.argv[1:]
    if verb == "read":
        read(task, first, Path(second))
    else:
        write(task, Path(first), second)
