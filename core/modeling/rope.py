"""Rotary position embedding (RoFormer, Su et al., 2021) and the ways in which it is stretched to longer texts.

Reads both spellings of configs: ``rope_theta`` beside ``rope_scaling`` with ``type`` or ``rope_type``, and transformers
5's ``rope_parameters``. The frequencies equal transformers' to the last operation, because an error of one part in 10^7
in a frequency is an error of 10^-3 in the angle at position 10,000.

Two variants depend on the length of the text. Here the length that counts for a token is its own position + 1, so that
a key does not depend on how the text was chunked, what it was batched with, or what came after it; a cached key could
not be rotated again. transformers takes the longest position of a call, which is the same token by token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hotswap.core.errors import ConfigError

_DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeConfig:
    """``dim``: rotated values of a head. ``context``: the greatest length; ``original``: the length of pretraining."""

    kind: str
    theta: float
    dim: int
    max_position: int
    original: int
    parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, config: dict[str, Any], head_dim: int, max_position: int) -> "RopeConfig":
        """``max_position`` is ``max_position_embeddings``. ConfigError for what is unknown or incomplete."""
        parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        if any(isinstance(value, dict) for value in parameters.values()):
            raise ConfigError(
                f"rope_parameters per layer type are not supported: {sorted(parameters)}", "rope_parameters")
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        kind = "longrope" if kind == "su" else kind  # longrope's first name, in early Phi-3 configs
        if kind not in _FREQUENCIES:
            raise ConfigError(
                f"unknown rope type {kind!r}, known are {sorted(_FREQUENCIES)}", "rope_parameters.rope_type")
        partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ConfigError(f"partial_rotary_factor {partial} is not supported, expected 1.0", "rope_parameters")
        theta = parameters.get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA
        stated = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        rope = cls(kind, theta, head_dim, max_position, stated or max_position, parameters)
        rope._check()
        return rope

    def _check(self) -> None:
        for key in _REQUIRED[self.kind]:
            if self.parameters.get(key) is None:
                raise ConfigError(f"rope type {self.kind!r} needs {key!r}", f"rope_parameters.{key}")
        for key in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            if len(self.parameters[key]) != self.dim // 2:
                raise ConfigError(
                    f"{len(self.parameters[key])} factors given, expected {self.dim // 2} (half of the head size)",
                    f"rope_parameters.{key}",
                )

    @property
    def factor(self) -> float:
        stated = self.parameters.get("factor")
        return float(stated) if stated is not None else self.max_position / self.original

    @property
    def context(self) -> int:
        """Tokens that the stretched positions are meant for."""
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position * max(self.factor, 1.0))
        if self.kind == "yarn":
            return max(self.max_position, int(self.original * self.factor))
        return self.max_position

    def cos_sin(
        self, positions: torch.Tensor, lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [P] -> cos, sin [P, dim / 2] float32, scaled where the variant scales attention.

        ``lengths`` [P]: the text length that counts for each position; positions + 1 where not given.
        """
        lengths = positions + 1 if lengths is None else lengths
        angles = positions[:, None].float() * _FREQUENCIES[self.kind](self, lengths)
        scale = _attention_scale(self)
        return angles.cos() * scale, angles.sin() * scale


class RotaryEmbedding:
    """Tables of cos and sin for every position of the context, in the model's dtype."""

    def __init__(self, config: RopeConfig, dtype: torch.dtype, device: str) -> None:
        cos, sin = config.cos_sin(torch.arange(config.context))
        self.cos, self.sin = cos.to(device, dtype), sin.to(device, dtype)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cos, sin [T, 1, D / 2], to be used by all layers."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def _exponents(rope: RopeConfig) -> torch.Tensor:
    return torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim


def _default(rope: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    frequencies: torch.Tensor = 1.0 / (rope.theta ** _exponents(rope))
    return frequencies


def _linear(rope: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    """Position interpolation (Chen et al., 2023)."""
    return _default(rope, lengths) / rope.factor


def _dynamic(rope: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    """NTK-aware scaling of the base, by how far a text exceeds the pretraining length. [P, dim / 2]."""
    lengths = lengths.clamp(min=rope.max_position)[:, None]
    stretch = (rope.factor * lengths / rope.max_position) - (rope.factor - 1)
    bases = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
    return 1.0 / (bases ** _exponents(rope))


def _llama3(rope: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    """Low frequencies interpolated, high ones kept, a ramp between (Llama 3.1)."""
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    frequencies = _default(rope, lengths)
    wavelengths = 2 * math.pi / frequencies
    ramp = (rope.original / wavelengths - low) / (high - low)
    scaled = torch.where(wavelengths > rope.original / low, frequencies / rope.factor, frequencies)
    between = (wavelengths >= rope.original / high) & (wavelengths <= rope.original / low)
    return torch.where(between, (1 - ramp) * scaled / rope.factor + ramp * scaled, scaled)


def _yarn(rope: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al., 2023): interpolate dimensions that turn seldom within the original length."""

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension(rope.parameters.get("beta_fast") or 32)
    high = dimension(rope.parameters.get("beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    extrapolated = 1 - ramp
    wavelengths = rope.theta ** _exponents(rope)
    return 1.0 / (rope.factor * wavelengths) * (1 - extrapolated) + 1.0 / wavelengths * extrapolated


def _longrope(rope: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    """LongRoPE (Ding et al., 2024): searched factors, one set within the original length, one beyond. [P, dim / 2]."""
    short, long = (torch.tensor(rope.parameters[key], dtype=torch.float32) for key in ("short_factor", "long_factor"))
    factors = torch.where(lengths[:, None] > rope.original, long, short)
    frequencies: torch.Tensor = 1.0 / (factors * rope.theta ** _exponents(rope))
    return frequencies


def _attention_scale(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by, so that attention keeps its temperature over longer texts."""
    stated = rope.parameters.get("attention_factor")
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if stated is not None:
        return float(stated)
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original)) if rope.factor > 1 else 1.0

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    mscale, mscale_all = rope.parameters.get("mscale"), rope.parameters.get("mscale_all_dim")
    return temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature(1.0)


_FREQUENCIES: dict[str, Callable[[RopeConfig, torch.Tensor], torch.Tensor]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3,
    "yarn": _yarn, "longrope": _longrope,
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor"),
}
