"""The generations of FlashAttention that may be installed, and how each is called on paged keys and values.

FlashAttention-2 (Dao, 2023) is the package ``flash-attn``; FlashAttention-3 (Shah et al., 2024), for Hopper, is built
from its ``hopper`` folder as ``flash_attn_3``; FlashAttention-4, in CuTe-DSL for Blackwell, is ``flash-attn-4``. The
limits of each are those of its docstrings and checks: pages of a multiple of 256 tokens for the second ("Paged KV cache
block size must be divisible by 256"), of any size for the third, 128 for the fourth, whose fast loads take no other.

Legend: T tokens, R rows, m queries of a row, P pages of a table, S tokens of a page, H query heads, K key-value heads,
D head size.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any, NamedTuple

import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import GraphLevel, GroupShape

logger = logging.getLogger(__name__)

Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [pages, S, K, D]."""

Capability = tuple[int, int]
"""Of a CUDA device."""


class Call(NamedTuple):
    """What a kernel needs to know of a step. ``kv_starts`` [R + 1] int32: sums of the rows' lengths, where a generation
    asks for them; ``queries``: the rows' common number of tokens, None where they differ."""

    shape: GroupShape
    table: torch.Tensor
    kv_lens: torch.Tensor
    query_starts: torch.Tensor
    kv_starts: torch.Tensor | None
    queries: int | None
    most_queries: int
    longest: int


@dataclass(frozen=True)
class Generation:
    """``functions``: what is called, with the arguments that it must take. ``versions``: at least, and below.

    ``capabilities``: the least, and the first that is too new. ``page_sizes``: the allowed sizes, None for any; where
    there are some, the tiles that a kernel loads lie within a page.
    """

    number: int
    module: str
    distributions: tuple[str, ...]
    versions: tuple[int, int]
    capabilities: tuple[Capability, Capability]
    head_dims: tuple[int, ...]
    page_sizes: tuple[int, ...] | None
    functions: dict[str, tuple[str, ...]]
    attend: Callable[[Any, torch.Tensor, Cache, Call], torch.Tensor]
    graph_level: GraphLevel
    sums_lengths: bool = False

    @property
    def label(self) -> str:
        return f"FlashAttention-{self.number}"


def _second(module: Any, q: torch.Tensor, cache: Cache, call: Call) -> torch.Tensor:
    """Rows of one length go to the kernel that splits long rows over the device, others to the one for any lengths."""
    options = {"softmax_scale": call.shape.scale, "causal": True, "window_size": _window(call.shape, -1),
               "softcap": call.shape.softcap or 0.0, "block_table": call.table}
    if call.queries is not None:
        rows = q.view(len(call.kv_lens), call.queries, *q.shape[1:])
        out: torch.Tensor = module.flash_attn_with_kvcache(rows, *cache, cache_seqlens=call.kv_lens, **options)
        return out.view(q.shape)
    result: torch.Tensor = module.flash_attn_varlen_func(
        q, *cache, call.query_starts, call.kv_starts, call.most_queries, call.longest, **options)
    return result


def _third(module: Any, q: torch.Tensor, cache: Cache, call: Call) -> torch.Tensor:
    result: torch.Tensor = module.flash_attn_with_kvcache(
        q, *cache, cache_seqlens=call.kv_lens, page_table=call.table, cu_seqlens_q=call.query_starts,
        max_seqlen_q=call.most_queries, softmax_scale=call.shape.scale, causal=True,
        window_size=_window(call.shape, -1), softcap=call.shape.softcap or 0.0)
    return result


def _fourth(module: Any, q: torch.Tensor, cache: Cache, call: Call) -> torch.Tensor:
    """It gives the sums of the exponentials, too."""
    out, _ = module.flash_attn_varlen_func(
        q, *cache, cu_seqlens_q=call.query_starts, seqused_k=call.kv_lens, page_table=call.table,
        max_seqlen_q=call.most_queries, max_seqlen_k=call.longest, softmax_scale=call.shape.scale, causal=True,
        window_size=_window(call.shape, None), softcap=call.shape.softcap or 0.0)
    result: torch.Tensor = out
    return result


def _window(shape: GroupShape, endless: int | None) -> tuple[int | None, int | None]:
    """(keys before the query's own, keys after it); our window counts the query's own key."""
    return (endless, endless) if shape.window is None else (shape.window - 1, 0)


_OPTIONS = ("softmax_scale", "causal", "window_size", "softcap")
_MULTIPLES_OF_8 = tuple(range(8, 257, 8))

GENERATIONS = (
    Generation(
        4, "flash_attn.cute", ("flash-attn-4",), (4, 5), ((10, 0), (12, 0)), (64, 96, 128), (128,),
        {"flash_attn_varlen_func": (
            *_OPTIONS, "cu_seqlens_q", "seqused_k", "page_table", "max_seqlen_q", "max_seqlen_k")},
        _fourth, GraphLevel.NEVER),  # its kernels are compiled at the first call of each kind
    Generation(
        3, "flash_attn_interface", ("flash_attn_3", "flashattn-hopper"), (3, 4), ((9, 0), (10, 0)), _MULTIPLES_OF_8,
        None,
        {"flash_attn_with_kvcache": (*_OPTIONS, "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q")},
        _third, GraphLevel.UNIFORM),
    Generation(
        2, "flash_attn", ("flash-attn",), (2, 3), ((8, 0), (13, 0)), _MULTIPLES_OF_8, (256, 512, 1024),
        {"flash_attn_varlen_func": (*_OPTIONS, "block_table"),
         "flash_attn_with_kvcache": (*_OPTIONS, "block_table", "cache_seqlens")},
        _second, GraphLevel.UNIFORM, sums_lengths=True),
)
"""The newest first: the first that is made for the device and installed is taken."""


class Chosen(NamedTuple):
    """``why``: what was chosen, and what was passed over for what reason."""

    generation: Generation
    module: Any
    why: str


def choose(wanted: int | None, capability: Capability | None) -> Chosen:
    """A generation that is installed and runs on a device of ``capability`` (None: there is none). ConfigError."""
    if capability is None:
        raise ConfigError(
            "FlashAttention needs a CUDA device of capability 8.0 or more, and none was found; choose attention cpu or "
            "torch on a CPU, triton on another GPU", "attention")
    passed = []
    for generation in GENERATIONS:
        if wanted not in (None, generation.number):
            continue
        try:
            version, module = _load(generation, capability)
        except ConfigError as error:
            passed.append(error.message)
            continue
        why = f"{generation.label} {version} on a device of capability {capability[0]}.{capability[1]}"
        return Chosen(generation, module, why + "".join(f"; {reason}" for reason in passed))
    raise ConfigError(
        f"no FlashAttention can be used: {'; '.join(passed)}. Install it with pip install 'hotswap[flash]', which "
        "builds it for the torch that is installed, or choose attention triton or torch", "attention")


def _load(generation: Generation, capability: Capability) -> tuple[str, Any]:
    """Its version and module; ConfigError says why it cannot be used here."""
    least, beyond = generation.capabilities
    if not least <= capability < beyond:
        raise ConfigError(
            f"{generation.label} is for capabilities from {least[0]}.{least[1]} to below {beyond[0]}.{beyond[1]}, and "
            f"the device has {capability[0]}.{capability[1]}", "attention")
    try:
        module = importlib.import_module(generation.module)
    except Exception as error:  # a build for another torch fails in many ways
        raise ConfigError(
            f"{generation.label} ({generation.distributions[0]}) cannot be imported: {error}", "attention") from error
    version = _version(generation.distributions, module)
    low, high = generation.versions
    major = version.partition(".")[0]
    if not (major.isdigit() and low <= int(major) < high):
        raise ConfigError(
            f"{generation.label} needs a version of {generation.distributions[0]} from {low} to below {high}, and "
            f"{version} is installed", "attention")
    for name, arguments in generation.functions.items():
        function = getattr(module, name, None)
        missing = [name] if function is None else _missing(function, arguments)
        if missing:
            raise ConfigError(
                f"{generation.label} {version} is too old: it has no {name}({', '.join(missing)})", "attention")
    return version, module


def _version(distributions: Sequence[str], module: Any) -> str:
    """As installed, or as the module says."""
    for distribution in distributions:
        try:
            return installed_version(distribution)
        except PackageNotFoundError:
            continue
    return str(getattr(module, "__version__", "a version that does not say its number"))


def _missing(function: Callable[..., Any], arguments: Sequence[str]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name in arguments if name not in parameters]
