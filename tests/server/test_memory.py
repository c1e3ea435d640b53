"""What is closed gives its memory back at once, and not when Python next looks for rings of references: half a gigabyte
of weights is a handful of objects to it."""

import gc
from collections import Counter

import pytest
from tokenizers import Tokenizer, models

from hotswap import LLM
from hotswap.core.config import load_config
from hotswap.core.engine.build import build_engine
from hotswap.core.engine.client import Engine
from hotswap.core.engine.loop import EngineLoop
from hotswap.core.errors import EngineStoppedError
from hotswap.core.execution.buffers import RequestTable
from hotswap.core.execution.cache import PagedCache
from hotswap.core.execution.runner import ModelRunner
from hotswap.core.execution.worker import ModelWorker
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import EvictionPolicy
from hotswap.core.testing.checkpoints import VOCAB_SIZE, tiny_checkpoint
from hotswap.server.served import served_by

HEAVY = (Component, Engine, EngineLoop, ModelWorker, ModelRunner, PagedCache, RequestTable)
LIGHT = EvictionPolicy  # a tree whose nodes know their parents is a ring by nature, and knows it
COMPOSITE = "attention={use: composite, prefill: torch, decode: torch}"
PROMPT = [2, 3, 4, 5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    words = {"<bos>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCAB_SIZE)}}
    Tokenizer(models.WordLevel(words, unk_token="w2")).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def alive():
    """How many heavy things there are, while nobody looks for rings."""
    gc.collect()
    gc.disable()
    yield lambda: Counter(
        type(thing).__name__ for thing in gc.get_objects()
        if issubclass(type(thing), HEAVY) and not issubclass(type(thing), LIGHT))
    gc.enable()


def start(checkpoint, *exchanges, **changes):
    """An engine that has worked, and whose parts have been exchanged."""
    built = build_engine(load_config({
        "model": {"path": str(checkpoint)}, "device": "cpu", "dtype": "float32", "execution": {"num_threads": 1},
        "scheduler": {"max_running": 2, "max_batch_tokens": 32}, "kvcache": {"num_blocks": 9}, **changes}),
        progress=False)
    llm = LLM.of(served_by(built))
    for sets in exchanges:
        llm.generate([PROMPT], max_tokens=3, ignore_eos=True)
        built.exchange(sets)
    llm.generate([PROMPT], max_tokens=3, ignore_eos=True)
    return llm


@pytest.mark.parametrize(("speculator", "changes", "exchanges"), [
    ("none", {}, []),
    ("ngram", {"attention": {"use": "composite", "prefill": "torch", "decode": "torch"}}, []),
    ("draft", {}, []),
    ("none", {"kv_transfer": {"use": "host", "memory": "1MiB"}}, []),
    ("none", {"parallel": [{"use": "data", "replicas": 2}]}, []),
    ("none", {}, [["scheduler=static"], ["kvcache=radix", COMPOSITE]]),
    ("none", {}, [["speculator={use: draft, model: DRAFT}"], ["kvcache.num_blocks=7"]]),
], ids=["plain", "n-grams", "draft model", "host tier", "replicas", "exchanged", "exchanged for a draft model"])
def test_a_closed_llm_keeps_nothing(checkpoint, alive, speculator, changes, exchanges):
    own = {"model": str(checkpoint)} if speculator == "draft" else {}
    sets = [[text.replace("DRAFT", str(checkpoint)) for text in texts] for texts in exchanges]
    before = alive()
    llm = start(checkpoint, *sets, speculator={"use": speculator, **own}, **changes)
    assert alive()["DecoderModel"] > before["DecoderModel"]
    llm.close()
    assert alive() - before == Counter()


def test_a_closed_llm_says_so(checkpoint):
    llm = start(checkpoint)
    llm.close()
    llm.close()
    with pytest.raises(EngineStoppedError, match="this LLM is closed"):
        llm.generate([PROMPT])


def test_parts_that_were_on_trial_when_the_engine_ended_are_let_go(checkpoint, alive, monkeypatch):
    monkeypatch.setattr("hotswap.core.engine.exchange.IDLE_S", 0.0)
    before = alive()
    llm = start(checkpoint)
    reports = llm.served.exchange(["kvcache=radix"], None)
    assert not reports[0].proven
    llm.close()
    assert alive() - before == Counter()
