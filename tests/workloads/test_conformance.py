"""Our workloads pass the kit, and the kit finds what is planted into them, by name."""

import json
from dataclasses import replace

import pytest

from hotswap.core.testing.workload import WorkloadSuite, context
from hotswap.plugins.workloads.azure import AzureTrace
from hotswap.plugins.workloads.burstgpt import BurstGPTTrace
from hotswap.plugins.workloads.mooncake import BailianTrace, MooncakeTrace
from hotswap.plugins.workloads.prompts import PromptsWorkload
from hotswap.plugins.workloads.sessions import SessionsWorkload
from hotswap.plugins.workloads.synthetic import SyntheticWorkload

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.6805900,{100 + second},{1 + second % 7}\n" for second in range(46, 60))
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{5 * n},ChatGPT,{400 + n},{n % 4},0,Conversation log\n" for n in range(30))


def blocks(second, size):
    return "".join(
        json.dumps({"timestamp": n * second, "input_length": 3 * size + n, "output_length": 9, "chat_id": n,
                    "hash_ids": [n % 2, 10 + n % 4, 20 + n, 70 + n]}) + "\n" for n in range(40))


class FileSuite(WorkloadSuite):
    cls, text, options = None, "", {}

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        self.path = tmp_path / "file"
        self.path.write_text(self.text)

    def make_workload(self):
        return self.cls(self.cls.Options(path=self.path, **self.options))


class TestSynthetic(WorkloadSuite):
    def make_workload(self):
        return SyntheticWorkload(SyntheticWorkload.Options(
            families=3, share=0.7, prompt={"dist": "lognormal", "median": 60, "sigma": 0.8, "max": 400},
            output={"dist": "uniform", "low": 1, "high": 40}, prefix={"dist": "uniform", "low": 8, "high": 90}))


class TestSessions(WorkloadSuite):
    def make_workload(self):
        return SessionsWorkload(SessionsWorkload.Options(
            turns={"dist": "uniform", "low": 1, "high": 6}, system=33, think={"dist": "uniform", "low": 0, "high": 3}))


class TestAzure(FileSuite):
    cls, text = AzureTrace, AZURE


class TestMooncake(FileSuite):
    cls, text = MooncakeTrace, blocks(1000, 512)


class TestMooncakeScaled(FileSuite):
    cls, text, options = MooncakeTrace, blocks(1000, 512), {"scale": 0.013, "max_prompt": 18}


class TestBailian(FileSuite):
    cls, text = BailianTrace, blocks(0.25, 16)


class TestBurstGPT(FileSuite):
    cls, text = BurstGPTTrace, BURST


class TestPrompts(FileSuite):
    cls, seeded = PromptsWorkload, False
    text = "\n".join(json.dumps(line) for line in (
        {"prompt": "Once upon a time"}, {"tokens": [1, 2, 3], "max_tokens": 5},
        {"messages": [{"role": "user", "content": "Hello"}]})) + "\n"


def changed(change):
    """A synthetic workload whose items are changed on their way: ``change(index, item, earlier items)``."""
    class Faulty(SyntheticWorkload):
        def items(self, given):
            earlier = []
            for index, item in enumerate(super().items(given)):
                earlier.append(change(index, item, earlier))
                yield earlier[-1]

    return Faulty


class Unseeded(SyntheticWorkload):
    calls = 0

    def items(self, given):
        Unseeded.calls += 1
        return super().items(replace(given, seed=Unseeded.calls))


class Deaf(SyntheticWorkload):
    def items(self, given):
        return super().items(replace(given, seed=0))


class Resuming(SyntheticWorkload):
    stream = None

    def items(self, given):
        self.stream = self.stream or super().items(given)
        return self.stream


class Careless(SyntheticWorkload):
    def items(self, given):
        return super().items(replace(given, max_model_len=1 << 20))




PLANTED = {
    "draws anew each time": (Unseeded, "the_same_seed"),
    "ignores the seed": (Deaf, "another_seed"),
    "goes on where it was": (Resuming, "the_same_seed"),
    "shares its stream": (Resuming, "two_streams"),
    "checks no context": (Careless, "nothing_fits"),
    "empty prompt": (changed(lambda i, item, _: replace(item, prompt=(), shared=0)), "fits_the_model"),
    "unknown token": (changed(lambda i, item, _: replace(item, prompt=(1000,), shared=0)), "fits_the_model"),
    "too long": (changed(lambda i, item, _: replace(item, max_tokens=4096)), "fits_the_model"),
    "generates nothing": (changed(lambda i, item, _: replace(item, max_tokens=0)), "fits_the_model"),
    "out of order": (changed(lambda i, item, _: replace(item, at=float(9 - i % 10))), "order_of_arrival"),
    "before the start": (changed(lambda i, item, _: replace(item, at=i - 1.0)), "order_of_arrival"),
    "waits for itself": (changed(lambda i, item, _: replace(item, after=i)), "waits_only"),
    "waits for a stranger": (changed(lambda i, item, _: replace(item, after=i - 1) if i else item), "waits_only"),
    "less shared than said": (changed(lambda i, item, _: replace(item, shared=len(item.prompt))), "share_what"),
    "shared with nobody": (changed(lambda i, item, _: replace(item, key="", shared=1)), "share_what"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_kit_finds_a_planted_fault_by_name(fault):
    cls, symptom = PLANTED[fault]

    class Planted(WorkloadSuite):
        def make_workload(self):
            return cls(cls.Options(families=2))

    [test] = [name for name in dir(Planted) if name.startswith("test_") and symptom in name]
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Planted(), test)()


def test_a_stream_is_drawn_as_it_is_asked_for():
    items = SyntheticWorkload().items(context())
    assert [len(next(items).prompt) for _ in range(3)] == [128] * 3
