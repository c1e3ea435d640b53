"""Attention over pages by the definition, with the checks that the packages make and the tiles that they load."""

import torch

TILE = 64
"""Keys that a kernel loads at a time. Those beyond the row's end come as zeros, those out of the window as they are."""

calls = []
"""Names of the functions that were called, oldest first."""


def check(q, k, v, table, page_multiple):
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query and key must have the same dtype")
    if table.dtype != torch.int32:
        raise RuntimeError("block_table must have dtype torch.int32")
    if table.stride(-1) != 1 or q.stride(-1) != 1:
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if k.shape[1] % page_multiple:
        raise RuntimeError(f"Paged KV cache block size must be divisible by {page_multiple}")
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if q.shape[-2] % k.shape[2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    if k.dim() != 4 or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise RuntimeError("k must have shape (num_blocks, page_block_size, num_heads_k, head_size)")


def attend(q, k, v, starts, lengths, table, scale, causal, window, softcap):
    """q [T, H, D], pages k and v [N, S, K, D], ``starts`` [R + 1], ``lengths`` [R], ``table`` [R, P] -> [T, H, D]."""
    assert starts.dtype == lengths.dtype == torch.int32, "cu_seqlens must have dtype int32"
    assert len(starts) == len(lengths) + 1 == len(table) + 1
    out = torch.empty(q.shape, dtype=q.dtype)
    for row, length in enumerate(lengths.tolist()):
        begin, end = starts[row : row + 2].tolist()
        if end > begin:
            out[begin:end] = _row(q[begin:end], k, v, table[row], length, scale, causal, window, softcap)
    return out


def _row(q, k, v, table, length, scale, causal, window, softcap):
    count, size = len(q), k.shape[1]
    left, right = window
    asked = length - count + torch.arange(count)
    first = 0 if left is None or left < 0 else max(0, length - count - left) // TILE * TILE
    at = torch.arange(first, -(-length // TILE) * TILE)
    inside = at < length
    pages = table[torch.where(inside, at, length - 1) // size].long()
    keys, values = (x[pages, at % size].float() for x in (k, v))
    keys, values = (torch.where(inside[:, None, None], x, 0.0) for x in (keys, values))
    group = q.shape[1] // k.shape[2]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = ~inside[None, :]
    if causal:
        hidden = hidden | (at[None, :] > asked[:, None])
    if left is not None and left >= 0:
        hidden = hidden | (at[None, :] < asked[:, None] - left)
    if right is not None and right >= 0:
        hidden = hidden | (at[None, :] > asked[:, None] + right)
    probs = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype).float()
    return torch.einsum("hqk,khd->qhd", probs, values).to(q.dtype)
