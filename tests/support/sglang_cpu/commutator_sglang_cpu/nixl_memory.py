"""Hand-over of KV by NIXL: SGLang registers its KV cache as VRAM, which here is DRAM."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Called by SGLang in each of its processes. Without NIXL there is nothing to do."""
    try:
        from nixl._api import nixl_agent
    except ImportError:
        return
    make = nixl_agent.__init__

    def make_for_memory(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    nixl_agent.__init__ = make_for_memory
