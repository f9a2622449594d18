"""Whether the Hugging Face hub can be had from here."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from ensemble.cli.doctor.finding import Finding
from ensemble.members.huggingface.checkpoint.hub import hub_can_be_reached


def hub_findings() -> Iterator[Finding]:
    """Whether the hub answers, and whether it will be asked with a token."""
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
