"""A plugin for pytest that makes the kit's suites short: ``pytest -p hotswap.core.testing.quick``.

Every check runs; those with random lives see fewer of them. For a look between two edits, and for
``hotswap plugins doctor``.
"""

import pytest

from hotswap.core.testing.suites import SUITES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    classes = {item.cls for item in items if isinstance(item, pytest.Function) and item.cls is not None}
    for cls in classes:
        names = {f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__}
        for part in SUITES.values():
            for attribute, value in part.quick.items() if names.intersection(part.suites) else ():
                setattr(cls, attribute, min(value, getattr(cls, attribute)))
