"""The models as other code uses them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.config.examples import SMALL, Load


def test_values_cannot_be_changed(load: Load) -> None:
    run = load(SMALL).config
    with pytest.raises(ValidationError):
        run.seed = 1
