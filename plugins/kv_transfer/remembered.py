"""A table that does not grow."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

REMEMBERED = 4096


class Remembered(OrderedDict[K, V]):
    """The newest ``most`` entries, by when their keys came: for what will be asked for soon, or never."""

    def __init__(self, most: int = REMEMBERED) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)
