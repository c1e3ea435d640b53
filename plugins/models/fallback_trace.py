"""What a transformers model does with attention, found out by running it without weights.

The class is built on torch's meta device, where tensors have shapes and no values, and run on a few tokens with an
attention function that writes down what it is asked for. So windows, scales and caps come from the code that will run
and not from config keys, and what our attention cannot do is refused before any weight is read.
"""

import copy
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hotswap.core.errors import ConfigError

BUILDING = threading.Lock()
"""transformers builds and loads models under process-wide settings (torch's default dtype among them)."""

_TRACING = "hotswap_trace"
_FAR = 1 << 20
_UNDERSTOOD = {
    "dropout", "scaling", "softcap", "sliding_window", "is_causal", "position_ids", "cache_position", "return_dict",
}
"""What an attention function may be given without anything being left out here, beside what is None or False."""


class TracedLayer(NamedTuple):
    """``module``: the name of what calls attention. ``window`` counts the tokens a query sees, itself included."""

    module: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class Trace:
    """``layers`` in the order in which they call attention. ``hidden_size``: the width of what the head reads.
    ``max_position``: positions below it give what they would give in a batch of their own."""

    layers: tuple[TracedLayer, ...]
    hidden_size: int
    vocab_size: int
    max_position: int


class Halves:
    """A causal language model of transformers in two: the trunk, and what the class does behind it with the logits,
    scales and caps included. The trunk's place is taken by rows that were computed before."""

    def __init__(self, model: Any) -> None:
        self.model, self.trunk, self._rows = model, model.base_model, _Rows()
        del model._modules[model.base_model_prefix]
        object.__setattr__(model, model.base_model_prefix, self._rows)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        """[1, T] each -> [1, T, hidden], behind the final norm."""
        out = self.trunk(input_ids=ids, position_ids=positions, use_cache=False, **more)
        self._rows.kind = type(out)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[1, N, hidden] -> [1, N, V]. Only after ``hidden``."""
        self._rows.rows = rows
        logits: torch.Tensor = self.model(input_ids=rows.new_zeros(rows.shape[:2], dtype=torch.int64)).logits
        return logits


class _Rows:
    """Answers as the trunk would."""

    kind: type[Any]
    rows: torch.Tensor

    @property
    def decoder(self) -> "_Rows":
        """Some classes go past their trunk to the decoder in it."""
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.kind(last_hidden_state=self.rows)


class _Asked(NamedTuple):
    """Stands for a mask: its definition, and the size of its window where it has one."""

    allows: Callable[..., Any]
    local_size: int | None


def trace(config: Mapping[str, Any]) -> Trace:
    """ConfigError for what the fallback does not run, with the reason."""
    return _trace(json.dumps(config, sort_keys=True, default=str))


@lru_cache(maxsize=8)
def _trace(config: str) -> Trace:
    model_class, hf_config = resolve(json.loads(config))
    calls: list[TracedLayer] = []
    with BUILDING, _registered(calls):
        try:
            with torch.device("meta"):
                # bfloat16 because torch's grouped multiplication has no shapes for another type.
                model = model_class._from_config(hf_config, attn_implementation=_TRACING, dtype=torch.bfloat16).eval()
            for name, module in model.named_modules():
                module.hotswap_name = name
            ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
            halves = Halves(model)
            with torch.inference_mode():
                # A mask of its own keeps transformers from looking for texts that are packed into one row.
                hidden = halves.hidden(ids, ids, attention_mask=torch.ones_like(ids))
                logits = halves.logits(hidden)
        except ConfigError:
            raise
        except Exception as error:  # whatever the class does that cannot be done here
            if isinstance(error, KeyError) and error.args == (_TRACING,):
                raise _refusal(model_class, "its attention does not go through transformers' interface") from error
            raise _refusal(
                model_class, "its code does not run on flat batches with positions, or asks for values where there are "
                f"shapes alone ({type(error).__name__}: {error})") from error
    _check_layers(model_class, hf_config, calls)
    context = _max_position(hf_config)
    layers = (call._replace(window=None) if call.window and call.window >= context else call for call in calls)
    return Trace(tuple(layers), hidden.shape[-1], logits.shape[-1], context)


def resolve(config: dict[str, Any]) -> tuple[Any, Any]:
    """The class in transformers and its config. ConfigError."""
    name = (config.get("architectures") or [None])[0]
    if name not in _causal_classes():
        own_code = ": code that comes with a checkpoint is never run" if config.get("auto_map") else ""
        raise ConfigError(
            f"transformers {transformers.__version__} has no causal language model {name!r}{own_code}", "architectures")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ConfigError(f"{name} with quantised weights ({method}) is not supported", "quantization_config")
    model_class = getattr(transformers, name)
    try:
        hf_config = model_class.config_class.from_dict(copy.deepcopy(config))
    except Exception as error:  # transformers validates with several libraries
        raise ConfigError(f"transformers does not take this config of {name}: {error}", "config") from error
    if hf_config.is_encoder_decoder or hf_config.get_text_config() is not hf_config:
        raise ConfigError(f"{name} is more than a decoder of text, which the fallback does not run", "architectures")
    if any(table.get("rope_type") == "dynamic" for table in _rope_tables(hf_config)):
        raise ConfigError(
            f"{name} with rope type 'dynamic': in transformers its angles depend on the longest text of a batch, so "
            "that requests would change each other", "rope_parameters.rope_type")
    for flag in ("output_attentions", "output_hidden_states", "output_router_logits", "use_cache"):
        if getattr(hf_config, flag, False):
            setattr(hf_config, flag, False)
    return model_class, hf_config


def _causal_classes() -> set[str]:
    names: set[str] = set()
    for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names.update([value] if isinstance(value, str) else value)
    return names


def _rope_tables(hf_config: Any) -> list[dict[str, Any]]:
    """One, or one for each kind of layer."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def _max_position(hf_config: Any) -> int:
    """With longrope the length of pretraining, since one longer text turns the angles of a whole batch."""
    value = getattr(hf_config, "max_position_embeddings", None)
    if not isinstance(value, int):
        raise ConfigError(
            f"max_position_embeddings is {value!r}, expected the number of positions", "max_position_embeddings")
    tables = [table for table in _rope_tables(hf_config) if table.get("rope_type") == "longrope"]
    return min([value, *(int(table["original_max_position_embeddings"]) for table in tables)])


@contextmanager
def _registered(calls: list[Any]) -> Iterator[None]:
    """The tracing attention and mask functions under their name, for as long as the block lasts."""

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, *_: Any, **kwargs: Any) -> tuple[Any, None]:
        calls.append(_read_call(module, q, k, v, mask, kwargs))
        return torch.empty_like(q.transpose(1, 2)), None

    def asked(mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> _Asked:
        return _Asked(mask_function, local_size)

    transformers.AttentionInterface.register(_TRACING, attention)
    AttentionMaskInterface.register(_TRACING, asked)
    try:
        yield
    finally:
        for interface in (transformers.AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_TRACING, None)


def _read_call(module: Any, q: Any, k: Any, v: Any, mask: Any, kwargs: dict[str, Any]) -> TracedLayer:
    given = {key for key, value in kwargs.items() if value is not None and value is not False}
    if unknown := given - _UNDERSTOOD:
        raise _refusal(type(module), f"it gives attention {', '.join(sorted(unknown))}, which is not supported")
    if kwargs.get("is_causal") is False:
        raise _refusal(type(module), "its attention is not causal")
    if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise _refusal(
            type(module), f"its queries, keys and values have sizes {q.shape[-1]}, {k.shape[-1]}, {v.shape[-1]}")
    scale = kwargs.get("scaling")
    return TracedLayer(
        module.hotswap_name, q.shape[1], k.shape[1], q.shape[-1],
        float(q.shape[-1] ** -0.5 if scale is None else scale), _window(module, mask, kwargs.get("sliding_window")),
        kwargs.get("softcap"))


def _window(module: Any, mask: Any, stated: int | None) -> int | None:
    """The window that the mask amounts to, after trying it at its edges."""
    if not isinstance(mask, _Asked):
        raise _refusal(type(module), "it adds to the attention scores or masks them in a way of its own")
    window = stated or mask.local_size
    edges = [0, _FAR - 1, _FAR, _FAR + 1] + ([_FAR - window, _FAR - window + 1] if window else [])
    for key in edges:
        expected = key <= _FAR and (window is None or key > _FAR - window)
        if bool(mask.allows(*map(torch.tensor, (0, 0, _FAR, key)))) is not expected:
            raise _refusal(type(module), "its attention is neither causal over all tokens nor over a sliding window")
    return window


def _check_layers(model_class: Any, hf_config: Any, layers: Sequence[TracedLayer]) -> None:
    if len(layers) != hf_config.num_hidden_layers:
        raise _refusal(
            model_class, f"{hf_config.num_hidden_layers} layers call transformers' attention interface "
            f"{len(layers)} times, expected once each")
    names = [layer.module for layer in layers]
    if len(set(names)) != len(names):
        raise _refusal(model_class, f"{max(names, key=names.count)} attends more than once a step")


def _refusal(model_class: Any, why: str) -> ConfigError:
    return ConfigError(f"the transformers fallback cannot run {model_class.__name__}: {why}", "model")
