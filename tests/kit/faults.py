"""One fault each, planted in a part that is right: mostly in the templates of ``hotswap plugins new``, which are short.

Loaded by path (the test folders are no packages). ``FAULTS`` says which check of the kit must find which: the docstring
of a class is what goes wrong, as docs/kit.md lists it.
"""

import importlib.util
import random
import sys
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hotswap.core.errors import BrokenComponentError, EngineStoppedError
from hotswap.core.hooks import hookimpl
from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.kvcache import CachePlan
from hotswap.core.interfaces.messages import Verdict
from hotswap.core.interfaces.parallel import MeshDim, RankPlan, Take
from hotswap.core.interfaces.scheduler import Row, StepPlan
from hotswap.core.interfaces.speculator import Drafts
from hotswap.core.modeling.layers import RowLinear
from hotswap.core.testing.rig import REGISTRY, build

SCAFFOLD = Path(__file__).parents[2] / "server" / "scaffold"


def template(kind):
    """The class of a template."""
    spec = importlib.util.spec_from_file_location(f"scaffold_{kind}", SCAFFOLD / kind / "hotswap_mypart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


T = SimpleNamespace(**{folder.name: template(folder.name) for folder in SCAFFOLD.iterdir() if folder.is_dir()})


# ---------------------------------------------------------------------- scheduler


class ForgetsWhoWasSuspended(T.scheduler.MyPart):
    """a request that was suspended is not taken into the queue again"""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = set()

    def admit(self, view):
        if view.id not in self.seen:
            super().admit(view)
        self.seen.add(view.id)


class IgnoresTheBudget(T.scheduler.MyPart):
    """rows together exceed the token budget of the step"""

    def _row(self, ctx, view, line, left):
        return super()._row(ctx, view, line, 1 << 20)


class WaitsForCompany(T.scheduler.MyPart):
    """nobody starts before four requests wait"""

    def _next(self, ctx, line):
        return super()._next(ctx, line) if line or len(self.waiting) >= 4 else None


class SuspendsForNothing(T.scheduler.MyPart):
    """requests are suspended although there is room"""

    def __init__(self, *args):
        super().__init__(*args)
        self.done = set()

    def plan(self, ctx):
        for view in ctx.running:
            due = (view.id, view.output_length // 10)
            if view.ready and view.output_length % 10 == 9 and due not in self.done:
                self.done.add(due)
                ctx.suspend(view.id, reason="for nothing")
                return StepPlan()
        return super().plan(ctx)


class NewestOnly(T.scheduler.MyPart):
    """the newest is served, and all others wait for it"""

    def plan(self, ctx):
        if self.waiting and ctx.free_slots > 0:
            view = ctx.view(max(self.waiting, key=self.waiting.__getitem__))
        else:
            ready = [view for view in ctx.running if view.ready]
            if not ready:
                return StepPlan()
            view = max(ready, key=lambda view: view.sequence)
        row = self._row(ctx, view, [], ctx.token_budget)
        if row:
            self.waiting.pop(view.id, None)
        return StepPlan([row] if row else [])


class KeepsTheDead(T.scheduler.MyPart):
    """requests that have ended are planned for"""

    def drop(self, request_id): ...


class ServesOnlyItsOwn(T.scheduler.MyPart):
    """a successor ignores the requests that its predecessor has started"""

    def __init__(self, *args):
        super().__init__(*args)
        self.own = set()

    def admit(self, view):
        super().admit(view)
        self.own.add(view.id)

    def plan(self, ctx):
        plan = super().plan(ctx)
        return StepPlan([row for row in plan.rows if row.request in self.own])


class NowAndThen(T.scheduler.MyPart):
    """every seventh plan breaks a rule, and is made again without a fault"""

    plans = 0

    def plan(self, ctx):
        plan = super().plan(ctx)
        if plan.rows:
            self.plans += 1
        return plan if self.plans % 7 else StepPlan([*plan.rows, *plan.rows[:1]])


class DropsOnlyWhatWaits(T.scheduler.MyPart):
    """the end of a request that runs makes it raise"""

    def drop(self, request_id):
        del self.waiting[request_id]


class DraftsWithoutRoom(T.scheduler.MyPart):
    """a row verifies more drafts than it has reserved room for"""

    def _row(self, ctx, view, line, left):
        row = super()._row(ctx, view, line, left)
        return row and (Row(row.request, row.n_tokens, row.draft_slots + 1) if row.draft_slots else row)


# ---------------------------------------------------------------------- queue policy


class EqualKeys(T.queue_policy.MyPart):
    """two requests have the same key"""

    def key(self, view, now):
        return (view.prompt_length,)


class SecretlyDynamic(T.queue_policy.MyPart):
    """a key that changes with time is said to stay"""

    def key(self, view, now):
        return (view.arrival - now * view.prompt_length, view.sequence)


class ShortOnes(T.queue_policy.MyPart):
    """a long request is overtaken for ever by short ones"""

    def key(self, view, now):
        return (view.prompt_length + view.max_new, view.sequence)


class RaisesForStrangers(T.queue_policy.MyPart):
    """a request that it never saw makes it raise"""

    def __init__(self, *args):
        super().__init__(*args)
        self.held = {}

    def admit(self, view):
        self.held[view.id] = view

    def drop(self, request_id):
        del self.held[request_id]


# ---------------------------------------------------------------------- KV manager and eviction policy


class PicksHeldPages(T.eviction_policy.MyPart):
    """a page that is held is named for eviction"""

    def on_pin(self, page): ...


class PickRemoves(T.eviction_policy.MyPart):
    """naming a page takes it out of the books, though it may be spared"""

    def pick(self):
        page = super().pick()
        del self.idle[page]
        return page


class SharedClone(T.eviction_policy.MyPart):
    """two cache groups share one book"""

    def clone(self):
        return self


class SharesWithEverybody(T.kvcache.MyPart):
    """the salt does not separate"""

    def match(self, tokens, key, limit, tail=0):
        return self.inner.match(tokens, replace(key, salt=""), limit, tail)

    def reserve(self, request_id, upto, match=None, key=None, tokens=()):
        return self.inner.reserve(request_id, upto, match, key and replace(key, salt=""), tokens)


class FencesIgnored(T.kvcache.MyPart):
    """pages are given away while a step in flight still reads them"""

    def release(self, request_id, fences, retain=True):
        return self.inner.release(request_id, (), retain)


class EvictsInSilence(T.kvcache.MyPart):
    """who follows the cache is not told what is evicted"""

    def events(self):
        return [event for event in super().events() if event.kind != "evicted"]


class UndoForgotten(T.kvcache.MyPart):
    """what a failed plan has reserved is kept"""

    def undo(self, entry): ...


# ---------------------------------------------------------------------- KV transfer


class NeverForgets(T.kv_transfer.MyPart):
    """the pages of a request that was aborted are kept"""

    def forget(self, request): ...


class UndoLoads(T.kv_transfer.MyPart):
    """the load of a plan that was undone is carried out"""

    def _undo_attach(self, request_id, record):
        self.records[request_id] = record


class Stumbles(T.kv_transfer.MyPart):
    """every hundredth look-up raises, and goes well the next time"""

    lookups = 0

    def lookup(self, *arguments):
        self.lookups += 1
        if self.lookups % 100 == 0:
            raise KeyError("planted")
        return super().lookup(*arguments)


class AllThatWasKnown(T.kv_transfer.MyPart):
    """a suspended request is taken to be as long as the host knew, not as the worker says"""

    def suspended(self, request, tokens, computed):
        super().suspended(request, tokens, max(0, computed - 1))


# ---------------------------------------------------------------------- attention


class NoWindow(T.attention.MyPart):
    """a window hides nothing"""

    def bind(self, group, shape, limits):
        return super().bind(group, replace(shape, window=None), limits)


class SeesTheNext(T.attention.MyPart):
    """a query sees the key behind its own"""

    def run(self, state, q, k, v, cache, out):
        super().run(state, q, k, v, cache, out)
        if len(q) > 1:
            out[:-1] += 0.01 * v.repeat_interleave(q.shape[1] // v.shape[1], 1)[1:]


class WrongGroups(T.attention.MyPart):
    """query heads read each other's keys"""

    def run(self, state, q, k, v, cache, out):
        order = torch.arange(q.shape[1]).view(k.shape[1], -1).t().flatten()
        super().run(state, q[:, order], k, v, cache, out)


class ReadsWholePages(T.attention.MyPart):
    """what lies behind a row's last token, another request's leavings, counts"""

    def run(self, state, q, k, v, cache, out):
        super().run(state, q, k, v, cache, out)
        pages = state.layout.groups[state.group]
        for row, length in enumerate(state.layout.kv_lens.tolist()):
            last = int(pages.page_table[row, (length - 1) // pages.page_size])
            rest = cache[1][last, (length - 1) % pages.page_size + 1 :]
            out[:] += 0 * rest.sum()


class OwnNotation(T.attention.MyPart):
    """its pages hold what another backend of the same layout would misread"""

    def run(self, state, q, k, v, cache, out):
        super().run(state, -q, -k, v, cache, out)


class NoCap(T.attention.MyPart):
    """the softcap is not applied"""

    def bind(self, group, shape, limits):
        return super().bind(group, replace(shape, softcap=None), limits)


# ---------------------------------------------------------------------- speculator


class MoreThanSlots(T.speculator.MyPart):
    """a row gets more drafts than it has slots"""

    def propose(self, rows):
        return Drafts([[*drafts, 1] for drafts in super().propose(rows).tokens])


class NoIds(T.speculator.MyPart):
    """drafts are no ids of the vocabulary"""

    def propose(self, rows):
        return Drafts([[10**6] * min(1, row.slots) for row in rows])


class LiesAboutItsOdds(T.speculator.MyPart):
    """drafts are not drawn from the probabilities that come with them"""

    def propose(self, rows):
        tokens = super().propose(rows).tokens
        return Drafts(tokens, [torch.full((len(drafts), 16), 1 / 16) if drafts else None for drafts in tokens])


class Moody(T.speculator.MyPart):
    """two instances that saw the same propose differently"""

    def __init__(self, *args):
        super().__init__(*args)
        self.random = random.Random(id(self))

    def propose(self, rows):
        return Drafts([[self.random.randrange(16) for _ in range(min(row.slots, 3))] for row in rows])


class WritesTheTokens(T.speculator.MyPart):
    """it writes into the tokens that it is shown"""

    def propose(self, rows):
        for row in rows:
            np.asarray(row.tokens.base)[-1] += 1
        return super().propose(rows)


# ---------------------------------------------------------------------- logits processor


class TouchesNeighbours(T.logits_processor.MyPart):
    """rows that were not named change"""

    def apply(self, logits, rows):
        super().apply(logits, rows)
        if rows:
            logits[:, 0] -= 1


class RemembersTheLast(T.logits_processor.MyPart):
    """a request inherits from another of its name"""

    def begin(self, request):
        if request.id not in self.asked:
            super().begin(request)

    def end(self, request): ...


class CountsCalls(T.logits_processor.MyPart):
    """each call of apply leaves a trace"""

    calls = 0

    def apply(self, logits, rows):
        super().apply(logits, rows)
        for row in rows:
            tokens, by = self.asked[row.request]
            self.asked[row.request] = tokens, by + 1


# ---------------------------------------------------------------------- model


class NoReduce(RowLinear):
    def __call__(self, x):
        return self.linear(x)


class ForgetsToReduce(T.model.MyPart):
    """ranks do not add up their parts of a contraction"""

    def build(self, *args):
        super().build(*args)
        for *_, down in self.layers:
            down.__class__ = NoReduce


class PositionsFromNought(T.model.MyPart):
    """each chunk of a prompt counts its positions from 0"""

    def forward(self, inputs, positions, attend, taps=None):
        return super().forward(inputs, torch.arange(len(positions)), attend, taps)


class LooksAtNeighbours(T.model.MyPart):
    """a row depends on the others of its step"""

    def forward(self, inputs, positions, attend, taps=None):
        x = super().forward(inputs, positions, attend, taps)
        return x + 0.01 * x.mean(0)


class HalfTheBytes(T.model.MyPart):
    """it says that its keys and values take half the memory that they take"""

    def cache_specs(self):
        return [replace(spec, bytes_per_token=spec.bytes_per_token // 2) for spec in super().cache_specs()]


class OneAttendForAll(T.model.MyPart):
    """two engines that share it attend in each other's place"""

    def forward(self, inputs, positions, attend, taps=None):
        self.attend = attend
        return super().forward(inputs, positions, lambda *arguments: self.attend(*arguments), taps)


class OneLayerLate(REGISTRY.load("model", "LlamaForCausalLM")):
    """hidden states are those of the layer before"""

    def forward(self, inputs, positions, attend, taps=None):
        asked = dict.fromkeys(self.taps())
        x = super().forward(inputs, positions, attend, asked)
        for name in taps or ():
            layer, _, number = name.partition(":")
            before = "embedding" if number == "0" else f"{layer}:{int(number) - 1}" if number else name
            taps[name] = asked[before]
        return x


class ForgetsTheHead(T.model.MyPart):
    """it does not list a layer whose weights a quantization is given"""

    @classmethod
    def linear_layers(cls, config, matrices):
        return [name for name in super().linear_layers(config, matrices) if name != "lm_head"]


# ---------------------------------------------------------------------- quantization


class Packs(T.quantization.MyPart):
    """Packs every layer as ``form``."""

    form = T.quantization.EightBits

    def pack(self, weight):
        return self.form(weight)


class NoBias(Packs):
    """the bias is not added"""

    class form(T.quantization.EightBits):
        def __init__(self, weight):
            super().__init__(replace(weight, bias=None))


class Coarse(Packs):
    """weights are rounded to fewer bits than was declared"""

    class form(T.quantization.EightBits):
        def __init__(self, weight):
            super().__init__(weight)
            self.numbers = self.numbers.div(16, rounding_mode="trunc").mul(16)


class CommonScale(Packs):
    """activations are rounded with one scale for all rows"""

    class form(T.quantization.EightBits):
        def __call__(self, x):
            scale = x.abs().max() / 127 if len(x) else 1.0
            return super().__call__((x / scale).round() * scale if scale else x)


class OneBehindTheOther(Packs):
    """rows are read as if one lay behind the other"""

    class form(T.quantization.EightBits):
        def __call__(self, x):
            return super().__call__(x.as_strided(x.shape, (x.shape[1], 1)))


class HalfTheMemory(Packs):
    """it says that it takes half the memory that it takes"""

    class form(T.quantization.EightBits):
        def __init__(self, weight):
            super().__init__(weight)
            self.nbytes //= 2


class LooksBack(T.quantization.MyPart):
    """it computes with the tensor that it was given, which the next layer overwrites"""

    def pack(self, weight):
        packed = super().pack(weight)
        return lambda x: packed(x) + 0 * weight.pieces[0].sum() + (weight.pieces[0].std() == 0)


class ScalesInPlace(T.quantization.MyPart):
    """the weights that it was given are changed"""

    def pack(self, weight):
        packed = super().pack(weight)
        weight.pieces[0].div_(2)
        return packed


class FromTheFirst(REGISTRY.load("quantization", "gguf")):
    """a part of a file's columns is read from the beginning of a block"""

    def pack(self, weight):
        return super().pack(replace(weight, pieces=tuple(
            piece if isinstance(piece, torch.Tensor) else replace(piece, first=0) for piece in weight.pieces)))


class DividesByNothing(Packs):
    """a row of zeros has no scale"""

    class form(T.quantization.EightBits):
        def __init__(self, weight):
            super().__init__(weight)
            self.scales = self.scales.where(self.scales > 1e-30, torch.nan)


# ---------------------------------------------------------------------- executor


class WaitsInSubmit(T.executor.MyPart):
    """submit returns when the step has run"""

    def submit(self, message):
        ticket = super().submit(message)
        self.tickets[ticket].exception()
        return ticket


class SwallowsErrors(T.executor.MyPart):
    """a step that raised looks like one that went well"""

    def _execute(self, message):
        verdict = super()._execute(message)
        return Verdict(message.step_id) if verdict.error else verdict


class WellThoughDead(T.executor.MyPart):
    """it says that it is well although its worker has died"""

    def health(self):
        return None


class LeavesItOpen(T.executor.MyPart):
    """stop does not close the worker"""

    def stop(self):
        if self.thread is not None:
            self.problem = self.problem or "stopped"
            self.thread.shutdown(wait=False)


class TellsOfNoShortage(T.executor.MyPart):
    """a worker without room for its pages looks like one that has died"""

    def allocate(self, plan):
        try:
            super().allocate(plan)
        except MemoryError as error:
            raise EngineStoppedError(str(error)) from error


class StopsToPrepare(T.executor.MyPart):
    """steps wait for parts that are being prepared"""

    def prepare(self, parts):
        return self._call(self.worker.prepare, parts).result()


class InPlaceAtOnce(T.executor.MyPart):
    """prepared parts are in place before they are exchanged"""

    def prepare(self, parts):
        info = super().prepare(parts)
        if parts:
            super().exchange(CachePlan({}), True, Take.PREPARED)
        return info


class TakesTheFirst(T.executor.MyPart):
    """what was prepared first is put in place, not what was prepared last"""

    first = None

    def prepare(self, parts):
        self.first = self.first or parts
        return super().prepare(self.first)


class TakesWhatThereIs(T.executor.MyPart):
    """an exchange for which nothing was prepared looks like one that went well"""

    def exchange(self, plan, keeps_pages, take):
        with suppress(RuntimeError):
            super().exchange(plan, keeps_pages, take)


class NoWayBack(T.executor.MyPart):
    """an exchange cannot be taken back"""

    def exchange(self, plan, keeps_pages, take):
        super().exchange(plan, keeps_pages, Take.SAME if take is Take.FORMER else take)


class KeepsTheOldForGood(T.executor.MyPart):
    """the old parts are never let go"""

    def settle(self): ...


class Pair:
    """Two ranks that look like one worker."""

    def __init__(self, factory, plan):
        self.ranks = [factory(plan, rank) for rank in range(2)]

    def each(self, name, *arguments):
        """On both of them, whatever one raises; what the first one returns."""
        calls = [Future() for _ in self.ranks]
        for rank, call in zip(self.ranks, calls, strict=True):
            try:
                call.set_result(getattr(rank, name)(*arguments))
            except Exception as error:
                call.set_exception(error)
        return [call.result() for call in calls][0]

    def __getattr__(self, name):
        return partial(self.each, name)

    def reports(self):
        return [rank.report() for rank in self.ranks]

    def prepare(self, parts):
        try:
            return self.each("prepare", parts)
        except Exception:
            self.each("prepare", {})
            raise


class TwoRanks(T.executor.MyPart):
    """Nothing is wrong with it."""

    pair = Pair

    def describe(self):
        return Description(offers=frozenset({"ranks", "exchange"}))

    def launch(self, factory, plan, meeting=None):
        return super().launch(lambda plan, rank: self.pair(factory, plan), RankPlan())

    def report(self):
        return self._call(self.worker.reports).result()


class OneKeepsThem(TwoRanks):
    """parts that one rank refuses stay prepared on the others"""

    class pair(Pair):
        def prepare(self, parts):
            return self.each("prepare", parts)


class OnlyTheFirst(TwoRanks):
    """an exchange reaches the first rank only"""

    class pair(Pair):
        def exchange(self, *arguments):
            self.ranks[0].exchange(*arguments)


class ClosesOne(TwoRanks):
    """stop closes the first rank only"""

    class pair(Pair):
        def close(self):
            self.ranks[0].close()


class TakesOneBack(TwoRanks):
    """after an exchange that one rank could not carry out, only that one is taken back"""

    class pair(Pair):
        failed = False

        def exchange(self, *arguments):
            if self.failed:
                return self.ranks[1].exchange(*arguments)
            try:
                return self.each("exchange", *arguments)
            except RuntimeError:
                self.failed = True
                raise


# ---------------------------------------------------------------------- launcher


class SecretInTheOpen(T.launcher.MyPart):
    """the arguments, and a secret among them, stand in the environment"""

    def start(self, entry, arguments):
        self.options = self.Options(command=["env", f"SEEN={arguments[0]['secret']}"])
        super().start(entry, arguments)


class SecretInTheCommand(T.launcher.MyPart):
    """the secret stands in the interpreter's command line"""

    def start(self, entry, arguments):
        again = "import os, sys; os.execv(sys.executable, [sys.executable, '-X', *sys.argv[1:2], *sys.argv[3:]])"
        self.options = self.Options(command=[sys.executable, "-c", again, arguments[0]["secret"]])
        super().start(entry, arguments)


class SamePlace(T.launcher.MyPart):
    """every process believes that it is the first"""

    def start(self, entry, arguments):
        for given in arguments:
            super().start(entry, [given])


class NothingEnds(T.launcher.MyPart):
    """a process that has ended is not told of"""

    def ended(self):
        return {}


class KillsAtOnce(T.launcher.MyPart):
    """processes that would end in time are killed"""

    def stop(self, timeout_s):
        super().stop(0.0)


class TimeForEach(T.launcher.MyPart):
    """each process has the whole time to end, one behind the other"""

    def stop(self, timeout_s):
        everyone = self.processes
        for process in everyone:
            self.processes = [process]
            super().stop(timeout_s)


# ---------------------------------------------------------------------- shard strategy


class UnknownAxis(T.shard.MyPart):
    """it shards an axis that the model does not have"""

    def layout(self, facts, inner):
        return super().layout(facts, inner).wrapped(MeshDim("mine", 1, ("width",)))


class DropsTheInner(T.shard.MyPart):
    """what stands behind it in the list is lost"""

    def layout(self, facts, inner):
        return super().layout(facts, RankPlan())


class LeavesOutTheRest(T.shard.MyPart):
    """the end of an axis is nobody's"""

    def layout(self, facts, inner):
        dim, *rest = super().layout(facts, inner).dims
        end = facts.axes["mlp"] - 4
        return replace(inner, dims=(MeshDim(dim.strategy, dim.size, ("mlp",), {"mlp": (0, 10, 20, end)}), *rest))


class TakesAnyModel(T.shard.MyPart):
    """a model without its axes is not refused"""

    def layout(self, facts, inner):
        return inner.wrapped(MeshDim("mine", 3, ("mlp",)))


# ---------------------------------------------------------------------- deployment and router


class LeavesThemRunning(T.deployment.MyPart):
    """engines run on after another could not be started"""

    def start(self, factories, now):
        return T.deployment.Line(factories, [factory.start() for factory in factories])


def with_line(**methods):
    """``start`` of a deployment whose face has these methods."""
    line = type("Line", (T.deployment.Line,), methods)
    return lambda self, factories, now: line(factories, [factory.start() for factory in factories])


class NoFailover(T.deployment.MyPart):
    """requests go to an engine that is lost"""

    start = with_line(add=lambda self, request, sink: self.clients[0].add(request, sink))


class DeadIfOneIs(T.deployment.MyPart):
    """one lost engine makes all of them look lost"""

    start = with_line(health=lambda self: next(filter(None, (client.health() for client in self.clients)), None))


class TwoOfOneName(T.deployment.MyPart):
    """a second request of the same id takes the first one's place"""

    def start(self, factories, now):
        line = super().start(factories, now)
        add = line.add

        def forgetful(request, sink):
            if request.id in line.live:
                for client in line.clients:
                    client.abort(request.id)
            add(request, sink)

        line.add = forgetful
        return line


class CountsForEver(T.deployment.MyPart):
    """requests that have ended are counted as live"""

    start = with_line(_deliver=lambda self, sink, output: sink(output))


class ChoosesTheAbsent(T.router.MyPart):
    """an engine that is down is chosen"""

    def pick(self, request, candidates):
        return 0


class PreparesOtherwise(T.router.MyPart):
    """a request that was prepared goes elsewhere"""

    def prepare(self, request):
        return lambda candidates: max(candidates, key=lambda one: one.loads.dispatched).engine


class DecidesOnce(T.router.MyPart):
    """an engine that has refused a request is chosen for it again"""

    def prepare(self, request):
        chosen = []

        def pick(candidates):
            chosen[:] = chosen or [self.pick(request, candidates)]
            return chosen[0]

        return pick


class Favourite(T.router.MyPart):
    """one engine gets everything, however busy"""

    def pick(self, request, candidates):
        return candidates[0].engine


# ---------------------------------------------------------------------- operators


def with_operator(**operators):
    """A component whose set has other operators."""
    changed = type("Changed", (T.operators.MySet,), operators)
    return lambda self, device, dtype: changed()


def normed_over_all(self, x, weight, eps):
    return x * (x.float().square().mean() + eps).rsqrt().to(x.dtype) * weight


def normed_in_its_dtype(self, x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def added_to_the_residual(self, x, residual, weight, eps):
    residual += x
    return self.rms_norm(residual, weight, eps)


def rotated_half_by_half(self, x, cos, sin):
    first, second = x.chunk(2, -1)
    first.copy_(first * cos - second * sin)
    second.copy_(second * cos + first * sin)


def gated_by_exponentials(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return gate * gate.exp() / (1 + gate.exp()) * up


def gated_in_one_place(self, gate_up):
    self.gate, self.up = (half.float() for half in gate_up.chunk(2, -1))
    return (self.gate * torch.sigmoid(self.gate) * self.up).to(gate_up.dtype)


class NormsAllTogether(T.operators.MyPart):
    """a norm is over all rows of the step"""

    bind = with_operator(rms_norm=normed_over_all)


class SquaresIn16Bits(T.operators.MyPart):
    """squares overflow in 16 bits"""

    bind = with_operator(rms_norm=normed_in_its_dtype)


class ChangesTheResidual(T.operators.MyPart):
    """the sum is left in the residual"""

    bind = with_operator(add_rms_norm=added_to_the_residual)


class ReadsWhatItWrote(T.operators.MyPart):
    """the second half of a pair is turned with the new first one"""

    bind = with_operator(rotate=rotated_half_by_half)


class OverflowsInTheGate(T.operators.MyPart):
    """a large gate gives no number"""

    bind = with_operator(silu_mul=gated_by_exponentials)


class OnePlaceForAllThreads(T.operators.MyPart):
    """threads keep what they work on in one place"""

    bind = with_operator(silu_mul=gated_in_one_place)


# ---------------------------------------------------------------------- observer and workload


class Unmarked(T.observer.MyPart):
    """a hook without its mark is never called"""

    def hotswap_request_finished(self, request, reason): ...


class Misspelt(T.observer.MyPart):
    """a hook that does not exist is waited for"""

    @hookimpl
    def hotswap_request_ended(self, request): ...


class Meddles(T.observer.MyPart):
    """it changes what it watches"""

    @hookimpl
    def hotswap_request_arrived(self, request):
        request.max_new = max(1, request.max_new - 1)


class RaisesOnAborts(T.observer.MyPart):
    """a request that was aborted makes it raise"""

    @hookimpl
    def hotswap_request_finished(self, reason):
        assert reason == "length"


class Unseeded(T.workload.MyPart):
    """the same seed gives other requests"""

    def items(self, context):
        return super().items(replace(context, seed=random.randrange(10**9)))


class AnyToken(T.workload.MyPart):
    """tokens are drawn that a model with a small vocabulary does not have"""

    def items(self, context):
        return super().items(replace(context, vocab_size=1000))


class AnyLength(T.workload.MyPart):
    """requests are as long as they like, whatever the context"""

    def items(self, context):
        return self._draw(context)


class OneStream(T.workload.MyPart):
    """two streams of one workload draw from one source"""

    def __init__(self, *args):
        super().__init__(*args)
        self.drawn = 0

    def _draw(self, context):
        for item in super()._draw(context):
            self.drawn += 1
            yield replace(item, max_tokens=1 + self.drawn % 30)


def kvcache(cls):
    return cls(cls.Options(), {"inner": build("kvcache", "prefix")})


def of_three(cls):
    return cls(cls.Options(size=3))


MAKERS: dict[str, Any] = {"kvcache": kvcache, "shard": of_three}
"""By kind: how a faulty class is made, where its options and parts are not enough."""

RAISE: dict[type, tuple[type[Exception], ...]] = {
    RaisesForStrangers: (KeyError,), UndoLoads: (KeyError,), TellsOfNoShortage: (EngineStoppedError,),
    NoFailover: (EngineStoppedError,), Misspelt: (BrokenComponentError,)}
"""Faults that raise of themselves where nobody asks, and what."""

FAULTS: dict[str, dict[type, str]] = {
    "scheduler": {
        ForgetsWhoWasSuspended: "test_shortage_ends_with_everybody_served",
        IgnoresTheBudget: "test_budget_and_row_limit_hold",
        WaitsForCompany: "test_a_prompt_longer_than_the_budget_is_served",
        SuspendsForNothing: "test_shortage_ends_with_everybody_served",
        NewestOnly: "test_an_old_request_does_not_starve_behind_new_ones",
        KeepsTheDead: "test_aborts_in_every_state_give_everything_back",
        ServesOnlyItsOwn: "test_a_successor_goes_on_where_it_left_off",
        NowAndThen: "test_requests_get_exactly_their_tokens_at_every_depth",
        DropsOnlyWhatWaits: "test_requests_get_exactly_their_tokens_at_every_depth",
        DraftsWithoutRoom: "test_drafts_change_nothing_but_the_speed",
    },
    "queue_policy": {
        EqualKeys: "test_equals_are_ordered_by_their_sequence",
        SecretlyDynamic: "test_a_key_that_is_said_to_stay_stays",
        ShortOnes: "test_one_that_waits_is_not_overtaken_for_ever",
        RaisesForStrangers: "test_requests_it_does_not_hold_are_tolerated",
    },
    "kvcache": {
        SharesWithEverybody: "test_each_part_of_the_key_separates",
        FencesIgnored: "test_fenced_pages_mean_later_and_their_fence_means_granted",
        EvictsInSilence: "test_events_tell_what_enters_and_leaves_the_index",
        UndoForgotten: "test_undo_brings_back_what_a_plan_has_done",
    },
    "eviction_policy": {
        PicksHeldPages: "test_a_held_page_is_never_picked",
        PickRemoves: "test_picking_changes_nothing_until_the_page_is_removed",
        SharedClone: "test_a_clone_is_empty_and_apart",
    },
    "kv_transfer": {
        NeverForgets: "test_an_abort_gives_everything_back_whatever_the_state",
        UndoLoads: "test_random_traffic_reads_only_what_it_wrote_and_gives_everything_back",
        Stumbles: "test_random_traffic_reads_only_what_it_wrote_and_gives_everything_back",
        AllThatWasKnown: "test_a_request_that_was_swapped_goes_on_where_it_was",
    },
    "attention": {
        NoWindow: "test_a_window_hides_what_is_older",
        SeesTheNext: "test_ragged_batches_with_padded_rows_agree_with_dense_attention",
        WrongGroups: "test_groups_of_query_heads_read_their_own_key_heads",
        ReadsWholePages: "test_ragged_batches_with_padded_rows_agree_with_dense_attention",
        OwnNotation: "test_in_every_layout_that_it_shares_another_would_find_the_keys_and_values",
        NoCap: "test_a_softcap_squashes_the_scores",
    },
    "speculator": {
        MoreThanSlots: "test_proposals_stay_within_what_was_asked",
        NoIds: "test_proposals_stay_within_what_was_asked",
        Moody: "test_proposals_stay_within_what_was_asked",
        WritesTheTokens: "test_proposals_stay_within_what_was_asked",
        LiesAboutItsOdds: "test_sampled_texts_are_of_the_distribution_without_it",
    },
    "logits_processor": {
        TouchesNeighbours: "test_rows_do_not_touch_each_other",
        RemembersTheLast: "test_an_ended_request_leaves_nothing_for_another_of_its_name",
        CountsCalls: "test_drafts_count_as_kept_and_leave_no_trace",
    },
    "model": {
        ForgetsToReduce: "test_sharded_over_ranks_it_gives_the_same",
        PositionsFromNought: "test_it_gives_the_reference_s_logits_whole_and_in_chunks",
        LooksAtNeighbours: "test_a_row_does_not_depend_on_its_neighbours_in_the_step",
        OneAttendForAll: "test_engines_of_one_process_may_share_it_where_its_facts_say_so",
        OneLayerLate: "test_hidden_states_are_those_that_their_names_say",
        HalfTheBytes: "test_its_facts_come_from_the_config_alone_and_agree_with_what_it_builds",
        ForgetsTheHead: "test_it_lists_the_layers_that_a_quantization_is_given",
    },
    "quantization": {
        NoBias: "test_every_product_is_the_dense_one_within_the_declared_rounding",
        Coarse: "test_every_product_is_the_dense_one_within_the_declared_rounding",
        CommonScale: "test_a_row_does_not_depend_on_the_others",
        OneBehindTheOther: "test_rows_of_any_strides_are_taken",
        HalfTheMemory: "test_it_says_how_much_memory_it_holds",
        LooksBack: "test_what_it_was_given_may_change_afterwards",
        ScalesInPlace: "test_packing_leaves_the_weights_alone",
        FromTheFirst: "test_every_product_is_the_dense_one_within_the_declared_rounding",
        DividesByNothing: "test_nothing_times_anything_is_nothing",
    },
    "operators": {
        NormsAllTogether: "test_a_row_does_not_depend_on_its_neighbours",
        SquaresIn16Bits: "test_large_and_small_values_are_normed_without_overflow",
        ChangesTheResidual: "test_the_sum_is_left_in_the_first_and_the_residual_is_not_touched",
        ReadsWhatItWrote: "test_pairs_are_rotated_in_place_and_what_lies_beside_them_is_not",
        OverflowsInTheGate: "test_a_gate_agrees_with_its_definition_whatever_it_is_given",
        OnePlaceForAllThreads: "test_threads_may_use_one_set_at_once",
    },
    "executor": {
        WaitsInSubmit: "test_submit_returns_before_the_step_has_run",
        SwallowsErrors: "test_a_step_that_raises_ends_with_an_error_or_ends_the_engine_by_name",
        WellThoughDead: "test_a_worker_that_dies_is_told_by_collect_by_submit_and_by_health",
        LeavesItOpen: "test_stop_closes_the_workers_within_its_bound_and_may_come_twice",
        ClosesOne: "test_stop_closes_the_workers_within_its_bound_and_may_come_twice",
        TellsOfNoShortage: "test_a_rank_without_room_for_the_pages_is_a_memory_error",
        StopsToPrepare: "test_steps_go_on_while_parts_are_prepared",
        InPlaceAtOnce: "test_prepared_parts_wait_until_an_exchange_puts_them_in_place",
        OnlyTheFirst: "test_prepared_parts_wait_until_an_exchange_puts_them_in_place",
        TakesTheFirst: "test_what_was_prepared_before_is_let_go",
        TakesWhatThereIs: "test_an_exchange_for_which_nothing_was_prepared_fails_and_is_undone",
        NoWayBack: "test_an_exchange_is_taken_back_and_again_until_it_is_settled",
        KeepsTheOldForGood: "test_an_exchange_is_taken_back_and_again_until_it_is_settled",
        OneKeepsThem: "test_parts_that_a_rank_refuses_or_cannot_load_are_prepared_on_none",
        TakesOneBack: "test_an_exchange_that_fails_on_a_rank_fails_and_is_taken_back_on_all",
    },
    "launcher": {
        SecretInTheOpen: "test_a_secret_among_the_arguments_is_in_no_command_line_and_no_environment",
        SecretInTheCommand: "test_a_secret_among_the_arguments_is_in_no_command_line_and_no_environment",
        SamePlace: "test_each_process_is_told_its_own_arguments_and_its_place",
        NothingEnds: "test_it_says_which_have_ended_and_why_without_waiting",
        KillsAtOnce: "test_stop_gives_them_their_time_and_then_ends_them_by_force",
        TimeForEach: "test_stop_gives_them_their_time_and_then_ends_them_by_force",
    },
    "shard": {
        UnknownAxis: "test_it_shards_axes_that_the_model_has_and_each_once",
        DropsTheInner: "test_what_stands_behind_it_keeps_its_size",
        LeavesOutTheRest: "test_all_ranks_together_give_what_one_gives",
        TakesAnyModel: "test_a_model_without_its_axes_is_refused_by_name",
    },
    "deployment": {
        LeavesThemRunning: "test_an_engine_that_cannot_be_started_stops_the_others_and_its_error_is_raised",
        NoFailover: "test_a_lost_engine_ends_its_own_requests_and_no_others",
        DeadIfOneIs: "test_a_lost_engine_ends_its_own_requests_and_no_others",
        TwoOfOneName: "test_an_id_that_lives_already_is_refused_and_the_first_one_goes_on",
        CountsForEver: "test_loads_count_what_lives",
    },
    "router": {
        ChoosesTheAbsent: "test_it_chooses_one_of_the_candidates_whoever_is_missing",
        PreparesOtherwise: "test_a_request_that_was_prepared_is_placed_like_one_that_was_not",
        DecidesOnce: "test_a_prepared_request_that_an_engine_refuses_goes_to_another",
        Favourite: "test_every_engine_gets_requests",
    },
    "observer": {
        Unmarked: "test_its_hooks_exist_are_marked_and_take_what_they_are_given",
        Misspelt: "test_its_hooks_exist_are_marked_and_take_what_they_are_given",
        Meddles: "test_it_changes_nothing_that_it_watches",
        RaisesOnAborts: "test_a_busy_engine_does_not_make_it_raise",
    },
    "workload": {
        Unseeded: "test_the_same_seed_gives_the_same_requests",
        AnyToken: "test_every_request_fits_a_smaller_model_or_it_is_refused",
        AnyLength: "test_every_request_fits_a_smaller_model_or_it_is_refused",
        OneStream: "test_two_streams_of_one_workload_do_not_disturb_each_other",
    },
}
