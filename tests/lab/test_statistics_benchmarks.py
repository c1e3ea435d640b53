"""What the simulations of experiments rest on."""

import gzip
import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from hotswap.core.registry import Registry
from hotswap.lab.metrics import values_of
from hotswap.lab.statistics import Settings

FOLDER = Path(__file__).parents[2] / "benchmarks" / "experiment"


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("noise", "fake_engine", "simulate", "real_runs", "methods", "record_noise"):
        sys.modules.pop(name, None)


@pytest.fixture
def recording(tmp_path):
    """3,000 steps of 4 rows, each 20 ms and a little more than the last, with a prompt now and then."""
    steps = [[0.02 * index, 4, 67 if index % 16 == 0 else 4, (2 if index % 16 == 0 else 1) * 0.02 * (1 + index / 3000)]
             for index in range(3000)]
    path = tmp_path / "noise.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"blocks": [{"steps": steps[at:at + 100]} for at in range(0, 3000, 100)]}, file)
    return path


def test_a_recording_tells_cost_from_noise(recording):
    noise = importlib.import_module("noise").Recording(recording)
    assert noise.cost(4, 4) == pytest.approx(0.03, rel=0.01) and noise.cost(4, 67) == pytest.approx(0.06, rel=0.01)
    assert noise.factors[0] == pytest.approx(2 / 3, rel=0.01) and noise.factors[-1] == pytest.approx(4 / 3, rel=0.01)
    assert 0.03 < noise.cost(4, 30) < 0.06


def test_resampled_noise_keeps_what_hangs_together(recording):
    noise = importlib.import_module("noise").Recording(recording)
    stream = noise.source(np.random.default_rng(0))
    factors = np.concatenate([stream(70) for _ in range(1000)])
    steps = np.abs(np.diff(factors))
    jumps = (steps > 0.01).mean()
    assert 0.2 / 1990 < jumps < 5 / 1990  # a stretch is a minute, 1,990 steps
    assert factors.min() < 0.7 and factors.max() > 1.3


def test_the_fake_engine_serves_every_token_and_is_slower_by_what_was_planted():
    fake, noise = importlib.import_module("fake_engine"), importlib.import_module("noise")
    plan = fake.schedule(1, 20, noise.nominal)
    base, slow = (fake.block(plan, lambda n: np.ones(n), share, "base", 0, 0) for share in (0.0, 0.03))
    assert len(base.requests) == 20
    assert all(record.output_tokens == len(record.chunks) and record.ended <= base.wall for record in base.requests)
    assert max(sum(r.sent <= at < r.ended for r in base.requests) for at in np.linspace(0, base.wall, 200)) == 4
    one, other = (values_of(block, importlib.import_module("simulate").SLO) for block in (base, slow))
    assert other["step_time"] / one["step_time"] == pytest.approx(1.03)
    assert 1.02 < other["tpot_p50"] / one["tpot_p50"] < 1.03


@pytest.mark.parametrize(("slowdown", "found"), [(0.0, False), (0.05, True)])
def test_simulated_experiments_find_what_is_there_and_nothing_else(slowdown, found, recording):
    simulate = importlib.import_module("simulate")
    runs = [simulate.experiment(seed, "heavy tails", slowdown, 4.0, 2.0, Settings(flips=1999, looks=4), recording)
            for seed in range(4)]
    named = [set(run.verdicts.values()) for run in runs]
    assert named.count({"worse"}) >= 3 if found else named.count(set()) >= 3


def test_noise_is_recorded_step_by_step(monkeypatch, config):
    module = importlib.import_module("record_noise")
    monkeypatch.setattr(module, "CONFIG", config)
    monkeypatch.setattr(module, "WORKLOAD", {"use": "synthetic", "prompt": 12, "output": 4})
    monkeypatch.setattr(module, "BLOCK_S", 0.2)
    running = module.blocks(5.0)
    recorded = [next(running), next(running)]
    running.close()
    for block in recorded:
        computed = sum(tokens for _, _, tokens, _ in block["steps"])
        assert computed == sum(prompt + output - 1 for *_, prompt, output in block["requests"])
        assert all(seconds > 0 for _, rows, _, seconds in block["steps"] if rows)
        assert sum(seconds for *_, seconds in block["steps"]) <= block["wall"]
    assert recorded[0]["steps"][-1][0] <= recorded[1]["at"] <= recorded[1]["steps"][0][0]


def test_methods_err_as_often_as_they_claim_where_noise_is_tame():
    methods, noise = importlib.import_module("methods"), importlib.import_module("noise")
    random = np.random.default_rng(3)
    drawn = [methods.quads_of(noise.drift, 20, 100, random) for _ in range(60)]
    for name in ("Student's t", "signed ranks", "20 % trimmed mean", "sign test"):
        intervals = [methods.METHODS[name](quads, random) for quads in drawn]
        assert sum(low > 0 or high < 0 for low, high in intervals) <= 8


def test_the_slowdown_is_found_as_if_it_were_installed_and_makes_steps_longer_by_its_share(monkeypatch):
    real_runs = importlib.import_module("real_runs")
    with real_runs.installed() as place:
        monkeypatch.syspath_prepend(place)
        importlib.invalidate_caches()
        slowed = Registry().load("attention", "slowed")
        backend = object.__new__(slowed)
        backend.options, backend._began, backend._ended = slowed.Options(share=0.5), 0.0, 0.0
        clock = iter([10.0, 10.0, 10.0, 10.3, 10.4, 10.45, 10.61, 10.62])
        monkeypatch.setattr(sys.modules[slowed.__module__], "perf_counter", lambda: next(clock))
        backend._inner = type("Inner", (), {"plan": lambda *_: None, "run": lambda *_: None})()
        backend.plan(None, None)  # begins at 10.0: nothing is known yet
        backend.run(*[None] * 6)  # the layers end at 10.3
        backend.plan(None, None)  # 0.4 s later: waits until 10.6
        assert backend._began == 10.62
        sys.modules.pop(slowed.__module__)
