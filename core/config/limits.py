"""What a component takes of what stands in the config: one rule, whoever asks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotswap.core.errors import ConfigError
from hotswap.core.explain import Problem, problems_of
from hotswap.core.interfaces.attention import AttentionSupport, GroupShape
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.quantization import QuantizationSupport

AUTO = "auto"


class Limit(NamedTuple):
    """``key``: a config path, or what else the ``value`` is. ``allowed``: what the component takes, None for anything.
    """

    key: str
    value: Any
    allowed: Sequence[Any] | None

    def __str__(self) -> str:
        instead = f", but {', '.join(map(str, self.allowed))}" if self.allowed else ""
        return f"{self.key} {self.value}{instead}"


@dataclass(frozen=True)
class AttentionNeeds:
    """What an attention backend must do, as far as it is known. ``page_size``: tokens, None where the config leaves it
    open. ``shapes``: of the model's cache groups, None before its checkpoint is open, empty where it does not say."""

    device: str
    dtype: str = AUTO
    page_size: int | None = None
    shapes: tuple[GroupShape, ...] | None = None


def lacking(limits: Iterable[Limit]) -> list[Limit]:
    """Those whose value is not taken. A value that is not known yet (None, "auto") is left to whoever knows it."""
    return [limit for limit in limits
            if limit.allowed is not None and limit.value not in (None, AUTO, *limit.allowed)]


def placement(device: str, dtype: str, support: AttentionSupport | QuantizationSupport) -> list[Limit]:
    """Where and in which dtype a component is to compute. A device's number ("cuda:1") makes no difference."""
    return [Limit("device", device.partition(":")[0], support.devices), Limit("dtype", dtype, support.dtypes)]


def attention_limits(needs: AttentionNeeds, support: AttentionSupport) -> list[Limit]:
    """``needs`` held against what a backend does."""
    limits = placement(needs.device, needs.dtype, support)
    limits.append(Limit("kvcache.block_size", needs.page_size, support.page_sizes))
    for shape in needs.shapes or ():
        limits += [
            Limit("head size", shape.head_dim, support.head_dims),
            Limit("a sliding window of", shape.window, None if support.windows else ()),
            Limit("a softcap of", shape.softcap, None if support.softcap else ())]
    return limits


def not_taken(part: Component, limits: Callable[[], Iterable[Limit]], path: str = "") -> list[Problem]:
    """What is given and ``part`` does not take, under the keys of ``limits``; under ``path``, that of the part, where
    the values are not the config's own. What ``part`` needs and does not find here is a problem, too."""
    try:
        given = limits()
    except ConfigError as error:
        return [Problem(found.path or path or part.kind, found.message) for found in problems_of(error)]
    return [
        Problem(path or key, (
            f"{part.label} does not take {f'the {key} ' if path else ''}{value!r}, but "
            f"{', '.join(map(str, allowed or ()))}. Change it, or {path or part.kind}."))
        for key, value, allowed in lacking(given)
    ]
