"""A stand-in for CUDA graphs on a CPU: it records operations and replays them as a graph would.

    monkeypatch.setitem(hotswap.core.execution.graphs.DEVICES, "cpu", RecordingGraphs)

As with the real ones, what is replayed are operations on addresses: no Python of the captured function runs again, a
number that it computed stays as it was, and memory that it was given and that has been freed since is gone. Unlike
there, that is an error and not a silent corruption.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hotswap.core.interfaces.graphs import GraphDevice, Replay

_READS_BACK = ("item", "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
"""Operations whose result the host waits for, or whose shape depends on what tensors hold."""

_INTEGER_POISON = 1 << 30


class StaleMemoryError(RuntimeError):
    """A replay would read or write memory that was freed after the capture."""


class ReadBackError(RuntimeError):
    """The captured function waits for the device."""


@dataclass(frozen=True)
class _Outside:
    """A tensor that was there before the capture: its address and shape, without keeping it alive."""

    storage: Any
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Outside":
        return cls(
            _weak(tensor.untyped_storage()), tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape),
            tensor.stride())

    def resolve(self, operation: str) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise StaleMemoryError(
                f"{operation} was captured with a tensor {list(self.size)} of {self.dtype} that has been freed since: "
                "its owner must keep it, and write into it instead of making a new one")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Operation:
    """``leaves`` and ``shape``: its arguments, flattened. ``results``: the tensors that it made, None where it returned
    memory that was there."""

    function: Any
    leaves: list[Any]
    shape: Any
    results: list[torch.Tensor | None]

    def replay(self) -> None:
        name = self.function.__name__
        args, kwargs = tree_unflatten(
            [leaf.resolve(name) if isinstance(leaf, _Outside) else leaf for leaf in self.leaves], self.shape)
        out = self.function(*args, **kwargs)
        if name.startswith("empty"):
            return
        for old, new in zip(self.results, _flat(out), strict=True):
            if old is not None:
                old.copy_(new)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's have no annotations
    """Runs operations and writes them down. ``made``: memory that belongs to the graph, by its storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in _READS_BACK or _picks_by_mask(func, args):
            raise ReadBackError(f"{func} makes the host wait for the device: it cannot be captured")
        kwargs = kwargs or {}
        leaves, shape = tree_flatten((args, kwargs))
        given = {_storage(x) for x in leaves if isinstance(x, torch.Tensor)}
        kept = [self._keep(x) for x in leaves]
        out = func(*args, **kwargs)
        results: list[torch.Tensor | None] = []
        for x in _flat(out):
            new = isinstance(x, torch.Tensor) and _storage(x) not in given and _storage(x) not in self.made
            results.append(x if new else None)
            if new:
                self.made[_storage(x)] = x
        self.operations.append(_Operation(func, kept, shape, results))
        return out

    def _keep(self, value: Any) -> Any:
        """The graph owns what was made in it, and knows of the rest where it lies."""
        if isinstance(value, torch.Tensor) and _storage(value) not in self.made:
            return _Outside.of(value)
        return value


class RecordingGraphs(GraphDevice):
    """``graphs``: operations of each capture; ``replays``: how many there were."""

    bytes_per_layer = 320 << 10

    def __init__(self, device: str = "cpu") -> None:
        self.graphs: list[int] = []
        self.replays = 0

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        recorder = _Recorder()
        with recorder:
            run()
        self.graphs.append(len(recorder.operations))
        _poison(recorder.made)
        return lambda: self._replay(recorder)

    def _replay(self, recorder: _Recorder) -> None:
        self.replays += 1
        for operation in recorder.operations:
            operation.replay()
        _poison(recorder.made)  # another graph's replay will have used the same pool


def _flat(out: Any) -> list[Any]:
    return [out] if isinstance(out, torch.Tensor) else tree_flatten(out)[0]


def _picks_by_mask(func: Any, args: Any) -> bool:
    """Whether the shape of the result depends on a mask."""
    return func.__name__.startswith("index.") and any(x is not None and x.dtype == torch.bool for x in args[1])


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _weak(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _poison(made: Mapping[int, torch.Tensor]) -> None:
    """What a captured step left in its own memory must be of no use to anybody."""
    for tensor in made.values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(_INTEGER_POISON if tensor.dtype in (torch.int32, torch.int64) else 0)
