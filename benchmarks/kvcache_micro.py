"""Microseconds per call of a KV manager's hot operations, at several pool sizes.

Usage: ``python benchmarks/kvcache_micro.py [prefix|radix|paged]``
"""

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

from hotswap.core.interfaces.kvcache import CacheConstraints, CacheKey, CacheSpec, KVCacheManager, Match
from hotswap.plugins.kvcache.paged import PagedKVCache
from hotswap.plugins.kvcache.prefix import PrefixKVCache
from hotswap.plugins.kvcache.radix import RadixKVCache

RUNNING = 256
PROMPT = 8192
KEY = CacheKey(model_revision="bench")


def best(run: Callable[[], object], rounds: int = 5) -> float:
    """The fastest of ``rounds`` runs, in microseconds: the others were disturbed."""
    times = []
    for _ in range(rounds):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return min(times) * 1e6


def admit(kv: KVCacheManager, request_id: str, tokens: list[int]) -> Match:
    kv.begin_plan()
    match = kv.match(tokens, KEY, len(tokens) - 1)
    grant = kv.reserve(request_id, len(tokens), match, KEY, tokens)
    assert not isinstance(grant, str)
    kv.commit(request_id, [], len(tokens))
    return match


def measure(make: Callable[[], KVCacheManager], num_pages: int) -> dict[str, float]:
    kv = make()
    specs = [CacheSpec("full", (0,), 8, 128, 4096)]
    limits = CacheConstraints(max_model_len=16384, max_running=RUNNING, num_pages=num_pages)
    result = {"configure": best(lambda: kv.configure(specs, 0, limits), 1)}

    ids = [f"decode-{i}" for i in range(RUNNING)]
    # Lengths are spread over a page, so that in each step a sixteenth of the rows crosses a page boundary.
    lengths = {request_id: 32 + i % 16 for i, request_id in enumerate(ids)}
    for i, request_id in enumerate(ids):
        admit(kv, request_id, [1000 + i] * lengths[request_id])

    def reserve() -> None:
        for request_id in ids:
            kv.reserve(request_id, lengths[request_id] + 1)

    def commit() -> None:
        for request_id in ids:
            lengths[request_id] += 1
            kv.commit(request_id, [7], lengths[request_id])

    reserves, commits, pure = [], [], []
    for _ in range(32):
        reserves.append(best(reserve, 1))
        pure.append(best(reserve, 1))
        commits.append(best(commit, 1))
    result["reserve, room is there"] = median(pure) / RUNNING
    result["reserve, decoding"] = median(reserves) / RUNNING
    result["commit, decoding"] = median(commits) / RUNNING

    cold = [[j * 100_000 + i for i in range(PROMPT)] for j in range(5)]
    prompts = iter(enumerate(cold))

    def admit_next() -> None:
        number, prompt = next(prompts)
        admit(kv, f"cold-{number}", prompt)

    result["admission of 8192 tokens, cold"] = best(admit_next)
    probe = list(cold[0]) + [1]
    result["match of 8192 cached tokens, first"] = best(lambda: kv.match(list(probe), KEY, PROMPT))
    result["match of 8192 cached tokens, again"] = best(lambda: kv.match(probe, KEY, PROMPT))
    result["match of 8192 unknown tokens"] = best(lambda: kv.match([5] * PROMPT, KEY, PROMPT - 1))
    result["release of 8192 tokens, undone"] = best(lambda: kv.undo(kv.release("cold-0", (1,))))
    return result


def main() -> None:
    managers: dict[str, type[KVCacheManager]] = {"prefix": PrefixKVCache, "radix": RadixKVCache, "paged": PagedKVCache}
    make = managers[(sys.argv[1:] or ["prefix"])[0]]
    sizes = [10_000, 100_000, 1_000_000]
    columns = [measure(make, size) for size in sizes]
    print(f"{'us per call':40s}" + "".join(f"{size:>12,d}" for size in sizes) + "  pages")
    for name in columns[0]:
        print(f"{name:40s}" + "".join(f"{column[name]:12.2f}" for column in columns))


if __name__ == "__main__":
    main()
