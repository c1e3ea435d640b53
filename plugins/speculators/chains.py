"""Drafting one token behind the other, for all rows of a step at once."""

from collections.abc import Callable, Sequence

import torch

from hotswap.core.interfaces.speculator import DraftRow, Drafts, Draw, ProposeRow

Extend = Callable[[list[int], list[ProposeRow], int, list[int]], torch.Tensor]
"""(places, rows, depth, tokens) -> logits [n, V] behind ``tokens``, each row's draft number ``depth`` (from 1 on).
``places``: where these rows stood among those of the call before."""


def draft_chains(rows: Sequence[ProposeRow], logits: torch.Tensor | None, draw: Draw, extend: Extend) -> Drafts:
    """As many drafts as each row has slots. ``logits`` [N, V]: for the first draft of the N rows that have any."""
    drafts: list[list[int]] = [[] for _ in rows]
    probs: list[list[torch.Tensor]] = [[] for _ in rows]
    active, depth = [i for i, row in enumerate(rows) if row.slots], 0
    while active:
        assert logits is not None, "rows with slots, but no logits"
        drawn = draw(logits, [
            DraftRow(rows[i].request, rows[i].end + depth, tuple(drafts[i])) for i in active])
        depth += 1
        for place, i in enumerate(active):
            drafts[i].append(drawn.tokens[place])
            if drawn.probs is not None:
                probs[i].append(drawn.probs[place])
        places = [place for place, i in enumerate(active) if rows[i].slots > depth]
        active = [active[place] for place in places]
        if active:
            logits = extend(places, [rows[i] for i in active], depth, [drafts[i][-1] for i in active])
    return Drafts(drafts, [torch.stack(q) if q else None for q in probs] if any(probs) else None)
