"""The experts of one layer that this rank holds: tokens sorted by expert, one multiplication an expert.

Legend of shapes: T tokens, k experts a token, E experts of this rank, I an expert's inner size on this rank.
"""

import torch
from torch.nn import functional

from hotswap.core.interfaces.operators import OperatorSet
from hotswap.core.modeling.layers import Axis
from hotswap.core.modeling.mesh import Mesh
from hotswap.core.modeling.weights import WeightSource
from hotswap.plugins.models.decoder_config import ALIGNED, ExpertsConfig


class Experts:
    """gate_up [E, 2 I, hidden], down [E, hidden, I]. ``load_counts`` [E] int64: tokens that each has worked on since
    the start, padding included. ``grouped``: one multiplication for all experts, which reads no count back to the host.
    """

    def __init__(
        self, c: ExpertsConfig, hidden_size: int, mesh: Mesh, dtype: torch.dtype, device: str, operators: OperatorSet,
    ) -> None:
        self.config, self.hidden_size, self.operators = c, hidden_size, operators
        self.part, self.inner = mesh.shard("expert", c.count), Axis("expert_mlp", c.size).part(mesh)
        size = self.inner.count
        self.gate_up = torch.empty(self.part.count, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(self.part.count, hidden_size, size, dtype=dtype, device=device)
        self.load_counts = torch.zeros(self.part.count, dtype=torch.int64, device=device)
        aligned = hidden_size % ALIGNED == 0 and size % ALIGNED == 0
        self.grouped = aligned and dtype == torch.bfloat16 and _since_ampere(device)

    def load(self, weights: WeightSource, prefix: str) -> None:
        """From three tensors an expert, as checkpoints are published."""
        gate, up, down = self.config.family.projections
        inner, size, hidden = self.inner, self.config.size, self.hidden_size
        for local, expert in enumerate(range(self.part.start, self.part.stop)):
            for name, rows in ((gate, slice(None, inner.count)), (up, slice(inner.count, None))):
                taken = weights.take(f"{prefix}{expert}.{name}.weight", (size, hidden), 0, inner)
                self.gate_up[local, rows].copy_(taken)
            self.down[local].copy_(weights.take(f"{prefix}{expert}.{down}.weight", (hidden, size), 1, inner))

    def load_fused(self, weights: WeightSource, prefix: str) -> None:
        """From two tensors for all experts, as transformers keeps them in memory."""
        count, size, hidden, inner = self.config.count, self.config.size, self.hidden_size, self.inner
        gate_up = weights.take(f"{prefix}gate_up_proj", (count, 2 * size, hidden), 0, self.part)
        self.gate_up[:, : inner.count].copy_(gate_up[:, inner.start : inner.stop])
        self.gate_up[:, inner.count :].copy_(gate_up[:, size + inner.start : size + inner.stop])
        down = weights.take(f"{prefix}down_proj", (count, hidden, size), 0, self.part)
        self.down.copy_(down[:, :, inner.start : inner.stop])

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], experts [T, k] numbered on the whole axis, weights [T, k] -> [T, hidden], what this rank's
        experts add to it.

        Rows are put back into the order of tokens before they are added, so that a sum does not depend on how a device
        orders its atomic additions, nor on what else is in the batch.
        """
        (num_tokens, top_k), num_local = experts.shape, self.part.count
        local = experts.flatten() - self.part.start
        local = local.where((local >= 0) & (local < num_local), num_local)  # other ranks' rows come last
        order = local.argsort(stable=True)
        # Not bincount, which has to know its result's size and so waits for the device.
        counts = local.new_zeros(num_local + 1).scatter_add_(0, local, torch.ones_like(local))[:num_local]
        self.load_counts += counts
        gated = self.operators.silu_mul(self._multiply(x[order // top_k], self.gate_up, counts))
        sorted_rows = self._multiply(gated, self.down, counts)
        rows = torch.empty_like(sorted_rows)
        rows[order] = sorted_rows
        rows = rows.view(num_tokens, top_k, self.hidden_size)
        return torch.bmm(weights.to(rows.dtype)[:, None], rows)[:, 0]

    def _multiply(self, rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """rows [T k, I'], the first counts[0] of them times weight[0].T and so on, weight [E, O, I'] -> [T k, O]; zeros
        where a row belongs to another rank."""
        if self.grouped:
            ends = counts.cumsum(0)
            out = functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends.to(torch.int32))
            here = torch.arange(len(rows), device=rows.device) < ends[-1]
            return out.where(here[:, None], 0)  # what lies beyond the last end was never written
        out, start = rows.new_zeros(len(rows), weight.shape[1]), 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                part = slice(start, start + count)
                torch.mm(rows[part], weight[expert].T, out=out[part])
            start += count
        return out


def _since_ampere(device: str) -> bool:
    """Whether torch has a kernel for grouped multiplication there."""
    return device.startswith("cuda") and torch.cuda.get_device_capability(device) >= (8, 0)
