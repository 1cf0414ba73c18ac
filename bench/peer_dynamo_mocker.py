"""Dynamo's mocker for a model whose card names a parser of tool calls: it has no option for that.

Runs in Dynamo's environment: ``python peer_dynamo_mocker.py PARSER OPTION ...``, with the options
of ``python -m dynamo.mocker``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

mocker: Any = importlib.import_module("dynamo.mocker.main")
build = mocker.build_runtime_config
parser = sys.argv.pop(1)


def with_parser(engine: Any) -> Any:
    block_size, config = build(engine)
    config.tool_call_parser = parser
    return block_size, config


mocker.build_runtime_config = with_parser
mocker.main()
