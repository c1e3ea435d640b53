"""torch's operators on packed weights: which are here, and what the processor makes of them."""

from collections.abc import Callable
from typing import Any

import torch

BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")
"""Any of them: products of bfloat16 cost less than those of float32."""

INT8 = ("amx_int8", "avx512_vnni", "avx_vnni")
"""Any of them: products of 8-bit numbers are added up exactly, and four at a time."""

AVX512 = ("avx512_f",)

AMX = ("amx_bf16",)
"""Products of whole tiles of bfloat16, which oneDNN uses."""


def operator(name: str) -> Callable[..., Any] | None:
    """``name``: "aten._weight_int4pack_mm_for_cpu". None where this torch has no such operator."""
    namespace, _, own = name.partition(".")
    found: Callable[..., Any] | None = getattr(getattr(torch.ops, namespace), own, None)
    return found


def needed(name: str) -> Callable[..., Any]:
    """An operator that :func:`lacking` has found to be there."""
    found = operator(name)
    assert found is not None, f"torch {torch.__version__} has no {name}, and nobody asked before"
    return found


def lacking(*names: str) -> str:
    """Why the operators cannot be used; empty where all are there."""
    absent = [name for name in names if operator(name) is None]
    return f"torch {torch.__version__} has no operator {', '.join(absent)}" if absent else ""


def processor_has(names: tuple[str, ...]) -> bool:
    """Whether the processor has any of these capabilities, as torch calls them."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in names)


def no_onednn() -> str:
    """Why oneDNN cannot be used; empty where it can."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch has no annotation there
    return "" if there else "this build of torch has no oneDNN"
