"""Write a first config, guessed from a table, members and perhaps a sample submission; comments name the guesses.

A member's kind tells what its source holds (``MemberKind.draft``).
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ensemble.common.errors import ConfigError, DataError, EnsembleError, WriteError
from ensemble.common.files import output_file, write_text
from ensemble.common.text import listed, plural, quoted
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

USUAL_SAMPLE = "sample_submission.csv"
_SCHEMA = "config.schema.json"
_HEAD_ROWS = 1_000  # that are looked at to see what columns hold
_PROSE = 0.3  # of a column's cells hold a blank between words; names of models and categories do not
# A row may have so many times the tokens that its bytes tell (in Chinese, in code), and special ones; rounded up to
# a step, and cut where nobody has asked for more.
_MARGIN, _SPECIAL, _STEP, _MAX_TOKENS = 1.5, 8, 64, 4096
_PLAIN = r"[A-Za-z_./][A-Za-z0-9_./-]*"
_WORDS = ("null", "true", "false", ".inf", ".nan")


@dataclass(frozen=True)
class FirstConfig:
    """The YAML, and a sentence for each guess in it that is worth a look."""

    text: str
    guesses: tuple[str, ...]


@dataclass(frozen=True)
class _Member:
    """A member's name, what it is made of as it was given, and what its kind says of that."""

    name: str
    source: str
    draft: Draft


def write_first_config(
    table: Path, sources: Sequence[str], sample: Path | None, output: Path, may_replace: bool
) -> FirstConfig:
    """Guess a config and write it; ``may_replace`` allows to replace an existing file.

    Raises:
        EnsembleError: as ``first_config``; or the file exists or cannot be written.
    """
    inputs = [table, *map(Path, sources), *([] if sample is None else [sample])]
    target = output_file(output, inputs, may_replace)
    if not target.parent.is_dir():
        raise ConfigError(f"--output: {output}: name a file in a folder that is there")
    config = first_config(table, sources, sample, output)
    try:
        write_text(target, config.text)
    except WriteError as error:
        raise ConfigError(error.problems) from error
    return config


def first_config(table: Path, sources: Sequence[str], sample: Path | None, output: Path) -> FirstConfig:
    """Guess a config, without writing it.

    Args:
        sources: of the members: folders of checkpoints or adapters, names on the hub, files of predictions.
        sample: a sample submission; None: the one beside the table, if it has the table's rows.
        output: the path of the YAML.

    Raises:
        EnsembleError: a file cannot be read, or cannot be used in a config; with every problem.
    """
    names = read_contents(table, Wanted("", None, (), _HEAD_ROWS)).names
    beside = table.parent / USUAL_SAMPLE
    found = sample or (beside if beside.is_file() and beside != table else None)
    header = () if found is None else read_header(found)
    id_column = _id_column(table, names, header)
    if sample is None and found is not None and _has_first_row(found, table, id_column):
        sample = found
    columns = [] if sample is None else [name for name in header if name != id_column]
    members = _members(sources, id_column)

    guesses: list[str] = []
    labels, reason = _labels(members, columns)
    maps = {member.name: _label_map(member, labels) for member in members}
    others = tuple(name for name in without_pandas_index(names) if name != id_column)
    rows = read_table(table, _needs(id_column, others, _HEAD_ROWS)).head(_HEAD_ROWS)
    held = {name: [row[name] for row in rows if row[name] not in (None, "")] for name in others}
    truth = _truth(held, labels)
    is_read = {name: _reading(cells) for name, cells in held.items() if name not in truth}
    file_column = None
    if any(member.draft.file_keys for member in members):
        file_column = next((name for name, how in is_read.items() if how in ("prose", "text")), id_column)
        is_read.pop(file_column, None)
    texts = _text_columns(table, is_read, guesses)
    if not texts and any(member.draft.reads_text for member in members):
        raise DataError(
            f"{table}: no column of text for the members to read beside {quoted(id_column)}, which is taken for "
            f"the ids; the columns are {listed(names)}"
        )
    used = [*texts, *truth, file_column]
    unused = [name for name in others if name not in used]

    schema = _schema_place(output)
    lines = [] if schema is None else [f"# yaml-language-server: $schema={schema}"]
    lines.append("# A first config by `ensemble init`. Check the lines with GUESS, then validate, plan, run.")
    lines += ["", "data:", f"  path: {_scalar(str(table))}", f"  id_column: {_scalar(id_column)}"]
    if len(truth) > 1 or truth == labels:
        lines.append(f"  label_columns: {_list(labels)}")
    elif truth:
        lines += [f"  label_column: {_scalar(truth[0])}  # the true labels: the run ends with scores"]
    if unused:
        lines += [f"  # not used: {', '.join(map(_shown, unused))}"]
    lines += ["", f"# {reason}", f"labels: {_list(labels)}", "", "models:"]
    if len(members) > 1:
        lines += [
            "  # All have the same weight. If true labels are known, `python -m ensemble fit` writes weights to a",
            "  # file of their own: run config.yaml weights.yaml",
        ]
    if "GUESS" in reason:
        guesses.append(f"labels: {reason.partition('GUESS: ')[2].rstrip('.')}")

    template, is_single = "", len(texts) == 1 and is_read[texts[0]] != "json"
    if not is_single:
        cell = {"json": " | fromjson | join('\\n')"}
        template = "\n\n".join(f"<{name}>: {{{{ {name}{cell.get(is_read[name], '')} }}}}" for name in texts)
    max_length, length_note = _max_length(table, id_column, texts, len(template)) if texts else (0, "")
    for member in members:
        lines += _member_lines(member, labels, maps[member.name], file_column, max_length, guesses)
    if any(member.draft.reads_text for member in members):
        lines += ["", "defaults:  # for all models"]
        if is_single:
            lines += [f"  text_column: {_scalar(texts[0])}"]
        else:
            what = "the columns, in the table's order; it must be the same as in the models' training"
            lines += [f"  # GUESS: {what}.", "  prompt_template: |-"]
            lines += [f"    {line}".rstrip() for line in template.split("\n")]
            guesses.append(f"prompt_template: {what}")
        lines += [f"  # {length_note}", f"  max_length: {max_length}"]
        guesses.append(f"max_length: {length_note.removeprefix('GUESS ').rstrip('.')}")
        lines += [
            "  # If `plan` says that a model is too large: 4-bit weights take a quarter of 16-bit weights.",
            "  # quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4}",
        ]
    if sample is not None:
        lines += ["", "submission:", f"  sample: {_scalar(str(sample))}", "  path: submission.csv"]
        pairs_of, is_guess = _submission_columns(columns, labels)
        if pairs_of:
            pairs = ", ".join(f"{_scalar(column)}: {_scalar(label)}" for column, label in pairs_of.items())
            lines += [f"  columns: {{{pairs}}}{'  # GUESS: which label each column is' * is_guess}"]
            if is_guess:
                guesses.append("submission.columns: which label each column of the sample is")
    lines += ["", "output_dir: runs/first", ""]
    return FirstConfig("\n".join(lines), tuple(guesses))


def _text_columns(table: Path, is_read: Mapping[str, str], guesses: list[str]) -> list[str]:
    """Return the columns that models read; those left out are added to ``guesses``.

    Raises:
        DataError: a template is needed, but it can read none of the columns' names.
    """
    texts = [name for name, how in is_read.items() if how in ("json", "prose")]
    texts = texts or [name for name, how in is_read.items() if how == "text"]
    if len(texts) > 1 or any(is_read[name] == "json" for name in texts):  # Jinja knows no other names
        fit = [name for name in texts if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
        fit = fit or [name for name in texts if is_read[name] != "json"][:1]
        if not fit:
            raise DataError(
                f"{table}: rename {listed(texts)}: a template reads names of letters, digits and _"
            )
        odd = [name for name in texts if name not in fit]
        if odd:
            guesses.append(
                f"{listed(odd)} left out: a template reads names of letters, digits and _; rename what models "
                "shall read"
            )
        texts = fit
    return texts


def _member_lines(
    member: _Member,
    labels: Sequence[str],
    label_map: Mapping[str, str],
    file_column: str | None,
    max_length: int,
    guesses: list[str],
) -> list[str]:
    """Return a member's YAML; its guesses are added to ``guesses``.

    Args:
        file_column: the column that names the files of members that read files.
        max_length: of all models, in tokens.
    """
    draft = member.draft
    lines = [f"  - name: {_scalar(member.name)}"]
    lines += [f"    {key}: {_scalar(value)}" for key, value in draft.settings.items()]
    if draft.of_labels is not None:
        key, text_of = draft.of_labels
        lines += [f"    # GUESS: {draft.guess}.", f"    {key}:"]
        lines += [f"      {_scalar(label)}: {_scalar(text_of(label))}" for label in labels]
        guesses.append(f"{member.name}.{key}: {draft.guess}")
    if draft.file_keys is not None and file_column is not None:
        column_key, *place_keys = draft.file_keys
        guess = f"the column that names the files; {' and '.join(place_keys)} say where they are"
        lines += [f"    {column_key}: {_scalar(file_column)}  # GUESS: {guess}"]
        guesses.append(f"{member.name}.{column_key}: {guess}")
    if label_map:
        pairs = ", ".join(f"{_scalar(theirs)}: {_scalar(ours)}" for theirs, ours in label_map.items())
        is_guess = not draft.are_named or (
            draft.labels_are_columns and not _same_but_case([*label_map], labels)
        )
        remark = "  # GUESS: in this order; as in its training?" if is_guess else ""
        lines += [f"    {'columns' if draft.labels_are_columns else 'label_map'}: {{{pairs}}}{remark}"]
        if is_guess:
            why = "have other names in its file" if draft.labels_are_columns else "are numbered"
            guesses.append(f"{member.name}: its labels {why}, and taken in the order of labels")
    if draft.reads_text and draft.max_length is not None and draft.max_length < max_length:
        lines += [f"    max_length: {draft.max_length}  # as many as it can read; longer rows are cut"]
    return lines


def _needs(id_column: str, columns: tuple[str, ...], limit: int | None) -> TableNeeds:
    return TableNeeds(id_column, None, (), columns, (), (), limit)


def _id_column(table: Path, names: Sequence[str], sample: Sequence[str]) -> str:
    """Return the column of the ids: the sample's, or one with such a name, or the first column.

    Raises:
        DataError: none of them has a different value in each row.
    """
    likely = [
        *(name for name in sample[:1] if name in names),
        *(name for name in names if name.lower() == "id"),
        *(name for name in names if re.search(r"(?i)[^a-z]id$|[a-z]I[dD]$", name)),
        *names[:1],
    ]
    reasons = list[str]()
    for name in dict.fromkeys(likely):
        contents = read_contents(table, Wanted(name, None, (), None))
        if not contents.rows:
            raise DataError(f"{table}: empty table: there is a header or a schema, but no row")
        ids = contents.ids
        if ids is None or contents.problems:
            reasons += contents.problems
        elif (
            pc.any(pc.fill_null(pc.equal(ids, ""), True)).as_py() or len(ids) > pc.count_distinct(ids).as_py()
        ):
            reasons.append(f"{table}: column {quoted(name)} has rows without a value, or with the same one")
        else:
            return name
    raise DataError([*reasons, f"{table}: no column names the rows; add one, such as id"])


def _has_first_row(sample: Path, table: Path, id_column: str) -> bool:
    """Return whether a sample submission has the table's first row: the sample beside train.csv is for test.csv."""
    if id_column not in read_header(sample):
        return False
    first = read_contents(table, Wanted(id_column, None, (), 1)).ids
    known = read_text_csv(sample, [id_column]).column(0)
    return first is not None and bool(pc.any(pc.equal(known, first[0].as_py())).as_py())


def _members(sources: Sequence[str], id_column: str) -> list[_Member]:
    """Return the members, each with its own name; raise ConfigError with the problems of all sources."""
    kinds = [KINDS.load(name) for name in KINDS.names()]
    members, problems, taken = list[_Member](), list[str](), {"ensemble"}
    for source in sources:
        try:
            draft = next(filter(None, (kind.draft(source, id_column) for kind in kinds)), None)
            if draft is None:
                problems.append(
                    f"{source}: neither a folder with a checkpoint nor a file of predictions that can be read"
                )
                continue
        except EnsembleError as error:
            problems += error.problems
            continue
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file_stem(Path(source))).strip(".-")
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


def _labels(members: Sequence[_Member], columns: Sequence[str]) -> tuple[list[str], str]:
    """Return the labels, and a sentence on their origin.

    Args:
        columns: of the sample submission, without its ids.
    """
    # A CSV may have more columns than labels, so it is asked last.
    known = sorted(
        (member for member in members if member.draft.labels),
        key=lambda member: (not member.draft.is_model, not member.draft.are_named),
    )
    if not known and columns:
        return [*columns], "The columns of the sample submission."
    if not known:
        raise ConfigError(
            f"{members[0].source}: its labels are not known; name a sample submission that has them (--sample)"
        )
    first = known[0]
    labels = [*(first.draft.labels or ())]
    if not first.draft.is_model and columns and set(columns) <= set(labels):
        return [*columns], "The columns of the sample submission, which the predictions have, too."
    if first.draft.are_named:
        return labels, f"In the order of {first.source}; other members are matched by name."
    if len(columns) == len(labels):
        said = "the sample submission's columns in their order, as the checkpoints only number their labels"
        return [*columns], f"GUESS: {said}."
    return labels, "GUESS: numbers as in the checkpoints; give each its name, here and in label_map."


def _label_map(member: _Member, labels: Sequence[str]) -> Mapping[str, str]:
    """Return the config's label by the member's label or its file's column, unless they match by name."""
    own = member.draft.labels or ()
    if member.draft.labels_are_columns:
        is_other = len(own) == len(labels) and not set(own) & set(labels)
        return (_same_but_case(own, labels) or dict(zip(own, labels, strict=True))) if is_other else {}
    if not member.draft.is_model or set(own) == set(labels) or len(own) != len(labels) or len(labels) == 1:
        return {}
    return _same_but_case(own, labels) if member.draft.are_named else dict(zip(own, labels, strict=True))


def _same_but_case(theirs: Sequence[str], ours: Sequence[str]) -> dict[str, str]:
    """Return our label by theirs if all differ only in upper and lower case or punctuation; else nothing."""

    def folded(name: str) -> str:
        return re.sub(r"[\W_]+", "", name.casefold())

    by_folded = {folded(label): label for label in ours}
    found = {name: by_folded[folded(name)] for name in theirs if folded(name) in by_folded}
    return found if len(set(found.values())) == len(theirs) else {}


def _submission_columns(columns: Sequence[str], labels: Sequence[str]) -> tuple[Mapping[str, str], bool]:
    """Return the label of each of the sample's columns if their names differ, and whether that is a guess."""
    if set(columns) <= set(labels):
        return {}, False
    if alike := _same_but_case(columns, labels):
        return alike, False
    if len(columns) == len(labels):
        return dict(zip(columns, labels, strict=True)), True
    if len(columns) == 1 and len(labels) == 2:  # of two classes the second is the one that is asked for
        return {columns[0]: labels[1]}, True
    return {}, False


def _truth(held: Mapping[str, Sequence[Any]], labels: Sequence[str]) -> list[str]:
    """Return the columns of the true labels: one for each label, or one that holds labels only, or none."""
    if set(labels) <= held.keys() and all(_reading(held[label]) == "number" for label in labels):
        return [*labels]
    holds = (name for name, cells in held.items() if cells and {*map(str, cells)} <= set(labels))
    return [*holds][:1]


def _reading(cells: Sequence[Any]) -> str:
    """Return what a column's cells are, none of them empty: json (lists), number, prose, text or other."""
    if not cells:
        return "other"
    if all(_is_list(cell) for cell in cells):
        return "json"
    if all(isinstance(cell, int | float) or _is_number(cell) for cell in cells):
        return "number"
    if not all(isinstance(cell, str) for cell in cells):
        return "other"
    blanks = sum(bool(re.search(r"\S\s+\S", cell)) for cell in cells)
    return "prose" if blanks >= _PROSE * len(cells) else "text"


def _is_list(cell: object) -> bool:
    """Return whether a cell is a list, also in JSON, whose items can be joined."""
    if isinstance(cell, str) and not cell.lstrip().startswith("["):
        return False
    try:
        value = parse_json_cell(cell)
    except TemplateProblem:
        return False
    return isinstance(value, list) and not any(isinstance(item, list | dict) for item in value)


def _is_number(cell: object) -> bool:
    try:
        return isinstance(cell, str) and (cell.lower() in ("true", "false") or float(cell) is not None)
    except ValueError:
        return False


def _max_length(table: Path, id_column: str, texts: Sequence[str], more: int) -> tuple[int, str]:
    """Return the most tokens that a row should have, and a sentence on how they were estimated.

    Args:
        more: bytes that a template adds to each row.
    """
    lengths = read_table(table, _needs(id_column, tuple(texts), None)).text_lengths(texts) + more
    longest = int(np.ceil(lengths.max() / BYTES_PER_TOKEN))
    wanted = -(-int(longest * _MARGIN + _SPECIAL) // _STEP) * _STEP
    tokens, cut = min(wanted, _MAX_TOKENS), ""
    if tokens < wanted:
        rows = int((lengths > tokens * BYTES_PER_TOKEN).sum())
        cut = f"; {plural(rows, 'row')} would be cut"
    middle = int(np.median(lengths) / BYTES_PER_TOKEN)
    said = f"{BYTES_PER_TOKEN:g} bytes a token: the longest row has {longest:,}, one in the middle {middle:,}"
    return tokens, f"GUESS by {said}{cut}."


def _schema_place(output: Path) -> str | None:
    """Return where editors find the schema, in a checkout or as installed; None if it is missing."""
    checkout, installed = Path(__file__).resolve().parents[2] / "docs", Path(sysconfig.get_path("data"))
    for place in (checkout / _SCHEMA, installed / "share/ensemble-runner" / _SCHEMA):
        if place.is_file():
            folder = output.absolute().parent
            is_near = place.is_relative_to(folder.parent)
            return os.path.relpath(place, folder) if is_near else str(place)
    return None


def _list(items: Sequence[str]) -> str:
    return f"[{', '.join(map(_scalar, items))}]"


def _scalar(value: object) -> str:
    """Return a value as YAML; text in quotes if it could be read as anything else."""
    if not isinstance(value, str):
        return json.dumps(value)
    text = value.replace("${", "$${")
    is_plain = re.fullmatch(_PLAIN, text, re.ASCII) and text.lower() not in _WORDS
    return text if is_plain and re.search("[A-Za-z]", text) else json.dumps(text, ensure_ascii=False)


def _shown(name: str) -> str:
    return name if re.fullmatch(r"[\w -]{1,60}", name) else quoted(name)
