"""Requests that share their parent's prompt (n > 1): which of them wait for it, and for how many tokens.

They share all of the prompt but its end, which each computes itself: the last token, from which it samples, and what a
speculator must see again.
"""

from collections.abc import Mapping

from hotswap.core.engine.pool import RUNNING, RequestState


def shareable(state: RequestState, reuse_tail: int) -> int:
    """Tokens of its prompt that a request may share; nothing where that is not positive."""
    return state.prompt_length - 1 - reuse_tail


def has_prompt(state: RequestState, reuse_tail: int) -> bool:
    """Has a request computed all that its children may share, and has it still?"""
    return state.status is RUNNING and state.verified >= shareable(state, reuse_tail)


def find_parent(state: RequestState, live: Mapping[str, RequestState], reuse_tail: int) -> bool:
    """Give a request the parent that it names, if that lives and can share its prompt. Says whether it must wait until
    the parent has computed the prompt; the parent keeps it until then."""
    request, parent = state.request, live.get(state.request.fork_of or "")
    if parent is None or shareable(state, reuse_tail) <= 0 or request.continued is not None:
        return False
    same = parent.request.prompt_token_ids == request.prompt_token_ids
    if not same or parent.request.cache_key != request.cache_key or state.prompt_logprobs is not None:
        return False
    state.parent = parent
    if has_prompt(parent, reuse_tail):
        return False
    parent.held.append(state)
    return True
