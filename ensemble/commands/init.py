"""Write a first config, guessed from a table, members and perhaps a sample submission; comments name the guesses.

A member's kind tells what its source holds (``MemberKind.draft``).
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ensemble.common.errors import ConfigError, DataError, EnsembleError, WriteError
from ensemble.common.files import output_file, write_text
from ensemble.common.text import listed, plural, quoted
from ensemble.config.document import parse
from ensemble.config.values import MAX_NAME_CHARACTERS
from ensemble.data.csv_file import read_header, read_text_csv
from ensemble.data.formats import read_contents
from ensemble.data.input_file import Wanted, without_pandas_index
from ensemble.data.json_cells import TemplateProblem, parse_json_cell
from ensemble.data.predictions_csv import file_stem
from ensemble.data.table import TableNeeds, read_table
from ensemble.members.base import Draft
from ensemble.members.registry import KINDS
from ensemble.planning.chunks import BYTES_PER_TOKEN

_HEAD_ROWS = 1_000  # that are looked at to see what columns hold
# A row may have so many times the tokens that its bytes tell (in Chinese, in code), and special ones; rounded up to
# a step, and cut where nobody has asked for more.
_MARGIN, _SPECIAL, _STEP, _MAX_TOKENS = 1.5, 8, 64, 4096


@dataclass(frozen=True)
class Guess:
    """Hold a guess: the key (of a member ``name.key``, of its labels ``name``), the value if any, the reason."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


@dataclass(frozen=True)
class _Member:
    name: str
    source: str  # as the user gave it
    draft: Draft


def write_first_config(
    table: Path, sources: Sequence[str], sample: Path | None, output: Path, may_replace: bool
) -> list[Guess]:
    """Guess a config, write it, and return its guesses; ``may_replace`` allows to replace an existing file."""
    inputs = [table, *map(Path, sources), *([] if sample is None else [sample])]
    target = output_file(output, inputs, may_replace)
    if not target.parent.is_dir():
        raise ConfigError(f"--output: {output}: name a file in a folder that is there")
    text = first_config(table, sources, sample)
    try:
        write_text(target, text)
    except WriteError as error:
        raise ConfigError(error.problems) from error
    return [*_guesses(text)]


def _guesses(text: str) -> Iterator[Guess]:
    """Yield the guesses that a config's comments name."""
    config = parse(text, "a first config").data
    values = {**config, **config.get("defaults", {})}
    values["submission.columns"] = config.get("submission", {}).get("columns")
    for member in config["models"]:
        values[member["name"]] = member.get("label_map", member.get("columns"))
        values |= {f"{member['name']}.{key}": value for key, value in member.items()}
    for comment in re.findall(r"# GUESS: (.*)", text):
        key, _, reason = comment.partition(": ")
        yield Guess(key, values.get(key), reason)


def first_config(table: Path, sources: Sequence[str], sample: Path | None) -> str:
    """Guess a config and return its YAML, with a comment for each guess.

    Args:
        sources: of the members: folders of checkpoints or adapters, names on the hub, predictions, scripts.
        sample: a sample submission; None: the one beside the table, if it has the table's rows.

    Raises:
        EnsembleError: a file cannot be read, or cannot be used in a config; with every problem.
    """
    names = read_contents(table, Wanted("", None, (), _HEAD_ROWS)).names
    beside = table.parent / "sample_submission.csv"
    likely_sample = sample or (beside if beside.is_file() and beside != table else None)
    header = () if likely_sample is None else read_header(likely_sample)
    id_column = _id_column(table, names, header)
    if sample is None and likely_sample is not None and _has_first_row(likely_sample, table, id_column):
        sample = likely_sample
    submitted = [] if sample is None else [name for name in header if name != id_column]
    members = _members(sources, id_column)
    submitted_cells: dict[str, list[str]] = {}
    if sample is not None:
        head = read_text_csv(sample, [id_column, *submitted], _HEAD_ROWS)
        submitted_cells = {name: head.column(name).unique().to_pylist() for name in submitted}
    labels, origin = _labels(members, submitted)
    answered = next(iter(submitted_cells.values())) if len(submitted) == 1 else []
    if len(answered) > 1 and not any(map(_is_number, answered)) and not set(answered) <= set(labels):
        labels, origin = _labels(members, answered, "cells")

    columns = tuple(name for name in without_pandas_index(names) if name != id_column)
    rows = read_table(table, TableNeeds(id_column, columns=columns, limit=_HEAD_ROWS)).head(_HEAD_ROWS)
    cells = {name: [row[name] for row in rows if row[name] not in (None, "")] for name in columns}
    truth = _truth(cells, labels)
    contents = {name: _content(cells[name]) for name in columns if name not in truth}
    file_column = None
    if any(member.draft.file_keys for member in members):
        file_column = next((name for name in contents if contents[name] in ("prose", "text")), id_column)
        contents.pop(file_column, None)
    reads_text = any(member.draft.reads_text for member in members)
    likely_texts: list[str] = []
    if reads_text:
        likely_texts = [name for name in contents if contents[name] in ("json", "prose")]
        likely_texts = likely_texts or [name for name in contents if contents[name] == "text"]
    is_template = len(likely_texts) > 1 or any(contents[name] == "json" for name in likely_texts)
    # Jinja knows no other names.
    texts = [
        name for name in likely_texts if not is_template or re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
    ]
    left_out = listed([name for name in likely_texts if name not in texts])
    if likely_texts and not texts:
        raise DataError(f"{table}: rename {left_out}: a template reads names of letters, digits and _")
    if reads_text and not texts:
        raise DataError(
            f"{table}: no column of text for the members to read beside {quoted(id_column)}, which is taken for "
            f"the ids; the columns are {listed(names)}"
        )

    schemas = [
        Path(__file__).resolve().parents[2] / "docs/config.schema.json",  # in a checkout
        Path(sysconfig.get_path("data")) / "share/ensemble-runner/config.schema.json",
    ]
    lines = [f"# yaml-language-server: $schema={schema}" for schema in schemas if schema.is_file()][:1]
    lines.append("# A first config by `ensemble init`. Check the lines with GUESS, then validate, plan, run.")
    lines += ["", "data:", f"  path: {_scalar(str(table))}", f"  id_column: {_scalar(id_column)}"]
    if len(truth) > 1 or truth == labels:
        lines.append(f"  label_columns: {_list(labels)}")
    elif truth:
        lines.append(f"  label_column: {_scalar(truth[0])}  # the true labels: the run ends with scores")
    unused = [name for name in columns if name not in (*texts, *truth, file_column)]
    if unused and not any(member.draft.reads_all_columns for member in members):
        lines.append(f"  # not used: {', '.join(map(_scalar, unused))}")
    if left_out:
        lines.append(
            f"  # GUESS: left out: {left_out}; rename what models shall read to letters, digits and _"
        )
    lines += ["", f"# {origin}", f"labels: {_list(labels)}", "", "models:"]
    if len(members) > 1:
        lines += [
            "  # All have the same weight. If true labels are known, `ensemble fit` writes weights to a file of",
            "  # their own: ensemble run config.yaml weights.yaml",
        ]
    filters = {"json": r" | fromjson | join('\n')"}
    template = "\n\n".join(f"<{name}>: {{{{ {name}{filters.get(contents[name], '')} }}}}" for name in texts)
    more_bytes = len(template) if is_template else 0
    max_length, reason = _max_length(table, id_column, texts, more_bytes) if texts else (0, "")
    for member in members:
        lines += _member_lines(member, labels, file_column, max_length)
    if reads_text:
        lines += ["", "defaults:  # for all models"]
        if is_template:
            lines.append(
                "  # GUESS: prompt_template: the columns, in the table's order; it must be the same as in training"
            )
            lines += ["  prompt_template: |-", *(f"    {line}".rstrip() for line in template.split("\n"))]
        else:
            lines.append(f"  text_column: {_scalar(texts[0])}")
        lines += [
            f"  # GUESS: max_length: {reason}",
            f"  max_length: {max_length}",
            "  # If `plan` says that a model is too large: 4-bit weights take a quarter of 16-bit weights.",
            "  # quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4}",
        ]
    if sample is not None:
        lines += ["", "submission:", f"  sample: {_scalar(str(sample))}", "  path: submission.csv"]
        lines += _answers(submitted_cells, labels) or _submission_columns(submitted_cells, labels)
    return "\n".join([*lines, "", "output_dir: runs/first", ""])


def _member_lines(
    member: _Member, labels: Sequence[str], file_column: str | None, max_length: int
) -> list[str]:
    """Return a member's YAML; ``file_column`` names the files of members that read files."""
    name, draft = member.name, member.draft
    lines = [f"  - name: {_scalar(name)}"]
    for key, value in draft.settings.items():
        lines += [f"    # GUESS: {name}.{key}: {draft.guess}"] if key == draft.guessed_key else []
        lines.append(f"    {key}: {_list(value) if isinstance(value, list) else _scalar(value)}")
    if draft.of_labels is not None:
        key, text_of = draft.of_labels
        lines += [f"    # GUESS: {name}.{key}: {draft.guess}", f"    {key}:"]
        lines += [f"      {_scalar(label)}: {_scalar(text_of(label))}" for label in labels]
    if draft.file_keys is not None and file_column is not None:
        key, *place_keys = draft.file_keys
        places = " and ".join(place_keys)
        lines.append(
            f"    # GUESS: {name}.{key}: the column that names the files; {places} say where they are"
        )
        lines.append(f"    {key}: {_scalar(file_column)}")
    own_labels, is_file = draft.labels or (), draft.labels_are_columns
    is_other = not set(own_labels) & set(labels) if is_file else set(own_labels) != set(labels)
    if is_other and len(own_labels) == len(labels) and (is_file or (draft.is_model and len(labels) > 1)):
        label_by_own = _same_but_case(own_labels, labels) if draft.are_named or is_file else {}
        if not label_by_own and (is_file or not draft.are_named):
            label_by_own = dict(zip(own_labels, labels, strict=True))
            why = "have other names in its file" if is_file else "are numbered"
            lines.append(f"    # GUESS: {name}: its labels {why}, and taken in the order of labels")
        if label_by_own:
            lines.append(f"    {'columns' if is_file else 'label_map'}: {_mapping(label_by_own)}")
    if draft.reads_text and draft.max_length is not None and draft.max_length < max_length:
        lines.append(f"    max_length: {draft.max_length}  # as many as it can read; longer rows are cut")
    return lines


def _id_column(table: Path, names: Sequence[str], sample: Sequence[str]) -> str:
    """Return the column of the ids, different in each row: the sample's, one with such a name, or the first."""
    likely = [
        *(name for name in sample[:1] if name in names),
        *(name for name in names if name.lower() == "id"),
        *(name for name in names if re.search(r"(?i)[^a-z]id$|[a-z]I[dD]$", name)),
        *names[:1],
    ]
    reasons: list[str] = []
    for name in dict.fromkeys(likely):
        contents = read_contents(table, Wanted(name, None, (), None))
        if not contents.rows:
            raise DataError(f"{table}: empty table: there is a header or a schema, but no row")
        ids = contents.ids
        if ids is None or contents.problems:
            reasons += contents.problems
        elif len(set(ids.to_pylist()) - {None, ""}) < len(ids):
            reasons.append(f"{table}: column {quoted(name)} has rows without a value, or with the same one")
        else:
            return name
    raise DataError([*reasons, f"{table}: no column names the rows; add one, such as id"])


def _has_first_row(sample: Path, table: Path, id_column: str) -> bool:
    """Return whether a sample submission has the table's first row: the sample beside train.csv is for test.csv."""
    if id_column not in read_header(sample):
        return False
    first = read_contents(table, Wanted(id_column, None, (), 1)).ids
    ids = read_text_csv(sample, [id_column]).column(0)
    return first is not None and bool(pc.any(pc.equal(ids, first[0].as_py())).as_py())


def _members(sources: Sequence[str], id_column: str) -> list[_Member]:
    """Return the members, each with its own name; raise ConfigError with the problems of all sources."""
    kinds = [KINDS.load(name) for name in KINDS.names()]
    members: list[_Member] = []
    problems: list[str] = []
    taken = {"ensemble"}
    for source in sources:
        try:
            draft = next(filter(None, (kind.draft(source, id_column) for kind in kinds)), None)
        except EnsembleError as error:
            problems += error.problems
            continue
        if draft is None:
            problems.append(
                f"{source}: no folder with a checkpoint, script (.py) or file of predictions that can be read"
            )
            continue
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file_stem(Path(source)).removesuffix(".py")).strip(".-")
        base = name = stem[: MAX_NAME_CHARACTERS - 4] or "model"
        number = 1
        while name.lower() in taken:
            number += 1
            name = f"{base}-{number}"
        taken.add(name.lower())
        members.append(_Member(name, source, draft))
    if problems:
        raise ConfigError(problems)
    return members


def _labels(
    members: Sequence[_Member], submitted: Sequence[str], places: str = "columns"
) -> tuple[list[str], str]:
    """Return the labels, and a sentence on their origin; ``submitted`` are the sample submission's ``places``."""
    # A CSV may have more columns than labels, so it is asked last.
    with_labels = sorted(
        (member for member in members if member.draft.labels),
        key=lambda member: (not member.draft.is_model, not member.draft.are_named),
    )
    if not with_labels and submitted:
        guess = "GUESS: labels: the cells of the sample submission; add those that it does not show"
        return [*submitted], guess if places == "cells" else "The columns of the sample submission."
    if not with_labels:
        raise ConfigError(
            f"{members[0].source}: its labels are not known; name a sample submission that has them (--sample)"
        )
    first = with_labels[0]
    labels = [*(first.draft.labels or ())]
    if not first.draft.is_model and submitted and set(submitted) <= set(labels):
        return [*submitted], f"The {places} of the sample submission, which the predictions have, too."
    if first.draft.are_named:
        return labels, f"In the order of {first.source}; other members are matched by name."
    if len(submitted) == len(labels):
        origin = f"GUESS: labels: the sample submission's {places}; the checkpoints only number theirs"
        return [*submitted], origin
    return labels, "GUESS: labels: numbers as in the checkpoints; give each its name, here and in label_map"


def _same_but_case(theirs: Sequence[str], ours: Sequence[str]) -> dict[str, str]:
    """Return our label by theirs if all differ only in upper and lower case or punctuation; else nothing."""

    def folded(name: str) -> str:
        return re.sub(r"[\W_]+", "", name.casefold())

    by_folded = {folded(label): label for label in ours}
    same = {name: by_folded[folded(name)] for name in theirs if folded(name) in by_folded}
    return same if len(set(same.values())) == len(theirs) else {}


def _answers(cells: Mapping[str, Sequence[str]], labels: Sequence[str]) -> list[str]:
    """Return the YAML for columns of the sample whose cells are labels, or labels joined."""
    lines = []
    for name, column_cells in cells.items():
        # One of several numbers, or of two labels, may as well be a probability.
        is_number = all(map(_is_number, column_cells)) and (len(cells) > 1 or len(labels) < 3)
        if is_number or name in labels:
            continue
        for separator in ("\n", " ", ", ", ",", ";", "|"):
            parts = [cell.split(separator) if cell else [] for cell in column_cells]
            if any(parts) and set(chain.from_iterable(parts)) <= set(labels):
                top, least = max(map(len, parts)), min(map(len, parts))
                # As many labels in each row are the likeliest ones; else each is decided by itself.
                key = f"top: {top}" if top == least else "above: 0.5"
                answer = "label" if top == least == 1 else f"{{{key}, separator: {_scalar(separator)}}}"
                lines.append(f"    {_scalar(name)}: {{answer: {answer}}}")
                break
    if not lines:
        return []
    return [
        "  # GUESS: submission.columns: answers, because the sample's cells are labels",
        "  columns:",
        *lines,
    ]


def _submission_columns(cells: Mapping[str, Sequence[str]], labels: Sequence[str]) -> list[str]:
    """Return the YAML for the label of each of the sample's columns; none if their names are the labels'.

    Columns whose cells are 0 and 1 are for decisions, unless each has the same cell in all rows.
    """
    distinct, submitted = [{*of_column} for of_column in cells.values()], [*cells]
    are_decided = {"0", "1"} in distinct and all(of_column <= {"0", "1"} for of_column in distinct)
    guess = "which label each column of the sample is"
    if set(submitted) <= set(labels):
        label_by_column = {name: name for name in submitted if are_decided}
    elif same := _same_but_case(submitted, labels):
        label_by_column, guess = same, ""
    elif len(submitted) == len(labels):
        label_by_column = dict(zip(submitted, labels, strict=True))
    elif len(submitted) == 1 and len(labels) == 2:  # of two classes the second is the one that is asked for
        label_by_column = {submitted[0]: labels[1]}
    else:
        return []
    lines = [f"  columns: {_mapping(label_by_column)}"] if label_by_column else []
    if are_decided:
        guess = "1 from 0.5 on, because the sample's cells are 0 and 1; fit finds better thresholds"
        lines = ["  columns:"]
        for name, label in label_by_column.items():
            lines.append(f"    {_scalar(name)}: {{answer: {{above: {{{_scalar(label)}: 0.5}}}}}}")
    return [f"  # GUESS: submission.columns: {guess}", *lines] if guess and lines else lines


def _truth(cells: Mapping[str, Sequence[Any]], labels: Sequence[str]) -> list[str]:
    """Return the columns of the true labels: one for each label, or one that holds labels only, or none."""
    if set(labels) <= cells.keys() and all(_content(cells[label]) == "number" for label in labels):
        return [*labels]
    return [name for name, values in cells.items() if values and {*map(str, values)} <= set(labels)][:1]


def _content(cells: Sequence[Any]) -> str:
    """Return what a column's cells are, none of them empty: json (lists), number, prose, text or other."""
    if not cells:
        return "other"
    if all(map(_is_list, cells)):
        return "json"
    if all(map(_is_number, cells)):
        return "number"
    if not all(isinstance(cell, str) for cell in cells):
        return "other"
    blanks = sum(bool(re.search(r"\S\s+\S", cell)) for cell in cells)
    # Names of models and categories hold no blanks.
    return "prose" if blanks >= 0.3 * len(cells) else "text"


def _is_list(cell: object) -> bool:
    """Return whether a cell is a list, also in JSON, whose items can be joined."""
    if isinstance(cell, str) and not cell.lstrip().startswith("["):
        return False
    try:
        value = parse_json_cell(cell)
    except TemplateProblem:
        return False
    return isinstance(value, list) and not any(isinstance(item, list | dict) for item in value)


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _max_length(table: Path, id_column: str, texts: Sequence[str], more_bytes: int) -> tuple[int, str]:
    """Return the most tokens that a row should have, with a template's bytes, and how they were estimated."""
    lengths = read_table(table, TableNeeds(id_column, columns=tuple(texts))).text_lengths(texts) + more_bytes
    longest, middle = np.ceil(np.array([lengths.max(), np.median(lengths)]) / BYTES_PER_TOKEN).astype(int)
    enough = -(-int(longest * _MARGIN + _SPECIAL) // _STEP) * _STEP
    tokens = min(enough, _MAX_TOKENS)
    reason = (
        f"the longest row has about {longest:,} tokens, the median row {middle:,} "
        f"({BYTES_PER_TOKEN:g} bytes of text count as a token)"
    )
    if tokens < enough:
        rows = int((lengths > tokens * BYTES_PER_TOKEN).sum())
        reason += f"; {plural(rows, 'row')} would be cut"
    return tokens, reason


def _list(items: Sequence[str]) -> str:
    return f"[{', '.join(map(_scalar, items))}]"


def _mapping(items: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{_scalar(key)}: {_scalar(value)}' for key, value in items.items())}}}"


def _scalar(value: object) -> str:
    """Return a value as YAML; text in quotes if it could be read as anything else."""
    if not isinstance(value, str):
        return json.dumps(value)
    text = value.replace("${", "$${")
    is_plain = re.fullmatch(r"[A-Za-z_./][A-Za-z0-9_./-]*", text) and re.search("[A-Za-z]", text)
    is_word = text.lower() in ("null", "true", "false", ".inf", ".nan")
    return text if is_plain and not is_word else json.dumps(text, ensure_ascii=False)
