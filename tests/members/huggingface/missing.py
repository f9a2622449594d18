"""The child side of a kind whose library is not there."""

from __future__ import annotations

from collections.abc import Mapping


def import_libraries() -> Mapping[str, str]:
    import a_library_that_nobody_has  # type: ignore[import-not-found]

    return {"it": a_library_that_nobody_has.__version__}
