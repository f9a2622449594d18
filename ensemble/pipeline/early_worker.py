"""Whether a run's first worker begins before its checks are made: as soon as the config is read."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from ensemble.common.gpus import has_driver
from ensemble.common.host import available_memory_bytes, usable_cpus
from ensemble.config import LoadedConfig
from ensemble.members.registry import member_kind
from ensemble.scheduling.launchers.early import begun_early

# Libraries take some hundred megabytes, which the plan shall not miss.
_MIN_MEMORY_BYTES: Final = 8 << 30


def early_worker(loaded: LoadedConfig, fresh: bool) -> AbstractContextManager[None]:
    """A worker process that imports libraries while this one does, and then looks at table and checkpoints.

    There is none where GPUs are, which want settings before libraries are imported; where something was run before,
    so that nothing may be left to compute; on a single CPU; and where memory is short.

    Args:
        fresh: whatever was run before is computed again.
    """
    config = loaded.config
    kinds = [kind for kind in map(member_kind, config.models) if kind.needs_worker]
    is_worth_it = (
        config.launcher == "local"
        and bool(kinds)
        # The class's own word: one that is made of it has another child.
        and bool(vars(type(kinds[0])).get("can_begin_early"))
        and usable_cpus() > 1
        # Not Path.exists, which raises an error where a folder above may not be entered.
        and (fresh or not os.path.exists(config.output_dir / "run.json"))  # noqa: PTH110
        and (available_memory_bytes() or 0) >= _MIN_MEMORY_BYTES
        and not has_driver()
    )
    return begun_early(kinds[0].child) if is_worth_it else nullcontext()
