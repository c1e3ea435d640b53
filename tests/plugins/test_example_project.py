"""The stranger's plugin in ``examples/plugins``: tested as it is, then installed into a fresh environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import venv
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples" / "plugins" / "hotswap-shortest-first"

Run = Callable[..., subprocess.CompletedProcess[str]]


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=240, check=False, **options)


def test_its_own_tests_pass():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    tested = run(
        sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=PROJECT, env=environment)
    assert tested.returncode == 0, tested.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a fresh environment that sees hotswap and its dependencies, with the project installed."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home / "venv", with_pip=False)
    interpreter = home / "venv" / "bin" / "python"
    site = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    Path(site, "hotswap.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    shutil.copytree(PROJECT, home / "project")
    installed = run(
        sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps", "--no-index",
        "--no-build-isolation", home / "project")
    assert installed.returncode == 0, installed.stderr
    return interpreter


@pytest.mark.slow
def test_once_installed_it_is_listed_with_its_package(python):
    listed = json.loads(run(python, "-m", "hotswap", "plugins", "--json").stdout)
    found = {(item["kind"], item["name"]): item for item in listed}
    for key in (("queue_policy", "shortest_job"), ("scheduler", "strict")):
        assert found[key]["distribution"] == "hotswap-shortest-first"
        assert found[key]["status"] == "available"
        assert found[key]["contract"] == f"{key[0]}/1"


@pytest.mark.slow
def test_a_config_that_names_it_is_accepted(python, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: smollm2-135m-instruct\n"
        "scheduler: {use: strict, policy: {use: shortest_job, tokens_per_second: 50}}\n")
    checked = run(python, "-m", "hotswap", "config", "check", config)
    assert checked.returncode == 0, checked.stderr
    assert "hotswap-shortest-first" in checked.stdout
    quickstart = ROOT / "examples/quickstart.yaml"
    exchanged = run(python, "-m", "hotswap", "config", "check", quickstart, "--set", "scheduler.use=strict")
    assert exchanged.returncode == 0, exchanged.stderr
    assert "scheduler:strict" in exchanged.stdout
    assert "queue_policy:fcfs" in exchanged.stdout, "the order that the file asks for"
    wrong = run(python, "-m", "hotswap", "config", "check", config, "--set", "scheduler.policy.tokens_per_secnd=1")
    assert wrong.returncode == 2
    assert "Did you mean 'scheduler.policy.tokens_per_second'?" in wrong.stderr


@pytest.fixture
def server(python, tmp_path):
    """``hotswap serve`` in the fresh environment, with the stranger's scheduler and policy; gives its address."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: smollm2-135m-instruct\ndtype: float32\ndevice: cpu\nmax_model_len: 512\n"
        "scheduler: {use: strict, policy: shortest_job, max_running: 4}\nkvcache: {memory: 64MiB}\n"
        "server: {port: 0}\n")
    process = subprocess.Popen([python, "-m", "hotswap", "serve", config], stderr=subprocess.PIPE, text=True)
    told = []
    try:
        for line in process.stderr:
            told.append(line)
            if found := re.search(r"on (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(told))
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield found[1]
        process.terminate()
        assert process.wait(timeout=60) == 0
        drain.join(timeout=10)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
@pytest.mark.real_model
def test_a_server_runs_on_it(server):
    components = json.dumps(httpx.get(f"{server}/server_info", timeout=60).json())
    assert components.count("hotswap-shortest-first") == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "smollm2-135m-instruct", "messages": question, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
