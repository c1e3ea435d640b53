"""Where weights come from: one face over safetensors directories and GGUF files, by Hugging Face's tensor names.

Every tensor is accounted for. What a model asks for and does not find, finds in another shape, or leaves untaken ends
the load with an error that lists the names.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch

from hotswap.core.errors import ComponentError, HotswapError, ModelLoadError
from hotswap.core.explain import nearest
from hotswap.core.interfaces.quantization import LinearWeight, Packed, Quantization
from hotswap.core.modeling.gguf import BlockRows, GGUFFile, Rows
from hotswap.core.modeling.gguf_checkpoint import TensorSource
from hotswap.core.modeling.linear import DenseLinear
from hotswap.core.modeling.mesh import Shard

IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
"""Buffers that old exporters wrote beside the weights and that follow from the config."""

_LISTED = 8


class WeightSource(ABC):
    """A checkpoint's tensors, each read when it is taken. Use as a context: leaving it without error calls finish()::

        with checkpoint.weights() as weights:
            model.load(weights)

    ``quantization`` packs what linear layers take; None: they keep it dense.
    """

    def __init__(self, location: str, progress: bool = False) -> None:
        self.location = location
        self.quantization = None
        self.taken = 0
        """Values that have been read, each shard counted by what it holds."""
        self._packed_values = self._packed_bytes = 0
        self._taken: set[str] = set()
        self._skipped: list[Callable[[str], bool]] = [lambda name: name.endswith(IGNORED_SUFFIXES)]
        self._missing: dict[str, None] = {}
        self._misshaped: dict[str, str] = {}
        self._progress = progress
        self._bar: Any = None

    @property
    def quantization(self) -> Quantization | None:
        return self._quantization

    @quantization.setter
    def quantization(self, quantization: Quantization | None) -> None:
        self._quantization = quantization
        self._formats = frozenset(() if quantization is None else quantization.support().blocks)
        """Of blocks that it takes as they are stored."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of all tensors in the checkpoint."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor. KeyError."""

    @abstractmethod
    def _read(self, name: str, dim: int, part: Shard | None) -> torch.Tensor:
        """The tensor, or indices ``part`` along ``dim`` of it, in its stored dtype (float32 from a GGUF file)."""

    def _read_blocks(self, name: str, dim: int, part: Shard | None) -> BlockRows | None:
        """The same as the file stores it; None where it is not stored in blocks that ``quantization`` takes."""
        return None

    def has(self, name: str) -> bool:
        return name in self.names()

    def take(self, name: str, shape: Sequence[int], dim: int = 0, part: Shard | None = None) -> torch.Tensor:
        """The tensor ``name`` on the CPU; its full shape must be ``shape``. ``part``: only these indices along ``dim``.

        What is missing or misshaped is reported by :meth:`finish`, all at once; until then the caller gets an empty
        tensor of the right shape, and nothing more is read.
        """
        return self._floating(name, self._take(name, tuple(shape), dim, part))

    def take_rows(
        self, name: str, shape: tuple[int, int], dim: int = 0, part: Shard | None = None,
        table: torch.Tensor | None = None,
    ) -> torch.Tensor | BlockRows:
        """The weight [O, I] of a linear layer, to be packed: as :meth:`take`, or in the file's own blocks where
        ``quantization`` takes them. ``table``: the same tensor, where somebody has taken it already and keeps it."""
        wanted = _part_of(shape, dim, part)
        if not self._known(name, shape):
            return torch.empty(wanted) if table is None else table
        part = part if wanted != shape else None
        blocks = self._read_blocks(name, dim, part)
        if table is not None:
            return table if blocks is None else blocks
        self._count(torch.Size(wanted).numel())
        self._packed_values += torch.Size(wanted).numel()
        return self._floating(name, self._read(name, dim, part)) if blocks is None else blocks

    def pack(self, weight: LinearWeight) -> Packed:
        """What a layer keeps of its weight. ComponentError where ``quantization`` raises."""
        quantization = self.quantization
        if quantization is None or self._broken:  # then the load ends in an error anyway
            packed: Packed = DenseLinear(weight)
        else:
            try:
                packed = quantization.pack(weight)
            except HotswapError:
                raise
            except Exception as error:
                raise ComponentError(quantization.kind, quantization.name, "pack", error) from error
        self._packed_bytes += packed.nbytes
        self._packed_values += 0 if weight.bias is None else weight.bias.numel()  # nbytes has it, too
        return packed

    def num_bytes(self, dtype: torch.dtype) -> int:
        """What a model of ``dtype`` keeps of all that was taken: packed forms as large as they are, the rest dense."""
        return (self.taken - self._packed_values) * dtype.itemsize + self._packed_bytes

    def take_integers(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """As :meth:`take`, a table of numbers as int64."""
        return self._take(name, tuple(shape), 0, None).long()

    def same(self, name: str, other: str, dtype: torch.dtype) -> bool:
        """Whether both hold the same values, in ``dtype``: ``name`` is nothing that anybody takes."""
        self._taken.add(name)
        if self._broken or self.shape(name) != self.shape(other):
            return self._broken
        return torch.equal(*(self._read(tensor, 0, None).to(dtype) for tensor in (name, other)))

    def _take(self, name: str, shape: tuple[int, ...], dim: int, part: Shard | None) -> torch.Tensor:
        wanted = _part_of(shape, dim, part)
        if not self._known(name, shape):
            return torch.empty(wanted)
        tensor = self._read(name, dim, part if wanted != shape else None)
        self._count(tensor.numel())
        return tensor

    def _known(self, name: str, shape: tuple[int, ...]) -> bool:
        """Note that the tensor is taken, and whether it is what it should be; False: nothing more is read."""
        self._taken.add(name)
        if not self.has(name):
            self._missing[name] = None
        elif self.shape(name) != shape:
            self._misshaped[name] = f"{name} has shape {self.shape(name)}, the config promises {shape}"
        return not self._broken

    def _floating(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{name} of {self.location} holds {tensor.dtype}: quantised weights are not read")
        return tensor

    @property
    def _broken(self) -> bool:
        return bool(self._missing or self._misshaped)

    def _count(self, values: int) -> None:
        self.taken += values
        self._advance(values)

    def skip(self, belongs_elsewhere: Callable[[str], bool]) -> None:
        """Names for which the predicate holds belong to another rank or need no reading: not unexpected."""
        self._skipped.append(belongs_elsewhere)

    def skipped(self, name: str) -> bool:
        """Whether a skip covers the tensor; some are covered from the start (``IGNORED_SUFFIXES``)."""
        return any(skip(name) for skip in self._skipped)

    def finish(self) -> None:
        """ModelLoadError listing what was missing or misshaped, and what nobody took. Idempotent."""
        self._close_bar()
        unexpected = [name for name in self.names() if name not in self._taken and not self.skipped(name)]
        problems = list(self._misshaped.values())[:_LISTED]
        if self._missing:
            problems.append(f"missing: {_listed(list(self._missing))}{self._nearest()}")
        if unexpected:
            problems.append(f"unexpected: {_listed(unexpected)}")
        if problems:
            raise ModelLoadError(
                f"the tensors of {self.location} are not those that its config promises: {'; '.join(problems)}. "
                "Check that config and weights belong together, or download the checkpoint again"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.finish()
        self._close_bar()

    def _nearest(self) -> str:
        near = nearest(next(iter(self._missing)), (name for name in self.names() if name not in self._taken))
        return f" (there is {near!r})" if near else ""

    def _advance(self, values: int) -> None:
        if not self._progress:
            return
        if self._bar is None:
            from tqdm import tqdm

            total = sum(torch.Size(self.shape(name)).numel() for name in self.names())
            self._bar = tqdm(
                total=total, desc="loading weights", unit=" values", unit_scale=True, leave=False,
                disable=None)  # unless stderr is a terminal
        self._bar.update(values)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _part_of(shape: tuple[int, ...], dim: int, part: Shard | None) -> tuple[int, ...]:
    return tuple(part.count if part and axis == dim else size for axis, size in enumerate(shape))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


class SafetensorsWeights(WeightSource):
    """``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists. Mapped, never unpickled."""

    def __init__(self, directory: Path, progress: bool = False) -> None:
        super().__init__(str(directory), progress)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in _weight_files(directory):
            for name, shape in _checked_header(file).items():
                if name in self._files:
                    raise ModelLoadError(f"tensor {name!r} is in {self._files[name].name} and in {file.name}: keep one")
                self._files[name] = file
                self._shapes[name] = shape

    def names(self) -> Sequence[str]:
        return tuple(self._shapes)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def _read(self, name: str, dim: int, part: Shard | None) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._files[name]
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt", device="cpu")
            except SafetensorError as error:
                raise ModelLoadError(f"{file} is damaged: download it again ({error})") from error
        if part is None:
            return cast(torch.Tensor, self._open[file].get_tensor(name))
        window = tuple(slice(part.start, part.stop) if axis == dim else slice(None) for axis in range(dim + 1))
        return cast(torch.Tensor, self._open[file].get_slice(name)[window])


class GGUFWeights(WeightSource):
    """A .gguf file's tensors as float32, dequantised one at a time, rows in Hugging Face's order; or in its blocks."""

    def __init__(self, file: GGUFFile, sources: dict[str, TensorSource], progress: bool = False) -> None:
        super().__init__(str(file.path), progress)
        self._file = file
        self._sources = sources

    def names(self) -> Sequence[str]:
        return tuple(self._sources)

    def has(self, name: str) -> bool:
        return name in self._sources

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        shape = self._file.tensors[source.gguf_name].shape
        return shape if source.item is None else shape[1:]

    def _read(self, name: str, dim: int, part: Shard | None) -> torch.Tensor:
        source, shape = self._sources[name], self.shape(name)
        if len(shape) == 2:
            return torch.from_numpy(
                self._file.dequantize(source.gguf_name, source.item, *_cut(shape[0], source.heads, dim, part)))
        values = self._file.dequantize(source.gguf_name, source.item)
        if source.heads:  # a bias
            values = values[_stored_rows(shape[0], source.heads)]
        tensor = torch.from_numpy(values)
        return tensor if part is None else tensor.narrow(dim, part.start, part.count)

    def _read_blocks(self, name: str, dim: int, part: Shard | None) -> BlockRows | None:
        source = self._sources[name]
        if self._file.format(source.gguf_name) not in self._formats:
            return None
        return self._file.blocks(
            source.gguf_name, source.item, *_cut(self.shape(name)[0], source.heads, dim, part))


def _cut(rows: int, heads: int | None, dim: int, part: Shard | None) -> tuple[Rows, slice]:
    """Which rows of a matrix in the file, and which of their columns, are ``part``, or all of it."""
    whole = slice(None)
    inner = whole if part is None else slice(part.start, part.stop)
    wanted, columns = (inner, whole) if dim == 0 else (whole, inner)
    return (_stored_rows(rows, heads)[wanted] if heads else wanted), columns


def _stored_rows(rows: int, heads: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Where each of a tensor's rows is in the file: llama.cpp keeps (first half, second half) of a head's rows
    interleaved, [H, D/2, 2], and Hugging Face one behind the other, [H, 2, D/2]."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{index} is damaged: download it again ({error!r})") from error
        files = [directory / name for name in sorted(set(weight_map.values()))]
        if absent := [file.name for file in files if file.parent != directory or not file.is_file()]:
            raise ModelLoadError(f"{index} lists files that are not there: {_listed(absent)}. Download them again")
        return files
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = [*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")]
        hint = ": pickled weights are not read, convert them to safetensors" if pickled else ""
        raise ModelLoadError(f"{directory} has no *.safetensors{hint}")
    return files


def _checked_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, after checking that the file is as long as its header says: a mapping of a file that was cut off
    reads as zeros."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            raise ModelLoadError(
                f"{file} is truncated: its header needs {8 + header_bytes} bytes, the file has {size}: "
                "download it again"
            )
        try:
            entries: dict[str, Any] = json.loads(stream.read(header_bytes))
            entries.pop("__metadata__", None)
            shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelLoadError(f"the header of {file} is damaged: download it again ({error!r})") from error
    expected = 8 + header_bytes + end
    if expected != size:
        state = "truncated" if size < expected else "longer than its header says"
        raise ModelLoadError(f"{file} is {state}: expected {expected} bytes, actual {size}: download it again")
    return shapes
