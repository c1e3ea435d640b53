"""In which order arms take their turns.

Rounds come in twos: the second runs backwards what the first drew by lot, so that each arm runs as often before the
base as behind it (ABBA or BAAB), and a drift that is steady over four blocks cancels. The lot is what the statistics
rest on: neither arm can be favoured by anything that does not know it.
"""

import random
from collections.abc import Iterator, Sequence

ROUNDS = 2
"""After so many rounds everything is balanced; only then may a run look at its results, and stop."""


def orders(arms: Sequence[str], seed: int) -> Iterator[tuple[str, ...]]:
    """The order of ``arms`` in each round, for ever."""
    draw = random.Random(f"order {seed}")
    while True:
        order = list(arms)
        draw.shuffle(order)
        yield tuple(order)
        yield tuple(reversed(order))
