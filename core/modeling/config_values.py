"""Values of a checkpoint's ``config.json``, checked as they are read."""

from collections.abc import Mapping
from typing import Any

from hotswap.core.errors import ConfigError


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; ``default`` where the key is missing or null. ConfigError names the key."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} is {value!r}, expected a positive integer", key)
    return value
