"""What it costs to choose a step's tokens, by what the requests ask for.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --rows 256 --vocab 151936 --dtype float32

Logits [rows, vocabulary] as from a model's head: normally distributed, a few tokens ahead. Milliseconds of
``TokenChooser.choose``, which is all that is between the head and the tokens: the processor's time of one thread, which
other programs hardly change, in the median.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from hotswap.core.execution.choosing import ChoiceRows, TokenChooser
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.request import SamplingParams

ASKED: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0}, "temperature 0.8": {"temperature": 0.8}, "min-p 0.05": {"min_p": 0.05},
    "top-k 50": {"top_k": 50}, "top-p 0.9": {"top_p": 0.9}, "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "typical 0.9": {"typical_p": 0.9}}


def logits_like_a_model_s(rows: int, vocab_size: int) -> torch.Tensor:
    """[rows, vocab_size] float32; another few tokens lead in each row, and 0.9 of the mass is in tens of tokens."""
    random = torch.Generator().manual_seed(0)
    lead = 18 * torch.exp(-torch.arange(vocab_size) / 20)
    orders = torch.stack([torch.randperm(vocab_size, generator=random) for _ in range(rows)])
    return 2 * torch.randn(rows, vocab_size, generator=random) + lead[orders]


def milliseconds(logits: torch.Tensor, asked: dict[str, float], repeat: int) -> float:
    rows, vocab_size = logits.shape
    chooser = TokenChooser([], vocab_size, "cpu")
    news = [NewRequest(str(row), [1, 2, 3], 3, SamplingParams(**asked), row) for row in range(rows)]  # type: ignore[arg-type]
    for new in news:
        chooser.begin(new)
    times = []
    for step in range(repeat):
        given = logits.clone()  # it may be changed
        begin = time.thread_time()
        chooser.choose(given, ChoiceRows([new.id for new in news], np.full(rows, 3 + step), [[]] * rows))
        times.append(time.thread_time() - begin)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeat", type=int, default=31)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logits = logits_like_a_model_s(asked.rows, asked.vocab).to(getattr(torch, asked.dtype))
    for name, params in ASKED.items():
        print(f"{name:20} {milliseconds(logits, params, asked.repeat):7.2f} ms")


if __name__ == "__main__":
    main()
