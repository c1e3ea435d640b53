"""Runs kernels of our own on the threads of torch's operators, so that no second pool fights for the cores.

torch's operators fork and join through an OpenMP runtime, which keeps a pool of threads for each thread that calls it.
Every such runtime has the entry point that GCC's compiled code calls, ``GOMP_parallel`` (LLVM's has it for
compatibility), and what it runs is any C function of one pointer. numba compiles such functions, and no compiler needs
to be installed for that. The call releases the interpreter's lock, and several threads may call at once.
Calls can be recorded (:func:`recording`), and made again without Python: :mod:`.recording` does that.

A kernel takes the address of an array of int64 words: addresses, sizes, strides, whatever it was made for. All threads
of the team run it at once with the same words; they divide the work among themselves by an atomic counter
(:func:`hotswap.plugins.cpu.machine.fetch_add`), so that a thread that has lost its core for a while does less, and any
number of threads is enough. The team is the one that torch's operators have, or the calling thread alone, and nothing
between: libgomp ends the threads that a smaller team leaves over, and the next operator would have to start others.

What a kernel may use is in :mod:`.machine` and :mod:`.vectors`; these, and the modules that have kernels, import numba,
which takes most of a second: import them where a part is bound, not where it is described.
"""

import ctypes
import gc
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from tqdm import tqdm

from hotswap.core.errors import ConfigError

logger = logging.getLogger(__name__)

OPTIONS = {"nopython": True, "error_model": "numpy", "boundscheck": False}
"""Of numba, for kernels: no checks of indices and divisors."""

RUNTIMES = ("libgomp*", "libomp*", "libiomp*")
"""OpenMP runtimes that torch may have brought along."""


def check_numba(what: str) -> None:
    """ConfigError that names ``what`` where numba is not installed."""
    if find_spec("numba") is None:
        raise ConfigError(
            f"{what} needs the package numba, which is not installed: pip install numba, or choose another")


@cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel(function, data, threads, flags)`` of the runtime that torch's operators are bound to: the first
    one in the process's global scope, or else one of torch's own that is loaded. None where there is neither."""
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return None
    beside = (str(path) for name in RUNTIMES for path in (Path(torch.__file__).parent / "lib").glob(name))
    for library in (None, *beside):
        try:
            function = ctypes.CDLL(library, mode=os.RTLD_NOLOAD if library else os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError, TypeError):  # not loaded; without it; no global scope, as on Windows
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


def team_note() -> str:
    """Why kernels run on one thread, where they do; else nothing."""
    if _parallel() is not None:
        return ""
    return "kernels run on one thread, since torch's OpenMP runtime has no GOMP_parallel"


def parallel_address() -> int:
    """Of the same function; 0 where there is none."""
    function = _parallel()
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class KernelWords(Protocol):
    """Where a call's words lie. Of those the first ``size`` bytes are the call's own, counters at their beginning
    values included; behind them may be what stays or is changed between calls. ``memory`` keeps them all."""

    address: int
    size: int
    memory: Any


class Call(NamedTuple):
    """Of a kernel, by addresses. ``kept``: what the call's own words were. ``owner``: what keeps their memory."""

    kernel: int
    words: int
    kept: bytes
    shared: bool
    owner: Any


class _Recording(threading.local):
    note: Callable[[Call], None] | None = None


_recording = _Recording()


@contextmanager
def recording(note: Callable[[Call], None]) -> Iterator[None]:
    """``note`` gets each call that this thread makes. What the words of these calls point to must stay where it is:
    tensors that torch's operators make or pass on are seen to by who records; anything else, such as what
    ``torch.from_numpy`` gives, must live as long as the layer or the part that calls, and be nobody else's (see
    :class:`ThreadWords` and :func:`is_recorded`)."""
    before, _recording.note = _recording.note, note
    try:
        yield
    finally:
        _recording.note = before


def is_recorded() -> bool:
    """Whether this thread's calls are recorded: memory that it keeps between calls must then be left alone."""
    return _recording.note is not None


class Kernel:
    """A decorator: ``function(data)`` of numba's subset, ``data`` a ``voidptr``, compiled when that is asked for.

    The machine code is kept beside the source, or else in the user's cache folder, for each kind of processor."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self._compiled: Any = None
        self._alone: Callable[[int], None] | None = None
        self._address = 0

    def compile(self) -> None:
        if self._compiled is None:
            compiled = _compile(self._function)
            self._address, self._alone = compiled.address, compiled.ctypes  # in this order: another may be calling
            self._compiled = compiled  # last: another thread may be asking

    def __call__(self, words: KernelWords, shared: bool) -> None:
        """Run with these words, on this thread, or if ``shared`` on ``torch.get_num_threads()``; returns when all have
        returned. RuntimeError where it is not compiled."""
        if self._alone is None:
            raise RuntimeError(f"kernel {self._function.__name__} is called, and nobody has compiled it")
        data = words.address
        if _recording.note is not None:
            kept = ctypes.string_at(data, words.size)
            _recording.note(Call(self._address, data, kept, shared, words.memory))
        if shared and (threads := torch.get_num_threads()) > 1 and (parallel := _parallel()) is not None:
            parallel(self._address, data, threads, 0)
        else:
            self._alone(data)


class Words:
    """Memory for ``size`` bytes of a kernel's words, which begins with a cache line."""

    def __init__(self, size: int) -> None:
        self.size, self.memory = size, ctypes.create_string_buffer(size + 64)
        self.skip = -ctypes.addressof(self.memory) % 64
        self.address = ctypes.addressof(self.memory) + self.skip


class ThreadWords(threading.local):
    """Of each thread its own words, and of each recorded call, whose words stay what they are. ``make`` makes them."""

    def __init__(self, make: Callable[[], Words]) -> None:
        self._make, self._kept = make, make()

    def of_call(self) -> Words:
        return self._kept if _recording.note is None else self._make()


def compile_kernels(kernels: Collection[Kernel]) -> None:
    """Behind a bar, where it takes long and stderr is a terminal."""
    for kernel in tqdm(kernels, "compiling kernels", unit="kernel", delay=1, leave=False, disable=None):
        kernel.compile()


def _compile(function: Callable[[Any], None]) -> Any:
    """A ``CFunc`` of numba's."""
    from numba import types
    from numba.core.caching import FunctionCache
    from numba.core.ccallback import CFunc

    class Kept(FunctionCache):  # type: ignore[misc]
        """numba looks for changes in a kernel's own file alone: the key tells those in other files."""

        def _index_key(self, sig: Any, codegen: Any) -> Any:
            return (*super()._index_key(sig, codegen), _sources())

        def load_overload(self, *arguments: Any) -> Any:
            with suppress(OSError):  # somebody else's file
                return super().load_overload(*arguments)
            return None

        def save_overload(self, *arguments: Any) -> None:
            try:
                super().save_overload(*arguments)
            except OSError as error:  # a full disk
                _warn_once(error.strerror or str(error))

    compiler = import_module("hotswap.plugins.cpu.compiling").KernelCompiler
    compiled: Any = CFunc(
        function, ((types.voidptr,), types.void), locals={}, options=OPTIONS, pipeline_class=compiler)
    try:
        compiled._cache = Kept(function)
    except RuntimeError:
        _warn_once("no folder can be written to")
    with _no_collection():
        compiled.compile()
    return compiled


@contextmanager
def _no_collection() -> Iterator[None]:
    """numba makes objects by the million, and Python's collector would look at all of torch's each time: an eighth of
    the time that compiling takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _warn_once(why: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept, and are compiled anew at each start (%s). Set NUMBA_CACHE_DIR to a folder "
        "that may be written to", why)


@cache
def _sources() -> str:
    """A digest of all that kernels are made of."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
