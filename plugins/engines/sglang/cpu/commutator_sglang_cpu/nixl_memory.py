"""Hand-over of KV by NIXL: what SGLang calls VRAM lies in ordinary memory here."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Called by SGLang in each of its processes. Without NIXL there is nothing to do."""
    try:
        from nixl._api import nixl_agent  # noqa: PLC0415 - optional; its only API
    except ImportError:
        return
    make = nixl_agent.__init__

    def make_for_memory(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    nixl_agent.__init__ = make_for_memory
