"""A mesh whose ranks are threads of this process: what a strategy gives a model, without processes.

Loaded by path (the test folders are no packages); the fixture ``on_ranks`` of conftest.py hands it to tests.
"""

import threading

import torch

from hotswap.core.modeling.mesh import Mesh, Routed, Shard


class ThreadMesh(Mesh):
    """Even shards of the given axes over ``size`` threads that meet at a barrier."""

    def __init__(self, rank, size, axes, meeting):
        self.rank, self.size, self.axes = rank, size, axes
        self.barrier, self.slots = meeting

    def shard(self, axis, total):
        if axis not in self.axes:
            return Shard(0, total)
        count = total // self.size
        return Shard(self.rank * count, count)

    def _meet(self, axis, x, combine):
        if axis not in self.axes:
            return x
        self.slots[self.rank] = x
        self.barrier.wait()
        result = combine(self.slots)
        self.barrier.wait()
        return result

    def reduce(self, axis, x):
        return self._meet(axis, x, lambda parts: torch.stack(parts).sum(0))

    def gather(self, axis, x, dim, total):
        return self._meet(axis, x, lambda parts: torch.cat(parts, dim))


class ExchangeMesh(ThreadMesh):
    """Ranks that share the experts and have tokens of their own, as many as they like: each gets everybody's, since
    only what its experts add counts, and takes its own tokens out of the sum."""

    def dispatch(self, axis, routed, total):
        self.counts = self._meet(axis, len(routed.x), list)
        return Routed(*(self._meet(axis, part, torch.cat) for part in routed[:3]))

    def combine(self, axis, y, routed):
        return self.reduce(axis, y).split(self.counts)[self.rank]


def on_ranks(size, axes, work, mesh=ThreadMesh):
    """``work(mesh)`` on each of ``size`` ranks; their results in order."""
    meeting = threading.Barrier(size, timeout=60), [None] * size
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = work(mesh(rank, size, axes, meeting))
        except BaseException as error:
            errors.append(error)
            meeting[0].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
