"""Copy in what a config names by address before anything runs, and copy results out when a run has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ensemble.common.errors import ConfigError
from ensemble.common.remote_files import Copy, address_of, copy_in, copy_out
from ensemble.config import LoadedConfig
from ensemble.config.document import Loc
from ensemble.pipeline.run_dir import RunDir

if TYPE_CHECKING:
    from ensemble.pipeline.run_report import RunReport


def with_copies(loaded: LoadedConfig) -> LoadedConfig:
    """Copy in every file that a config names by address, and return the config with the paths of the copies.

    Raises:
        EnsembleError: with every problem, each with its key; see ``copy_in``.
    """
    config = loaded.config
    if address_of(config.output_dir) is not None:
        where = loaded.document.where(("output_dir",))
        raise ConfigError(f"{where}: a run works in a local folder; name one, and this address as copy_to")
    submission, submission_address = config.submission, None
    if submission is not None and submission.path is not None:
        submission_address = address_of(submission.path)
    if submission is not None and submission_address is not None:
        from ensemble.data.formats import is_parquet  # imports pyarrow

        path = config.output_dir / "submission.parquet" if is_parquet(Path(submission_address)) else None
        config = config.model_copy(update={"submission": submission.model_copy(update={"path": path})})
    addresses = dict(_addresses(config, ()))
    copies: dict[str, Copy] = {}
    if addresses:
        from ensemble.pipeline.checks import Problems  # imports the whole planner

        problems = Problems()
        for loc, address in addresses.items():
            with problems.at(loaded.document.where(loc)):
                copies[address] = copies.get(address) or copy_in(address)
        problems.raise_any()
        config = _with_local_paths(config, copies)
    return replace(
        loaded, config=config, copies=tuple(copies.values()), submission_address=submission_address
    )


def _addresses(value: Any, loc: Loc) -> Iterator[tuple[Loc, str]]:
    """Yield the place and the address of every path below a value of a config that is an address."""
    if isinstance(value, Path):
        address = address_of(value)
        if address is not None:
            yield loc, address
    elif isinstance(value, BaseModel | tuple):
        for key, item in value if isinstance(value, BaseModel) else enumerate(value):
            yield from _addresses(item, (*loc, key))


def _with_local_paths(value: Any, copies: dict[str, Copy]) -> Any:
    """Return a value of a config with the paths of copies for addresses; one without addresses stays as it is."""
    if isinstance(value, Path):
        address = address_of(value)
        return value if address is None else copies[address].path
    if not isinstance(value, BaseModel | tuple) or not any(_addresses(value, ())):
        return value
    if isinstance(value, tuple):
        return tuple(_with_local_paths(item, copies) for item in value)
    changes = {key: _with_local_paths(item, copies) for key, item in value if any(_addresses(item, ()))}
    return value.model_copy(update=changes)


def result_addresses(loaded: LoadedConfig) -> tuple[str, ...]:
    """Return the addresses to which a run copies results; a trial on the first rows copies none."""
    folder = loaded.config.copy_to
    addresses = (folder and f"{folder.rstrip('/')}/run.json", loaded.submission_address)
    return () if loaded.config.limit is not None else tuple(filter(None, addresses))


def copy_results(loaded: LoadedConfig, report: RunReport) -> None:
    """Copy the results of a run that has merged to the addresses of its config, ``run.json`` last.

    Raises:
        WriteError: an object cannot be written.
    """
    rundir = RunDir(loaded.config.output_dir)
    otherwise = f"the results are complete in {rundir.root}, and the same command copies them again"
    if loaded.submission_address is not None and "submission" in report.files:
        copy_out(Path(report.files["submission"]), loaded.submission_address, otherwise)
    if loaded.config.copy_to is None:
        return
    files = [*sorted(rundir.predictions_dir.iterdir()), rundir.ensemble, rundir.submission, rundir.config]
    for path in (*files, rundir.report_page, rundir.run_json):
        if path.is_file():
            name = path.relative_to(rundir.root).as_posix()
            copy_out(path, f"{loaded.config.copy_to.rstrip('/')}/{name}", otherwise)
