"""Which asyncio task runs: groups belong to one."""

from __future__ import annotations

import sys
from typing import Any


def current_task() -> Any:
    """The calling thread's task; ``None`` outside of one. A program without asyncio does not import it here."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return None
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
