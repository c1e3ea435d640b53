"""New beginnings for prompts, where a server's prefix cache cannot be emptied.

A server that has seen a prompt answers it faster. What is measured twice, in another block, by another arm or in
another run, must therefore look new to it, and yet share with its neighbours what it shared.
"""

import random
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hotswap.lab.load import Numbered

HEAD_TOKENS = 8
"""So many tokens at the beginning of a prompt are replaced."""


class Renewal:
    """Requests whose first tokens are alike still are behind their renewal. ``pool``: requests like those that will be
    sent, from whose tokens the new ones are drawn. No two runs draw alike, whatever their seeds."""

    def __init__(self, pool: Iterable[Numbered]) -> None:
        self._run = secrets.token_hex(8)
        self._pool = sorted({token for _, item in pool for token in item.prompt})

    def __call__(self, items: Iterable[Numbered], name: str) -> Iterator[Numbered]:
        """``items`` as no other ``name`` has them."""
        for index, item in items:
            yield index, replace(item, prompt=self._renewed(item.prompt, name))

    def _renewed(self, prompt: tuple[int, ...], name: str) -> tuple[int, ...]:
        head = prompt[:HEAD_TOKENS]
        draw = random.Random(f"{self._run} {name} {head}")
        return (*draw.choices(self._pool, k=len(head)), *prompt[HEAD_TOKENS:])
