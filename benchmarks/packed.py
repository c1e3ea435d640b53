"""Results of experiments as the repository keeps them: with all samples, packed, and without paths of a machine."""

import gzip
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hotswap.lab.records import Result
from hotswap.lab.report import read_result


def pack(plain: Path, into: Path, roots: Sequence[Path]) -> None:
    """Keep a result with all its samples. Paths in it that lie below one of the ``roots`` begin there."""
    text = plain.read_text("utf-8")
    for root in roots:
        text = text.replace(f"{root}/", "")
    into.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_packed(file: Path) -> Result:
    with tempfile.TemporaryDirectory() as room:
        plain = Path(room) / "result.json"
        plain.write_bytes(gzip.decompress(file.read_bytes()))
        return read_result(plain)
