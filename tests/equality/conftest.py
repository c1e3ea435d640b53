"""Whole engines, from a config to tokens, against transformers' own greedy generation."""

import contextlib
import copy
import importlib.util
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hotswap.core.config import load_config
from hotswap.core.engine.build import Built, build_engine
from hotswap.core.errors import ConfigError
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.request import Request, RequestOutput, SamplingParams, TokenLogprob
from hotswap.lab.decisions.again import replay
from hotswap.lab.decisions.log import open_logs

NEAR_TIE = 1e-3
"""Where the reference's best two logits are closer than this, either may be chosen."""

MAX_NEAR_TIES = 0.01
"""At most this share of the compared positions may be near ties."""


class Counting(Observer):
    """Counts what happened, so that a run can prove that it exercised what it names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    @hookimpl
    def hotswap_step_planned(self, message: Any, suspensions: Any) -> None:
        begun = {resume.request: resume.computed for resume in message.resumes}
        left = {new.id: len(new.tokens) - begun[new.id] for new in message.new}
        widths = {row.request: row.n_tokens for row in message.rows}
        self.seen["suspensions"] += len(suspensions)
        self.seen["copied pages"] += sum(
            len(change.copies) for _, grant in message.grants for change in grant.groups.values())
        self.seen.update(f"suspended by {mode}" for _, mode, _ in suspensions)
        self.seen["cut prompts"] += sum(widths.get(request, 0) < length for request, length in left.items())
        self.seen["mixed steps"] += len({width > 1 for width in widths.values()}) > 1
        self.seen["computed"] += sum(widths.values())
        self.seen["widest row"] = max(self.seen["widest row"], *widths.values(), 0)

    @hookimpl
    def hotswap_step_finished(self, verdict: Any) -> None:
        for row in verdict.rows:
            self.seen["accepted"] += row.accepted
            self.seen["rejected"] += row.drafted - row.accepted

    @hookimpl
    def hotswap_request_finished(self, request: Any, reason: str) -> None:
        self.seen[reason] += 1
        self.seen["cached tokens"] += request.cached_tokens or 0
        self.seen["preempted"] += request.preemptions


@dataclass
class Reference:
    """transformers' logits for the tokens that were generated: its own greedy choice and the margin at each place."""

    model: Any
    _known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, float]]] = field(default_factory=dict)

    def __call__(self, prompt: Sequence[int], output: Sequence[int]) -> list[tuple[int, float]]:
        """(best token, how far it is ahead of the token that was chosen) for each token of ``output``."""
        key = (tuple(prompt), tuple(output))
        if key not in self._known:
            self._known[key] = self._judge(list(prompt), list(output))
        return self._known[key]

    def _judge(self, prompt: list[int], output: list[int]) -> list[tuple[int, float]]:
        if not output:
            return []
        logits = self.logits(prompt + output[:-1], len(output))
        ahead = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return list(zip(logits.argmax(-1).tolist(), ahead.tolist(), strict=True))

    @torch.inference_mode()
    def logits(self, ids: list[int], last: int = 0) -> torch.Tensor:
        """[T, V] float32 behind each of the ``last`` ids, 0: behind all of them."""
        logits: torch.Tensor = self.model(torch.tensor([ids]), logits_to_keep=last).logits[0].float()
        return logits


class TieBook:
    """How many positions were compared, and at how many the reference itself was undecided."""

    def __init__(self) -> None:
        self.compared = self.near_ties = 0

    def compare(self, reference: Reference, prompt: Sequence[int], output: Sequence[int]) -> None:
        for place, (token, (best, ahead)) in enumerate(zip(output, reference(prompt, output), strict=True)):
            self.compared += 1
            if token != best:
                assert ahead < NEAR_TIE, (
                    f"token {place} is {token}, transformers says {best}, which is {ahead:.4f} ahead")
                self.near_ties += 1

    def check(self) -> None:
        print(f"{self.near_ties} near ties in {self.compared} positions")
        assert self.near_ties <= MAX_NEAR_TIES * self.compared, f"{self.near_ties} in {self.compared}"


@dataclass
class Answer:
    """All that a client gets for one request, from its outputs joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.error, self.cached_tokens = output.finish_reason, output.error, output.cached_tokens


class Running:
    """A built engine and what a test needs of it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.built: Built = build_engine(load_config(config, environ={}), progress=False)
        self.counting = Counting()
        self.built.components.add(self.counting)
        self.count = 0

    @property
    def seen(self) -> Counter[str]:
        return self.counting.seen

    def answer(self, *requests: dict[str, Any], on_output: Callable[[int, Answer], None] | None = None) -> list[Answer]:
        """The answers to requests that are submitted at once; each is given by the fields of ``Request`` and, beside
        them, of ``SamplingParams``. ``on_output(index, answer so far)`` is called on the loop's thread."""
        answers = [Answer() for _ in requests]
        left = threading.Semaphore(0)

        def submit(index: int) -> None:
            def sink(output: RequestOutput) -> None:
                answers[index].add(output)
                if on_output is not None:
                    on_output(index, answers[index])
                if output.finish_reason:
                    left.release()

            self.built.engine.add(self.request(index, **requests[index]), sink)

        # Between two turns of the loop, so that a test sees the same plans each time.
        self.built.engine.call(lambda: [submit(index) for index in range(len(requests))])
        for _ in requests:
            assert left.acquire(timeout=120), f"a request did not end: {self.built.engine.health()}"
        self.count += 1
        return answers

    def request(self, index: int, prompt: Sequence[int], **fields: Any) -> Request:
        own = {key: fields.pop(key) for key in ("priority", "eos_token_ids", "detokenizer", "fork_of") if key in fields}
        sampling = SamplingParams(**{"temperature": 0, **fields})
        return Request(self.name(index), list(prompt), sampling, seed=sampling.seed or 0, **own)

    def name(self, index: int) -> str:
        """The id of a request of the round that runs."""
        return f"{self.count}-{index}"

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, abort: Mapping[int, int] | None = None,
        priorities: Sequence[int] | None = None, **sampling: Any,
    ) -> list[list[int]]:
        """The outputs of all prompts, submitted at once. ``abort``: which are given up, after how many tokens."""
        abort = abort or {}

        def give_up(index: int, answer: Answer) -> None:
            if index in abort and len(answer.token_ids) >= abort[index]:
                self.built.engine.abort(self.name(index))

        answers = self.answer(
            *({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "priority": priority, **sampling}
              for prompt, priority in zip(prompts, priorities or [0] * len(prompts), strict=True)),
            on_output=give_up)
        for index, answer in enumerate(answers):
            assert answer.error is None, answer.error
            assert index in abort or len(answer.token_ids) == max_tokens
        return [answer.token_ids for answer in answers]

    def under_load(self, prompts: list[list[int]], expected: list[list[int]], work: Callable[[], Any]) -> Any:
        """Does ``work`` while each prompt is asked again and again; every answer must be as expected."""
        load = Load(self, prompts, expected)
        try:
            while not (self.built.engine.loop.pool.running or load.wrong):
                time.sleep(0.001)
            return work()
        finally:
            load.end()

    def assert_clean(self) -> None:
        loop = self.built.engine.loop
        self.built.engine.call(loop.parts.kv.check)
        usage = loop.parts.kv.usage()
        assert (usage.held, usage.fenced) == (0, 0)
        assert not loop.pool.states


class Load:
    """Each prompt is asked again as soon as it is answered. The outputs are of unlike lengths, so that at any moment
    some are under way."""

    def __init__(self, engine: "Running", prompts: list[list[int]], expected: list[list[int]]) -> None:
        self._engine, self._prompts, self._expected = engine, prompts, expected
        self._ending, self._ended = False, threading.Semaphore(0)
        self.wrong: list[tuple[int, Answer]] = []
        for index in range(len(prompts)):
            self._ask(index, 0)

    def _ask(self, index: int, turn: int) -> None:
        whole = self._expected[index]
        answer, expected = Answer(), whole[: len(whole) - 2 * ((index + turn) % len(self._prompts))]

        def sink(output: RequestOutput) -> None:  # on the loop's thread
            answer.add(output)
            if output.finish_reason is None:
                return
            if answer.error is not None or answer.token_ids != expected:
                self.wrong.append((index, answer))
            if self._ending or self.wrong:
                self._ended.release()
            else:
                self._ask(index, turn + 1)

        self._engine.built.engine.add(self._engine.request(
            f"{index}-{turn}", self._prompts[index], max_tokens=len(expected), ignore_eos=True), sink)

    def end(self) -> None:
        self._ending = True
        for _ in self._prompts:
            assert self._ended.acquire(timeout=120), f"a request did not end: {self._engine.built.engine.health()}"
        self._engine.count += 1
        assert not self.wrong


@dataclass
class Tiny:
    """Two layers of random weights, wide enough apart that greedy choices are rarely close; 160 tokens, 0 is BOS."""

    path: Path
    reference: Reference

    def config(self, scheduler: Any, kv: str, speculator: Any, depth: int, **changes: Any) -> dict[str, Any]:
        """Pages for about two of the prompts at a time, unless the manager is the contiguous one."""
        scheduler = {"use": scheduler} if isinstance(scheduler, str) else dict(scheduler)
        pages = 1 + (4 * 32 if kv == "contiguous" else 44)
        return {
            "model": {"path": str(self.path)}, "dtype": "float32", "device": "cpu", "max_model_len": 128,
            "scheduler": {"max_batch_tokens": 48, "max_running": 6, **scheduler},
            "kvcache": {"use": kv, "block_size": 4, "num_blocks": changes.pop("num_blocks", pages)},
            "speculator": speculator, "execution": {"depth": depth, "num_threads": 1}, "observers": [], **changes,
        }

    def prompts(self, seed: int = 1) -> list[list[int]]:
        """Random ones, one of a single token, and a family with a shared prefix, two of them the same."""
        rng = random.Random(seed)
        shared = self.prompt(21, rng)
        own = [self.prompt(length, rng) for length in (1, 3, 17, 40)]
        family = [shared + self.prompt(length, rng) for length in (2, 5, 11)]
        return [*own, *family, family[0]]

    def prompt(self, length: int, rng: random.Random) -> list[int]:
        return [rng.randrange(2, 160) for _ in range(length)]


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Any]:
    """``run(config)`` starts an engine that is stopped after the test. With ``--whole`` its decisions are logged, and
    must be the same in a replay."""
    started: list[Running] = []
    logs: list[Path] = []

    def start(config: dict[str, Any]) -> Running:
        started.append(Running(add_log(request, config, logs)))
        return started[-1]

    yield start
    while started:
        started.pop().built.engine.stop()
    assert_same_again(logs)


def add_log(request: pytest.FixtureRequest, config: dict[str, Any], logs: list[Path]) -> dict[str, Any]:
    """With ``--whole``: the config with an observer that logs decisions, to a file that is appended to ``logs``."""
    if not request.config.getoption("--whole"):
        return config
    folder: Path = request.getfixturevalue("tmp_path")
    logs.append(folder / f"decisions-{len(logs)}.jsonl")
    log = {"use": "decision_log", "path": str(logs[-1]), "flush": False}
    return {**config, "observers": [*config.get("observers", ["metrics"]), log]}


def assert_same_again(paths: list[Path]) -> None:
    """Every decision of engines that have been stopped comes out as it was logged."""
    for path in paths:
        if not list(path.parent.glob(f"{path.stem}*")):
            continue  # what the test started was refused
        for log in open_logs([path]):
            try:
                outcome = replay(log)
            except ConfigError as error:  # an engine that works together with others; a part that only the test has
                assert "whose answers are in no log" in str(error) or "is called 'planted:" in str(error), error
            else:
                assert outcome.equal, outcome


class Deployed:
    """Several engines behind one face, each with a counting observer."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.built: Built = build_engine(load_config(config, environ={}), progress=False)
        self.counting = [Counting() for _ in self.built.engines]
        for built, counting in zip(self.built.engines, self.counting, strict=True):
            built.components.add(counting)
        self.count = 0

    @property
    def seen(self) -> list[Counter[str]]:
        """Of each engine."""
        return [counting.seen for counting in self.counting]

    def name(self, index: int) -> str:
        return f"{self.count}-{index}"

    def request(self, index: int, prompt: Sequence[int], **sampling: Any) -> Request:
        own = {key: sampling.pop(key) for key in ("detokenizer", "fork_of") if key in sampling}
        sampling = {"temperature": 0, "ignore_eos": True, **sampling}
        return Request(self.name(index), list(prompt), SamplingParams(**sampling), seed=sampling.get("seed", 0), **own)

    def submit(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, abort: Mapping[int, int] | None = None,
        **sampling: Any,
    ) -> list[tuple[Answer, threading.Event]]:
        """Add all; each answer is whole when its event is set. ``abort``: which are given up, after how many tokens."""
        abort = abort or {}
        return [
            self.submit_one(index, prompt, max_tokens, abort.get(index), **sampling)
            for index, prompt in enumerate(prompts)]

    def submit_one(
        self, index: int, prompt: Sequence[int], max_tokens: int, most: int | None = None, **sampling: Any,
    ) -> tuple[Answer, threading.Event]:
        """``most``: after so many tokens it is given up."""
        answer, ended = Answer(), threading.Event()

        def sink(output: RequestOutput) -> None:
            answer.add(output)
            if most is not None and len(answer.token_ids) >= most:
                self.built.engine.abort(output.request_id)
            if output.finish_reason:
                assert not ended.is_set(), "a second last output"
                ended.set()

        self.built.engine.add(self.request(index, prompt, max_tokens=max_tokens, **sampling), sink)
        return answer, ended

    def wait(self, boxes: list[tuple[Answer, threading.Event]]) -> list[Answer]:
        for _, ended in boxes:
            assert ended.wait(60), f"a request did not end: {self.built.engine.engines()}"
        self.count += 1
        return [answer for answer, _ in boxes]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, abort: Mapping[int, int] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        answers = self.wait(self.submit(prompts, max_tokens, abort, **sampling))
        for index, answer in enumerate(answers):
            assert answer.error is None, answer.error
            assert index in (abort or {}) or len(answer.token_ids) == max_tokens
        return [answer.token_ids for answer in answers]

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """No loop takes a turn: what is sent meanwhile is seen by none of them."""
        go, halted = threading.Event(), threading.Barrier(len(self.built.engines) + 1)

        def halt() -> None:
            halted.wait(10)
            go.wait(60)

        threads = [threading.Thread(target=built.engine.call, args=(halt,)) for built in self.built.engines]
        for thread in threads:
            thread.start()
        halted.wait(10)
        try:
            yield
        finally:
            go.set()
            for thread in threads:
                thread.join()

    def lose(self, number: int) -> None:
        """An engine's loop ends by itself."""
        loop = self.built.engines[number].engine.loop

        def collapse() -> bool:
            raise RuntimeError("planted: the device is lost")

        self.built.engines[number].engine.call(lambda: setattr(loop, "turn", collapse))
        end = time.monotonic() + 10
        while self.built.engines[number].engine.failure is None and time.monotonic() < end:
            time.sleep(0.005)

    def assert_idle(self) -> None:
        self.built.engine.drain(30)
        assert self.built.engine.loads().dispatched == 0

    def assert_clean(self, seconds: float = 10.0) -> None:
        """Once every transfer has ended, within ``seconds``."""
        end = time.monotonic() + seconds
        while any(built.engine.loop.transfers.pending for built in self.built.engines) and time.monotonic() < end:
            time.sleep(0.005)
        for built in self.built.engines:
            loop = built.engine.loop
            built.engine.call(loop.parts.kv.check)
            if loop.transfers.component is not None:
                assert not loop.transfers.component.leaks(), built.replica.name
            usage = loop.parts.kv.usage()
            assert (usage.held, usage.fenced) == (0, 0), built.replica.name
            assert not loop.pool.states
        assert self.built.engine.loads().dispatched == 0


@pytest.fixture
def deploy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """``deploy(config)`` starts the engines of a deployment, stopped after the test; ``--whole`` as above."""
    started: list[Deployed] = []
    logs: list[Path] = []

    def start(config: dict[str, Any]) -> Deployed:
        started.append(Deployed(add_log(request, config, logs)))
        return started[-1]

    yield start
    for deployed in started:
        deployed.built.engine.stop()
    assert_same_again(logs)


class Examples:
    """``example(name, path, **changes)``: a config of ``examples/models``, whose model is too large to be here,
    with the one at ``path`` in its place."""

    folder = Path(__file__).parents[2] / "examples" / "models"

    @property
    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.yaml"))

    def __call__(self, name: str, path: Path, **changes: Any) -> dict[str, Any]:
        return {
            **yaml.safe_load((self.folder / f"{name}.yaml").read_text("utf-8")), "model": {"path": str(path)},
            "device": "cpu", "dtype": "float32", "max_model_len": 128, "observers": [],
            "kvcache": {"use": "prefix", "block_size": 4, "num_blocks": 200}, **changes}


@pytest.fixture(scope="session")
def example() -> Examples:
    return Examples()


@pytest.fixture
def torch_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for graphs records operations of torch's: kernels for CPUs, which are none, are not taken."""
    from hotswap.plugins.operators.cpu import CPUOperators

    def refuse(self: Any, device: str, dtype: torch.dtype) -> Any:
        raise ConfigError("they are recorded")

    monkeypatch.setattr(CPUOperators, "bind", refuse)


@pytest.fixture
def book() -> Iterator[TieBook]:
    """Compares with the reference; after the test, near ties must have been rare."""
    ties = TieBook()
    yield ties
    ties.check()


@pytest.fixture
def thrice(book: TieBook) -> Callable[..., Any]:
    """``thrice(engine, model, max_tokens, depth)``: each of the model's prompts cold, warm, and with requests that are
    given up, held against the reference; then nothing is held, and so many steps were in flight. Returns what was
    seen."""

    def run(engine: Any, model: Tiny, max_tokens: int, depth: int) -> Counter[str]:
        prompts = model.prompts()
        for abort in ({}, {}, {1: 3, 4: 3}):
            for prompt, output in zip(prompts, engine.generate(prompts, max_tokens, abort), strict=True):
                book.compare(model.reference, prompt, output)
        engine.assert_clean()
        assert engine.built.engine.loop.max_depth_seen == depth
        assert engine.seen["abort"] == 2
        seen: Counter[str] = engine.seen
        return seen

    return run


@pytest.fixture(scope="session")
def tiny(tiny_of: Callable[..., Tiny]) -> Tiny:
    return tiny_of("Llama")


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """``tiny_of(family, **changes of its config)``: a model of any family of transformers."""

    def make(family: str, **changes: Any) -> Tiny:
        import transformers

        torch.manual_seed(7)
        architecture = getattr(transformers, f"{family}ForCausalLM", None) or getattr(
            transformers, f"{family}LMHeadModel")
        config = architecture.config_class(**{
            "vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, **changes,
        })
        model = architecture(config).eval()
        model.set_attn_implementation("eager")  # the one that leaves nothing out
        path = tmp_path_factory.mktemp(f"tiny-{family.lower()}")
        model.save_pretrained(path)
        return Tiny(path, Reference(model))

    return make


@pytest.fixture(scope="session")
def noisy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tiny, float], Path]:
    """``noisy_of(model, noise)``: the model with noise on its weights, of so many standard deviations of each: a draft
    model that is often right."""

    def make(tiny: Tiny, noise: float) -> Path:
        model = copy.deepcopy(tiny.reference.model)
        random = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=random)
        path = tmp_path_factory.mktemp("noisy")
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Two cache groups: the second layer sees a window of 12 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False,
        use_sliding_window=True, sliding_window=12, max_window_layers=1, bos_token_id=0, eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("tiny-windowed")
    model.save_pretrained(path)
    return Tiny(path, Reference(model))


@pytest.fixture(scope="session")
def smollm2() -> Reference:
    """SmolLM2-135M-Instruct in transformers, loaded without any of our code."""
    file = Path(__file__).parents[1] / "models" / "reference.py"
    spec = importlib.util.spec_from_file_location("models_reference", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Reference(module.smollm2_reference())
