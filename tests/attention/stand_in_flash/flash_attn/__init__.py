"""Stands for the package flash-attn (FlashAttention-2): the documented signatures, by the definition, on a CPU."""

import flash_stand_in as stand_in
import torch

__version__ = "2.8.3"


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):
    stand_in.calls.append("varlen")
    assert dropout_p == 0.0 and alibi_slopes is None
    stand_in.check(q, k, v, block_table, 256)
    assert cu_seqlens_k.dtype == cu_seqlens_q.dtype == torch.int32
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= lengths.max()
    return stand_in.attend(
        q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale or q.shape[-1] ** -0.5, causal, window_size, softcap)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):
    stand_in.calls.append("kvcache")
    assert k is None and v is None and rotary_cos is None and cache_batch_idx is None
    stand_in.check(q, k_cache, v_cache, block_table, 256)
    rows, count = q.shape[:2]
    starts = torch.arange(0, (rows + 1) * count, count, dtype=torch.int32)
    out = stand_in.attend(
        q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale or q.shape[-1] ** -0.5,
        causal, window_size, softcap)
    return out.view(q.shape)
