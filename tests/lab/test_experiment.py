"""What an experiment file may say. Everything wrong is refused with its path, before a model is loaded."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from hotswap.core.config.files import read_file
from hotswap.core.errors import ConfigError
from hotswap.lab.experiment import load_experiment, overrides
from hotswap.lab.load import ClosedLoop, OpenLoop
from hotswap.lab.plan import make_plan, refusals
from hotswap.server.cli import main

SHIPPED = [file for name in ("experiments", "techniques")
           for file in sorted((Path(__file__).parents[2] / "examples" / name).glob("*.yaml"))]
BASE = {"base": {"model": "smollm2-135m-instruct"}, "arms": {"static": {"scheduler": "static"}}}


def refusal(**fields):
    with pytest.raises(ConfigError) as caught:
        make_plan(load_experiment({**BASE, **fields}, beyond=refusals), progress=False)
    return str(caught.value)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    for module in ("arms", "bench"):
        monkeypatch.setattr(
            f"hotswap.lab.{module}.build_engine", lambda *args, **kwargs: pytest.fail("a model was loaded"))


@pytest.mark.parametrize(
    "given, seconds", [("500ms", 0.5), ("2s", 2), ("1.5 min", 90), ("250us", 0.00025), ("1h", 3600)])
def test_durations_have_units(given, seconds):
    assert load_experiment({**BASE, "slo": {"ttft": given}}).slo == {"ttft": pytest.approx(seconds)}


@pytest.mark.parametrize("given", [500, 0.5, "500", "500mss", "ms", "-1s", "0s", True])
def test_an_slo_without_a_unit_is_refused(given):
    assert refusal(slo={"ttft": given}).startswith("slo.ttft: should be")


def test_slos_are_of_latencies_that_there_are():
    assert "there is no 'ttfft'. Did you mean 'ttft'?" in refusal(slo={"ttfft": "1s"})
    assert refusal(slo={"queue": "1s"}, processes="separate").startswith("slo.queue: a server does not tell")


def test_an_unknown_key_is_named_with_the_nearest():
    assert refusal(workloads="synthetic").startswith("workloads: unknown key. Did you mean 'workload'?")
    assert "load.concurency: unknown key. Did you mean 'load.concurrency'?" in refusal(load={"concurency": 3})
    assert "Did you mean 'load.rate'?" in refusal(rate=3)
    assert "there is no 'tpott_p50'. Did you mean 'tpot_p50'?" in refusal(metrics=["tpott_p50"])


def test_an_unknown_key_of_an_arm_is_named_with_the_arm():
    message = refusal(arms={"mine": {"schedular": "static"}})
    assert message.startswith("arms.mine.schedular: unknown key. Did you mean 'scheduler'?")
    assert refusal(arms={"mine": {"scheduler": {"use": "static", "polici": 3}}}).startswith(
        "arms.mine.scheduler.polici")
    assert refusal(arms={"mine": {"scheduler": "statik"}}).startswith("arms.mine.scheduler")
    assert refusal(arms={"peer": {"url": "http://127.0.0.1:1", "modle": "m"}}).startswith(
        "arms.peer.modle: unknown key beside 'url'. Did you mean 'model'?")


def test_arms_may_not_differ_in_the_model():
    message = refusal(arms={"mine": {"model": "another"}})
    assert message.startswith("arms.mine.model: the arm serves another, but 'base' serves smollm2-135m-instruct")


WRONG = {
    "arms": {"a": {"schedulr": "static"}, "b": {"scheduler.max_running": "many"}, "c": {"scheduler": "statik"},
             "d": {"url": "http://127.0.0.1:1", "modle": "m", "reset": "no"}, "e": {"url": "http://127.0.0.1:1"}},
    "sampling": {"temperatur": 0}, "workload": {"use": "synthetic", "promt": 3}, "processes": "shared",
    "out": "/proc/no"}
TOLD = (
    "arms.a.schedulr: unknown key. Did you mean 'scheduler'?", "arms.b.scheduler.max_running: ", "arms.c.scheduler",
    "arms.d.modle: unknown key beside 'url'. Did you mean 'model'?", "arms.d.reset: should be true or false, not 'no'",
    "arms.e.url: http://127.0.0.1:1 does not answer", "sampling: unknown field 'temperatur'", "workload.promt: ",
    "processes: ", "out: nothing can be written to")


@pytest.mark.parametrize(("more", "beside"), [
    ({}, ()), ({"slo": {"ttft": "500"}, "minuts": 3}, ("slo.ttft: ", "minuts: unknown key. Did you mean 'minutes'?"))],
    ids=["well formed", "ill formed"])
def test_all_that_is_wrong_with_a_file_is_told_at_once_each_with_its_path(config, tmp_path, more, beside):
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump({"base": config.name, **WRONG, **more}))
    result = CliRunner().invoke(main, ["ab", str(file)])
    assert result.exit_code == 2, result.output
    head, *lines = result.output.splitlines()
    assert head.endswith(f"{file}: {len(TOLD + beside)} problems:")
    missing = [start for start in TOLD + beside if not any(line.strip().startswith(start) for line in lines)]
    assert not missing, result.output


def test_what_is_wrong_with_the_base_is_not_told_for_every_arm():
    told = refusal(base={"model": "m", "schedulr": "static"}, arms={"a": {"seed": 1}, "b": {"sed": 1}})
    assert told.startswith("2 problems:") and "base.schedulr: " in told and "arms.b.sed: " in told


def test_an_arm_that_is_no_mapping_hides_nothing_of_the_others():
    told = refusal(arms={"a": 3, "b": {"schedulr": "static"}})
    assert told.startswith("2 problems:") and "arms.a: " in told and "arms.b.schedulr: " in told


def test_a_workload_longer_than_the_context_is_refused(config):
    values = {"base": str(config), "arms": {"static": {"scheduler": "static", "max_model_len": 100}}}
    with pytest.raises(ConfigError, match="128 .*32.*100"):
        make_plan(load_experiment({**values, "workload": {"use": "synthetic", "prompt": 128, "output": 32}}))
    make_plan(load_experiment({**values, "workload": {"use": "synthetic", "prompt": 60, "output": 32}}))


def test_a_report_that_cannot_be_written_is_refused(config, tmp_path):
    (tmp_path / "file").write_text("")
    values = {"base": str(config), "arms": {"a": {"seed": 3}}, "workload": {"use": "synthetic", "prompt": 20}}
    with pytest.raises(ConfigError, match="out: nothing can be written to"):
        make_plan(load_experiment({**values, "out": str(tmp_path / "file" / "inside")}))
    make_plan(load_experiment({**values, "out": str(tmp_path / "new" / "inside")}))
    assert not (tmp_path / "new").exists(), "it is not written to before the run"


def test_loads():
    def load(**fields):
        return load_experiment({**BASE, "load": fields}).load.loop

    assert load() == ClosedLoop(8)
    assert load(concurrency=3) == ClosedLoop(3)
    assert load(rate=2.5, arrivals="bursty", limit=9) == OpenLoop(2.5, "bursty", 0.25, 9)
    assert load(arrivals="workload") == OpenLoop(1.0, "workload")
    for wrong in ({"concurrency": 1, "rate": 1}, {"arrivals": "poisson"}, {"arrivals": "workload", "rate": 1}):
        assert refusal(load=wrong).startswith("load: ")


def test_there_must_be_something_to_compare():
    assert "there should be an arm" in refusal(arms={})
    assert "names no arm" in refusal(against="other")
    assert "nothing but 'static'" in refusal(against="static")
    assert "'base' is required" in refusal(base=None)
    experiment = load_experiment({**BASE, "arms": {"a": {}, "b": {"seed": 1}}, "against": "b"})
    assert experiment.compared == ["a"]


def test_a_workload_without_times_of_its_own_cannot_say_when_requests_are_due(config):
    values = {"base": str(config), "arms": {"static": {"scheduler": "static"}}, "load": {"arrivals": "workload"}}
    with pytest.raises(ConfigError, match=r"load\.arrivals: workload:sessions has no times of its own"):
        make_plan(load_experiment({**values, "workload": {"use": "sessions", "message": 9, "output": 9}}))


def test_pairs_come_in_twos():
    assert refusal(pairs=3).startswith("pairs: ")


def test_sampling_fields_are_checked_and_those_of_the_workload_refused():
    assert refusal(sampling={"temperatur": 0}).startswith("sampling: unknown field 'temperatur'")
    assert refusal(sampling={"max_tokens": 3}).startswith("sampling.max_tokens: the workload says how long")
    assert refusal(sampling={"n": 2}).startswith("sampling.n: ")


def test_arms_that_cannot_share_weights_are_told_apart():
    assert "another dtype" in refusal(arms={"b": {"dtype": "float32"}}, processes="shared")
    assert "parallel list" in refusal(
        arms={"b": {"parallel": [{"use": "tensor", "size": 2}]}}, processes="shared")


@pytest.mark.parametrize("change, why", [
    ({"dtype": "bfloat16"}, "another dtype"), ({"parallel": [{"use": "tensor", "size": 2}]}, "parallel list")])
def test_arms_that_cannot_share_weights_run_apart_of_themselves(config, change, why):
    values = {"base": str(config), "arms": {"b": change}, "workload": {"use": "synthetic", "prompt": 20}}
    plan = make_plan(load_experiment(values), progress=False)
    assert plan.separate
    assert why in plan.notes[0]


def test_overrides_may_be_nested_or_dotted():
    nested = {"scheduler": {"use": "static", "policy": "fcfs"}, "seed": 3}
    assert list(overrides(nested)) == ['scheduler.use="static"', 'scheduler.policy="fcfs"', "seed=3"]
    assert list(overrides({"scheduler.use": "static"})) == ['scheduler.use="static"']


def test_a_base_file_is_found_beside_the_experiment(config, tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump({"base": config.name, "arms": {"static": {"scheduler": "static"}}}))
    assert load_experiment(file).base == str(config)


@pytest.mark.parametrize("arguments, words", [
    (["ab", "nowhere.yaml"], "cannot read"),
    (["ab", "{config}", "--arm", "scheduler"], "should be KEY=VALUE"),
    (["ab", "{config}", "--arm", "scheduler={{"], "the value is no YAML"),
    (["bench", "{config}", "--key-file", "nowhere"], "are for servers, which --url names"),
    (["bench", "--url", "http://127.0.0.1:1", "--key-file", "nowhere"], "--key-file: nowhere cannot be read"),
    (["ab", "{config}", "--arm", "schedular=static"], "Did you mean 'scheduler'?"),
    (["ab", "{config}", "--arm", "scheduler='static"], "--arm: \"scheduler='static\" cannot be divided into changes"),
    (["ab", "{config}", "--url", "http://[::1"], "is no name for an arm"),
    (["ab", "{config}", "--arm", "scheduler=static", "--arm", "scheduler=static"], "given twice"),
    (["ab", "{config}", "--arm", "model=other"], "serves other"),
    (["ab", "{config}", "--arm", "scheduler=static", "--out", "/proc/nowhere"], "out: nothing can be written"),
    (["bench"], "give CONFIG or --url"),
    (["bench", "{config}", "--slo", "ttft=3"], "slo.ttft: should be a duration with its unit"),
    (["bench", "{config}", "--option", "prompts=3"], "workload.prompts: unknown key"),
    (["bench", "{config}", "--option", "prompt=300"], "300"),
    (["bench", "{config}", "--sampling", "temperature=hot"], "sampling: temperature"),
    (["bench", "{config}", "--output", "/proc/nowhere"], "--output: /proc/nowhere cannot be written"),
    (["bench", "--url", "http://127.0.0.1:1"], "does not answer GET /v1/models"),
    (["bench", "--url", "localhost"], "should be a server's address"),
    (["bench", "--url", "http://127.0.0.1:99999"], "should be a server's address"),
    (["bench", "--url", "http://127.0.0.1:1", "--set", "seed=3"], "--set changes CONFIG, and there is none"),
    (["bench", "{config}", "--requests", "3", "--seconds", "2"], "keep one of them"),
    (["bench", "{config}", "--seconds", "nan"], "should be a length of time, not nan"),
    (["bench", "{config}", "--rate", "inf"], "load.rate: "),
    (["bench", "{config}", "--option", "use=azure"], "says --workload"),
    (["bench", "{config}", "--option", "prefix=30"], "of no use without 'families'"),
    (["bench", "{config}", "--option", "prompt=20", "--arrivals", "workload"], "has no times of its own, as traces"),
    (["bench", "--url", "http://127.0.0.1:1", "--chat"], "--chat needs CONFIG"),
    (["bench", "--url", "http://127.0.0.1:1", "--slo", "queue=1s"], "slo.queue: a server does not tell"),
])
def test_bad_input_ends_the_commands_with_2_before_a_model_is_loaded(config, arguments, words):
    result = CliRunner().invoke(main, [argument.format(config=config) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.timeout(60)
def test_a_window_over_a_trace_of_one_moment_is_refused_where_it_would_never_close(config, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,20,4\n")
    result = CliRunner().invoke(main, [
        "bench", str(config), "--workload", "azure", "--option", f"path={trace}", "--arrivals", "workload",
        "--seconds", "0.2"])
    assert result.exit_code == 2, result.output
    assert "workload: its requests are all due at once, and fill no stretch of time" in result.output


def test_ab_names_the_extra_that_it_needs(config, monkeypatch):
    monkeypatch.setattr("hotswap.lab.commands.ab.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["ab", str(config), "--arm", "scheduler=static"])
    assert result.exit_code == 2
    assert "pip install 'hotswap[lab]'" in result.output


def test_bench_needs_no_extra():
    without = "import sys; sys.modules |= {'scipy': None, 'plotly': None}; "
    program = without + "import hotswap.lab.bench, hotswap.lab.commands.bench, hotswap.lab.summary"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_the_experiments_that_ship_can_be_run(file):
    plan = make_plan(load_experiment(read_file(file), file.parent), progress=False)
    assert len(plan.arms) >= 2 and all(item.prompt for item in itertools.islice(plan.items(), 20))
