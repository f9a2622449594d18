"""The templates of a config: compiled, and tried on the first rows.

A config without templates does not import Jinja2: a tenth of the parent's start-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble.celltext import TemplateProblem
from ensemble.config import RunConfig
from ensemble.errors import ConfigError, DataError, EnsembleError
from ensemble.tables.table import InputTable

if TYPE_CHECKING:
    from ensemble.template import PromptTemplate

RENDERED_ROWS = 5


def compile_templates(config: RunConfig, problems: list[EnsembleError]) -> dict[str, PromptTemplate]:
    """Templates by member name, without those that are wrong.

    Args:
        problems: takes an error for each of those.
    """
    compiled = {}
    for index, model in enumerate(config.models):
        if model.prompt_template is None:
            continue
        from ensemble.template import compile_template

        try:
            compiled[model.name] = compile_template(model.prompt_template)
        except TemplateProblem as error:
            problems.append(ConfigError(f"models[{index}].prompt_template: {error}"))
    return compiled


def render_first_rows(
    config: RunConfig,
    table: InputTable,
    templates: dict[str, PromptTemplate],
    problems: list[EnsembleError],
) -> dict[str, str]:
    """Render every template on the first rows; the first row's text per member is what ``validate`` shows.

    Args:
        problems: takes an error for each template that fails.
    """
    previews: dict[str, str] = {}
    rows = table.head(RENDERED_ROWS)
    for index, model in enumerate(config.models):
        if model.name not in templates:
            continue
        for number, row in enumerate(rows):
            try:
                text = templates[model.name].render(row)
            except TemplateProblem as error:
                place = f"row {number + 1} (id {table.ids[number].as_py()!r})"
                problems.append(DataError(f"models[{index}].prompt_template: {place}: {error}"))
                break
            previews.setdefault(model.name, text)
    return previews
