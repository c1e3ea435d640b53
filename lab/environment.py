"""What numbers depend on besides the config: versions, processor, operating system."""

import os
import platform
from pathlib import Path
from typing import Any

from hotswap.core.engine.assembly import versions


def environment() -> dict[str, Any]:
    return {
        "versions": {**versions(), "python": platform.python_version()},
        "platform": platform.platform(), "processor": _processor(), "cores": len(os.sched_getaffinity(0)),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
