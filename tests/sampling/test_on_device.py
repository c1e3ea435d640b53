"""On an accelerator the same distributions, the same faults, and the same tokens but for the last bits of exp2."""

import numpy as np
import pytest
import torch

from hotswap.core.execution.logprobs import token_logprobs
from hotswap.core.execution.sampling import processed_probs, sample
from hotswap.core.execution.sampling_table import SamplingTable
from hotswap.core.execution.verification import verify
from hotswap.core.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KINDS = [
    SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.05), SamplingParams(typical_p=0.8), SamplingParams(top_k=900, top_p=0.95, temperature=1.5),
]  # fmt: skip


def test_device_and_host_agree() -> None:
    rows, vocab_size = 16 * len(KINDS), 32_000
    logits = 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[5, 7], logits[6] = torch.nan, -torch.inf
    names = [str(row) for row in range(rows)]
    results = []
    for device in ("cpu", "cuda"):
        table = SamplingTable(device)
        for row, name in enumerate(names):
            table.add(name, KINDS[row % len(KINDS)], row)
        batch, x = table.batch(names, np.arange(rows)), logits.to(device)
        drafts = [[token] for token in range(rows // 2)]
        q = [
            torch.full((1, vocab_size), 1 / vocab_size, device=device) if row % 2 else None for row in range(rows // 2)
        ]
        results.append((sample(x, batch).to_host(), processed_probs(x, batch).cpu(), verify(x, batch, drafts, q),
                        token_logprobs(x[7:], list(range(7, rows)), [3] * (rows - 7))))  # fmt: skip
    (host, host_probs, host_verified, host_logprobs), (device_, probs, verified, logprobs) = results
    assert host[1].keys() == device_[1].keys() == {5, 6}
    assert np.mean(np.array(host[0]) == np.array(device_[0])) > 0.98
    torch.testing.assert_close(probs, host_probs, rtol=1e-3, atol=1e-5, equal_nan=True)
    assert np.mean([a == b for a, b in zip(host_verified.kept, verified.kept, strict=True)]) > 0.95
    assert [entry.rank for entry in logprobs] == [entry.rank for entry in host_logprobs]
