"""``python benchmarks/cpu``: see README.md beside this file."""

import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    # Run as a folder, this folder comes first and would lend its modules' names to everybody.
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in (str(ROOT), str(Path(__file__).parent)))]
    from benchmarks.cpu.commands import main

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends with this
    main()
