"""How each row of logits is sampled: the parameters of the worker's requests, and the rows of a step that share a path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

import numpy as np
import torch

from hotswap.core.execution.randomness import Array, Stream, keys, uniforms
from hotswap.core.request import SamplingParams

_LARGEST_VOCABULARY = 1 << 31
_SMALL_K = 127
"""With no more, rows share a group whatever their top-k: looking for fewer would not be quicker."""

_COLUMNS = np.dtype([
    ("parameters", np.float64, (5,)), ("seed", np.uint64), ("greedy", np.bool_), ("filtered", np.bool_),
])  # fmt: skip


class Scratch:
    """Memory of a worker's that serves each step anew: that of large new tensors is cleared by the system page by page,
    which takes longer than what is done in it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, purpose: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor for ``purpose``, which always has the same ``dtype``, until the next one for it."""
        size, buffer = prod(shape), self._buffers.get(purpose)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[purpose] = torch.empty(size, dtype=dtype, device=self._device)
        return buffer[:size].view(*shape)


@dataclass(frozen=True)
class Group:
    """Rows of a batch that take the same path.

    ``rows`` [n] int64, rising; ``parameters`` [n, 5] float64, infinity being top-k, top-p or typical turned off.
    ``filtered``: every row has top-k or top-p; otherwise none has. ``uses_mass``: no row has top-k, so that top-p is a
    share of the mass of all tokens; otherwise every row has top-k. ``largest_k``: of the rows' top-k, 0 where there is
    none. ``cuts_min_p``, ``cuts_typical``: some row has that filter.
    """

    rows: torch.Tensor
    parameters: torch.Tensor
    filtered: bool
    cuts_min_p: bool
    cuts_typical: bool
    uses_mass: bool
    largest_k: int

    @property
    def cuts_any(self) -> bool:
        """Whether what is left of a row depends on more of it than its best token."""
        return self.filtered or self.cuts_typical

    @property
    def temperature(self) -> torch.Tensor:
        return self.parameters[:, 0:1]

    @property
    def top_k(self) -> torch.Tensor:
        return self.parameters[:, 1:2]

    @property
    def top_p(self) -> torch.Tensor:
        return self.parameters[:, 2:3]

    @property
    def min_p(self) -> torch.Tensor:
        return self.parameters[:, 3:4]

    @property
    def typical_p(self) -> torch.Tensor:
        return self.parameters[:, 4:5]

    def take(self, index: torch.Tensor) -> "Group":
        """The rows at ``index`` of this group."""
        return replace(self, rows=self.rows[index], parameters=self.parameters[index])


@dataclass(frozen=True)
class SamplingBatch:
    """How each of N rows of logits is sampled: made by :meth:`SamplingTable.batch`.

    ``positions`` [N]: the index in its sequence of the token that each row chooses.
    """

    positions: Array
    columns: Array = field(repr=False)
    groups: tuple[Group, ...] = field(repr=False)
    scratch: Scratch = field(repr=False)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def greedy(self) -> Array:
        """[N] bool."""
        result: Array = self.columns["greedy"]
        return result

    @property
    def has_greedy(self) -> bool:
        """Whether any is: those that are not lie in groups."""
        return sum(len(group.rows) for group in self.groups) < len(self)

    def keys(self, stream: Stream) -> Array:
        """[N] int64: what each row's random numbers are made of."""
        return keys(self.columns["seed"], self.positions, stream).view(np.int64)

    def uniforms(self, stream: Stream) -> Array:
        return uniforms(self.columns["seed"], self.positions, stream)

    def select(self, rows: Array) -> "SamplingBatch":
        """The batch of these rows alone."""
        columns = self.columns[rows]
        device = self.groups[0].rows.device if self.groups else torch.device("cpu")
        return SamplingBatch(self.positions[rows], columns, _group(columns, device), self.scratch)


class SamplingTable:
    """The sampling parameters of the worker's requests, as columns, so that a step's batch is one gather.

    The last batch's groups are kept: a decode step of the same rows as before costs only its positions.
    """

    def __init__(self, device: "torch.device | str" = "cpu", vocab_size: int = _LARGEST_VOCABULARY) -> None:
        """``vocab_size``: the width of the logits. A top-k that leaves all of them is none, and costs nothing."""
        self._device, self._vocab_size = torch.device(device), vocab_size
        self._scratch = Scratch(self._device)
        self._columns = np.zeros(64, dtype=_COLUMNS)
        self._slots: dict[str, int] = {}
        self._free = list(range(len(self._columns)))
        self._last: tuple[tuple[str, ...], Array, tuple[Group, ...]] | None = None

    def add(self, request: str, params: SamplingParams, seed: int) -> None:
        """A request arrives, or arrives again with other parameters."""
        slot = self._slots.get(request)
        if slot is None:
            slot = self._slots[request] = self._free.pop() if self._free else self._grow()
        self._columns[slot] = self._record(params, seed)
        self._last = None

    def _record(self, params: SamplingParams, seed: int) -> tuple[Any, ...]:
        # Off is infinity: the running sum of a filter that is off stays below its limit whatever the rounding.
        top_k = float(params.top_k) if 0 < params.top_k < self._vocab_size else inf
        top_p, typical_p = (p if p < 1.0 else inf for p in (params.top_p, params.typical_p))
        parameters = (params.temperature, top_k, top_p, params.min_p, typical_p)
        return parameters, seed % 2**64, params.greedy, min(top_k, top_p) < inf

    def _grow(self) -> int:
        size = len(self._columns)
        self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
        self._free.extend(range(size + 1, 2 * size))
        return size

    def remove(self, request: str) -> None:
        """The request is gone. Unknown names are ignored."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)
            self._last = None

    def batch(self, requests: Sequence[str], positions: "Array | Sequence[int]") -> SamplingBatch:
        """One entry of each a row of logits; a request that verifies k drafts has k + 1 rows, positions rising."""
        names = tuple(requests)
        if self._last is None or self._last[0] != names:
            columns = self._columns[[self._slots[name] for name in names]]
            self._last = names, columns, _group(columns, self._device)
        _, columns, groups = self._last
        return SamplingBatch(np.asarray(positions, dtype=np.int64), columns, groups, self._scratch)


def _group(columns: Array, device: torch.device) -> tuple[Group, ...]:
    """The rows that are not greedy, by the path they take."""
    groups = []
    paths = _paths(columns, device)
    for path in np.unique(paths[~columns["greedy"]]):
        rows = np.flatnonzero(~columns["greedy"] & (paths == path))
        parameters = columns["parameters"][rows]
        top_k, min_p, typical_p = parameters[:, 1], parameters[:, 3], parameters[:, 4]
        has_top_k = top_k < inf
        groups.append(Group(
            rows=torch.from_numpy(rows).to(device),
            parameters=torch.from_numpy(parameters).to(device),
            filtered=bool(columns["filtered"][rows[0]]),
            cuts_min_p=bool((min_p > 0).any()),
            cuts_typical=bool((typical_p < inf).any()),
            uses_mass=not has_top_k.any(),
            largest_k=int(top_k[has_top_k].max(initial=0)),
        ))  # fmt: skip
    return tuple(groups)


def _paths(columns: Array, device: torch.device) -> Array:
    """[N]: 0 without top-k and top-p, 1 with top-p alone, else 2 or more.

    On a CPU as many of a group's best tokens are looked for as its largest top-k wants, and one request must not make
    the others' share of a step dear: there, rows share a group whose top-k is within a factor of two. An accelerator
    sorts everything.
    """
    top_k = columns["parameters"][:, 1]
    has_top_k = top_k < inf
    if device.type != "cpu":
        return np.where(has_top_k, 2, columns["filtered"])
    _, bits = np.frexp(np.clip(top_k, _SMALL_K, _LARGEST_VOCABULARY))
    return np.where(has_top_k, bits, columns["filtered"])
