"""A tiny transformer, what it must say, and a host with an allocator simple enough to be right."""

import pytest
import torch

from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.execution.worker import ModelWorker
from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec, Grant, GroupGrant, GroupPlan
from hotswap.core.interfaces.messages import NewRequest, Resume, StepMessage
from hotswap.core.interfaces.model import Model, ModelFacts
from hotswap.core.interfaces.scheduler import Row
from hotswap.core.interfaces.speculator import Drafts, Speculator, SpeculatorNeeds
from hotswap.core.request import SamplingParams
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.speculators.none import NoSpeculator

VOCAB_SIZE, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MAX_LEN = 61, 32, 4, 2, 8, 160
POISON = VOCAB_SIZE - 1
"""A token whose embedding is NaN."""

WINDOW = 6
GREEDY = SamplingParams(temperature=0)


class TinyModel(Model):
    """Two layers with random weights, the second behind a sliding window. ``before_forward`` is called with the ids."""

    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(5)

        def weight(*size):
            return torch.randn(size, generator=random) / size[-1] ** 0.5

        self.embedding, self.places = weight(VOCAB_SIZE, HIDDEN) * 5, weight(MAX_LEN + 64, HIDDEN) * 3
        self.embedding[POISON] = torch.nan
        self.layers = [[weight(heads * HEAD_DIM, HIDDEN) * 2 for heads in (HEADS, KV_HEADS, KV_HEADS)] for _ in "ab"]
        self.out = [weight(HIDDEN, HEADS * HEAD_DIM) for _ in "ab"]
        self.final = weight(VOCAB_SIZE, HIDDEN) * 3
        self.before_forward = lambda ids: None
        self.head_rows = []

    @classmethod
    def facts(cls, config):
        return ModelFacts("Tiny", 2, HIDDEN, VOCAB_SIZE, MAX_LEN)

    def build(self, config, mesh, dtype, device): ...

    def load(self, weights): ...

    def cache_specs(self):
        size = 2 * KV_HEADS * HEAD_DIM * 4
        return [
            CacheSpec("full", (0,), KV_HEADS, HEAD_DIM, size),
            CacheSpec("window", (1,), KV_HEADS, HEAD_DIM, size, "window", WINDOW),
        ]

    def attention_shapes(self, page_sizes):
        return {
            spec.group: GroupShape(
                HEADS, KV_HEADS, HEAD_DIM, page_sizes.get(spec.group, 0), HEAD_DIM**-0.5, spec.window)
            for spec in self.cache_specs()
        }

    def forward(self, inputs, positions, attend):
        self.before_forward(inputs)
        x = self.embedding[inputs] + self.places[positions]
        for layer, (weights, out) in enumerate(zip(self.layers, self.out, strict=True)):
            q, k, v = (torch.nn.functional.linear(x, w).view(len(x), -1, HEAD_DIM) for w in weights)
            x = x + torch.nn.functional.linear(attend(layer, q, k, v).flatten(1), out)
        return x

    def head(self, rows):
        self.head_rows.append(len(rows))
        logits = torch.nn.functional.linear(torch.nn.functional.layer_norm(rows, rows.shape[-1:]), self.final)
        logits[:, POISON] -= 100.0  # it never comes of itself
        return logits


def dense_attend(layer, q, k, v):
    """Attention over one whole sequence, by the definition."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    at = torch.arange(len(q))
    hidden = at[None, :] > at[:, None]
    if layer == 1:
        hidden |= at[None, :] <= at[:, None] - WINDOW
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Reference:
    """What the tiny model says when each sequence is computed whole."""

    def __init__(self, model):
        self.model = model

    def logits(self, tokens):
        return self.model.head(self.model.forward(torch.tensor(tokens), torch.arange(len(tokens)), dense_attend))

    def greedy(self, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


class Script(Speculator):
    """Proposes what ``plan(request, tokens, slots)`` says; remembers what it was told."""

    def __init__(self, plan, lookahead=3):
        super().__init__()
        self.plan, self.lookahead = plan, lookahead
        self.observed, self.forgotten = [], []

    def needs(self):
        return SpeculatorNeeds(lookahead=self.lookahead)

    def propose(self, rows):
        return Drafts([self.plan(row.request, row.tokens.tolist(), row.slots) for row in rows])

    def observe(self, rows, taps):
        self.observed += [(row.request, row.drafted, row.accepted) for row in rows if row.drafted]

    def forget(self, request_ids):
        self.forgotten += request_ids


class Host:
    """Plans steps by hand. Its bounds are upper bounds, as the engine's: a message can be made before the last verdict.

    Pages of all groups are handed out last in, first out, so that a freed page is reused at once.
    """

    def __init__(self, worker, page_size, num_pages):
        self.worker, self.page_size = worker, page_size
        groups = [spec.group for spec in worker.info().cache_specs]
        worker.allocate(CachePlan({group: GroupPlan(num_pages, page_size) for group in groups}))
        self.free = {group: list(range(1, num_pages)) for group in groups}
        self.tables, self.bound, self.tokens, self.verdicts = {}, {}, {}, []
        self.message, self.step_id = StepMessage(1), 1

    def new(self, request, prompt, sampling=GREEDY, *, prompt_length=None, seed=0, **fields):
        self.tokens[request] = list(prompt)
        self.message.new.append(NewRequest(
            request, list(prompt), prompt_length or len(prompt), sampling, seed, **fields))
        self.resume(request, 0)

    def resume(self, request, computed):
        self.message.resumes.append(Resume(request, computed))
        self.tables[request], self.bound[request] = {group: [] for group in self.free}, computed

    def release(self, request):
        for group, pages in self.tables.pop(request, {}).items():
            self.free[group] += [page for page in pages if page]

    def drop(self, request):
        self.message.drops.append(request)
        self.release(request)

    def suspend(self, request):
        self.message.suspensions.append((request, "recompute"))
        self.release(request)

    def row(self, request, n=1, drafts=0):
        """Grant what is missing, and plan a row."""
        self.bound[request] += n + drafts
        self.grant(request, self.bound[request])
        self.message.rows.append(Row(request, n, drafts))

    def grant(self, request, upto):
        groups = {}
        for group, table in self.tables[request].items():
            need = -(-upto // self.page_size) - len(table)
            if need > 0:
                pages = tuple(self.free[group].pop() for _ in range(need))
                groups[group] = GroupGrant(len(table), pages)
                table += pages
        if groups:
            self.message.grants.append((request, Grant(groups)))

    def take(self):
        """The message as it is; the next one begins."""
        message, self.step_id = self.message, self.step_id + 1
        self.message = StepMessage(self.step_id)
        return message

    def absorb(self, verdict):
        """Corrects the bounds: only right where nothing else is in flight."""
        self.verdicts.append(verdict)
        for row in verdict.rows:
            if row.error is None:
                self.tokens[row.request] += row.kept
                self.bound[row.request] = row.computed
        return {row.request: row for row in verdict.rows}

    def step(self):
        verdict = self.worker.execute(self.take())
        assert verdict.error is None, verdict.error
        return self.absorb(verdict)

    def prefill(self, request, chunk=None):
        """Compute all known tokens, ``chunk`` at a time; the last step samples."""
        while (left := len(self.tokens[request]) - self.bound[request]) > 0:
            self.row(request, min(left, chunk or left))
            row = self.step()[request]
            assert row.error is None, row.error
            if row.kept:
                return row
        raise AssertionError("nothing was left to compute")

    def generate(self, request, count, chunk=None, drafts=0):
        """At least ``count`` tokens more, cut to ``count``."""
        begin = len(self.tokens[request])
        self.prefill(request, chunk)
        while len(self.tokens[request]) - begin < count:
            self.row(request, 1, drafts)
            row = self.step()[request]
            assert row.error is None, row.error
        return self.tokens[request][begin : begin + count]


@pytest.fixture
def model():
    return TinyModel()


@pytest.fixture
def reference():
    return Reference(TinyModel())


@pytest.fixture
def make_host(model):
    def make(page_size=4, num_pages=200, speculator=None, processors=(), max_running=4, clock=lambda: 0.0):
        settings = WorkerSettings("float32", "cpu", MAX_LEN, 256, max_running)
        worker = ModelWorker(
            model, model.facts({}), TorchAttention(), speculator or NoSpeculator(), processors, settings, clock)
        return Host(worker, page_size, num_pages)

    return make


@pytest.fixture
def script():
    return Script


@pytest.fixture
def prompts():
    """Prompts of lengths around a page's end, by name."""
    random = torch.Generator().manual_seed(3)
    lengths = {"a": 3, "b": 4, "c": 5, "d": 9, "e": 37}
    return {name: torch.randint(0, POISON, (length,), generator=random).tolist() for name, length in lengths.items()}


@pytest.fixture
def poison():
    return POISON


@pytest.fixture
def make_host_of():
    return Host
