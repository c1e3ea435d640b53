"""How many pages of which size: the same number for every group, so that all hold equally many tokens."""

from collections.abc import Sequence

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.kvcache import CacheConstraints, CachePlan, CacheSpec, GroupPlan

DEFAULT_PAGE_SIZE = 16
"""Tokens; small enough that a request wastes little in its last page, large enough that tables stay short."""

KINDS = ("full", "latent", "window")


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def choose_page_size(constraints: CacheConstraints) -> int:
    """The wanted page size if the attention backend allows it; the allowed one nearest to 16 if none is wanted."""
    wanted, allowed = constraints.page_size, constraints.page_sizes
    if wanted is None:
        return min(allowed or (DEFAULT_PAGE_SIZE,), key=lambda size: (abs(size - DEFAULT_PAGE_SIZE), size))
    if wanted < 1:
        raise ConfigError(f"got {wanted}, expected at least 1 token a page", "kvcache.block_size")
    if allowed is not None and wanted not in allowed:
        raise ConfigError(
            f"got {wanted}, but the attention backend allows {', '.join(map(str, sorted(allowed)))}; "
            "choose one of these or leave it out",
            "kvcache.block_size",
        )
    return wanted


def plan_pages(specs: Sequence[CacheSpec], num_bytes: int, constraints: CacheConstraints) -> CachePlan:
    """Divide ``num_bytes``. ``constraints.num_pages``, where given, is what each group gets, dummy page included."""
    for spec in specs:
        if spec.kind not in KINDS:
            raise ConfigError(
                f"cache group {spec.group!r} is of kind {spec.kind!r}, which this manager cannot page "
                f"(it can: {', '.join(KINDS)})",
                "kvcache",
            )
    page_size = choose_page_size(constraints)
    page_bytes = page_size * sum(spec.bytes_per_token for spec in specs)
    num_pages = constraints.num_pages if constraints.num_pages is not None else num_bytes // max(1, page_bytes)
    require_room(num_pages, page_size, page_bytes, num_bytes, constraints)
    return CachePlan({spec.group: GroupPlan(num_pages, page_size) for spec in specs})


def require_room(
    num_pages: int, page_size: int, page_bytes: int, num_bytes: int, constraints: CacheConstraints,
) -> None:
    """One request of ``max_model_len`` tokens must fit beside the dummy page, or it could never be served.
    ``page_bytes``: of one page in every group."""
    needed, available = pages_for(constraints.max_model_len, page_size) + 1, max(0, num_pages)
    if available >= needed:
        return
    if constraints.num_pages is not None:
        key, given, enough = "kvcache.num_blocks", f"kvcache.num_blocks is {available}", f"{needed}"
    else:
        enough_bytes = needed * page_bytes
        key, given = "kvcache.memory", f"{num_bytes} bytes hold {available}"
        enough = f"{enough_bytes} bytes ({-(-enough_bytes // 2**20)}MiB)"
    fits = (available - 1) * page_size
    raise ConfigError(
        f"one request of max_model_len={constraints.max_model_len} tokens needs {needed} pages of {page_size} tokens, "
        f"the dummy page included, but {given}; give at least {enough}"
        + (f", or lower max_model_len to {fits}" if fits > 0 else ""), key)
