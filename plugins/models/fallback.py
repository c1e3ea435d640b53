"""Any decoder that transformers knows, run by transformers' own code over our attention and our pages.

Legend of shapes: T tokens of the step, H query heads, K key-value heads, D head size, V vocabulary, N rows that need
logits.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from hotswap.core.errors import ConfigError, ModelLoadError
from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.kvcache import CacheSpec
from hotswap.core.interfaces.model import Attend, Model, ModelFacts
from hotswap.core.modeling.mesh import Mesh
from hotswap.core.modeling.weights import WeightSource
from hotswap.plugins.models.fallback_check import check_against_eager
from hotswap.plugins.models.fallback_trace import BUILDING, Halves, TracedLayer, resolve, trace

ATTENTION = "hotswap"
"""Our name in transformers' table of attention functions. It has none in the table of masks, so that none is made."""


class TransformersModel(Model):
    """The fallback for architectures that have no component of their own: transformers builds the model and calls our
    attention through its attention interface (Wolf et al., 2020; interface of transformers 5).

    Choose it for a decoder that nothing else here runs. It runs whole on one device and takes more time a step than a
    component of ours: nothing is fused, and each layer is a dozen of Python modules. What it cannot run exactly (masks,
    sinks or biases of a model's own, states other than keys and values) is refused at the start.
    """

    @classmethod
    def facts(cls, config: dict[str, Any]) -> ModelFacts:
        found = trace(config)
        return ModelFacts(
            config["architectures"][0], len(found.layers), found.hidden_size, found.vocab_size, found.max_position,
            attention=tuple(_shape(layer) for layer, _ in _groups(found.layers).values()))

    def describe(self) -> Description:
        return Description(offers=frozenset({"any_architecture"}))

    def build(self, config: dict[str, Any], mesh: Mesh, dtype: torch.dtype, device: str) -> None:
        if not mesh.alone:
            raise ConfigError(
                f"{self.label} runs whole on one device; leave out the strategies that divide a model, or choose one "
                "that has a component of its own", "parallel")
        self.config, self.dtype, self.device = config, dtype, device
        self.trace = trace(config)
        self.groups = _groups(self.trace.layers)

    def cache_specs(self) -> list[CacheSpec]:
        """``bytes_per_token`` is that of all layers of the group."""
        specs = []
        for group, (layer, members) in self.groups.items():
            num_bytes = 2 * len(members) * layer.kv_heads * layer.head_dim * self.dtype.itemsize
            kind = "full" if layer.window is None else "window"
            specs.append(
                CacheSpec(group, members, layer.kv_heads, layer.head_dim, num_bytes, kind, layer.window))
        return specs

    def attention_shapes(self, page_sizes: dict[str, int]) -> dict[str, GroupShape]:
        return {group: _shape(layer, page_sizes.get(group, 0)) for group, (layer, _) in self.groups.items()}

    def load(self, weights: WeightSource) -> None:
        model_class, hf_config = resolve(self.config)
        transformers.AttentionInterface.register(ATTENTION, _attention)
        with BUILDING, _quiet():
            try:
                model, report = model_class.from_pretrained(
                    None, config=hf_config, state_dict=_lazy(weights), dtype=self.dtype, attn_implementation=ATTENTION,
                    ignore_mismatched_sizes=True, output_loading_info=True)
            except RuntimeError as error:
                raise ModelLoadError(
                    f"transformers could not load {weights.location} as {model_class.__name__}: {error}") from error
        _check_report(weights, report)
        self.calls = _Calls()
        for index, layer in enumerate(self.trace.layers):
            model.get_submodule(layer.module).hotswap_layer = (index, self.calls)
        self.halves = Halves(model.to(self.device).eval())
        check_against_eager(self)

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, attend: Attend,
        taps: dict[str, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """[T] -> [T, hidden], behind the final norm, which belongs to transformers' trunk."""
        self.calls.attend = attend
        # Drafts may lie beyond the last position; they are never kept, but a table of positions must have their rows.
        positions = positions.clamp(max=self.trace.max_position - 1)
        return self.halves.hidden(inputs[None], positions[None])[0]

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        return self.halves.logits(rows[None])[0].float()


class _Calls:
    """Where the attention of the running step goes."""

    attend: Attend


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *_: Any, **__: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    index, calls = module.hotswap_layer
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return calls.attend(index, q, k, v)[None], None


def _groups(layers: tuple[TracedLayer, ...]) -> dict[str, tuple[TracedLayer, tuple[int, ...]]]:
    """Layers that attend alike, by a name; the layer shows what they have in common."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, layer in enumerate(layers):
        alike.setdefault(layer[1:], []).append(index)
    groups: dict[str, tuple[TracedLayer, tuple[int, ...]]] = {}
    for members in alike.values():
        first = layers[members[0]]
        kind = "full" if first.window is None else "window"
        name = kind if kind not in groups else f"{kind}_{members[0]}"
        groups[name] = first, tuple(members)
    return groups


def _shape(layer: TracedLayer, page_size: int = 0) -> GroupShape:
    return GroupShape(
        layer.heads, layer.kv_heads, layer.head_dim, page_size, layer.scale, layer.window, layer.softcap)


class _LazyTensor:
    """A tensor of the checkpoint that is read when transformers indexes it, which it does from several threads."""

    def __init__(self, weights: WeightSource, name: str, reading: threading.Lock) -> None:
        self.weights, self.name, self.reading = weights, name, reading

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self.reading:
            return self.weights.take(self.name, self.weights.shape(self.name))[index]


def _lazy(weights: WeightSource) -> dict[str, _LazyTensor]:
    reading = threading.Lock()
    return {name: _LazyTensor(weights, name, reading) for name in weights.names() if not weights.skipped(name)}


def _check_report(weights: WeightSource, report: dict[str, Any]) -> None:
    """transformers' account of what it took, in the words of our own."""
    problems = [
        f"{name} has shape {tuple(stored)}, the config promises {tuple(wanted)}"
        for name, stored, wanted in sorted(report["mismatched_keys"])[:8]
    ]
    for what in ("missing", "unexpected"):
        if names := sorted(report[f"{what}_keys"]):
            problems.append(f"{what}: {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if names[8:] else ""))
    if problems or report["error_msgs"]:
        raise ModelLoadError(
            f"the tensors of {weights.location} are not those that its config promises: "
            f"{'; '.join([*problems, *report['error_msgs']])}. Check that config and weights belong together, or "
            "download the checkpoint again")
    weights.skip(lambda name: True)  # what transformers leaves out knowingly, it knows to follow from the config


@contextmanager
def _quiet() -> Iterator[None]:
    """No bar and no report of transformers': loading has a bar of its own, and errors say what the report says."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
