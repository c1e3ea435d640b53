"""The parts of a worker that can be exchanged while it serves, and what they ask of the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hotswap.core.blame import blame
from hotswap.core.config.limits import AttentionNeeds, attention_limits, lacking
from hotswap.core.errors import ConfigError
from hotswap.core.execution.layout import batch_layout
from hotswap.core.execution.speculation import SpeculatorCache
from hotswap.core.execution.static import GraphKey
from hotswap.core.interfaces.attention import AttentionBackend, BatchLimits, GraphLevel, GroupShape
from hotswap.core.interfaces.graphs import GraphDevice
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.speculator import Speculator, SpeculatorNeeds
from hotswap.core.modeling.mesh import Mesh


@dataclass(frozen=True)
class Placed:
    """An attention backend and a speculator, bound to the model and loaded. ``keys``: the steps to capture, and
    ``device``, what captures them with this backend. ``speculator_bytes``: of its weights."""

    attention: AttentionBackend
    speculator: Speculator
    needs: SpeculatorNeeds
    own_cache: SpeculatorCache
    keys: tuple[GraphKey, ...] = ()
    device: GraphDevice | None = None
    speculator_bytes: int = 0


def keys_for(
    keys: Sequence[GraphKey], attention: AttentionBackend, lookahead: int, max_batch_tokens: int,
) -> tuple[GraphKey, ...]:
    """Of the numbers of rows in ``keys``, which were chosen for other parts, the steps that can be captured for these.
    """
    level = attention.support().graph_level
    if level == GraphLevel.NEVER:
        return ()
    wanted = [1, 1 + lookahead] if lookahead and level >= GraphLevel.UNIFORM else [1]
    rows = [key.rows for key in keys if key.queries == 1]
    return tuple(GraphKey(row, m) for m in wanted for row in rows if row * m <= max_batch_tokens)


def check_needs(speculator: Speculator, needs: SpeculatorNeeds, model: Model, mesh: Mesh) -> None:
    """ConfigError for what ``speculator`` wants and ``model`` does not give, or has already."""
    if (needs.taps or needs.cache_specs) and not (mesh.is_first and mesh.is_last):
        raise ConfigError(
            f"{speculator.label} reads hidden states or keeps a cache, which several stages do not give it; choose a "
            "speculator that needs neither, or one stage", "speculator")
    if unknown := [tap for tap in needs.taps if tap not in model.taps()]:
        raise ConfigError(
            f"{speculator.label} reads the hidden states {', '.join(unknown)}, but {model.label} gives "
            f"{', '.join(model.taps()) or 'none'}; choose layers that the model has, or another speculator",
            "speculator")
    groups = {spec.group for spec in model.cache_specs()}
    layers = {layer for spec in model.cache_specs() for layer in spec.layers}
    for spec in needs.cache_specs:
        assert spec.group not in groups and layers.isdisjoint(spec.layers), f"{speculator.label} claims {spec} twice"
        groups.add(spec.group)
        layers.update(spec.layers)


def check_support(
    attention: AttentionBackend, shapes: Mapping[str, GroupShape], device: str, dtype: str,
) -> None:
    """ConfigError that lists everything the model needs and ``attention`` does not do, before any request meets it."""
    needs = AttentionNeeds(device, dtype, shapes=tuple(shapes.values()))
    if lacks := lacking(attention_limits(needs, attention.support())):
        raise ConfigError(
            f"{attention.label} does not support what this model needs: {'; '.join(dict.fromkeys(map(str, lacks)))}. "
            "Choose another backend", "attention")


def rehearse(attention: AttentionBackend, shapes: Mapping[str, GroupShape], device: str, dtype: str) -> None:
    """Have ``attention`` attend a prompt, a decoding row and a chunk in pages of nobody's, before a request meets it:
    ConfigError where it raises, or gives what is no number. Kernels are compiled meanwhile, beside serving."""
    lengths, past = np.array([5, 1, 3]), np.array([0, 7, 2])
    torch_dtype = getattr(torch, dtype)
    for group, shape in shapes.items():
        width = -(-8 // shape.page_size)
        limits = BatchLimits(int(lengths.sum()), len(lengths), width, device, dtype)
        tables = np.arange(1, 1 + len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
        try:
            with torch.inference_mode():
                cache = attention.allocate(shape, 1 + tables.size, limits)
                for tensor in cache:
                    tensor.zero_()
                state = attention.bind(group, shape, limits)
                layout = batch_layout(lengths, past, {group: (tables, shape.page_size)}, device)
                attention.plan(state, layout)
                q, k = (torch.full((limits.max_tokens, heads, shape.head_dim), 0.5, dtype=torch_dtype, device=device)
                        for heads in (shape.heads, shape.kv_heads))
                out = torch.full_like(q, torch.nan)
                attention.run(state, q, k, k.clone(), cache, out)
        except Exception as error:
            raise ConfigError(f"it has failed in a rehearsal: {blame(error, attention)}", "attention") from error
        if not torch.isfinite(out).all():
            raise ConfigError(
                f"{attention.label} has given what is no number in a rehearsal with group {group!r}", "attention")
