"""Before any test module is imported."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# Triton reads this while it is imported, which transformers does: without an NVIDIA driver its kernels are interpreted.
if find_spec("triton") and not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", default=False,
        help="run every combination: of parts on the real model (half an hour), of what kernels are compiled for")
