"""What the machine can do at most: reading memory, multiplying matrices, and all linear layers of a step by operator.

Every layer has weights of its own, so that they come from memory as they do in the model. What this torch or this
processor cannot do is told with its reason.

Legend of shapes: T rows, I input features, O output features.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm

from hotswap.core.config import load_config
from hotswap.core.engine.build import open_model
from hotswap.core.engine.clock import SystemClock
from hotswap.core.registry import Registry

READ_BYTES = 1 << 30
"""Far beyond any cache."""
GEMM_SIZE = 2048
SECONDS, QUICK_SECONDS = 1.0, 0.01
LEAST_CALLS = 3
GROUP = 32
"""Input features that share a scale in the 4-bit operator, as in GGUF's blocks."""
now = SystemClock().now


@dataclass(frozen=True)
class Shapes:
    """Of all linear layers of a decoder: ``layer``'s are (O, I) pairs, projections of one input fused."""

    layer: Sequence[tuple[int, int]]
    layers: int
    head: tuple[int, int]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shapes":
        """From a checkpoint's config."""
        hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        layer = [
            ((heads + 2 * kv_heads) * size, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner)]
        return cls(layer, config["num_hidden_layers"], (config["vocab_size"], hidden))

    @property
    def parameters(self) -> int:
        return self.layers * sum(o * i for o, i in self.layer) + self.head[0] * self.head[1]


def shapes_of(config: Path) -> Shapes:
    resolved = load_config(config)
    return Shapes.of(open_model(resolved.config, Registry(), progress=False).checkpoint.config)


Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, I] in the operator's dtype -> [T, O]."""


def _plain(weight: torch.Tensor) -> Linear:
    return lambda x: functional.linear(x, weight)


def _packed(weight: torch.Tensor) -> Linear:
    """Laid out for oneDNN beforehand."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _int8(weight: torch.Tensor) -> Linear:
    """8-bit weights, a scale for each output feature; rows are quantised as they come, with one scale for them all."""
    scales = weight.float().abs().amax(1) / 127
    packed = torch.ops.onednn.qlinear_prepack((weight.float() / scales[:, None]).round().to(torch.int8), None)
    zeros = torch.zeros(len(scales), dtype=torch.int64)

    def linear(x: torch.Tensor) -> torch.Tensor:
        low, high = (float(bound) for bound in torch.aminmax(x))
        scale = max(-low, high, 1e-6) / 127
        quantised = x.float().mul_(1 / scale).round_().add_(128).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            quantised, scale, 128, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], "")

    return linear


def _int4(weight: torch.Tensor) -> Linear:
    """4-bit weights in groups, each with a scale and a zero."""
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).clamp_min(1e-6)
    levels = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15).int().view(weight.shape)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    both = torch.stack([scales, low + 8 * scales], 2).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, both)


OPERATORS: Mapping[str, tuple[torch.dtype, Callable[[torch.Tensor], Linear]]] = {
    "fp32": (torch.float32, _plain), "bf16": (torch.bfloat16, _plain), "bf16 packed": (torch.bfloat16, _packed),
    "int8": (torch.bfloat16, _int8), "int4": (torch.bfloat16, _int4),
}


def measured(config: Path, rows: Sequence[int], threads: int | None = None, quick: bool = False) -> dict[str, Any]:
    """Everything, as JSON; times are milliseconds."""
    shapes, before, seconds = shapes_of(config), torch.get_num_threads(), QUICK_SECONDS if quick else SECONDS
    torch.set_num_threads(threads or before)
    try:
        found: dict[str, Any] = {
            "threads": torch.get_num_threads(), "parameters": shapes.parameters,
            "read_gb_s": read_bandwidth(quick),
            "gemm_gflop_s": {name: gemm_peak(dtype, quick) for name, dtype in _DTYPES.items()}, "linear_ms": {}}
        with torch.inference_mode():
            for name in tqdm(OPERATORS, desc="operators", disable=None):
                found["linear_ms"][name] = _operator(name, shapes, rows, seconds)
        return found
    finally:
        torch.set_num_threads(before)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_bandwidth(quick: bool = False) -> float:
    """GB/s, the best of all readings of a block of memory."""
    seconds, size = (QUICK_SECONDS, READ_BYTES // 16) if quick else (SECONDS, READ_BYTES)
    memory = torch.ones(size // 4)
    return size / 1e9 / min(_times(memory.sum, seconds))


def gemm_peak(dtype: torch.dtype, quick: bool = False) -> float:
    """GFLOP/s of a large product, the best of all."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
    return 2 * GEMM_SIZE**3 / 1e9 / min(_times(lambda: a @ b, QUICK_SECONDS if quick else SECONDS))


def _operator(name: str, shapes: Shapes, rows: Sequence[int], seconds: float) -> dict[str, Any]:
    """By number of rows: the median and the least of layers and head together; or why there is none."""
    dtype, pack = OPERATORS[name]
    try:
        layers = [[pack(_weight(shape, dtype)) for shape in shapes.layer] for _ in range(shapes.layers)]
        head = pack(_weight(shapes.head, dtype))
        return {str(count): _step(layers, head, shapes, count, dtype, seconds) for count in rows}
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return {"problem": str(error).splitlines()[0][:200]}


def _weight(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).mul_(0.02).to(dtype)


def _step(
    layers: Sequence[Sequence[Linear]], head: Linear, shapes: Shapes, rows: int, dtype: torch.dtype, seconds: float,
) -> dict[str, float]:
    inputs = [torch.randn(rows, i).to(dtype) for _, i in [*shapes.layer, shapes.head]]

    def step() -> None:
        for linears in layers:
            for linear, x in zip(linears, inputs[:-1], strict=True):
                linear(x)
        head(inputs[-1])

    times = _times(step, seconds)
    return {"median": 1e3 * statistics.median(times), "best": 1e3 * min(times)}


def _times(call: Callable[[], object], seconds: float) -> list[float]:
    """Of calls for so many seconds, the first left out."""
    call()
    times, until = list[float](), now() + seconds
    while len(times) < LEAST_CALLS or now() < until:
        begun = now()
        call()
        times.append(now() - begun)
    return times


def told(found: Mapping[str, Any]) -> str:
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['threads']} threads: memory is read at {found['read_gb_s']:.1f} GB/s; a product of " + ", ".join(
        f"{name} runs at {value:.0f} GFLOP/s" for name, value in found["gemm_gflop_s"].items())
    operators = found["linear_ms"]
    rows = list(dict.fromkeys(count for one in operators.values() for count in one if count != "problem"))
    yield ""
    yield f"All linear layers of one step, {found['parameters'] / 1e6:.1f} M parameters, ms (least):"
    yield ""
    yield f"| rows | {' | '.join(operators)} |"
    yield "|" + "---|" * (len(operators) + 1)
    for count in rows:
        cells = [f"{one[count]['median']:.1f} ({one[count]['best']:.1f})" if count in one else "–"
                 for one in operators.values()]
        yield f"| {count} | {' | '.join(cells)} |"
    for name, one in operators.items():
        if "problem" in one:
            yield f"{name}: not here, since {one['problem']}"
