"""Writes docs/reference/config.md and docs/config.schema.json from the pydantic models.

Run it as ``python scripts/make_reference.py``.

What a key means is the comment behind it in the model's source.  A test keeps both files in step.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ensemble.config.schema import (  # noqa: E402
    AllowedLabelsTable,
    AnswerColumnConfig,
    AnswerConfig,
    CalibrationConfig,
    DataConfig,
    EnsembleConfig,
    FittingConfig,
    MemberConfig,
    RuleConfig,
    RunConfig,
    SubmissionConfig,
    TrainingConfig,
    TuningConfig,
)
from ensemble.config.values import MustBe  # noqa: E402
from ensemble.members.huggingface.settings import HuggingFaceSettings, TextSettings  # noqa: E402
from ensemble.members.registry import KINDS  # noqa: E402
from ensemble.merging.methods import METHODS  # noqa: E402

PAGE, SCHEMA = ROOT / "docs" / "reference" / "config.md", ROOT / "docs" / "config.schema.json"
# Keys that several kinds have, by the titles of their sections.
SHARED: dict[str, type[MemberConfig]] = {
    "`models` with a checkpoint": HuggingFaceSettings,
    "`models` that read text": TextSettings,
}
INTRODUCTION = """\
# The keys of a config

`scripts/make_reference.py` makes this page from the models that check a config. Editors read the same keys from
[`config.schema.json`](../config.schema.json): with this first line they complete keys and mark mistakes.

```yaml
# yaml-language-server: $schema=docs/config.schema.json
```

The path may also be an address. `ensemble validate` finds more than an editor: it knows the rules that tie keys
together, the table and the models. [Several config files, `--set` and `${NAME}`](../how-to/several-configs.md) has
its own page. A key under `defaults` counts for every model whose kind has that key and that does not set it. The
keys of a mapping have a section of their own. Brackets say what a key holds, and its default.
"""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")


def kinds() -> dict[str, type[MemberConfig]]:
    """The built-in kinds' keys by ``task_type``."""
    return {name: KINDS.load(name).Settings for name in KINDS.built_in}


def methods() -> dict[str, type[EnsembleConfig]]:
    """The keys of the built-in merge methods that have some of their own."""
    found = {name: METHODS.load(name).Settings for name in METHODS.built_in}
    return {name: settings for name, settings in found.items() if settings is not EnsembleConfig}


def page() -> str:
    """docs/reference/config.md."""
    parts = [INTRODUCTION]
    for title, model in (
        ("The run", RunConfig),
        ("`data`", DataConfig),
        ("`data.allowed_labels` of another table", AllowedLabelsTable),
        ("`training`", TrainingConfig),
        ("`ensemble`", EnsembleConfig),
        ("`rules`: each of them", RuleConfig),
        ("`submission`", SubmissionConfig),
        ("`submission.columns`: each with answers", AnswerColumnConfig),
        ("`answer` of such a column", AnswerConfig),
        ("`fitted_on`", FittingConfig),
        ("`tuned_on`", TuningConfig),
    ):
        parts += [section(title, model, model.model_fields)]
        for key in ("folds", "extra") if model is TrainingConfig else ():
            (inner,) = inner_models(TrainingConfig.model_fields[key].annotation)
            parts += [section(f"`training.{key}`", inner, inner.model_fields)]
        for name, method in methods().items() if model is EnsembleConfig else ():
            own = [key for key in method.model_fields if key not in EnsembleConfig.model_fields]
            parts += [section(f"`ensemble` with `method: {name}`", method, own)]
    parts += [section("`models`: every kind", MemberConfig, MemberConfig.model_fields)]
    parts += [section("`calibration` of a model", CalibrationConfig, CalibrationConfig.model_fields)]
    for title, shared in SHARED.items():
        names = ", ".join(f"`{name}`" for name, kind in kinds().items() if issubclass(kind, shared))
        parts += [section(title, shared, own_keys(shared), f"These keys belong to {names}.")]
    for name, kind in kinds().items():
        more = [title for title, shared in SHARED.items() if issubclass(kind, shared)]
        links = " and ".join(link(title) for title in more)
        text = f"It also has the keys of {links}." if more else ""
        parts += [section(f"`models` with `task_type: {name}`", kind, own_keys(kind), text)]
    seen: dict[type[BaseModel], str] = {}
    keys: set[str] = set()
    for name, kind in kinds().items():
        for key in kind.model_fields:
            if key not in MemberConfig.model_fields:
                which = f" with `task_type: {name}`" if key in keys else ""
                parts += inner_sections(f"`{key}` of a model{which}", kind.model_fields[key].annotation, seen)
        keys |= kind.model_fields.keys()
    return "\n".join(parts)


def inner_sections(title: str, hint: Any, seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """Yield sections for the mappings that a key holds, those within the mappings included; each once.

    A mapping that shares keys with one before names it, and lists the other keys. ``seen`` has titles by mapping.
    """
    for model in inner_models(hint):
        if model in seen:
            continue
        bases = [one for one in model.__mro__[1:] if issubclass(one, BaseModel) and one.model_fields]
        base = next((one for one in bases if any(issubclass(other, one) for other in seen)), None)
        larger = next((one for one in seen if issubclass(one, model)), None)
        if larger is not None:
            names = ", ".join(f"`{key}`" for key in model.model_fields)
            yield f"## {title}\n\n{in_short(model)} Its keys are {names} of {link(seen[larger])}.\n"
        elif base is not None:
            where = base if base in seen else next(other for other in seen if issubclass(other, base))
            names = "" if where is base else f" {', '.join(f'`{key}`' for key in base.model_fields)}"
            more = f"It also has the keys{names} of {link(seen[where])}."
            yield section(
                title, model, [key for key in model.model_fields if key not in base.model_fields], more
            )
        else:
            yield section(title, model, model.model_fields)
        seen[model] = title
        for key, field in model.model_fields.items():
            place = title.replace("` of", f".{key}` of", 1)
            yield from inner_sections(place, field.annotation, seen)


def inner_models(hint: Any) -> Iterator[type[BaseModel]]:
    """The models that stand directly in a type, such as a mapping of them."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for part in get_args(hint):
        yield from inner_models(part)


def own_keys(model: type[BaseModel]) -> list[str]:
    """Return the keys that a model adds to those of the sections before it, or redefines."""
    before: list[type[MemberConfig]] = [MemberConfig, *(one for one in SHARED.values() if one is not model)]
    known = {key for base in before if issubclass(model, base) for key in base.model_fields}
    return [
        key
        for key in model.model_fields
        if key not in known or (key in model.__annotations__ and key != "task_type")
    ]


def link(title: str) -> str:
    """Return a link to a section of this page."""
    anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    return f"[{title}](#{anchor})"


def section(
    title: str, model: type[BaseModel], keys: Mapping[str, object] | list[str], more: str = ""
) -> str:
    meanings, hints = comments(model), get_type_hints(model, include_extras=True)
    rows = []
    for key in keys:
        field = model.model_fields[key]
        held = " or ".join(dict.fromkeys(map(in_a_list, phrases(hints[key]))))
        if field.is_required():
            held += "; **required**"
        else:
            value = field.get_default(call_default_factory=True)
            plain = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
            held += "" if plain is None else f"; `{in_yaml(plain)}`"
        meaning = meanings.get(key)
        rows.append(f"- `{key}` ({held})" + (f": {meaning}" if meaning else ""))
    about = " ".join([in_short(model), more]).strip()
    return f"## {title}\n\n{about}\n\n" + "\n".join(rows) + "\n"


def in_short(model: type[BaseModel]) -> str:
    """The first sentence of a model's docstring."""
    text = (model.__doc__ or "").split("\n\n")[0].replace("\n    ", " ").replace("``", "`")
    return re.split(r"[.;:] ", text)[0].rstrip(".") + "."


def comments(model: type[BaseModel]) -> dict[str, str]:
    """What stands behind each field in the source of a model and of those that it is made of."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if not issubclass(one, BaseModel) or one is BaseModel:
            continue
        before = ""
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(one)).readline):
            if token.type == tokenize.COMMENT:
                text = token.string.lstrip("# ").replace("None:", "left out:").replace("False:", "false:")
                name = token.line.strip().partition(":")[0]
                if name in one.model_fields:
                    found[name] = text
                else:
                    before = f"{before} {text}".strip()
            elif token.type == tokenize.NAME and token.line.startswith(f"    {token.string}:"):
                if before and token.string in one.model_fields:
                    found[token.string] = before[0].lower() + before[1:].rstrip(".")
                before = ""
    return found


def phrases(hint: Any) -> Iterator[str]:
    """What a type holds, in the words of its error messages."""
    said = [one.phrase for one in getattr(hint, "__metadata__", ()) if isinstance(one, MustBe)]
    if said:
        yield said[-1]
    elif get_origin(hint) is Literal:
        yield ", ".join(f"`{in_yaml(value)}`" for value in get_args(hint))
    elif hint is bool:
        yield "true or false"
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        yield "mapping"
    else:
        for inner in get_args(hint):
            if inner is not type(None):
                yield from phrases(inner)


def in_a_list(phrase: str) -> str:
    """A phrase for a list, where neither articles nor the obvious are needed."""
    shorter = re.sub(r"\bthe (name|path) of a (?=column|file|folder)|, and not empty$", "", phrase)
    shorter = re.sub(r"\b(number|time|size) of (at least|more than)", r"\1, \2", shorter)
    return re.sub(r"^(an?|the) |(?<= or )an? ", "", shorter)


def in_yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def schema_text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """docs/config.schema.json: at least as permissive as the loader, and strict about keys."""
    run = plain(RunConfig)
    members = {name: plain(model) for name, model in kinds().items()}
    usual = MemberConfig.model_fields["task_type"].default
    for member in members.values():
        member["required"] = ["name"]  # the rest may stand under defaults
    named: dict[str, Any] = {"properties": {"task_type": {"enum": [*members]}}}
    items: dict[str, Any] = {
        "type": "object",
        "if": named,
        "then": {
            "allOf": [
                {
                    "if": {"properties": {"task_type": {"const": name}}, "required": ["task_type"]},
                    "then": {"$ref": f"#/$defs/{name}"},
                }
                for name in members
            ]
            + [
                {
                    "if": {"not": {"required": ["task_type"]}},
                    "then": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in members]},
                }
            ],
        },
        "else": {"required": ["name"]},  # a kind of an installed package
    }
    keys = {key: value for member in members.values() for key, value in member["properties"].items()}
    run["properties"]["models"] = {**run["properties"]["models"], "items": items}
    run["properties"]["defaults"] = {
        "type": "object",
        "description": "keys that count for every model whose kind has them and that does not say otherwise",
        "properties": {key: value for key, value in keys.items() if key not in ("name", "task_type")},
    }
    # References start at the root.
    inner = {name: part for member in members.values() for name, part in member.pop("$defs", {}).items()}
    run["$defs"] = {**run.get("$defs", {}), **inner, **members}
    run["$defs"].pop("MemberConfig", None)
    run["$defs"]["EnsembleConfig"].pop("additionalProperties")  # methods bring keys of their own
    heading = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A config of ensemble",
        "$comment": f"A model without task_type is {usual}.",
    }
    return {**heading, **run}


def plain(model: type[BaseModel]) -> dict[str, Any]:
    """A model's own schema, with what its comments say; labels and names may be numbers."""
    found = model.model_json_schema()
    models: dict[str, type[BaseModel]] = {MemberConfig.__name__: MemberConfig}
    pending: list[type[BaseModel]] = [model, MemberConfig]
    while pending:
        for field in pending.pop().model_fields.values():
            for one in inner_models(field.annotation):
                if one.__name__ not in models:
                    models[one.__name__] = one
                    pending.append(one)
    for name, part in ((model.__name__, found), *found.get("$defs", {}).items()):
        owner = model if name == model.__name__ else models[name]
        meanings = comments(owner)
        part.pop("title", None)
        part["description"] = in_short(owner)
        for key, value in part.get("properties", {}).items():
            value.pop("title", None)
            if "examples" in value:
                value["examples"] = [
                    yaml.safe_load(one) if isinstance(one, str) else one for one in value["examples"]
                ]
            part["properties"][key] = loosened(value)
            if key in meanings:
                part["properties"][key]["description"] = meanings[key]
    return found


def loosened(value: dict[str, Any]) -> dict[str, Any]:
    value = {key: loosened(one) if key in ("items", "additionalProperties") and isinstance(one, dict) else one
             for key, one in value.items()}  # fmt: skip
    if value.get("type") == "string" and "enum" not in value and "const" not in value:
        return {**value, "type": ["string", "integer"]}
    for union in ("anyOf", "oneOf"):
        if union in value:
            value[union] = [loosened(one) for one in value[union]]
    return value


if __name__ == "__main__":
    main()
