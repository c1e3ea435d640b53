"""A model by its name: a directory, a .gguf file, a name of the catalogue, or a hub id; config, weights and tokenizer.

Opening reads configs and headers alone; weights are read when a model takes them.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotswap.core.errors import ConfigError, ModelLoadError
from hotswap.core.explain import nearest
from hotswap.core.modeling import catalogue, gguf_checkpoint
from hotswap.core.modeling.gguf import GGUFFile

if TYPE_CHECKING:
    from hotswap.core.modeling.tokenizer import Tokenizer
    from hotswap.core.modeling.weights import WeightSource

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


class Checkpoint(ABC):
    """config: as in config.json, whatever the format. generation_config: {} where there is none. chat_template: Jinja,
    None where there is none. warnings: what a user should know at the start. revision: changes whenever the files do.
    """

    def __init__(self, path: Path, config: dict[str, Any], revision: str, progress: bool) -> None:
        self.path = path
        self.config = config
        self.revision = revision
        self.progress = progress
        self.generation_config: dict[str, Any] = {}
        self.chat_template: str | None = None
        self.warnings: list[str] = []

    @abstractmethod
    def weights(self) -> "WeightSource":
        """A fresh source: ``with checkpoint.weights() as weights: model.load(weights)``."""

    @property
    def block_formats(self) -> frozenset[str]:
        """Formats of quantised blocks ("Q4_1") in which matrices are stored; empty where all are dense."""
        return frozenset()

    @property
    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Without one a model takes token ids alone."""

    @abstractmethod
    def _load_tokenizer(self) -> "Tokenizer": ...

    def tokenizer(self) -> "Tokenizer":
        """Loaded once. ConfigError where the checkpoint has none."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return self._load_tokenizer()

    @property
    def architecture(self) -> str:
        """The entry point of ``hotswap.model`` that can run it. ConfigError where the config names none."""
        architectures = self.config.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise ConfigError(
                f"the config of {self.path} has architectures={architectures!r}, expected a list of one name")
        return architectures[0]

    def eos_token_ids(self, vocab_size: int) -> frozenset[int]:
        """Every id that ends a text: those of the config, the generation config and the tokenizer, below the width of
        the head, ``vocab_size`` (a tokenizer may know more ids than the head has)."""
        stated = [self.config.get("eos_token_id"), self.generation_config.get("eos_token_id")]
        if self.has_tokenizer:
            stated.append(self.tokenizer().eos_id)
        return frozenset(id for value in stated for id in _ids(value) if 0 <= id < vocab_size)

    @property
    def bos_token_id(self) -> int | None:
        """The tokenizer's, else the config's."""
        bos = self.tokenizer().bos_id if self.has_tokenizer else None
        return bos if bos is not None else next(iter(_ids(self.config.get("bos_token_id"))), None)


def open_checkpoint(
    model: str, *, revision: str | None = None, cache_dir: str | Path | None = None, progress: bool = True,
) -> Checkpoint:
    """``model``: a directory with config.json, a .gguf file, a catalogue name, or a hub id ("owner/name").

    ``revision`` and ``cache_dir`` concern hub ids. ``progress``: show bars where stderr is a terminal. Raises
    ConfigError for a name that is none of these, ModelLoadError for damaged files.
    """
    path = catalogue.find(model) if model in catalogue.CATALOGUE else Path(model).expanduser()
    if model and path.exists():
        if revision is not None:
            raise ConfigError(
                f"{revision!r} was given, but {model} is no hub repository, which alone has revisions; leave it out",
                "model.revision")
        return _open_local(path, progress)
    is_path = path.suffix == ".gguf" or model.startswith((".", "/", "~"))
    if _HUB_ID.fullmatch(model) and not is_path:
        return _open_local(_download(model, revision, cache_dir, progress), progress)
    if is_path or len(path.parts) > 1:
        raise ConfigError(
            f"there is no file or directory {model!r}: give the path of a .gguf file, or of a directory that holds "
            "config.json", "model")
    near = nearest(model, catalogue.CATALOGUE)
    hint = f" Did you mean {near!r}?" if near else f" The catalogue has {sorted(catalogue.CATALOGUE)}."
    raise ConfigError(
        f"unknown model {model!r}: expected an existing directory or .gguf file, a hub id (owner/name), "
        f"or a catalogue name.{hint}", "model",
    )


def _open_local(path: Path, progress: bool) -> Checkpoint:
    if path.suffix == ".gguf" and path.is_file():
        return GGUFCheckpoint(path, progress)
    if path.is_file():
        raise ConfigError(f"{path} is a file that is not .gguf: name the directory that holds config.json", "model")
    if (path / "config.json").is_file():
        return DirectoryCheckpoint(path, progress)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return GGUFCheckpoint(found[0], progress)
    what = f"{len(found)} .gguf files, name one of them" if found else "neither config.json nor a .gguf file"
    raise ConfigError(f"{path} has {what}", "model")


def _download(repo: str, revision: str | None, cache_dir: str | Path | None, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no annotations
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": None if progress else True})

    try:
        return Path(snapshot_download(
            repo, revision=revision, cache_dir=cache_dir, allow_patterns=_HUB_FILES, tqdm_class=Bar))
    except Exception as error:  # offline, no such repository, gated, disk full: the library has no common base
        raise ConfigError(
            f"{repo!r} is no local path and could not be fetched from the hub ({type(error).__name__}: {error}). "
            "Check the name and the connection, or give a local directory or .gguf file", "model",
        ) from error


class DirectoryCheckpoint(Checkpoint):
    """A Hugging Face directory: config.json, *.safetensors, tokenizer.json, and the optional files beside them."""

    def __init__(self, path: Path, progress: bool = True) -> None:
        files = sorted(f for f in path.iterdir() if f.suffix in (".json", ".safetensors", ".jinja", ".model"))
        super().__init__(path, _read_json(path / "config.json"), _identity(files), progress)
        self.generation_config = _read_json(path / "generation_config.json", optional=True)
        self.tokenizer_config = _read_json(path / "tokenizer_config.json", optional=True)
        self.chat_template = self._find_chat_template()

    def weights(self) -> "WeightSource":
        from hotswap.core.modeling.weights import SafetensorsWeights

        return SafetensorsWeights(self.path, self.progress)

    @property
    def has_tokenizer(self) -> bool:
        from hotswap.core.modeling import tokenizer

        return tokenizer.has_tokenizer(self.path)

    def _load_tokenizer(self) -> "Tokenizer":
        from hotswap.core.modeling import tokenizer

        return tokenizer.from_directory(self.path, self.tokenizer_config)

    def _find_chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text("utf-8")
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
        return template


class GGUFCheckpoint(Checkpoint):
    """One .gguf file with everything in it."""

    def __init__(self, path: Path, progress: bool = True) -> None:
        self._file = GGUFFile(path)
        super().__init__(path, gguf_checkpoint.hf_config(self._file), _identity([path]), progress)
        self.chat_template = self._file.metadata.get("tokenizer.chat_template")
        if warning := gguf_checkpoint.check_pre_tokenizer(self._file):
            self.warnings.append(warning)

    def weights(self) -> "WeightSource":
        from hotswap.core.modeling.weights import GGUFWeights

        return GGUFWeights(self._file, gguf_checkpoint.tensor_sources(self._file, self.config), self.progress)

    @property
    def block_formats(self) -> frozenset[str]:
        formats = {self._file.format(name) for name, tensor in self._file.tensors.items() if len(tensor.shape) > 1}
        return frozenset(formats - gguf_checkpoint.DENSE_FORMATS)

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self._file.metadata

    def _load_tokenizer(self) -> "Tokenizer":
        from hotswap.core.modeling import tokenizer

        return tokenizer.from_gguf(self._file.metadata)


def _read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} holds a {type(value).__name__}, expected an object")
    return value


def _identity(files: Iterable[Path]) -> str:
    """A digest of paths, sizes and times of change: cheap, and different whenever the weights could be."""
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _ids(value: Any) -> list[int]:
    """Configs state one id, a list of ids, or nothing."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [id for id in ids if not isinstance(id, int) or isinstance(id, bool)]:
        raise ModelLoadError(f"the config states the token id {wrong[0]!r}, expected an integer")
    return ids
