"""Which device, which dtype, how much memory: what "auto" chooses, and why."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.parallel import Replica

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def auto_device() -> str:
    """What "auto" stands for: CUDA where there is a device."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(wanted: str) -> None:
    """ConfigError for a kind of device that torch does not know. Whether there is one is asked at the start."""
    if wanted == "auto":
        return
    try:
        torch.device(wanted)
    except RuntimeError:
        kind = wanted.partition(":")[0]
        raise ConfigError(
            f"there is no kind of device called {kind!r}; give cpu, cuda, one of several such as cuda:1, or auto",
            "device") from None


def choose_device(wanted: str, notes: list[str]) -> str:
    """``wanted``, or what "auto" stands for. ConfigError where ``wanted`` is not there."""
    check_device(wanted)
    if wanted == "auto":
        device = auto_device()
        notes.append(f"device: {device} (auto: {'a' if device == 'cuda' else 'no'} CUDA device was found)")
        return device
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{wanted!r} cannot be used: {reason}; choose cpu, or auto", "device") from error
    return wanted


def place(device: str, replica: Replica, alone: bool, cuda_devices: int | None = None) -> tuple[str, int]:
    """Where an engine runs, and by how many engines its memory is shared.

    ``device`` is what the config names. A deployment's engines of one rank (``alone``) are dealt out over the CUDA
    devices, unless one is named; where there are other ranks, each has a device of its own, which it finds itself.
    ``cuda_devices``: None to count them.
    """
    if device != "cuda" or replica.count == 1:
        return device, replica.count
    if not alone:
        return device, 1
    count = torch.cuda.device_count() if cuda_devices is None else cuda_devices
    return f"cuda:{replica.first_rank % count}", -(-replica.count // count)


def choose_dtype(wanted: str, checkpoint_config: dict[str, Any], device: str, notes: list[str]) -> str:
    """``wanted`` or, for "auto", the checkpoint's own dtype if the device computes well in it."""
    if wanted != "auto":
        return wanted
    stored = checkpoint_config.get("dtype") or checkpoint_config.get("torch_dtype")
    stated = str(stored).removeprefix("torch.") if stored else "quantised or of no stated dtype"
    if stated == "float32":
        dtype, why = "float32", "as the checkpoint"
    elif stated == "float16" and device != "cpu":
        dtype, why = "float16", "as the checkpoint"
    elif stated == "float16":
        dtype, why = "float32", "the checkpoint is float16, which CPUs compute slowly and bfloat16 cannot hold"
    elif _has_bfloat16(device):
        dtype, why = "bfloat16", f"the checkpoint is {stated}, and the device has bfloat16 instructions"
    else:
        dtype, why = "float32", f"the checkpoint is {stated}, but the device has no bfloat16 instructions"
    notes.append(f"dtype: {dtype} (auto: {why})")
    return dtype


def free_bytes(device: str) -> int:
    """Memory that can still be taken, in bytes."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return free
    return min(_free_host_bytes(), _free_cgroup_bytes())


_NO_MEMORY = ("out of memory", "DefaultCPUAllocator", "Storage size calculation overflowed")
"""What torch says where it has only a RuntimeError for it: on CPUs, and for pinned memory."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """What torch raises where memory does not suffice becomes MemoryError, as numpy has it; nothing else does."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY):
            raise MemoryError(str(error)) from error
        raise


def _has_bfloat16(device: str) -> bool:
    kind = torch.device(device).type
    if kind == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _free_host_bytes() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Where the system does not say what is available, half of what is installed is a careful guess.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_cgroup_bytes() -> int:
    """What a container's limit leaves; caches that the kernel would give back count as taken."""
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - int(used))
