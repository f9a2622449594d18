"""``tune``: tries settings of every member, and writes down the fastest.

What was measured is kept in ``output_dir/tune`` until all is done: an interrupted one goes on there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ensemble.analysis.tune.trials import MemberTrials
from ensemble.analysis.tune.tuning import Tuning
from ensemble.common.clock import boot_seconds
from ensemble.common.digests import digest_of
from ensemble.common.errors import ConfigError, OutputError
from ensemble.common.files import output_file, write_text
from ensemble.common.host import cpu_products, is_busy, usable_cpus
from ensemble.common.packages import installed_versions
from ensemble.common.text import duration, listed, plural
from ensemble.config import LoadedConfig, TuningConfig
from ensemble.config.overrides import path_of
from ensemble.members.registry import member_kind
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.run import Display
from ensemble.pipeline.run_dir import RunDir, hold
from ensemble.pipeline.signals import heed_signals

# The mean over rows of the largest difference of a probability; docs/tuning.md says why.
TOLERANCE = 0.02
_MARKER = ".tune.json"  # no member has such a name
# Of a config, what no trial takes from it.
_NOT_TAKEN = {"ensemble", "rules", "submission", "output_dir", "report", "retries", "on_member_failure"}
_NOT_TAKEN |= {"time_limit", "tuned_on"}
_VERSIONS = ("torch", "transformers")


def tune(
    loaded: LoadedConfig,
    display: Display,
    rows: int | None = None,
    tolerance: float | None = None,
    target: Path | None = None,
    owns_process: bool = True,
) -> Tuning:
    """Try settings of every member that has any to choose.

    Args:
        rows: of the sample; None: 256.
        tolerance: how far a candidate's probabilities may be from the reference's, in the mean over rows of a
            row's largest difference; and the share of rows whose first label may be another; None: ``TOLERANCE``.
        target: where to write the overlay, as :func:`check_output` gives it; None: nowhere.
        owns_process: as :func:`heed_signals` takes it.

    Raises:
        EnsembleError: of exit code 2 as a run would end before it writes anything, 3 when another ``tune`` goes on
            there, 1 where the disk was full; the same command then goes on.
        Interrupted: a signal came; the same command goes on.
    """
    tolerance = TOLERANCE if tolerance is None else tolerance
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < float("inf"):
        raise ConfigError(
            f"--tolerance: {tolerance} is no number of at least 0; {TOLERANCE:g} is the usual one"
        )
    if rows is not None and rows < 1:
        raise ConfigError(f"--rows: {rows} is no number of rows; give at least 1")
    began = boot_seconds()
    busy = ""
    if is_busy():
        busy = "other programs compute here, so speeds say little"
    prepared = prepare(loaded, must_fit=False)
    config, gpus = loaded.config, prepared.plan.gpus
    rundir = RunDir(config.output_dir)
    if target is not None:
        samples = [] if config.submission is None else [config.submission.sample]
        output_file(target, [config.data.path, *samples, *map(Path, prepared.file_states)])
        rundir.demand_free("--write", target)
    devices = [device.name for device in gpus or prepared.inventory.hosts] or [cpu_products()]
    made_on: dict[str, Any] = {
        "devices": sorted(devices),
        "versions": installed_versions(_VERSIONS),
        "cores": usable_cpus(),
        "asked": rows,
        "made_of": digest_of(
            {
                "config": config.model_dump(mode="json", exclude=_NOT_TAKEN),
                "table": repr(prepared.table_state),
            }
        ),
        "members": [model.name for model in config.models],
    }
    members = [
        MemberTrials(
            prepared,
            index,
            rows,
            rundir.tune_dir / model.name,
            tolerance,
            display.say,
            owns_process,
        )
        for index, model in enumerate(config.models)
        if member_kind(model).needs_worker
    ]
    tunable = [one for one in members if one.count]
    skipped = tuple(
        model.name for model in config.models if model.name not in [member.model.name for member in tunable]
    )
    if not tunable:
        raise ConfigError(
            "models: no member has settings that tune could choose; it is for checkpoints that transformers loads"
        )
    folder = RunDir(rundir.tune_dir)
    folder.create()
    with hold(folder), heed_signals(owns_process):
        _begin(folder.root, made_on)
        if busy:
            display.say(f"! {busy}: wait, or run it again later")
        count = sum(member.count for member in tunable)
        seconds = [member.expected_seconds() for member in tunable]
        kept = sum(member.kept for member in tunable)
        left = sum(seconds) * max(0, count - kept) / count
        about = f", about {duration(left)}" if all(seconds) and left else ""
        about += f" ({kept} done already)" if kept else ""
        display.say(
            f"{plural(count, 'trial')} at most, each in a fresh worker, of {tunable[0].rows:,} of "
            f"{plural(prepared.table.rows, 'row')}{about}; what is done is kept in {folder.root}"
        )
        tunings = [member.tune() for member in tunable]
        tuning = Tuning(
            members=tuple(tunings),
            skipped=skipped,
            busy=busy,
            rows=min(member.rows for member in tunable),
            tolerance=tolerance,
            seconds=boot_seconds() - began,
            tuned_on=TuningConfig.model_validate(
                {
                    "versions": made_on["versions"],
                    "rows": min(member.rows for member in tunable),
                    "devices": [*dict.fromkeys(devices)],
                    "tolerance": tolerance,
                    "date": datetime.now(UTC).date().isoformat(),
                }
            ),
        )
        # Before what was measured may be forgotten: where it cannot be written, the same command goes on here.
        if target is not None and tuning.has_result:
            write_text(target, tuning.overlay())
        _mark(folder.root, {**made_on, "complete": True})
    return tuning


def check_output(output: Path, may_replace: bool, sources: Sequence[Path]) -> Path:
    """Where the overlay is to be written, asked before anything is tried.

    Raises:
        EnsembleError: a file is there already, or it is one of the config's, whose keys the overlay would lack,
            or there is no such folder, or nothing may be written there.
    """
    target = output_file(output, sources)
    if not may_replace and os.path.lexists(output):
        raise OutputError(f"--write: {output} is there already; --force replaces it")
    if not target.parent.is_dir():
        raise ConfigError(f"--write: {output}: name a file in a folder that is there")
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise OutputError(
            f"--write: {output}: nothing can be written in its folder ({error}); choose another"
        ) from error
    return target


def overrides_beside(loaded: LoadedConfig, tuning: Tuning) -> list[str]:
    """The config's overrides that go with the overlay: none of a key that it sets, as overrides come last."""
    keys_of = {member.name: member.keys for member in tuning.members}
    taken: list[str] = []
    for index, model in enumerate(loaded.config.models):
        for key in keys_of.get(model.name, ()):
            taken += [f"models.{index}.{key}", f"models.{model.name}.{key}"]
    places = {override: path_of(override) for override in loaded.overrides}
    return [
        override
        for override, at in places.items()
        if not any(f"{at}.".startswith(f"{key}.") for key in taken)
    ]


def _begin(folder: Path, made_on: Mapping[str, Any]) -> None:
    """Keep what an interrupted ``tune`` has measured here of the same config, table and versions, and nothing else.

    Raises:
        OutputError: something is there that none has made.
    """
    others = [path for path in folder.iterdir() if path.name not in (".lock", _MARKER)]
    try:
        before = json.loads((folder / _MARKER).read_bytes())
    except OSError:
        before = None
        if others:
            raise OutputError(
                f"{folder}: holds {listed([path.name for path in others])}, which tune has not made; choose "
                "another output_dir"
            ) from None
    except ValueError:
        before = None
    if before != made_on:
        names = {*made_on["members"], *(before or {}).get("members", ())}
        for path in others:
            if path.name in names:
                shutil.rmtree(path, ignore_errors=True)
    _mark(folder, made_on)


def _mark(folder: Path, made_on: Mapping[str, object]) -> None:
    write_text(folder / _MARKER, json.dumps(made_on) + "\n")
