"""The command line: config, plugins, and how every wrong config ends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from hotswap.server.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run():
    def invoke(*arguments: object, **environ: str):
        return CliRunner().invoke(main, [str(a) for a in arguments], env=environ, catch_exceptions=False)

    return invoke


@pytest.fixture
def file(tmp_path, parts):
    def write(**changes):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**parts, **changes}, sort_keys=False))
        return path

    return write


def hotswap(*arguments, options=()):
    """Run the command in a process of its own, from this tree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, *options, "-m", "hotswap", *arguments],
        capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_plugins_lists_in_under_a_second_and_imports_neither_torch_nor_a_component():
    durations = []
    for _ in range(3):
        began = time.perf_counter()
        listed = hotswap("plugins")
        durations.append(time.perf_counter() - began)
    assert listed.returncode == 0, listed.stderr
    assert min(durations) < 1.0
    lines = listed.stdout.splitlines()
    assert lines[0].split() == ["KIND", "NAME", "DISTRIBUTION", "VERSION", "CONTRACT", "STATUS", "REASON"]
    assert any(line.split()[:6] == ["scheduler", "chunked", "hotswap", "0.1.0", "scheduler/1", "available"]
               for line in lines)
    traced = hotswap("plugins", options=("-X", "importtime")).stderr
    imported = {line.rpartition("|")[2].strip() for line in traced.splitlines()}
    assert "hotswap.core.registry" in imported
    heavy = ("torch", "transformers", "numpy", "fastapi", "hotswap.plugins")
    assert not [name for name in imported if name.split(".")[0] in heavy or name.startswith("hotswap.plugins")]


def test_importing_hotswap_imports_no_torch():
    code = "import sys, hotswap; hotswap.SamplingParams; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0


def test_version(run):
    assert run("--version").output == "hotswap 0.1.0\n"


def test_plugins_as_json_and_broken_ones_found_by_loading(run, parts, install):
    install("broken", {"hotswap.observer": {"broken": "broken:X"}}, "raise RuntimeError('at import')")

    def status(*options):
        listed = json.loads(run("plugins", "--json", *options).output)
        return {(item["kind"], item["name"]): (item["status"], item["reason"]) for item in listed}

    assert status()["observer", "broken"] == ("available", "")
    loaded = status("--load")
    assert loaded["observer", "fake"] == ("loaded", "")
    assert loaded["observer", "broken"][0] == "broken"
    assert "at import" in loaded["observer", "broken"][1]


def test_plugins_show_prints_documentation_and_options(run):
    page = run("plugins", "show", "scheduler:chunked").output
    assert page.startswith("scheduler:chunked  hotswap 0.1.0  scheduler/1")
    assert "Choose it to bound the time between tokens" in page
    assert 'policy: component, default {"use": "fcfs"}' in page
    facts = json.loads(run("plugins", "show", "hotswap:chunked".replace("hotswap", "scheduler"), "--json").output)
    assert facts["status"] == "loaded"
    assert "max_chunk" in facts["options"]["properties"]


def test_plugins_show_of_what_there_is_not(run):
    assert run("plugins", "show", "chunked").exit_code == 2
    result = run("plugins", "show", "scheduler:chunkd")
    assert result.exit_code == 2
    assert "Did you mean 'chunked'?" in result.stderr


def test_config_check_lists_what_would_run(run, file):
    result = run("config", "check", file())
    assert result.exit_code == 0, result.output
    assert "scheduler.policy" in result.output
    assert "queue_policy:fake" in result.output


def test_config_check_of_a_combination_that_cannot_exist(run, file):
    result = run("config", "check", file(scheduler={"use": "fake", "policy": "forking"}))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("hotswap: scheduler.policy: queue_policy:forking requires 'fork' of the kvcache")


def test_a_name_that_two_packages_offer_ends_with_exit_code_2_until_one_is_chosen(run, file, install):
    install("rival", {"hotswap.scheduler": {"fake": "parts:FakeScheduler"}})
    result = run("config", "check", file())
    assert result.exit_code == 2
    assert "'fake' is offered by parts 1.0 and rival 1.0: choose 'parts:fake' or 'rival:fake'" in result.stderr
    assert run("config", "check", file(scheduler="rival:fake")).exit_code == 0
    listed = run("plugins").output
    assert listed.count("ambiguous") == 2
    assert "also in rival: choose 'parts:fake'" in listed


def test_config_show_names_every_value_with_its_source(run, file):
    path = file(speculator={"use": "fake", "max_draft": 5}, server={"port": 9001, "api_keys": ["sk-secret"]})
    result = run(
        "config", "show", path, "--json", "--set", "scheduler.policy=forking", HOTSWAP_SERVER__HOST="127.0.0.2")
    shown = {row["path"]: (row["value"], row["source"]) for row in json.loads(result.output)}
    assert shown["model.name"] == ("m", f"file {path}")
    assert shown["dtype"] == ("auto", "default")
    assert shown["server.port"] == (9001, f"file {path}")
    assert shown["server.host"] == ("127.0.0.2", "environment HOTSWAP_SERVER__HOST")
    assert shown["scheduler.max_running"] == (256, "default")
    assert shown["scheduler.policy.use"] == ("forking", "flag")
    assert shown["speculator.max_draft"] == (5, f"file {path}")
    assert shown["observers[0].use"] == ("fake", f"file {path}")
    assert shown["parallel"] == ([], "default")
    assert "sk-secret" not in result.output
    assert "server.port" in run("config", "show", path).output


def test_what_a_flag_made_void_is_told_by_check_and_show_and_generate(run, file, monkeypatch, tmp_path):
    import types

    monkeypatch.setitem(sys.modules, "hotswap.server.generate", types.SimpleNamespace(generate_file=lambda *_: 0))
    path = file(speculator={"use": "fake", "max_draft": 5})
    told = f"speculator.max_draft of file {path} was given to 'fake'; 'none' has no such option, so it is left out\n"
    flags = (path, "--set", "speculator=none")
    assert f"note: {told}" in run("config", "check", *flags).stdout
    assert run("config", "show", *flags).stderr == f"warning: {told}"
    assert run("generate", *flags, "--input", "in", "--output", tmp_path / "out").stderr == f"warning: {told}"


def test_config_schema_has_the_options_of_the_named_components(run, file):
    schema = json.loads(run("config", "schema", file()).output)
    text = json.dumps(schema)
    assert "max_draft" in text
    assert "max_chunk" not in text
    assert schema["required"] == ["model"]
    for section in ("AttentionSection", "ExecutionSection"):
        [auto] = [choice for choice in schema["$defs"][section]["anyOf"] if choice.get("title") == "auto"]
        assert auto["properties"]["use"] == {"const": "auto"} and "required" not in auto
    everything = json.dumps(json.loads(run("config", "schema", "--all").output))
    assert "max_draft" in everything and "max_chunk" in everything
    assert run("config", "schema").exit_code == 2
    assert run("config", "schema", "--all", "--set", "seed=1").exit_code == 2
    of = {name: run("config", "schema", file(), "--set", f"scheduler={name}").output for name in ("chunked", "static")}
    assert ["max_chunk" in of[name] for name in of] == [True, False]


def test_what_auto_will_choose_is_no_component_whose_options_the_schema_could_have(run, file):
    told = run("config", "schema", file(attention="auto", execution={"use": "auto", "depth": 2}))
    assert told.exit_code == 0, told.output
    assert "stop_timeout_s" not in told.stdout and "max_draft" in told.stdout


def test_a_kind_of_device_that_there_is_not_is_refused_in_words_of_our_own(run, file):
    told = run("config", "check", file(), "--set", "device=gpu")
    assert told.exit_code == 2
    assert told.stderr == (
        "hotswap: device: there is no kind of device called 'gpu'; give cpu, cuda, one of several such as cuda:1, or "
        "auto\n")
    assert run("config", "check", file(), "--set", "device=cpu").exit_code == 0


@pytest.mark.parametrize("command", [("config", "check"), ("config", "show"), ("config", "schema"), ("serve",)])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seq": 4}, "max_num_seq: unknown key. Did you mean 'scheduler.max_running'?"),
        ({"server": {"port": "x"}}, "server.port: should be a valid integer, not 'x'."),
        ({"kvcache": {"memory": "250X"}}, "kvcache.memory: unknown unit 'X'"),
    ],
)
def test_a_bad_config_ends_every_command_with_one_message_and_exit_code_2(run, file, command, changes, message):
    result = run(*command, file(**changes))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"hotswap: {message}")
    assert "Traceback" not in result.output


def test_a_missing_config_file_is_one_message(run):
    result = run("serve", "no/such/file.yaml")
    assert result.exit_code == 2
    assert result.stderr == "hotswap: cannot read the config file 'no/such/file.yaml': No such file or directory.\n"


def test_serve_takes_host_and_port_as_flags(run, file, monkeypatch):
    import types

    served = []
    module = types.ModuleType("hotswap.server.run")
    module.serve = served.append
    monkeypatch.setitem(sys.modules, "hotswap.server.run", module)
    path = file(server={"port": 1})
    assert run("serve", path, "--host", "::1", "--port", 9003, "--set", "seed=7").exit_code == 0
    [resolved] = served
    assert (resolved.config.server.host, resolved.config.server.port, resolved.config.seed) == ("::1", 9003, 7)
    assert resolved.source("server.port") == "flag"


def test_generate_passes_its_files_on_and_tells_failures_by_its_exit_code(run, file, monkeypatch, tmp_path):
    import types

    calls = []
    module = types.ModuleType("hotswap.server.generate")
    module.generate_file = lambda *arguments: calls.append(arguments) or len(calls) - 1
    monkeypatch.setitem(sys.modules, "hotswap.server.generate", module)
    arguments = ("generate", file(), "--input", "in.jsonl", "--output", tmp_path / "out")
    assert run(*arguments).exit_code == 0
    assert calls[0][1:] == (Path("in.jsonl"), tmp_path / "out")
    failed = run(*arguments)
    assert (failed.exit_code, failed.stderr[:26]) == (1, "hotswap: 1 requests failed")
    assert run("generate", file()).exit_code == 2
