"""The kernels compile for GPUs that are not here: what the interpreter cannot tell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
ROWS = [[1, 30], [40, 5], [3, 9]]
PLAIN = {"name": "plain", "rows": ROWS, "heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
CASES = [
    PLAIN,
    {**PLAIN, "name": "everything", "head_dim": 80, "kv_heads": 8, "window": 100, "softcap": 30.0, "dtype": "float16"},
]
WHOLE = [
    *CASES,
    {**PLAIN, "name": "float32", "head_dim": 64, "heads": 9, "kv_heads": 3, "dtype": "float32"},
    {**PLAIN, "name": "large heads", "head_dim": 256, "softcap": 50.0, "window": 4096},
    {**PLAIN, "name": "large heads in float32", "head_dim": 256, "dtype": "float32"},
    {**PLAIN, "name": "one head a key", "kv_heads": 8, "head_dim": 96},
    {**PLAIN, "name": "one key for many heads", "heads": 71, "kv_heads": 1, "head_dim": 64, "page_size": 1},
]
SMALLEST_SHARED_MEMORY = 99 * 1024
"""Bytes that a program may have on sm_86 and sm_89; sm_80 and sm_90 have more."""


def test_every_launch_compiles_for_ampere_and_hopper_and_fits_their_shared_memory(tmp_path, pytestconfig):
    """``pytest tests/attention --whole`` compiles all variants."""
    cases = WHOLE if pytestconfig.getoption("--whole", default=False) else CASES
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py"), "80", "90"], input=json.dumps(cases),
        env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    for architecture in (80, 90):
        for case in cases:
            kernels = [
                one["kernel"] for one in compiled if (one["case"], one["architecture"]) == (case["name"], architecture)]
            assert set(kernels) == {"write_kv", "attend_tiles", "attend_splits", "reduce_splits"}
    for one in compiled:
        assert one["cubin"] > 0
        assert one["shared"] <= SMALLEST_SHARED_MEMORY, one
