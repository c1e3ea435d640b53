"""Stands for the package flash-attn-4: the documented signature, by the definition, on a CPU."""

import flash_stand_in as stand_in


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None,
    page_table=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, mask_mod=None, block_sparse_tensors=None,
    cu_total_m_blocks=None, cu_total_n_blocks=None, aux_tensors=None, return_lse=False,
):
    stand_in.calls.append("cute")
    assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
    assert q.shape[-1] in (64, 96, 128)
    stand_in.check(q, k, v, page_table, 128)
    assert all(side is None or side >= 0 for side in window_size)
    out = stand_in.attend(
        q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale or q.shape[-1] ** -0.5, causal, window_size,
        softcap)
    return out, None
