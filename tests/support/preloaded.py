"""For `multiprocessing`'s fork server: what a process with storage tiers spends its start on."""

from __future__ import annotations

from tests.support.kv_rig import host

from commutator_engine_kit.nixl.library import load_nixl

host()
load_nixl()
