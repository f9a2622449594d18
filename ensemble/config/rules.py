"""The rules that tie keys together, such as "exactly one of these two" and "the weights are not all 0".

They take plain data and pass over what is of the wrong type, so that one call of ``load_config`` shows them
beside the wrong types.  No sentence holds a value.  What a single key may hold is in ``values``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic_core import PydanticCustomError

from ensemble.config.document import Problem, place
from ensemble.config.values import GPU_NUMBER, as_label, with_home

# The type of pydantic's error for broken rules; it carries them as ``problems``.
BROKEN_RULES: Final = "broken_rules"
_COMMIT: Final = r"[0-9a-fA-F]{40}"
_PICKLES: Final = "drop this; the model's own key allow_pickle says whether pickles may be read"
_KERNELS: Final = "runs compiled code from the hub; it needs trust_remote_code: true"
_OWN: Final = "use the model's own key of this name instead"
_UNTRUSTED_KWARGS: Final = {
    "model_kwargs": {
        "use_safetensors": _PICKLES,
        "weights_only": _PICKLES,
        "allow_all_kernels": _KERNELS,
        "kernel_config": _KERNELS,
    },
    "tokenizer_kwargs": {"revision": _OWN, "trust_remote_code": _OWN},
}
T = TypeVar("T")


def broken(values: Mapping[str, Any]) -> Iterator[Problem]:
    """The rules that a whole config breaks, those of its models included."""
    labels = _texts(values.get("labels"))
    first: dict[str, int] = {}
    for index, label in enumerate(labels):
        if label is not None and first.setdefault(label, index) != index:
            yield ("labels", index), f"the same as labels[{first[label]}]; name each label once"
    data = values.get("data")
    id_column = data.get("id_column", "id") if isinstance(data, dict) else None
    if isinstance(id_column, str) and id_column in first:
        yield ("labels", first[id_column]), "the same as data.id_column; predictions hold both columns"
    # With a label that cannot be read, what is not among the others may still be right.
    known = set() if None in labels else set(first)
    yield from _broken_in_models(values.get("models"), known)
    submission = values.get("submission")
    columns = submission.get("columns") if isinstance(submission, dict) else None
    for column, label in _items(columns):
        if known and label not in known:
            yield ("submission", "columns", column), "must be one of the labels"
    yield from _broken_limit(values)


def _broken_limit(values: Mapping[str, Any]) -> Iterator[Problem]:
    limit = values.get("time_limit")
    if isinstance(limit, int | float) and not isinstance(limit, bool) and limit == 0:
        yield ("time_limit",), "must be more than 0"
    if values.get("fill") == "sample" and values.get("submission") is None:
        yield ("fill",), "sample needs submission.sample, the file whose values it takes"


def _broken_in_models(models: object, labels: set[str]) -> Iterator[Problem]:
    listed = models if isinstance(models, list | tuple) else ()
    members = [(index, member) for index, member in enumerate(listed) if isinstance(member, dict)]
    names: dict[str, int] = {}
    for index, member in members:
        for loc, sentence in broken_in_member(member, labels):
            yield ("models", index, *loc), sentence
        name = member.get("name")
        if isinstance(name, str) and names.setdefault(name.lower(), index) != index:
            first = f"models[{names[name.lower()]}].name"
            yield ("models", index, "name"), f"the same as {first}; names must differ in more than their case"
    weights = [member.get("weight", 1.0) for _, member in members]
    if weights and all(isinstance(weight, int | float) and 0 <= weight < math.inf for weight in weights):
        if not any(weights):
            yield ("models",), "the weights are all 0; at least one must be more"
        elif math.isinf(sum(float(weight) for weight in weights)):
            yield ("models",), "the weights add up to more than a number can hold"


def broken_in_member(member: Mapping[str, Any], labels: set[str]) -> Iterator[Problem]:
    """The rules that one model breaks; ``labels`` are the config's, empty where they are not known."""
    inputs = [key for key in ("prompt_template", "text_column") if member.get(key) is not None]
    if not inputs:
        yield (), "prompt_template or text_column is required, for example text_column: text"
    elif len(inputs) == 2:
        yield ("prompt_template",), "give either prompt_template or text_column, not both"
    yield from _broken_trust(member)
    given: dict[str, str] = {}
    for key, label in _items(member.get("label_map")):
        if labels and label not in labels:
            yield ("label_map", key), "must be one of the labels"
        elif given.setdefault(label, key) != key:
            yield ("label_map", key), f"the same label as {place(('label_map', given[label]))} has"
    yield from _broken_placement(member)
    yield from _broken_weights(member)


def _broken_trust(member: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that let files of the checkpoint run code, or would do so past the keys that are there for it."""
    revision, is_trusted = member.get("revision"), member.get("trust_remote_code") is True
    commit = "a commit's whole hash (40 hexadecimal digits), since a branch or tag can be moved to other code"
    if is_trusted and _is_remote(member):
        if revision is None:
            yield ("revision",), f"required with trust_remote_code: true; name {commit}"
        elif isinstance(revision, str) and not re.fullmatch(_COMMIT, revision):
            yield ("revision",), f"with trust_remote_code: true this is {commit}"
    for key, instead in _UNTRUSTED_KWARGS.items():
        given = member.get(key)
        for name in given if isinstance(given, dict) else ():
            if name in instead and not (is_trusted and instead[name] is _KERNELS):
                yield (key, name), instead[name]


def _broken_placement(member: Mapping[str, Any]) -> Iterator[Problem]:
    gpus, sizes, layers = (member.get(key) for key in ("num_gpus", "max_memory", "device_map"))
    if layers == {}:
        yield ("device_map",), "must not be empty; name the place of each part, such as {model: 0, score: 0}"
    if isinstance(gpus, int):
        there = f"a lease of {gpus} has GPUs 0 to {gpus - 1}" if gpus else "num_gpus: 0 leaves only cpu"
        sentence = f"there is no such GPU: {there}; GPUs count from 0 within it"
        for key in sizes if isinstance(sizes, dict) else ():
            if re.fullmatch(GPU_NUMBER, str(key)) and int(key) >= gpus:
                yield ("max_memory", str(key)), sentence
        for key, place in layers.items() if isinstance(layers, dict) else ():
            if isinstance(place, int) and place >= gpus:
                yield ("device_map", str(key)), sentence
    settings = member.get("quantization_config")
    if isinstance(settings, dict) and _asks_for_offload(member):
        in_bits = next((key for key in ("load_in_8bit", "load_in_4bit") if settings.get(key)), None)
        if in_bits and not settings.get("llm_int8_enable_fp32_cpu_offload"):
            yield (
                ("quantization_config",),
                f"{in_bits} and offload go together only with llm_int8_enable_fp32_cpu_offload: true, which keeps "
                "the offloaded layers in float32",
            )


def _broken_weights(member: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that say which weights are loaded, and where they would shut each other out."""
    adapter, gguf_file = member.get("adapter_name_or_path"), member.get("gguf_file")
    if member.get("merge_adapter") is True:
        if adapter is None:
            yield ("merge_adapter",), "there is no adapter to merge; add adapter_name_or_path"
        elif member.get("quantization_config") is not None:
            yield (
                ("merge_adapter",),
                "quantized weights cannot take an adapter in without rounding it away; leave it unmerged, or drop "
                "quantization_config",
            )
    if adapter is not None and _asks_for_offload(member):
        yield (
            ("adapter_name_or_path",),
            "an adapter needs its base on the devices themselves, not offloaded; quantize it, give it more GPUs, "
            "or merge the adapter into a checkpoint first",
        )
    if gguf_file is not None and member.get("quantization_config") is not None:
        yield (
            ("gguf_file",),
            "its weights are quantized already and are read as they were; drop quantization_config",
        )
    if gguf_file is not None and member.get("offload_folder") is not None:
        yield ("gguf_file",), "transformers cannot offload a GGUF file to disk; drop offload_folder"


def _asks_for_offload(member: Mapping[str, Any]) -> bool:
    sizes = member.get("max_memory")
    to_cpu = isinstance(sizes, dict) and "cpu" in sizes and member.get("num_gpus") != 0
    placed = member.get("device_map")
    places = {str(device) for device in placed.values()} if isinstance(placed, dict) else set()
    by_hand = "disk" in places or ("cpu" in places and len(places) > 1)
    return to_cpu or by_hand or member.get("offload_folder") is not None


def _is_remote(member: Mapping[str, Any]) -> bool:
    source = member.get("model_name_or_path")
    try:
        return isinstance(source, str) and not Path(with_home(source)).is_dir()
    except (OSError, ValueError):  # a name that no folder can have
        return True


def _texts(values: object) -> list[str | None]:
    texts = [as_label(value) for value in values] if isinstance(values, list | tuple) else []
    return [text if isinstance(text, str) else None for text in texts]


def _items(mapping: object) -> Iterator[tuple[str, str]]:
    for key, value in mapping.items() if isinstance(mapping, dict) else ():
        label = as_label(value)
        if isinstance(label, str):
            yield key, label


def checked(value: T, problems: Iterator[Problem]) -> T:
    """The value itself, if there are no problems.

    Raises:
        PydanticCustomError: of type ``BROKEN_RULES``, with all of them.
    """
    found = list(problems)
    if found:
        text = "; ".join(f"{place(loc)}: {sentence}" for loc, sentence in found)
        raise PydanticCustomError(BROKEN_RULES, "{text}", {"text": text, "problems": found})
    return value
