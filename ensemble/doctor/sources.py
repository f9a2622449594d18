"""Whether models can be had: the Hugging Face hub from here, its cache, and the folders that the config names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ensemble.checkpoint.hub import find_file, hub_can_be_reached
from ensemble.doctor.finding import Finding
from ensemble.errors import CheckpointError

if TYPE_CHECKING:
    from ensemble.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """Something the config names: ``key`` says where, ``file`` is a small one that must be among its files."""

    key: str
    name: str
    file: str
    revision: str | None = None


def named_sources(models: Sequence[ModelConfig]) -> Iterator[Source]:
    """The checkpoints and adapters of a config."""
    for index, model in enumerate(models):
        key = f"models[{index}] ({model.name})"
        if model.gguf_file is None:
            yield Source(key, model.model_name_or_path, "config.json", model.revision)
        elif Path(model.model_name_or_path).is_dir():  # from the hub it would be all of the weights
            yield Source(key, model.model_name_or_path, model.gguf_file)
        if model.adapter_name_or_path is not None:
            yield Source(
                f"models[{index}].adapter_name_or_path", model.adapter_name_or_path, "adapter_config.json"
            )


def source_findings(sources: Sequence[Source]) -> Iterator[Finding]:
    """Whether the hub answers, and which of the sources cannot be had."""
    from huggingface_hub import constants, get_token

    host = urlsplit(constants.ENDPOINT).hostname or "its address"
    if hub_can_be_reached():
        token = (
            "with a token" if get_token() else "without a token: gated models, such as Gemma, need HF_TOKEN"
        )
        yield Finding("ok", f"the Hugging Face hub can be reached ({host}), {token}")
    else:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"no connection to {host}"
        advice = "name models by folders; what is in the hub's cache works too"
        yield Finding("note", f"the Hugging Face hub cannot be reached ({why})", advice)
    for source in sources:
        try:
            find_file(source.name, source.file, source.revision)
        except CheckpointError as error:
            yield from (
                Finding.of_sentence("problem", f"{source.key}: {text}", "mend the path")
                for text in error.problems
            )
