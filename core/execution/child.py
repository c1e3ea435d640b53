"""``python -m hotswap.core.execution.child``: calls what its standard input names, with what it holds.

Standard input is one JSON object, ``{"call": "module:function", "arguments": {...}}``. Secrets travel this way, because
command lines and environments can be read by others.
"""

import json
import sys
from importlib import import_module
from typing import Any


def call(entry: str, arguments: dict[str, Any]) -> Any:
    """``entry`` is "module:function"; ``arguments`` are JSON."""
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)(arguments)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    call(given["call"], given["arguments"])
