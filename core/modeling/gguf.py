"""The GGUF container (llama.cpp's file format, versions 2 and 3): metadata, tensor table, dequantisation.

The header is parsed here and not by the ``gguf`` package, whose reader makes one array object per string of the
vocabulary and so needs seconds where this needs tenths; the block formats are dequantised by that package.
"""

import mmap
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hotswap.core.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

Rows = slice | np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class GGUFTensor:
    """``shape`` in torch's order, slowest first; ``offset`` from the start of the file; ``type`` is ggml's type id."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class BlockRows:
    """Rows of a tensor as the file stores them: ``data`` uint8 [O, bytes of a row], blocks of ``block_values`` values
    in the format ``type`` ("Q4_1"), one behind the other.

    Of a row's values those from number ``first`` on are meant, ``width`` of them (None: all): a part of the columns may
    begin and end within a block.
    """

    type: str
    data: "torch.Tensor"
    block_values: int
    block_bytes: int
    first: int = 0
    width: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I), in values."""
        rows, row_bytes = self.data.shape
        stored = row_bytes // self.block_bytes * self.block_values
        return rows, stored - self.first if self.width is None else self.width

    def __getitem__(self, rows: slice) -> "BlockRows":
        """Some of the rows, in the same memory."""
        return replace(self, data=self.data[rows])

    def dequantize(self) -> "torch.Tensor":
        """[O, I] float32."""
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values = torch.from_numpy(dequantize(self.data.numpy(), GGMLQuantizationType[self.type]))
        return values[:, self.first : self.first + self.shape[1]]


class GGUFFile:
    """A mapped .gguf file: ``metadata`` by key (arrays as lists), ``tensors`` by llama.cpp's names.

    Opening reads the header alone. ModelLoadError for anything that is not a whole, readable GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        if self.size < 24:
            raise ModelLoadError(f"{path} has {self.size} bytes, too few for a GGUF header: download it again")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header()
        except (_Damaged, struct.error, ValueError, TypeError, OverflowError) as error:
            what = error if isinstance(error, _Damaged) else "a value runs past the end of the file, or cannot be right"
            raise ModelLoadError(
                f"the header of {path} is damaged or cut off: {what} (the file has {self.size} bytes); "
                "download it again"
            ) from error

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path} is not a GGUF file: it starts with {self._map[:4]!r}, expected b'GGUF'")
        version, num_tensors, num_fields = struct.unpack_from("<IQQ", self._map, 4)
        if version not in _VERSIONS:
            raise ModelLoadError(f"{self.path} is GGUF version {version}, supported are {_VERSIONS}: convert it again")
        cursor = _Cursor(self._map, 24)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        entries = [cursor.tensor_entry() for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment <= 0:
            raise ModelLoadError(f"{self.path} states general.alignment {alignment}, expected a positive number")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {
            name: GGUFTensor(name, shape, type_id, data_start + offset, self._tensor_bytes(name, shape, type_id))
            for name, shape, type_id, offset in entries
        }
        end = max((t.offset + t.num_bytes for t in self.tensors.values()), default=data_start)
        if end > self.size:
            raise ModelLoadError(
                f"{self.path} is truncated: its tensors need {end} bytes, the file has {self.size}: download it again"
            )

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        except (ValueError, KeyError) as error:
            raise ModelLoadError(
                f"tensor {name!r} of {self.path} has the unknown ggml type {type_id}: a newer gguf package may know it"
            ) from error
        if not shape or shape[-1] % block_values:
            raise ModelLoadError(
                f"tensor {name!r} of {self.path} has shape {shape}, rows must be multiples of {block_values}")
        return cast(int, prod(shape) // block_values * block_bytes)

    def dequantize(
        self, name: str, index: int | None = None, rows: "Rows" = slice(None), columns: slice = slice(None),
    ) -> "np.ndarray[Any, Any]":
        """The values of a tensor as float32, in memory of their own; or only those at ``index`` of its first axis. Of a
        matrix only ``rows`` and ``columns``, as :meth:`blocks` takes them."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        shape, kind = tensor.shape if index is None else tensor.shape[1:], GGMLQuantizationType(tensor.type)
        try:
            if len(shape) == 2:
                return self.blocks(name, index, rows, columns).dequantize().numpy()
            values = dequantize(self._raw(tensor, index).reshape(*shape[:-1], -1), kind)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"tensor {name!r} of {self.path} is stored as {kind.name}, which cannot be read") from error
        return np.require(values, np.float32, "W").reshape(shape)  # not where the file is mapped

    def blocks(
        self, name: str, index: int | None = None, rows: "Rows" = slice(None), columns: slice = slice(None),
    ) -> BlockRows:
        """A tensor of two dimensions, or of three at ``index`` of its first axis, as it is stored: of its ``rows`` (a
        slice, or their numbers in the order that is wanted) the whole blocks in which ``columns`` lie. In a copy, which
        outlives the file, of these alone."""
        import torch
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor = self.tensors[name]
        kind = GGMLQuantizationType(tensor.type)
        size, num_bytes = GGML_QUANT_SIZES[kind]
        start, stop, _ = columns.indices(tensor.shape[-1])
        stored = self._raw(tensor, index).reshape(tensor.shape[-2], -1, num_bytes)
        wanted = stored[:, start // size : -(-stop // size)][rows]
        data = np.require(wanted, requirements=("C", "W"))  # not the mapped file
        return BlockRows(
            kind.name, torch.from_numpy(data.reshape(len(data), -1)), size, num_bytes, start % size, stop - start)

    def format(self, name: str) -> str:
        """The format in which a tensor is stored: "F32", "Q4_1"."""
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(self.tensors[name].type).name)

    def _raw(self, tensor: GGUFTensor, index: int | None) -> "np.ndarray[Any, Any]":
        """The tensor's bytes, or those at ``index`` of its first axis, where the file is mapped."""
        num_bytes = tensor.num_bytes if index is None else tensor.num_bytes // tensor.shape[0]
        return np.frombuffer(self._map, np.uint8, num_bytes, tensor.offset + (index or 0) * num_bytes)


class _Damaged(Exception):
    """What in a header cannot be, and where."""


class _Cursor:
    """Reads little-endian values one after the other; struct.error where the file ends too soon."""

    def __init__(self, buffer: mmap.mmap, position: int) -> None:
        self.buffer = buffer
        self.position = position

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.buffer, self.position)
        self.position += struct.calcsize(code)
        return value

    def string(self) -> str:
        (value,) = self.strings(1)
        return value

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id != _ARRAY:
            raise _Damaged(f"unknown metadata type {type_id} at offset {self.position}")
        element, count = struct.unpack_from("<IQ", self.buffer, self.position)
        self.position += 12
        if element == _STRING:
            return self.strings(count)
        if element not in _SCALARS:
            raise _Damaged(f"unknown array element type {element} at offset {self.position}")
        code = f"<{count}{_SCALARS[element][1]}"
        values = struct.unpack_from(code, self.buffer, self.position)
        self.position += struct.calcsize(code)
        return list(values)

    def strings(self, count: int) -> list[str]:
        # A vocabulary has 10^5 of them: one loop over local names, which is several times faster than string().
        buffer, position, size, unpack = self.buffer, self.position, len(self.buffer), _U64.unpack_from
        values = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(buffer, position)[0]
            if position > size:
                raise _Damaged(f"a string at offset {start} does not fit into the file")
            values.append(buffer[start:position].decode("utf-8"))
        self.position = position
        return values

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.scalar("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise _Damaged(f"tensor {name!r} has {num_dimensions} dimensions")
        dims = [self.scalar("<Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(dims)), self.scalar("<I"), self.scalar("<Q")
