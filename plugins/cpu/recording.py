"""Records a step on a CPU and replays it: kernels of our own by one call for all that follow each other, operators of
torch's one by one, and nothing else of the Python that asked for them.

Where a decoding step has few rows, Python takes as long to say where the tensors of a layer are as the threads to
multiply. What it says is the same for each step of as many rows, as long as the tensors lie where they lay: those that
are made within the step get memory of the recorder's own (:mod:`.arena`).
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hotswap.core.interfaces.graphs import CaptureError, GraphDevice, Replay
from hotswap.plugins.cpu.arena import Arena
from hotswap.plugins.cpu.team import Call, Kernel, compile_kernels, parallel_address, recording

_READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__})
"""Functions that give Python what a tensor holds, and that torch does not dispatch."""

_SPLITS = frozenset({torch.tensor_split, torch.Tensor.tensor_split})
"""Functions that read a tensor which says where to split, without an operator for it."""

_COLLECTS = frozenset({torch.tensor, torch.as_tensor})
"""Functions that read the tensors of a list."""

_SUSPECT = _READS | _SPLITS | _COLLECTS

_SHAPED_BY_VALUES = frozenset({
    "nonzero", "nonzero_numpy", "argwhere", "where.default", "masked_select", "bincount", "repeat_interleave.Tensor",
    "repeat_interleave.self_Tensor", "narrow.Tensor", "one_hot", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive"})
"""Operators, or overloads, whose result has a shape that depends on what tensors hold."""

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators that give memory and do nothing with it."""


class _Kind(Enum):
    """What is to be done for a replay of an operator."""

    EMPTY = auto()  # nothing
    VIEW = auto()  # nothing
    READS = auto()  # it cannot be replayed
    WRITES = auto()  # the same again, into its arguments
    ANY = auto()  # the same again, or nothing, if what it gave is another's memory


@cache
def _kind(operator: Any) -> _Kind:
    name = operator.overloadpacket.__name__
    if {name, f"{name}.{operator._overloadname}"} & _SHAPED_BY_VALUES:
        return _Kind.READS
    if name in _EMPTY:
        return _Kind.EMPTY
    if operator._schema.is_mutable:
        return _Kind.WRITES
    # Those that are made of others, such as ``contiguous``, are views or not, as it comes.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    return _Kind.VIEW if operator.is_view and not composite else _Kind.ANY


class StepRecorder(GraphDevice):
    """For CPUs. Of what is neither a kernel of ours nor an operator of torch's, nothing is recorded: see
    :func:`hotswap.plugins.cpu.team.recording`."""

    on_demand = True
    bytes_per_layer = 16 << 10

    def __init__(self) -> None:
        self._arena = Arena()

    def setting(self) -> int:
        """Of how many threads the teams are that a replay calls for."""
        return torch.get_num_threads()

    def capture(self, run: Callable[[], None]) -> Replay:
        replay: Kernel = import_module("hotswap.plugins.cpu.replay_kernels").replay  # late: it imports numba
        compile_kernels([replay])
        parts = list[Call | Replay]()
        faults = _Faults()
        operators = _Operators(self._arena, parts.append, faults)
        try:
            with recording(parts.append), operators, _NoReading(faults):
                run()
        except Exception as error:  # the same step, run eagerly, tells whether the fault is its own
            raise CaptureError(f"recording it raised {type(error).__name__}: {error}") from error
        faults.check()
        return _Record(replay, parts, (self._arena, operators.outside))


class _Record:
    """``memory``: what keeps all that calls have the addresses of."""

    def __init__(self, replay: Kernel, parts: Sequence[Call | Replay], memory: Any) -> None:
        self._memory, self._steps = memory, list[Replay]()
        for is_call, group in groupby(parts, lambda part: isinstance(part, Call)):
            some: list[Any] = list(group)
            self._steps += [_Calls(replay, some)] if is_call else some

    def __call__(self) -> None:
        for step in self._steps:
            step()


class _Calls:
    """Calls of kernels without anything between them: the words of the kernel that makes them, as
    :mod:`.replay_words` names them."""

    def __init__(self, replay: Kernel, calls: Sequence[Call]) -> None:
        self._replay, self._owners = replay, [call.owner for call in calls]
        offsets = np.cumsum([0, *(len(call.kept) for call in calls)])
        self._kept = np.frombuffer(b"".join(call.kept for call in calls), np.uint8)
        start = self._kept.ctypes.data
        self._calls = np.array([
            (call.kernel, call.words, start + offset, len(call.kept), call.shared)
            for call, offset in zip(calls, offsets, strict=False)], np.int64)
        threads = torch.get_num_threads()
        self.memory = np.array(
            [self._calls.ctypes.data, len(calls), parallel_address() if threads > 1 else 0, threads], np.int64)
        self.address, self.size = self.memory.ctypes.data, self.memory.nbytes

    def __call__(self) -> None:
        self._replay(self, shared=False)


class _Faults:
    """What cannot be recorded, as it is found. What is recorded is carried through nevertheless: begun anew, it would
    change twice what it changes."""

    def __init__(self) -> None:
        self._first = ""

    def reads(self, what: object) -> None:
        self._first = self._first or f"{what} makes Python wait for what tensors hold"

    def check(self) -> None:
        """CaptureError with the first of them."""
        if self._first:
            raise CaptureError(self._first)


class _NoReading(TorchFunctionMode):
    """What Python reads of a tensor would be the same in each replay."""

    def __init__(self, faults: _Faults) -> None:
        super().__init__()
        self._faults = faults

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SUSPECT and _reads_unseen(func, args, kwargs):
            self._faults.reads(f"{'torch' if func in _COLLECTS else 'Tensor'}.{func.__name__}")
        return func(*args, **kwargs)


def _reads_unseen(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether one of those that are suspect reads what tensors hold."""
    if func in _SPLITS:
        return _has_tensors((args[1:], [x for name, x in kwargs.items() if name not in ("input", "self")]))
    if func in _COLLECTS:
        data = args[0] if args else kwargs.get("data")
        return isinstance(data, list | tuple) and _has_tensors(data)
    return True


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in tree_leaves(tree))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's have no annotations
    """Runs torch's operators; what they make lies in the arena; and says by ``note`` what does the same again.
    ``outside``: tensors elsewhere that nothing else keeps, since what gave them is not run again."""

    def __init__(self, arena: Arena, note: Callable[[Replay], None], faults: _Faults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena, self._note, self._faults = arena, note, faults
        self.outside: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch keeps its compiler away from what is below, which it can only once it has imported it: more
        than a second of each start. Nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind is _Kind.EMPTY:  # most of what a layer of ours asks of torch: these two are worth short ways
            return self._arena.like(func(*args, **kwargs))
        if kind is _Kind.VIEW:
            return self._kept(func(*args, **kwargs))
        given = {_identity(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs)
        if kind is _Kind.READS or _reads_values(func, args, out):
            self._faults.reads(func)
            return out
        new = {
            place: x for place, x in enumerate(tree_leaves(out))
            if isinstance(x, torch.Tensor) and _identity(x) not in given}
        if not new and kind is not _Kind.WRITES:  # a view after all, as of what is contiguous already
            return self._kept(out)
        ours = {place: self._arena.like(x) for place, x in new.items()}
        for place, x in new.items():
            ours[place].copy_(x)
        self._note(self._again(func, args, kwargs, ours))
        by_origin = {id(x): ours[place] for place, x in new.items()}
        return tree_map_only(torch.Tensor, lambda x: by_origin.get(id(x), x), out)

    def _kept(self, views: Any) -> Any:
        for x in (views,) if isinstance(views, torch.Tensor) else tree_leaves(views):
            if not self._arena.holds(x):
                self.outside.append(x)
        return views

    def _again(self, func: Any, args: Any, kwargs: Any, results: Mapping[int, torch.Tensor]) -> Replay:
        """It keeps no block: what lies in one is there as long as the step needs it."""
        args, kwargs, targets = tree_map_only(torch.Tensor, self._arena.borrowed, (args, kwargs, dict(results)))

        def again() -> None:
            leaves = tree_leaves(func(*args, **kwargs))
            for place, target in targets.items():
                target.copy_(leaves[place])

        return again


def _identity(tensor: torch.Tensor) -> int:
    """Of its memory; of what has a layout of its own, such as oneDNN's, of the tensor."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    address: int = tensor.untyped_storage()._cdata
    return address


def _reads_values(operator: Any, args: Any, out: Any) -> bool:
    """Whether what tensors hold decides over numbers that Python gets, or over the shape of what is picked."""
    if operator.overloadpacket is torch.ops.aten.index and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
        return True
    return any(isinstance(x, int | float | complex) for x in tree_leaves(out))
