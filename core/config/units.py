"""Sizes of memory with their units."""

import re

UNITS = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}
"""Decimal and binary; ``Mi`` is Kubernetes' spelling of ``MiB``. Case matters: ``m`` would be milli, ``b`` bits."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


def parse_bytes(value: object) -> object:
    """``"250MiB"``, ``"1.5 GiB"``, ``"250MB"`` or ``"250Mi"`` as bytes, rounded down; other types pass unchanged.

    Raises ValueError where the whole text is not a number and a known unit.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"should be a number and a unit such as '4GiB', not {value!r}.")
    number, unit = match.groups()
    if unit not in UNITS:
        raise ValueError(f"unknown unit '{unit}' in {value!r}; the units are {', '.join(u for u in UNITS if u)}.")
    return int(float(number) * UNITS[unit]) if "." in number else int(number) * UNITS[unit]
