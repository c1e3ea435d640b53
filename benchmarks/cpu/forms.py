"""What all linear layers of a step take in each packed form, by number of rows.

    python benchmarks/cpu/forms.py
    python benchmarks/cpu/forms.py none int8 'gguf:kernels=torch;many_rows=null' --rows 1 4 8 64

Every layer's own weights, one layer behind the other as in a step, so that none of them is in the processor's cache;
the head with one row for each sequence, at most 64. The forms take turns, and the least of all rounds is shown.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from quality import load

from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.layers import ColumnLinear, RowLinear, VocabHead
from hotswap.core.registry import Registry

DEFAULT = ("none", "int8", "gguf", "int8:kernels=torch", "gguf:kernels=torch;many_rows=null")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 128, 512)
SAMPLED = 64


def linear_layers(holder: object) -> list[ColumnLinear | RowLinear | VocabHead]:
    """Those of a model, in the order in which it has them."""
    found: list[ColumnLinear | RowLinear | VocabHead] = []
    for value in vars(holder).values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, (ColumnLinear, RowLinear, VocabHead)):
                found.append(each)
            elif type(each).__module__.startswith("hotswap.plugins.models") and hasattr(each, "__dict__"):
                found += linear_layers(each)
    return found


def width(layer: ColumnLinear | RowLinear | VocabHead) -> int:
    """Input features."""
    if isinstance(layer, ColumnLinear):
        return layer.in_features
    return layer.part.count if isinstance(layer, RowLinear) else layer.features


@torch.inference_mode()
def step_ms(layers: Sequence[ColumnLinear | RowLinear | VocabHead], rows: int, dtype: torch.dtype) -> float:
    inputs = {width(layer): torch.randn(rows, width(layer)).to(dtype) for layer in layers}
    begin = time.perf_counter()
    for layer in layers:
        x = inputs[width(layer)]
        layer.linear(x[:SAMPLED] if isinstance(layer, VocabHead) else x)
    return 1000 * (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", default=DEFAULT, help="NAME or 'NAME:OPTION=VALUE;OPTION=VALUE'")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    registry, checkpoint, dtype = Registry(), open_checkpoint(asked.model, progress=False), getattr(torch, asked.dtype)
    layers = {form: linear_layers(load(form, checkpoint, asked.dtype, registry).model) for form in asked.forms}
    print(f"milliseconds, {torch.get_num_threads()} threads, least of {asked.rounds} rounds\n")
    print("| rows | " + " | ".join(f"`{form}`" for form in layers) + " |\n|" + "---|" * (1 + len(layers)))
    for rows in asked.rows:
        least = dict.fromkeys(layers, float("inf"))
        for _ in range(asked.rounds):
            for form, own in layers.items():
                least[form] = min(least[form], step_ms(own, rows, dtype))
        print(f"| {rows} | " + " | ".join(f"{value:.1f}" for value in least.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
