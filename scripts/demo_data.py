"""The part of the demo that needs no torch: its rows, its tables, its scores and its README.

Owns the reading of Debian's `data.noun`, the split, and the text files under `demo/`. It does not
train; it needs the standard library only, and gives the same rows for the same input everywhere.

A line of `data.noun` looks like this, says wndb(5WN); the topic is the second field, the number of
the lexicographer file that the synset stands in:

    02084071 05 n 03 dog 0 domestic_dog 0 Canis_familiaris 0 023 @ 02083346 n 0000 ... | a member
"""

from __future__ import annotations

import csv
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_DATA_NOUN = Path("/usr/share/wordnet/data.noun")

# The fourteen largest lexicographer files of nouns, by the numbers of lexnames(5WN).
TOPICS = {
    "04": "act",
    "05": "animal",
    "06": "artifact",
    "07": "attribute",
    "08": "body",
    "09": "cognition",
    "10": "communication",
    "13": "food",
    "14": "group",
    "15": "location",
    "18": "person",
    "20": "plant",
    "26": "state",
    "27": "substance",
}
TEST_ROWS = 2000
VALIDATION_ROWS = 2000
# Of the training rows, those that the repository holds, for members that are trained as they start.
TRAIN_TABLE_ROWS = 4000
# Of the test rows, from the top, those that the repository holds a picture of.
PICTURE_ROWS = 300
SPLIT_SEED = 20
SUBMISSION_SEED = 21

_EXAMPLE = re.compile(r'"[^"]*"?')
_EMPTY_CLAUSES = re.compile(r"\s*;(?:\s*;)+")


class DemoDataError(Exception):
    """The source file is missing or is not WordNet's; the message is for the user."""


@dataclass(frozen=True)
class Gloss:
    """One synset of a wanted topic: `words` are its lemmas, which no table of the demo shows."""

    id: str
    text: str
    topic: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Split:
    """Three lists of glosses; no text of one occurs in another."""

    train: list[Gloss]
    validation: list[Gloss]
    test: list[Gloss]


@dataclass(frozen=True)
class Trained:
    """What training tells about a member; `epoch` is the one kept."""

    name: str
    architecture: str
    tokenizer: str
    parameters: int
    epoch: int
    validation_loss: float
    temperature: float


@dataclass(frozen=True)
class Score:
    """One line of the final table, over the test rows."""

    name: str
    log_loss: float
    accuracy: float


def parse_line(line: str, topics: Mapping[str, str] = TOPICS) -> Gloss | None:
    """Read one line of `data.noun`; None for the licence header and for topics left out."""
    if line.startswith("  "):
        return None
    head, separator, gloss = line.partition(" | ")
    fields = head.split()
    if not separator or len(fields) < 6 or fields[2] != "n":
        raise DemoDataError(f"not a line of data.noun: {line[:60]!r}")
    topic = topics.get(fields[1])
    text = definition(gloss)
    if topic is None or not text:
        return None
    word_count = int(fields[3], 16)  # hexadecimal, says wndb(5WN)
    words = tuple(word.replace("_", " ") for word in fields[4 : 4 + 2 * word_count : 2])
    return Gloss(id=f"n{fields[0]}", text=text, topic=topic, words=words)


def definition(gloss: str) -> str:
    """Drop the quoted examples: they show the word in use, often far from its own topic."""
    text = _EMPTY_CLAUSES.sub(";", _EXAMPLE.sub("", gloss))
    return " ".join(text.split()).strip(" ;")


def read_source(path: Path, topics: Mapping[str, str] = TOPICS) -> tuple[list[Gloss], str]:
    """Return the usable glosses in file order, and the licence notice that the file opens with."""
    if not path.is_file():
        raise DemoDataError(
            f"{path} not found. Install WordNet's data (Debian, Ubuntu: "
            "apt-get install wordnet-base) or give its place with --data-noun PATH."
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    # A header line is two spaces, its number, a space, then the text.
    header = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    notice = "\n".join(parts[1].rstrip() if len(parts) > 1 else "" for parts in header) + "\n"
    if "WordNet 3.0 Copyright" not in notice or "Title to copyright" not in notice:
        raise DemoDataError(f"{path} does not open with the licence notice of WordNet 3.0")
    parsed = (parse_line(line, topics) for line in lines)
    glosses = [gloss for gloss in parsed if gloss is not None]
    return drop_duplicates(glosses), notice


def drop_duplicates(glosses: Iterable[Gloss]) -> list[Gloss]:
    """Keep the first of each text, and none of a text under two topics: it has no one answer."""
    by_text: dict[str, list[Gloss]] = defaultdict(list)
    for gloss in glosses:
        by_text[gloss.text.casefold()].append(gloss)
    return [same[0] for same in by_text.values() if len({gloss.topic for gloss in same}) == 1]


def split(glosses: Sequence[Gloss]) -> Split:
    """Shuffle with a fixed seed, then cut; the test table stays shuffled.

    WordNet's offsets go by topic: the first hundred rows in order of their ids would all be acts.
    """
    shuffled = sorted(glosses, key=lambda gloss: gloss.id)
    random.Random(SPLIT_SEED).shuffle(shuffled)
    held_out = TEST_ROWS + VALIDATION_ROWS
    if len(shuffled) <= 2 * held_out:
        raise DemoDataError(f"only {len(shuffled)} glosses: too few to hold out {held_out}")
    return Split(
        train=shuffled[held_out:],
        validation=shuffled[TEST_ROWS:held_out],
        test=shuffled[:TEST_ROWS],
    )


def write_tables(train: Sequence[Gloss], test: Sequence[Gloss], directory: Path) -> None:
    """Write `train.csv`, `test.csv`, and a `sample_submission.csv` with rows in another order on purpose.

    Competitions do that now and then; a submission must follow the sample's ids, not the table's.
    """
    for name, glosses in (("train.csv", train[:TRAIN_TABLE_ROWS]), ("test.csv", test)):
        with (directory / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["id", "gloss", "label"])
            writer.writerows([gloss.id, gloss.text, gloss.topic] for gloss in glosses)
    topics = sorted(TOPICS.values())
    ids = [gloss.id for gloss in test]
    random.Random(SUBMISSION_SEED).shuffle(ids)
    with (directory / "sample_submission.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", *topics])
        uniform = [f"{1 / len(topics):.6f}"] * len(topics)
        writer.writerows([row_id, *uniform] for row_id in ids)


def score(name: str, table: Sequence[dict[str, float]], truth: Sequence[str]) -> Score:
    """Log loss in nats and accuracy of one table of probabilities."""
    pairs = list(zip(table, truth, strict=True))
    return Score(
        name=name,
        log_loss=-sum(math.log(max(row[topic], 1e-15)) for row, topic in pairs) / len(pairs),
        accuracy=sum(max(row, key=row.__getitem__) == topic for row, topic in pairs) / len(pairs),
    )


_README = """\
# The demo's data and models

Written by `scripts/make_demo.py`: edit the script, not these files.

**Task.** Name the topic of a noun, one of {topic_count}, from its definition. The data are the noun
glosses of WordNet 3.0 (Debian's package `wordnet-base`, file `data.noun`); the topic is the
lexicographer file that a synset stands in. Examples in quotes were cut from the glosses, and of
equal glosses one was kept (none where their topics differ). Then {train:,} were drawn for
training, {validation:,} for choosing the epoch and a temperature, and {test:,} for the test. No
gloss is in two of these, though similar wordings are common in WordNet. The models of text also
learned from the words of the training synsets, as short texts of their own.

| File | What it is |
|---|---|
| `test.csv` | `id` (`n` and the synset's offset in `data.noun`), `gloss`, `label` |
| `train.csv` | the first {train_table:,} of the training rows, for members that are trained as they start |
| `sample_submission.csv` | the ids in another order, a column per topic, uniform probabilities |
| `small/` | tables of eight other topics, which the models never saw: `scripts/demo_small_tables.py` |
| `pictures/` | `<id>.png`: the glosses of the first {pictures} rows of `test.csv`, drawn, 27 by 27 pixels |
{members}
| `heads/llama_mean.safetensors` | a linear head on the mean of llama's hidden states, trained on `train.csv` |
| `pairs.csv` | `prompt` and two answers as JSON lists; `label`: which answer is about something alive |
| `adapters/llama_pairs/` | a LoRA adapter and head for `pairs.csv`, trained over llama's weights in nf4 |
| `LICENSE.WordNet` | the licence of WordNet: the tables, pictures, models and tokenizers are made from it |

`gemma2` and `llama` list their labels in different orders. Their tokenizers put a bos and an eos
token around a text, and the eos is the token that is pooled. `smollm3` has no head and puts nothing
around a text: behind `{{{{ gloss }}}} Topic:` it gives the topic's name, a token each, such as ` food`.
A picture says how often which letter follows which (a row and a column for each letter and for all
else), and nothing but the gloss went into it. Weights are stored as float16 and meant to run as
float32 on a CPU. The models are a demonstration: they know short dictionary definitions in English
and nothing else.

**Measured** on the {test:,} test rows, one row at a time with plain transformers in float32 (of
`vit` with all of their pictures); log loss in nats:

| | log loss | accuracy |
|---|---|---|
{scores}

{training}

**Rebuild** ({minutes:.0f} minutes of processor time, about half of that on two free cores):

    apt-get install wordnet-base
    make demo

Seeds are fixed; the last digits vary with the processor and the version of torch.
"""


def readme(data: Split, trained: Sequence[Trained], scores: Sequence[Score], seconds: float) -> str:
    """The demo's README, with the figures measured; `seconds` are of processor time."""
    return _README.format(
        topic_count=len(TOPICS),
        train=len(data.train),
        train_table=TRAIN_TABLE_ROWS,
        pictures=PICTURE_ROWS,
        validation=len(data.validation),
        test=len(data.test),
        members="\n".join(
            f"| `models/{member.name}/` | `{member.architecture}`, "
            f"{member.parameters:,} parameters; {member.tokenizer} |"
            for member in trained
        ),
        scores="\n".join(f"| {s.name} | {s.log_loss:.4f} | {s.accuracy:.4f} |" for s in scores),
        training="\n".join(
            f"- `{member.name}`: kept after epoch {member.epoch}, validation log loss "
            f"{member.validation_loss:.4f}, temperature {member.temperature:.2f} (already folded "
            "into the weights)"
            for member in trained
        ),
        minutes=seconds / 60,
    )
