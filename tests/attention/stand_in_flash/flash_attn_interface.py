"""Stands for flash_attn_3 (FlashAttention-3, for Hopper): the documented signature, by the definition, on a CPU."""

import flash_stand_in as stand_in

__version__ = "3.0.0.b1"


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):
    stand_in.calls.append("hopper")
    assert k is None and v is None and qv is None and rotary_cos is None
    stand_in.check(q, k_cache, v_cache, page_table, 1)
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    return stand_in.attend(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale or q.shape[-1] ** -0.5, causal,
        window_size, softcap)
