"""Runs strangers' code to look at it: what it prints is no part of our answer, and what it starts ends with it."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Standard output becomes standard error, for code that is not Python's, too."""
    with contextlib.redirect_stdout(sys.stderr):
        _flush()
        kept = os.dup(1)
        try:
            os.dup2(2, 1)
            yield
        finally:
            _flush()
            os.dup2(kept, 1)
            os.close(kept)


def _flush() -> None:
    """What Python and C's stdio still hold goes where it was written to, and not where their output goes next."""
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    ctypes.CDLL(None).fflush(None)


class Ended(NamedTuple):
    """``code`` is None for what was ended because its time was over. Bytes that are no UTF-8 are replaced."""

    code: int | None
    out: str
    err: str


def run_child(command: Sequence[str], timeout: float, folder: Path | None = None) -> Ended:
    """Run ``command`` in ``folder``, in a session of its own, with the modules that this process finds. After
    ``timeout`` seconds, and where we are interrupted, it is ended with all that it has started."""
    with subprocess.Popen(
        command, cwd=folder, env=surroundings(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    ) as process:
        try:
            said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            said = error.stdout or b"", error.stderr or b""
        finally:
            code: int | None = process.returncode
            if code is None:  # it has not been waited for: its number is still its group's
                os.killpg(process.pid, signal.SIGKILL)
    out, err = (text.decode(errors="replace") for text in said)
    return Ended(code, out, err)


def surroundings() -> dict[str, str]:
    """The environment of a child that finds the modules which this process finds."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    found.pop("PYTEST_ADDOPTS", None)  # is about the tests of whoever has set it
    return found
