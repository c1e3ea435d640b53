"""hotswap: an LLM serving engine whose parts can be exchanged.

Importing this package imports neither torch nor any component; :class:`LLM` and :class:`SamplingParams` are loaded
when they are first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from hotswap.core.request import SamplingParams
    from hotswap.server.llm import LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from hotswap.server.llm import LLM

        return LLM
    if name == "SamplingParams":
        from hotswap.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'hotswap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
