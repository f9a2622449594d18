"""What stands on disk of a member's work: parts, rows that could not be computed, sealed predictions.

A run asks here what is left to do.  Nothing is believed that cannot be proved: a part must hold what its name says,
predictions what their seal says, and both must carry the fingerprint of the work that is asked for now.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.checkpoint.content import FileDigests
from ensemble.errors import ConfigError
from ensemble.fingerprint import Fingerprint, member_fingerprint
from ensemble.planning.facts import read_json
from ensemble.prepare import Prepared
from ensemble.rundir import RunDir, atomic_path, bad_rows_path, part_name, read_part, write_text
from ensemble.sizes import plural

_HASH_BYTES = 1 << 20


@dataclass
class MemberWork:
    """A member's work, as far as it is done.

    Attributes:
        is_done: bool [rows], the rows whose probabilities stand in parts or in the sealed predictions.
        bad_rows: table row to reason, of rows that an earlier run could not compute.
        is_sealed: the predictions CSV is complete and is what this run would write.
        workers: what the workers of the run that sealed the predictions did, as run.json has it.
        worked: what they did of the member's work, in bytes of text.
        is_damaged: there are predictions of this very work, but they were changed or cut since.
        changed: what is no longer as it was when the predictions were made, in words; empty without any.
    """

    member: str
    fingerprint: Fingerprint
    parts_dir: Path
    is_done: npt.NDArray[np.bool_]
    bad_rows: dict[int, str] = field(default_factory=dict)
    is_sealed: bool = False
    workers: list[dict[str, Any]] = field(default_factory=list)
    worked: float = 0.0
    is_damaged: bool = False
    changed: tuple[str, ...] = ()

    def parts(self) -> Iterator[pa.Table]:
        """The parts that hold what their names say, in the order of their names."""
        for path in sorted(self.parts_dir.glob("*.csv")):
            table = _table(read_part(path), len(self.is_done))
            if table is not None:
                yield table


def refuse_trial(prepared: Prepared, rundir: RunDir) -> None:
    """A trial on the first rows must not take the place of a real run.

    Raises:
        ConfigError: the directory holds predictions of more rows.
    """
    for member in prepared.plan.members if prepared.config.limit is not None else ():
        sealed = read_json(rundir.seal(member.name)).get("rows")
        if isinstance(sealed, int) and sealed > prepared.table.rows:
            raise ConfigError(
                f"output_dir: {rundir.root} holds {member.name}'s predictions of {sealed:,} rows, which a trial on "
                f"{prepared.table.rows:,} rows would replace; give the trial its own: --set output_dir=trial"
            )


def find_works(prepared: Prepared, rundir: RunDir, say: Callable[[str], None]) -> dict[str, MemberWork]:
    """What is done of every member, by name.

    Args:
        say: takes a sentence for the user about each member of which something is, or was, there.

    Raises:
        CheckpointError: a weight file cannot be read.
    """
    works = {}
    files = FileDigests(prepared.config.hash_weights)
    keeps_bad_rows = prepared.config.on_bad_row == "uniform"
    for member in prepared.plan.members:
        fingerprint = member_fingerprint(prepared, member, files)
        work = find_work(rundir, member.name, fingerprint, prepared.table.rows, keeps_bad_rows)
        works[member.name] = work
        rows, done = prepared.table.rows, int(work.is_done.sum())
        if work.is_sealed:
            say(f"{member.name}: done by an earlier run, reused")
        elif done:
            say(f"{member.name}: {done:,} of {plural(rows, 'row')} kept from an earlier run")
        elif work.is_damaged:
            say(f"{member.name}: {rundir.predictions(member.name)} has been changed; it is computed again")
        elif work.changed:
            say(
                f"{member.name}: {', '.join(work.changed)} changed since its predictions were made; it runs again"
            )
    return works


def find_work(
    rundir: RunDir, member: str, fingerprint: Fingerprint, rows: int, keeps_bad_rows: bool
) -> MemberWork:
    """What is done of a member; parts that are not what their names say are removed.

    Args:
        rows: of the table.
        keeps_bad_rows: rows that could not be computed count as done (``on_bad_row: uniform``); else they are
            tried again.
    """
    work = MemberWork(
        member, fingerprint, rundir.parts_dir(member, fingerprint.digest), np.zeros(rows, dtype=np.bool_)
    )
    sealed = read_json(rundir.seal(member))
    made_of = Fingerprint.from_dict(sealed.get("fingerprint"))
    if made_of is not None:
        work.changed = fingerprint.changed_from(made_of)
        bad_rows = _rows_with_reasons(sealed.get("bad_rows"), rows)
        is_as_sealed = not work.changed and sealed.get("sha256") == _file_digest(rundir.predictions(member))
        if is_as_sealed and (keeps_bad_rows or not bad_rows):
            work.is_done[:] = True
            work.is_sealed, work.bad_rows = True, bad_rows
            workers, worked = sealed.get("workers"), sealed.get("work")
            work.workers = workers if isinstance(workers, list) else []
            work.worked = worked if isinstance(worked, float) and math.isfinite(worked) else 0.0
            return work
        work.is_damaged = not work.changed and not is_as_sealed
        if is_as_sealed and not any(work.parts_dir.glob("*.csv")):
            _write_as_part(work, rundir.predictions(member), bad_rows)
    for path in sorted(work.parts_dir.glob("*.csv")):
        table = _table(read_part(path), rows)
        if table is not None:
            work.is_done[table.column("row").to_numpy()] = True
        elif path.is_file():
            path.unlink()
    if keeps_bad_rows:
        noted = _rows_with_reasons(read_json(bad_rows_path(work.parts_dir)), rows)
        work.bad_rows = {row: reason for row, reason in noted.items() if not work.is_done[row]}
        work.is_done[list(work.bad_rows)] = True
    return work


def write_bad_rows(work: MemberWork, bad_rows: Mapping[int, str]) -> None:
    """Keep which rows could not be computed, for the next run.

    Raises:
        WriteError: the disk is full or the like.
    """
    write_text(bad_rows_path(work.parts_dir), _json(dict(sorted(bad_rows.items()))))


def seal(
    rundir: RunDir,
    work: MemberWork,
    sha256: str,
    bad_rows: Mapping[int, str],
    workers: Sequence[Mapping[str, Any]],
    worked: float,
) -> None:
    """Say beside a member's predictions what they were made of.

    Args:
        sha256: of the predictions CSV.
        workers: what they did, as run.json has it.
        worked: how much that was, in bytes of text.

    Raises:
        WriteError: the disk is full or the like.
    """
    document = {
        "fingerprint": work.fingerprint.to_dict(),
        "sha256": sha256,
        "rows": len(work.is_done),
        "bad_rows": dict(sorted(bad_rows.items())),
        "workers": list(workers),
        "work": worked,
    }
    write_text(rundir.seal(work.member), _json(document))


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _write_as_part(work: MemberWork, predictions: Path, bad_rows: Collection[int]) -> None:
    """The sealed rows that were computed, as a part: those that were not are to be tried again."""
    table = pa_csv.read_csv(predictions, parse_options=pa_csv.ParseOptions(newlines_in_values=True))
    rows = np.setdiff1d(np.arange(len(table)), list(bad_rows))
    columns = [pa.array(rows), *(column.take(rows) for column in table.columns[1:])]
    names = ["row", *(f"p{label}" for label in range(len(columns) - 1))]
    sink = io.BytesIO()
    pa_csv.write_csv(pa.table(columns, names=names), sink)
    work.parts_dir.mkdir(exist_ok=True)
    with atomic_path(work.parts_dir / part_name(0, len(rows), sink.getvalue())) as temporary:
        temporary.write_bytes(sink.getvalue())


def _file_digest(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return file_sha256(path)
    return None


def _table(content: bytes | None, rows: int) -> pa.Table | None:
    """A part as a table; None where it is none of a table of so many rows."""
    if content is None:
        return None
    # Types are given, because an empty part or one of whole numbers would be taken for something else.
    names = content.partition(b"\n")[0].decode("utf-8", "replace").replace('"', "").split(",")
    types = {name: pa.int64() if name == "row" else pa.float64() for name in names}
    try:
        options = pa_csv.ConvertOptions(column_types=types)
        table = pa_csv.read_csv(io.BytesIO(content), convert_options=options)
    except pa.ArrowInvalid:
        return None
    if table.column_names != ["row", *(f"p{label}" for label in range(len(names) - 1))]:
        return None
    numbers = table.column("row").to_numpy()
    return table if not len(numbers) or (numbers.min() >= 0 and numbers.max() < rows) else None


def _rows_with_reasons(found: object, rows: int) -> dict[int, str]:
    named = found.items() if isinstance(found, dict) else ()
    return {
        int(row): str(why) for row, why in named if re.fullmatch("[0-9]{1,18}", str(row)) and int(row) < rows
    }


def _json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
