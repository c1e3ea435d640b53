"""What every engine is asked: requests of ``benchmarks/workloads.py``, and how many of them are under way at a time.

Engines' own processes import this, too: standard library only.
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.workloads import Item, batch8, mixed, prefix, single

QUICK_REQUESTS, QUICK_TOKENS = 4, 8
"""What is left of a load where only the machinery is tried."""


@dataclass(frozen=True)
class Load:
    """``streams``: most requests under way; None: all at once. ``face``: "offline", in the engine's own process;
    "http", through its server; None: offline where the engine can, else through its server."""

    requests: Callable[[int], list[Item]]
    words: str
    streams: int | None = None
    face: str | None = None

    def items(self, seed: int, quick: bool = False) -> list[Item]:
        """The same for the same seed; other seeds share no prefix."""
        items = self.requests(seed)
        if quick:
            return [Item(item.prompt, min(item.max_tokens, QUICK_TOKENS)) for item in items[:QUICK_REQUESTS]]
        return items


LOADS = {
    "single": Load(single, "1 × 128 in, 128 out"),
    "batch8": Load(batch8, "8 × 128 in, 128 out, at once"),
    "mixed": Load(mixed, "64 × 32–512 in, 16–128 out, at once"),
    "prefix": Load(prefix, "32 × 1,024 shared + 32 in, 32 out, at once, cache cold"),
    "offline16": Load(mixed, "mixed, 16 under way, without a server", 16, "offline"),
    "http": Load(mixed, "mixed, 16 streams over HTTP", 16, "http"),
}

WARM_UP = Load(lambda seed: [Item(item.prompt, min(item.max_tokens, 32)) for item in mixed(seed)[:16]], "warm-up")
WARM_UP_SEED = 900
