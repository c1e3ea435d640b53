"""Whether a quantization can pack a checkpoint's weights, before any of them is read."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hotswap.core.config.check import unmet
from hotswap.core.config.limits import not_taken, placement
from hotswap.core.errors import ConfigError
from hotswap.core.explain import Problem, join, nearest, raise_problems
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.quantization import Quantization

if TYPE_CHECKING:
    from hotswap.core.modeling.checkpoint import Checkpoint


def check_quantization(
    quantization: Quantization, checkpoint: "Checkpoint", model: Model | None, device: str, dtype: str,
    path: str = "quantization",
) -> list[str]:
    """What the operator should know of the choice. ConfigError, under the config ``path``, for what does not fit.

    ``model``: whose layers are packed; None: they are a component's own, which take any form.
    """
    problems = not_taken(quantization, lambda: placement(device, dtype, quantization.support()), path)
    if model is not None:
        problems += [each for each in unmet({Model.kind: model, path: quantization}) if each.path == path]
    raise_problems(problems)
    raise_problems(_idle_patterns(quantization.patterns(), checkpoint, model, path))
    support, formats = quantization.support(), checkpoint.block_formats
    if support.needs_blocks and not formats:
        raise ConfigError(
            f"{quantization.label} keeps the quantised blocks of a GGUF file, and {checkpoint.path} has none; choose "
            "another quantization, or a .gguf file that is quantised", path)
    note = quantization.note(device, dtype)
    notes = [f"{path}: {note}"] if note else []
    if support.needs_blocks and (others := sorted(formats - set(support.blocks))):
        notes.append(
            f"{path}: {quantization.label} has no path of its own for {', '.join(others)}, so that those weights are "
            f"dequantised; it has for {', '.join(support.blocks)}")
    return notes


def _idle_patterns(
    patterns: Mapping[str, str], checkpoint: "Checkpoint", model: Model | None, path: str,
) -> list[Problem]:
    """Those that fit no layer, and would have no effect."""
    if not patterns:
        return []
    layers = layer_names(checkpoint, model)
    problems = []
    for option, pattern in patterns.items():
        if not any(fnmatchcase(name, pattern) for name in layers):
            kinds = sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in layers})
            near = nearest(pattern, kinds)
            hint = f" Did you mean {near!r}?" if near else ""
            problems.append(Problem(
                join(path, option), f"{pattern!r} fits no linear layer of {checkpoint.path}.{hint} There are "
                f"{', '.join(kinds)}."))
    return problems


def layer_names(checkpoint: "Checkpoint", model: Model | None) -> Sequence[str]:
    """Of the layers that a quantization is given. Reads headers alone."""
    weights = checkpoint.weights()
    matrices = [
        name.removesuffix(".weight") for name in weights.names()
        if name.endswith(".weight") and len(weights.shape(name)) == 2]
    return matrices if model is None else model.linear_layers(checkpoint.config, matrices)
