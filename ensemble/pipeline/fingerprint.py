"""The identity of a member's work: what its probabilities depend on, as digests.

An earlier run's work is this run's where the fingerprints agree.  Only digests leave this module: settings may hold
secrets from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ensemble.config import ModelConfig
from ensemble.members.huggingface.checkpoint.digests import (
    FileDigests,
    digest_of,
    hub_commit,
    tokenizer_digest,
    weights_digest,
)
from ensemble.members.huggingface.checkpoint.hub import find_file
from ensemble.members.huggingface.checkpoint.quantization_keys import without_defaults
from ensemble.members.huggingface.checkpoint.tokenizer_files import own_max_length, own_truncation_side
from ensemble.pipeline.validate import Prepared, text_columns
from ensemble.planning.plan import MemberPlan

# To be raised where the same digests come to mean something else; older work then counts as another's.
SCHEME = 2
# Keys of a member that are taken as they stand; the others by what they come to, so that to spell out what would
# be so without them changes nothing.
_AS_GIVEN = (
    *("prompt_template", "add_special_tokens", "allow_tf32", "merge_adapter", "gguf_file"),
    "trust_remote_code",
)
# Of model_kwargs and tokenizer_kwargs: how files are had, not what is made of them. A token may change every day.
_HOW_TO_FETCH = (
    *("token", "use_auth_token", "cache_dir", "force_download", "resume_download", "local_files_only"),
    "proxies",
)


@dataclass(frozen=True)
class Fingerprint:
    """What a member's probabilities depend on; each component is a digest in hexadecimal.

    ``settings`` are the keys that change numbers or the columns of the member's CSV, ``weights`` the model's and
    the adapter's files (see ``content.FileDigests.weights``), ``tokenizer`` its files, ``rows`` the ids and the
    columns that the member reads.  Devices, replicas, chunks, batches and the member's name are in none of them.
    """

    settings: str
    weights: str
    tokenizer: str
    rows: str

    @property
    def digest(self) -> str:
        """All components in one."""
        return digest_of(self.to_dict())

    def changed_from(self, other: Fingerprint) -> tuple[str, ...]:
        """What differs, in words that can follow "its": settings, weights, tokenizer, rows."""
        return tuple(
            part.name for part in fields(self) if getattr(self, part.name) != getattr(other, part.name)
        )

    def to_dict(self) -> dict[str, str | int]:
        """As JSON can hold it, for ``from_dict``."""
        return {"scheme": SCHEME, **asdict(self)}

    @classmethod
    def from_dict(cls, document: object) -> Fingerprint | None:
        """What ``to_dict`` gave; None for anything else, and for a fingerprint of another scheme."""
        if not isinstance(document, dict) or document.get("scheme") != SCHEME:
            return None
        parts = {part.name: str(document.get(part.name)) for part in fields(cls)}
        return cls(**parts) if all(re.fullmatch("[0-9a-f]{64}", one) for one in parts.values()) else None


def member_fingerprint(
    prepared: Prepared, member: MemberPlan, files: FileDigests | None = None
) -> Fingerprint:
    """The fingerprint of a member's work, before the table forgets its columns.

    With ``hash_weights`` every byte of the weights counts, so that switching it on or off counts as a change, too.

    Args:
        files: what is known of files already; one for all members of a run, where they share weights.

    Raises:
        CheckpointError: a file of the checkpoint cannot be read.
    """
    model = member.model
    files = files or FileDigests(prepared.config.hash_weights)
    weights, tokenizer = file_digests(prepared, model, files)
    return Fingerprint(
        settings=digest_of(_settings(prepared, member)),
        weights=weights,
        tokenizer=tokenizer,
        rows=prepared.table.digest(columns_read(model)),
    )


def file_digests(prepared: Prepared, model: ModelConfig, files: FileDigests) -> tuple[str, str]:
    """The digests of a member's weights and of its tokenizer.

    Raises:
        CheckpointError: a file cannot be read, or is being written to.
    """
    return _weights(prepared, model, files), _tokenizer(prepared, model, files)


def columns_read(model: ModelConfig) -> tuple[str, ...]:
    """The table's columns that a member reads, as text or in its template."""
    if model.prompt_template is None:
        return text_columns(model)
    from ensemble.data.template import compile_template  # Jinja2 only where it is needed: start-up time

    return compile_template(model.prompt_template).columns


def _settings(prepared: Prepared, member: MemberPlan) -> dict[str, object]:
    config, model, checkpoint = prepared.config, member.model, prepared.checkpoints[member.name]
    is_unknown = not checkpoint.folder.is_dir()  # still on the hub, so that only its name tells
    return {
        **{key: getattr(model, key) for key in _AS_GIVEN},
        "text_columns": text_columns(model),
        **_tokenizer_settings(checkpoint.folder, model),
        "attn_implementation": _attention(member),
        "quantization_config": without_defaults(model.quantization_config, _dtype(member)),
        "label_order": checkpoint.label_order,
        "activation": checkpoint.activation,
        "dtype": _dtype(member),
        "model_kwargs": _without_fetching(model.model_kwargs),
        "tokenizer_kwargs": _without_fetching(model.tokenizer_kwargs),
        "source": [model.model_name_or_path, model.revision or "main"] if is_unknown else None,
        "seed": config.seed,
        "csv": [config.data.id_column, *config.labels],
    }


def _tokenizer_settings(folder: Path, model: ModelConfig) -> dict[str, object]:
    # Settings and code of its own, a GGUF file's vocabulary, files that may still be on the hub: then it is not
    # known here what holds where the config does not say.
    is_plain = not (_without_fetching(model.tokenizer_kwargs) or model.gguf_file or model.trust_remote_code)
    is_known = is_plain and Path(model.model_name_or_path).is_dir()
    return {
        "max_length": model.max_length or (own_max_length(folder) if is_known else None),
        "truncation_side": model.truncation_side or (own_truncation_side(folder) if is_known else None),
    }


def _attention(member: MemberPlan) -> str | None:
    """The attention that its workers are told to take; None where only they see what suits the model."""
    return member.model.attn_implementation or member.placement.attention


def _dtype(member: MemberPlan) -> str:
    """What the worker makes of dtype: auto (worker/precision.py); "auto" is the checkpoint's own."""
    if member.model.dtype != "auto":
        return member.model.dtype
    return member.placement.dtype if member.gpus else "float32"


def _without_fetching(kwargs: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in kwargs.items() if key not in _HOW_TO_FETCH}


def _weights(prepared: Prepared, model: ModelConfig, files: FileDigests) -> str:
    folder = prepared.checkpoints[model.name].folder
    base = hub_commit(model.model_name_or_path, folder) or weights_digest(
        folder, model.model_kwargs, model.gguf_file, model.trust_remote_code, files
    )
    name = model.adapter_name_or_path
    if name is None:
        return digest_of([base])
    place = find_file(name, "adapter_config.json").parent
    return digest_of([base, hub_commit(name, place) or weights_digest(place, {}, None, False, files)])


def _tokenizer(prepared: Prepared, model: ModelConfig, files: FileDigests) -> str:
    folder = prepared.checkpoints[model.name].folder
    commit = hub_commit(model.model_name_or_path, folder)
    own = folder if commit is None else None
    return digest_of([commit, tokenizer_digest(own, model.tokenizer_kwargs, files)])
