"""Try settings of every member, and write the fastest: ``tune``.

Trials are kept in ``output_dir/tune`` until all are done, so that an interrupted command goes on there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ensemble.analysis.tune.trials import MemberTrials
from ensemble.analysis.tune.tuning import Tuning
from ensemble.common.clock import boot_seconds
from ensemble.common.digests import digest_of
from ensemble.common.errors import ConfigError, OutputError
from ensemble.common.files import output_file, read_json, write_text
from ensemble.common.host import cpu_products, usable_cpus
from ensemble.common.packages import installed_versions
from ensemble.common.text import duration, listed, plural
from ensemble.config import LoadedConfig, TuningConfig
from ensemble.config.overlays import path_of
from ensemble.members.registry import member_kind
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.run import Display
from ensemble.pipeline.run_dir import RunDir, hold
from ensemble.pipeline.signals import heed_signals

# The mean over rows of the largest difference of a probability; docs/tuning.md says why.
TOLERANCE = 0.02
_MARKER = ".tune.json"  # no member has such a name
# Keys of a config that trials do not take.
_NOT_TAKEN = {"ensemble", "rules", "submission", "output_dir", "report", "retries", "on_member_failure"}
_NOT_TAKEN |= {"time_limit", "tuned_on", "copy_to"}


def tune(
    loaded: LoadedConfig,
    display: Display,
    rows: int | None = None,
    tolerance: float | None = None,
    target: Path | None = None,
    owns_process: bool = True,
) -> Tuning:
    """Try settings of every member that has any to choose, and write the overlay to ``target``; see ``api.tune``.

    Raises:
        EnsembleError: a run of the config could not start, another ``tune`` uses the folder, or the disk is full.
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
    prepared = prepare(loaded, must_fit=False)
    config, gpus = loaded.config, prepared.plan.gpus
    rundir = RunDir(config.output_dir)
    if target is not None:
        samples = [] if config.submission is None else [config.submission.sample]
        output_file(target, [config.data.path, *samples, *map(Path, prepared.file_states)])
        rundir.demand_free("--write", target)
    members = [
        MemberTrials(
            prepared, index, rows, rundir.tune_dir / model.name, tolerance, display.say, owns_process
        )
        for index, model in enumerate(config.models)
        if member_kind(model).needs_worker
    ]
    tunable = [member for member in members if member.count]
    names = [member.model.name for member in tunable]
    if not tunable:
        raise ConfigError(
            "models: no member has settings that tune could choose; it is for checkpoints that transformers loads"
        )
    devices = [device.name for device in gpus or prepared.inventory.hosts] or [cpu_products()]
    versions = installed_versions(("torch", "transformers"))
    made_of = digest_of(
        {
            "config": config.model_dump(mode="json", exclude=_NOT_TAKEN),
            "table": repr(prepared.table_state),
            "devices": sorted(devices),
            "versions": versions,
            "cores": usable_cpus(),
            "rows": rows,
        }
    )
    sample_rows = tunable[0].rows
    folder = RunDir(rundir.tune_dir)
    folder.create()
    with hold(folder), heed_signals(owns_process):
        marker = {"made_of": made_of, "members": names}
        _begin(folder.root, marker)
        kept = sum(member.kept for member in tunable)
        seconds = [member.expected_seconds() for member in tunable]
        about = f", about {duration(sum(seconds))}" if all(seconds) else ""
        about += f" ({kept} done already)" if kept else ""
        display.say(
            f"{plural(sum(member.count for member in tunable), 'trial')} at most, each in a fresh worker, of "
            f"{sample_rows:,} of {plural(prepared.table.rows, 'row')}{about}; what is done is kept in {folder.root}"
        )
        tuning = Tuning(
            members=tuple(member.tune() for member in tunable),
            skipped=tuple(model.name for model in config.models if model.name not in names),
            rows=sample_rows,
            tolerance=tolerance,
            seconds=boot_seconds() - began,
            tuned_on=TuningConfig.model_validate(
                {
                    "versions": versions,
                    "rows": sample_rows,
                    "devices": [*dict.fromkeys(devices)],
                    "tolerance": tolerance,
                    "date": datetime.now(UTC).date().isoformat(),
                }
            ),
        )
        # First, so that the same command goes on with these trials if the file cannot be written.
        if target is not None and tuning.has_result:
            write_text(target, tuning.overlay())
        write_text(folder.root / _MARKER, json.dumps({**marker, "complete": True}) + "\n")
    return tuning


def overrides_beside(loaded: LoadedConfig, tuning: Tuning) -> list[str]:
    """Return the config's overrides of keys that the overlay does not set, as overrides would come last."""
    keys_of = {member.name: member.keys for member in tuning.members}
    tuned = {
        f"models.{name}.{key}."
        for index, model in enumerate(loaded.config.models)
        for key in keys_of.get(model.name, ())
        for name in (index, model.name)
    }
    return [override for override in loaded.overrides if not f"{path_of(override)}.".startswith(tuple(tuned))]


def _begin(folder: Path, marker: Mapping[str, Any]) -> None:
    """Keep the trials of an interrupted ``tune`` of the same config, table and versions; remove others."""
    others = [path for path in folder.iterdir() if path.name not in (".lock", _MARKER)]
    before = read_json(folder / _MARKER)
    if others and not (folder / _MARKER).exists():
        raise OutputError(
            f"{folder}: holds {listed([path.name for path in others])}, which tune has not made; choose "
            "another output_dir"
        )
    if before != marker:
        for path in others:
            if path.name in (*marker["members"], *before.get("members", ())):
                shutil.rmtree(path, ignore_errors=True)
    write_text(folder / _MARKER, json.dumps(marker) + "\n")
