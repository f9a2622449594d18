"""Copy in what a config names by address before anything runs, and copy results out when a run has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ensemble.common.errors import ConfigError, EnsembleError
from ensemble.common.files import is_parquet
from ensemble.common.remote_files import Copy, address_of, copy_in, copy_out, demand_writable
from ensemble.config import LoadedConfig
from ensemble.config.document import Loc
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import MERGED, RunReport


def with_copies(loaded: LoadedConfig) -> LoadedConfig:
    """Copy in what a config names by address, and name the copies in it; raises as ``copy_in`` does."""
    config, submission_address = loaded.config, None
    if address_of(config.output_dir) is not None:
        where = loaded.document.where(("output_dir",))
        raise ConfigError(f"{where}: a run works in a local folder; name one, and this address as copy_to")
    submission = config.submission
    if submission is not None and submission.path is not None:
        submission_address = address_of(submission.path)
        if submission_address is not None:
            path = config.output_dir / "submission.parquet" if is_parquet(submission.path) else None
            submission = submission.model_copy(update={"path": path})
            config = config.model_copy(update={"submission": submission})
    copies: dict[str, Copy] = {}

    def copied(address: str, loc: Loc) -> Path:
        if address not in copies:
            with _errors_with_key(loaded, loc):
                copies[address] = copy_in(address)
        return copies[address].path

    config = _with_local_paths(config, (), copied)
    return replace(
        loaded, config=config, copies=tuple(copies.values()), submission_address=submission_address
    )


def _with_local_paths(value: Any, loc: Loc, copied: Callable[[str, Loc], Path]) -> Any:
    """Return a value of a config with the paths of copies for addresses."""
    if isinstance(value, Path):
        address = address_of(value)
        return value if address is None else copied(address, loc)
    if isinstance(value, tuple):
        return tuple(_with_local_paths(item, (*loc, index), copied) for index, item in enumerate(value))
    if isinstance(value, BaseModel):
        items = {key: _with_local_paths(item, (*loc, key), copied) for key, item in value}
        changes = {key: item for key, item in items.items() if item != getattr(value, key)}
        return value.model_copy(update=changes) if changes else value
    return value


def demand_writable_results(loaded: LoadedConfig) -> None:
    """Try the addresses to which a run copies results; raise an OutputError that names the key of one."""
    for key, address in _result_addresses(loaded).items():
        with _errors_with_key(loaded, key):
            demand_writable(address)


@contextmanager
def _errors_with_key(loaded: LoadedConfig, key: Loc) -> Iterator[None]:
    """Put the place of a key before the problems of an error that is raised inside."""
    try:
        yield
    except EnsembleError as error:
        where = loaded.document.where(key)
        raise type(error)([f"{where}: {problem}" for problem in error.problems]) from error


def copy_results(loaded: LoadedConfig, report: RunReport) -> tuple[str, ...]:
    """Copy what a run has merged to the addresses of its config, ``run.json`` last, and return these."""
    addresses = _result_addresses(loaded)
    if not addresses or report.status not in MERGED:
        return ()
    rundir, folder = RunDir(loaded.config.output_dir), loaded.config.copy_to
    otherwise = f"the results are complete in {rundir.root}, and the same command copies them again"
    if loaded.submission_address is not None and "submission" in report.files:
        copy_out(Path(report.files["submission"]), loaded.submission_address, otherwise)
    if folder is not None:
        files = [*sorted(rundir.predictions_dir.iterdir()), rundir.ensemble, rundir.submission, rundir.config]
        for path in (*files, rundir.report_page, rundir.run_json):
            if path.is_file():
                name = path.relative_to(rundir.root).as_posix()
                copy_out(path, f"{folder.rstrip('/')}/{name}", otherwise)
    return tuple(addresses.values())


def _result_addresses(loaded: LoadedConfig) -> dict[Loc, str]:
    """Return the addresses to which a run copies results, by their keys; a trial on the first rows copies none."""
    addresses: dict[Loc, str] = {}
    if loaded.config.limit is not None:
        return addresses
    if loaded.config.copy_to is not None:
        addresses["copy_to",] = f"{loaded.config.copy_to.rstrip('/')}/run.json"
    if loaded.submission_address is not None:
        addresses["submission", "path"] = loaded.submission_address
    return addresses
