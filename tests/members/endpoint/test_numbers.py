"""The numbers of a model behind a server are those of the same checkpoint in transformers, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_language_model
from tests.members.endpoint.serving import Stub, serving
from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")
CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ONE_TOKEN = {"winner_a": "plants", "winner_b": "food", "tie": "animal"}
SEVERAL = {"winner_a": " plants or food", "winner_b": " food", "tie": " river body"}


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    folder = tmp_path_factory.mktemp("a server")
    make_language_model(folder / "model", "llama", pad=None)
    (folder / "model/chat_template.jinja").write_text(CHAT, encoding="utf-8")
    with serving(folder) as stub:
        yield stub


def twins(stub: Stub, task_type: str = "causal_lm", **keys: Any) -> list[dict[str, Any]]:
    """A member behind the server, and the same by transformers; ``keys`` are those that they share."""
    api = keys.pop("api", "completions")
    own = {"url": stub.url, "model": "tiny", "api": api, "max_concurrency": 4}
    plain = {"model_name_or_path": str(stub.folder / "model"), "max_length": 512}
    if api == "chat":
        plain["apply_chat_template"] = True
    return [
        {"name": "asked", "task_type": "endpoint", **own, **keys},
        {"name": "plain", "task_type": task_type, **plain, **keys},
    ]


@pytest.mark.parametrize(
    ("behaviour", "keys"),
    [
        ({}, {"label_tokens": ONE_TOKEN, "prompt_template": "{{ text }} "}),
        ({}, {"label_tokens": SEVERAL, "prompt_template": "{{ text }}", "length_normalize": "tokens"}),
        (
            {},
            {
                "label_tokens": SEVERAL,
                "prompt_template": "{{ text }}",
                "api": "chat",
                "length_normalize": "bytes",
            },
        ),
        (
            {"asked": False, "most": 400},
            {"label_tokens": ONE_TOKEN, "prompt_template": "{{ text }} ", "top_logprobs": 367},
        ),
        (
            {"tells": False, "most": 400},
            {
                "label_tokens": ONE_TOKEN,
                "prompt_template": "{{ text }}",
                "api": "chat",
                "top_logprobs": 367,
            },
        ),
    ],
    ids=[
        "asked tokens",
        "several tokens",
        "several in a chat",
        "by text",
        "chat by text",
    ],
)
def test_it_says_what_causal_lm_says(
    behaviour: dict[str, Any], keys: dict[str, Any], language_model: Stub, project: Project
) -> None:
    project.write_table(40)
    language_model.behave(**behaviour)
    swap = {"columns": ["text", "label"], "labels": ["winner_a", "winner_b"]}
    models = twins(language_model, **keys, views=[{"name": "as_is"}, {"name": "swapped", "swap": swap}])
    other = {key: models[0].pop(key) for key in ("top_logprobs",) if key in models[0]}
    models[1] = {key: value for key, value in models[1].items() if key not in other}
    models[0] |= other
    project.write_config(project.config(models=models, defaults=None, report=False))
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    asked, plain = (project.values(f"runs/first/predictions/{name}.csv") for name in ("asked", "plain"))
    np.testing.assert_allclose(asked, plain, atol=1e-5)
    masses = [member["counters"]["other_mass"] for member in project.run_json()["members"]]
    assert masses[0] == pytest.approx(masses[1], abs=1e-3)
