"""Verdicts of experiments: what they rest on is told in docs/statistics.md."""

from hotswap.lab.statistics.comparison import analyse
from hotswap.lab.statistics.monitor import Monitor
from hotswap.lab.statistics.settings import Settings

__all__ = ["Monitor", "Settings", "analyse"]
