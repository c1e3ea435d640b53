"""Before any test module is imported."""

import os
from importlib.util import find_spec
from pathlib import Path

# Triton reads this while it is imported, which transformers does: without an NVIDIA driver its kernels are interpreted.
if find_spec("triton") and not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
