"""Compiles what the ``triton`` backend launches, for GPUs that are not here; run by ``test_triton_compiled.py``.

    python compile_kernels.py 80 90 < cases.json

Triton's driver is replaced by one that names the architecture. The backend plans and runs a real batch, and each kernel
that it would launch is compiled for the very arguments instead. Prints a JSON line a kernel.
"""

import json
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from hotswap.core.testing.attention import AttentionCase, check_attention
from hotswap.plugins.attention.triton import backend, kernels


class Compiler:
    """Stands in for the kernels."""

    def __init__(self, case: str) -> None:
        self.case, self.done = case, set()

    def __getattr__(self, name: str):
        compiler = self

        class Kernel:
            def __getitem__(self, grid):
                return lambda *args, **options: compiler.compile(name, grid, args, options)

        return Kernel()

    def compile(self, name, grid, args, options) -> None:
        variant = name, *options.items()
        if variant in self.done:
            return
        self.done.add(variant)
        compiled = getattr(kernels, name).warmup(*args, grid=grid, **options)
        print(json.dumps({
            "case": self.case, "kernel": name, "lines": options.get("BLOCK_M"), "triton": triton.__version__,
            "architecture": compiled.metadata.target.arch, "shared": compiled.metadata.shared,
            "cubin": len(compiled.asm["cubin"])}), flush=True)


class Uninterpreted(backend.TritonAttention):
    """Binds on a CPU although nothing is interpreted."""

    def bind(self, group, shape, limits):
        return backend._State(group, shape, limits, backend.choose_tiles(shape, getattr(torch, limits.dtype).itemsize))


def main() -> None:
    for fields in json.load(sys.stdin):
        case = AttentionCase(**{**fields, "rows": tuple(map(tuple, fields["rows"]))})
        for architecture in map(int, sys.argv[1:]):
            target = GPUTarget("cuda", architecture, 32)
            driver.set_active(SimpleNamespace(
                get_current_target=lambda target=target: target,
                get_current_device=lambda architecture=architecture: architecture,  # each has a cache of its own
                get_current_stream=lambda device: 0))
            attention = Uninterpreted()
            attention._kernels = Compiler(case.name)
            try:
                check_attention(attention, case)
            except AssertionError as error:  # nothing was computed
                assert "differs from dense" in str(error)


main()
