"""Lets its memory be read and written by NIXL until its standard input ends."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.transfer import Buffer

from commutator_engine_kit.nixl.agent import TransferAgent

if __name__ == "__main__":
    name, size_bytes, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = Buffer(size_bytes)
    memory.fill(seed)
    agent = TransferAgent(name, {"UCX": {}})
    agent.register([memory.region], "UCX")
    told = {
        "metadata": base64.b64encode(agent.metadata()).decode(),
        "address": memory.address,
    }
    print(json.dumps(told), flush=True)
    sys.stdin.read()
    agent.close()
