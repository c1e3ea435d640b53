"""What the benchmark of exchanges makes of its measurements, and that a server that dies ends it."""

import importlib.util
import random
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location(
        "exchange_benchmark", Path(__file__).parents[2] / "benchmarks" / "exchange.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Server:
    """Answers each prompt with itself; ``exchanges`` succeed, and then it is gone."""

    def __init__(self, exchanges, wrong=""):
        self.left, self.wrong, self.asked = exchanges, wrong, 0

    def stream(self, prompt, tokens):
        self.asked += 1
        if not self.left:
            raise ConnectionError("nobody is there")
        return prompt + (self.wrong if self.asked > 2 else ""), [0.1 * token for token in range(tokens)]

    def exchange(self, text):
        while self.asked < 4:  # twice without exchanges, and at least twice with
            time.sleep(0.001)
        if not self.left:
            raise ConnectionError("nobody is there")
        self.left -= 1
        return {"exchanged": [text], "recomputed": 0, "handed_over": 1, "pause_ms": 2.0 + self.left}

    def config(self):
        return {"kvcache": {"use": "prefix"}}

    def memory(self):
        return (100 + self.left) << 20


def test_answers_pauses_and_memory_are_counted(benchmark):
    result = benchmark.run(Server(1000), 2, 5, 12, random.Random(1))
    assert (result["exchanges"], result["failed"], result["wrong"]) == (12, 0, 0) and result["answers"]
    assert sum(found["n"] for found in result["pause_ms"].values()) == 12
    assert all(path.endswith(", handed over") for path in result["pause_ms"])
    assert result["itl_ms"]["with exchanges"] == pytest.approx({"p50": 100, "p90": 100, "p99": 100, "max": 100})
    assert result["memory_mib"]["series"] == list(range(1099, 1087, -1))
    assert (result["memory_mib"]["second quarter"], result["memory_mib"]["last quarter"]) == (1095, 1089)


def test_memory_is_summed_up_every_20_exchanges(benchmark):
    found = benchmark.growth(list(range(1, 201)))
    assert found["every 20 exchanges"] == list(range(20, 201, 20))
    assert len(found["series"]) == 200


def test_what_the_numbers_depend_on_is_kept_and_no_path_of_the_machine(benchmark, tmp_path):
    settings = benchmark.settings_of(benchmark.read([]))
    assert settings == {
        "config": "examples/quickstart.yaml", "streams": 16, "exchanges": 200, "tokens": 60, "threads": 1,
        "cache": "512MiB", "seed": 1}
    assert benchmark.settings_of(benchmark.read([str(tmp_path / "mine.yaml"), "--threads", "2"])) == {
        **settings, "config": "mine.yaml", "threads": 2}


def test_an_answer_that_differs_from_the_undisturbed_one_is_counted(benchmark):
    result = benchmark.run(Server(1000, wrong="!"), 2, 5, 3, random.Random(1))
    assert result["wrong"] == result["answers"] > 0


def test_a_server_that_dies_ends_the_benchmark(benchmark):
    with pytest.raises(ConnectionError):
        benchmark.run(Server(3), 2, 5, 12, random.Random(1))
