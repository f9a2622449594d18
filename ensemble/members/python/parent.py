"""Describe a user's function on the parent's side, which reads the code and never imports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import CheckpointError
from ensemble.common.text import shown_path
from ensemble.config import MemberConfig
from ensemble.members.base import Assigned, Inspection, MemberKind, OutputColumns, Reads, ResourceRequest
from ensemble.members.huggingface.checkpoint.digests import weight_samples
from ensemble.members.python.settings import PythonSettings
from ensemble.members.python.source import Source, find_source


@dataclass(frozen=True)
class PythonInspection(Inspection):
    """Add the user's code, and the name of the frames' index."""

    source: Source
    id_column: str


class PythonFunction(MemberKind[PythonSettings, PythonInspection]):
    """Describe a user's function."""

    Settings: ClassVar[type[MemberConfig]] = PythonSettings
    child: ClassVar[str] = "ensemble.members.python.child"
    activation_key: ClassVar[str] = "activation"

    def request(self) -> ResourceRequest:
        model = self.settings
        return ResourceRequest(
            num_gpus=model.num_gpus, replicas=model.replicas, gpu_memory=model.gpu_memory or "all"
        )

    def reads(self) -> Reads:
        return Reads(self.settings.columns, any_type=True, ids=True)

    def sources(self) -> tuple[str, ...]:
        try:
            code = find_source(self.settings.module_and_function[0], self.settings.is_file).files
        except CheckpointError:  # which inspect reports
            code = ()
        return tuple(str(path) for path in (*code, *self.settings.depends_on))

    def inspect(self, columns: OutputColumns) -> PythonInspection:
        model = self.settings
        problems = [
            f"depends_on: {path}: no such file or folder" for path in model.depends_on if not path.exists()
        ]
        module, function = model.module_and_function
        functions = {"predict": function} | ({} if model.setup is None else {"setup": model.setup})
        try:
            source = find_source(module, model.is_file)
            problems += source.problems(functions)
        except CheckpointError as error:
            raise CheckpointError([*error.problems, *problems]) from None
        problems += [
            f"predict: {name}, beside {source.file}, has the name of an installed module, which would be imported "
            "in its place; rename it"
            for name in source.shadowed()
        ]
        if problems:
            raise CheckpointError(problems)
        return PythonInspection(
            activation=model.activation,
            label_order=tuple(range(len(columns.labels))),
            summary=f"{function} of {shown_path(source.file) if model.is_file else module}",
            warnings=(),
            source=source,
            id_column=columns.id_column,
        )

    def fingerprint(self, inspected: PythonInspection, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        return {
            "function": model.module_and_function[1],
            "setup": model.setup,
            "columns": model.columns,
            "kwargs": model.kwargs,
            "activation": model.activation,
        }

    def content(self, inspected: PythonInspection, files: FileDigests) -> Mapping[str, str]:
        """Return the digests of the code and, if ``depends_on`` names any, of further files."""
        source = inspected.source
        digests = {"code": files.together(source.root, dict.fromkeys(source.files))}
        if self.settings.depends_on:
            digests["files"] = digest_of([_digest(path, files) for path in self.settings.depends_on])
        return digests

    def worker_settings(
        self, inspected: PythonInspection, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        model, source = self.settings, inspected.source
        return {
            "module": source.name,
            "file": str(source.file) if model.is_file else None,
            "function": model.module_and_function[1],
            "setup": model.setup,
            "columns": list(model.columns),
            "kwargs": model.kwargs,
            "id_column": inspected.id_column,
            "batch_size": model.batch_size,
        }


def _digest(path: Path, files: FileDigests) -> str:
    paths = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    # Large files are sampled, unless the run asks for every byte (hash_weights).
    samples = {file: weight_samples(file) if file.stat().st_size > 256 << 20 else None for file in paths}
    return files.together(path if path.is_dir() else path.parent, samples)
