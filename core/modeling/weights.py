"""Where weights come from: one face over safetensors directories and GGUF files, by Hugging Face's tensor names.

Every tensor is accounted for. What a model asks for and does not find, finds in another shape, or leaves untaken ends
the load with an error that lists the names.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch

from hotswap.core.errors import ModelLoadError
from hotswap.core.explain import nearest
from hotswap.core.modeling.gguf import GGUFFile
from hotswap.core.modeling.gguf_checkpoint import TensorSource
from hotswap.core.modeling.mesh import Shard

IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
"""Buffers that old exporters wrote beside the weights and that follow from the config."""

_LISTED = 8


class WeightSource(ABC):
    """A checkpoint's tensors, each read when it is taken. Use as a context: leaving it without error calls finish()::

        with checkpoint.weights() as weights:
            model.load(weights)
    """

    def __init__(self, location: str, progress: bool = False) -> None:
        self.location = location
        self.taken = 0
        """Values that have been read, each shard counted by what it holds."""
        self._taken: set[str] = set()
        self._skipped: list[Callable[[str], bool]] = [lambda name: name.endswith(IGNORED_SUFFIXES)]
        self._missing: list[str] = []
        self._misshaped: list[str] = []
        self._progress = progress
        self._bar: Any = None

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of all tensors in the checkpoint."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor. KeyError."""

    @abstractmethod
    def _read(self, name: str, dim: int, part: Shard | None) -> torch.Tensor:
        """The tensor, or indices ``part`` along ``dim`` of it, in its stored dtype (float32 where quantised)."""

    def has(self, name: str) -> bool:
        return name in self.names()

    def take(self, name: str, shape: Sequence[int], dim: int = 0, part: Shard | None = None) -> torch.Tensor:
        """The tensor ``name`` on the CPU; its full shape must be ``shape``. ``part``: only these indices along ``dim``.

        What is missing or misshaped is reported by :meth:`finish`, all at once; until then the caller gets an empty
        tensor of the right shape, and nothing more is read.
        """
        tensor = self._take(name, tuple(shape), dim, part)
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{name} of {self.location} holds {tensor.dtype}: quantised weights are not read")
        return tensor

    def take_integers(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """As :meth:`take`, a table of numbers as int64."""
        return self._take(name, tuple(shape), 0, None).long()

    def _take(self, name: str, shape: tuple[int, ...], dim: int, part: Shard | None) -> torch.Tensor:
        wanted = tuple(part.count if part and axis == dim else size for axis, size in enumerate(shape))
        self._taken.add(name)
        if not self.has(name):
            self._missing.append(name)
        elif self.shape(name) != shape:
            self._misshaped.append(f"{name} has shape {self.shape(name)}, the config promises {shape}")
        if self._missing or self._misshaped:
            return torch.empty(wanted)
        tensor = self._read(name, dim, part if wanted != shape else None)
        self.taken += tensor.numel()
        self._advance(tensor)
        return tensor

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
        problems = self._misshaped[:_LISTED]
        if self._missing:
            problems.append(f"missing: {_listed(self._missing)}{self._nearest()}")
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
        near = nearest(self._missing[0], (name for name in self.names() if name not in self._taken))
        return f" (there is {near!r})" if near else ""

    def _advance(self, tensor: torch.Tensor) -> None:
        if not self._progress:
            return
        if self._bar is None:
            from tqdm import tqdm

            total = sum(torch.Size(self.shape(name)).numel() for name in self.names())
            self._bar = tqdm(
                total=total, desc="loading weights", unit=" values", unit_scale=True, leave=False,
                disable=None)  # unless stderr is a terminal
        self._bar.update(tensor.numel())

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


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
    """A .gguf file's tensors as float32, dequantised one at a time, rows in Hugging Face's order."""

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
        source = self._sources[name]
        tensor = torch.from_numpy(self._file.dequantize(source.gguf_name, source.item))
        if source.heads:
            # llama.cpp keeps (first half, second half) of a head's rows interleaved: [.., D/2, 2] back to [.., 2, D/2].
            paired = tensor.reshape(source.heads, -1, 2, *tensor.shape[1:])
            tensor = paired.transpose(1, 2).reshape(tensor.shape)
        return tensor if part is None else tensor.narrow(dim, part.start, part.count)


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
