"""The config: what may be said (schema), where it is said (sources), and whether it can work (check)."""

from hotswap.core.config.schema import Config
from hotswap.core.config.sources import ResolvedConfig, load_config

__all__ = ["Config", "ResolvedConfig", "load_config"]
