"""The tutorial's commands and edits, one after the other as a reader would, in a fresh environment; and its tables."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import threading
import venv
from pathlib import Path

import httpx
import pytest

from hotswap.core.registry import INTERFACES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w+) (tutorial[^\n]*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, mark, code in BLOCKS if (language, mark) == ("sh", "tutorial")
            for line in code.splitlines()]
MADE_BY_HAND = [". .venv/bin/activate", "pip install -c constraints-cpu.txt -e '.[kit]'"]
"""Which the README's line, run by CI, and the fixture below stand for."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a fresh environment that sees hotswap and its dependencies."""
    home = tmp_path_factory.mktemp("reader")
    venv.create(home / "venv", with_pip=False)
    site = next((home / "venv/lib").glob("python*/site-packages"))
    (site / "hotswap.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    return home


def arguments(line, home):
    """A line of the tutorial as a command of that environment."""
    program, *rest = shlex.split(line)
    python = str(home / "venv/bin/python")
    return {
        "pip": [sys.executable, "-m", "pip", "--python", python, *rest, "--quiet", "--no-deps", "--no-index"],
        "hotswap": [python, "-m", "hotswap", *rest],
        "pytest": [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *rest],
    }[program]


def run(line, home, code=0):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        arguments(line, home), cwd=home, capture_output=True, text=True, timeout=300, check=False,
        env={**environment, "OMP_NUM_THREADS": "1"})
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


class Server:
    """``hotswap serve`` as the tutorial calls it, on a free port."""

    def __init__(self, line, home):
        self.process = subprocess.Popen(
            [*arguments(line, home), "--port", "0"], cwd=home, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        told = []
        for line in self.process.stderr:
            told.append(line)
            if found := re.search(r"on (http://\S+)", line):
                self.reader = threading.Thread(target=self.process.stderr.read, daemon=True)
                self.reader.start()
                return found[1]
        raise AssertionError("".join(told))

    def __exit__(self, *_):
        self.process.terminate()
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join(10)
            self.process.stderr.close()


@pytest.mark.slow
@pytest.mark.real_model
def test_the_tutorial_holds_from_its_first_line_to_its_last(home):
    new, install, serve, test, doctor = [line for line in COMMANDS if line not in MADE_BY_HAND]
    run(new, home)
    run(install, home)
    module = home / "hotswap-my-scheduler/hotswap_my_scheduler.py"
    with Server(serve, home) as url:
        [ask] = [code for _, mark, code in BLOCKS if mark == "tutorial ask"]
        words = shlex.split(ask)
        path = next(word for word in words if word.startswith("http://")).removeprefix("http://127.0.0.1:8000")
        answer = httpx.post(url + path, json=json.loads(words[words.index("-d") + 1]), timeout=120)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        told = json.dumps(httpx.get(f"{url}/server_info", timeout=60).json())
        assert '"name": "my_scheduler"' in told and '"hotswap-my-scheduler"' in told
    [edit] = [code for language, _, code in BLOCKS if language == "python"]
    text = module.read_text()
    [old] = [line for line in text.splitlines(keepends=True) if "if may_start else None" in line]
    module.write_text(text.replace(old, edit))
    assert " passed" in run(f"{test} -p hotswap.core.testing.quick", home)
    report = run(doctor + " --no-kit", home)
    assert "warning" in report and "Choose it ..." in report
    faulty = "min(view.ready, left, self.options.max_chunk)"
    assert faulty in text and f"`{faulty}`" in PAGE
    module.write_text(text.replace(faulty, "min(view.ready, self.options.max_chunk)"))
    failed = run(f"{test} -p hotswap.core.testing.quick -k budget", home, code=1)
    assert "TestMyScheduler::test_budget_and_row_limit_hold" in failed
    assert "scheduler 'MyScheduler' made an invalid plan: row ('r1', 8 tokens, -5 drafts)" in failed


def test_the_tutorial_s_first_screen_is_a_plugin_that_serves():
    screen = "\n".join(PAGE.splitlines()[:30])
    for needed in ("hotswap plugins new", "pip install", "hotswap serve", "curl"):
        assert needed in screen
    assert COMMANDS[:2] == MADE_BY_HAND


def rows(page):
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_kit_s_page_lists_the_suite_of_every_kind():
    from hotswap.core.testing.suites import SUITES

    listed = {cells[0]: (cells[1].strip("`"), cells[2].split(",")[0].strip("`")) for cells in rows("kit.md")
              if len(cells) == 4 and cells[0] in SUITES}
    assert listed == {
        kind: (part.suite.removeprefix("hotswap.core.testing.").replace(":", "."), part.maker)
        for kind, part in SUITES.items()}


def test_the_page_on_versions_lists_every_contract_with_its_number():
    listed = {cells[1].strip("`") for cells in rows("versions.md") if cells[0].startswith("[")}
    assert listed == {interface.contract for interface in INTERFACES}


@pytest.mark.parametrize("kind", [interface.kind for interface in INTERFACES])
def test_the_page_of_a_kind_names_its_suite(kind):
    from hotswap.core.testing.suites import SUITES

    module = SUITES[kind].suite.partition(":")[0].replace("hotswap.", "", 1).replace(".", "/")
    assert f"`{module}.py`" in (ROOT / f"docs/kinds/{kind}.md").read_text()
