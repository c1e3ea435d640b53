"""``hotswap plugins doctor``: what it says of a part that is well, and of each way in which one can be ill."""

import ctypes
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from hotswap.core.testing.suites import SUITES
from hotswap.server.cli import main
from hotswap.server.commands import doctor as doctor_module
from hotswap.server.commands import doctor_kit, plugins
from hotswap.server.commands.doctor import Finding, Health
from hotswap.server.commands.doctor_kit import KitReport
from hotswap.server.commands.strangers import run_child

HEAD = """
import os, time
from datetime import date
from typing import Annotated
from hotswap.core.interfaces.component import ComponentOptions, Description, Requirement
from hotswap.core.interfaces.deployment import Router
"""
ROUTERS = {
    "well": '''
class Well(Router):
    """The first one. Choose it for tests."""
    class Options(ComponentOptions):
        seed: int = 0
        """Of nothing."""
    def pick(self, request, candidates):
        return min(candidates, key=lambda one: one.loads.dispatched).engine
''',
    "bare": '''
class Bare(Well):
    class Options(ComponentOptions):
        seed: int = 0
    __doc__ = None
''',
    "unfilled": '''
class Unfilled(Well):
    """The first one.

    Choose it ... (say when).
    """
''',
    "wanting": '''
class Wanting(Well):
    """Choose it where a size is known."""
    class Options(ComponentOptions):
        size: int
        """How many."""
''',
    "silent": '''
class Silent(Well):
    """Choose it never."""
    def describe(self):
        return Description(requires=(Requirement("kvcache", "fork", ""),))
''',
    "stranger": '''
class Stranger(Well):
    """Choose it never."""
    def describe(self):
        return Description(requires=(Requirement("cache", "fork", "it forks"),))
''',
    "unbuildable": '''
class Unbuildable(Well):
    """Choose it never."""
    def __init__(self, options=None, parts=None):
        raise ValueError("no")
''',
    "leaving": '''
class Leaving(Well):
    """Choose it never."""
    def describe(self):
        raise SystemExit("it has gone")
''',
    "optionless": '''
class Optionless(Well):
    """Choose it never."""
    Options = dict
''',
    "dated": '''
class Dated(Well):
    """Choose it on its day."""
    class Options(ComponentOptions):
        day: date
        """Which."""
''',
    "abrupt": '''
class Abrupt(Well):
    """Choose it never."""
    def pick(self, request, candidates):
        os._exit(3)
''',
    "raising": '''
class Raising(Well):
    """Choose it never."""
    def pick(self, request, candidates):
        raise ValueError("odd")
''',
    "favourite": '''
class Favourite(Well):
    """Choose it never."""
    def pick(self, request, candidates):
        return candidates[0].engine
''',
}


BUFFERED = """
import ctypes, routers
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
output = ctypes.c_void_p(libc.fdopen(1, b"w"))  # C's own stdout holds nothing back with PYTHONUNBUFFERED
libc.fputs(b"held", output)
X = routers.Well
"""


def install(site, name, source, points, contract="v1"):
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    declared = f"\n[hotswap.contract]\nrouter = {contract}\n" if contract else ""
    (info / "entry_points.txt").write_text(
        "[hotswap.router]\n" + "\n".join(f"{key} = {value}" for key, value in points.items()) + declared)
    (site / f"{name}.py").write_text(source)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    install(site, "routers", HEAD + "".join(ROUTERS.values()), {
        name: f"routers:{name.capitalize()}" for name in ROUTERS})
    install(site, "undeclared", "from routers import Well", {"undeclared": "undeclared:Well"}, contract="")
    install(site, "future", "raise SystemExit('must not be imported')", {"future": "future:X"}, contract="v9")
    install(site, "broken", "import no_such_module", {"broken": "broken:X"})
    install(site, "slow", "import time, routers; time.sleep(1.1); X = routers.Well", {"slow": "slow:X"})
    install(site, "chatty", "import routers; print('hello', end=''); X = routers.Well", {"chatty": "chatty:X"})
    install(site, "typo", "\nclass X(:\n", {"typo": "typo:X"})
    install(site, "inner", "import routers\n\nrouters.Well.no_such\n", {"inner": "inner:X"})
    install(site, "nameless", "import routers", {"nameless": "nameless:NoSuch"})
    install(site, "raw", "import os, routers; os.write(1, b'raw'); print('hello'); X = routers.Well", {"raw": "raw:X"})
    install(site, "buffered", BUFFERED, {"buffered": "buffered:X"})
    install(site, "latin", "import os, routers; os.write(2, b'\\xff'); X = routers.Well", {"latin": "latin:X"})
    install(site, "leaver", "import sys; sys.exit(0)", {"leaver": "leaver:X"})
    return site


@pytest.fixture
def command(site, monkeypatch):
    """``command("router:well")``: in this process; what looks at imports and runs the kit starts others, which find
    what this one does."""
    monkeypatch.syspath_prepend(str(site))
    yield lambda *arguments: CliRunner().invoke(main, ["plugins", "doctor", *arguments])
    for name in (file.stem for file in site.glob("*.py")):
        sys.modules.pop(name, None)


@pytest.fixture
def doctor(command):
    """``doctor("router:well", ...)`` -> (exit code, check -> (health, detail))."""

    def run(*arguments, kit=False):
        done = command(*arguments, "--json", *([] if kit else ["--no-kit"]))
        assert done.exit_code in (0, 1), done.output
        found = json.loads(done.stdout)
        return done.exit_code, {one["check"]: (one["health"], one["detail"]) for one in found}

    return run


def test_one_that_is_well_passes_every_check_and_the_kit(doctor):
    code, found = doctor("router:well", kit=True)
    assert code == 0
    assert {check: health for check, (health, _) in found.items()} == dict.fromkeys(
        ("import", "contract", "documentation", "options", "description", "kit"), "ok")
    assert re.fullmatch(r"8 checks in \d+\.\d s", found["kit"][1])


def test_a_transfer_between_engines_is_held_against_the_suite_of_such(doctor, monkeypatch):
    """Checks of reuse by tokens do not concern it; its own are run in tests/transfers."""
    suites = []

    def note(kind, use, options, offers, home):
        suites.append(SUITES[kind].suite_for(offers))
        return KitReport(checks=1)

    monkeypatch.setattr(doctor_module, "run_kit", note)
    for use in ("tcp", "host"):
        assert doctor(f"kv_transfer:{use}", kit=True)[1]["kit"][0] == "ok"
    assert [suite.partition(":")[2] for suite in suites] == ["KVHandoffSuite", "KVTransferSuite"]


def test_a_fault_is_told_by_the_name_of_the_check_that_found_it(doctor):
    code, found = doctor("router:favourite", kit=True)
    assert code == 1
    health, detail = found["kit"]
    assert health == "problem"
    assert "test_every_engine_gets_requests: AssertionError: 60 different requests went" in detail


def test_a_cause_that_several_checks_met_is_told_once_and_with_its_place(doctor):
    _, found = doctor("router:raising", kit=True)
    head, *lines = found["kit"][1].splitlines()
    failed = int(re.match(r"(\d+) of \d+ checks fail:", head)[1])
    [(count, place)] = [re.match(r"  (\d+) checks: ValueError: odd \(at (.*)\)", line).groups() for line in lines[::2]]
    assert int(count) == failed == len(lines[1].split(", ")) > 1
    file, _, line = place.rpartition(":")
    assert (Path(file).name, Path(file).read_text().splitlines()[int(line) - 1].strip()) == (
        "routers.py", 'raise ValueError("odd")')


@pytest.mark.parametrize(("name", "said"), [("raw", "raw"), ("buffered", "held")])
def test_what_a_module_writes_past_python_spoils_no_answer_either(command, capfd, name, said):
    json.loads(command(f"router:{name}", "--no-kit", "--json").stdout)
    ctypes.CDLL(None).fflush(None)  # what C's stdio held back would come now
    assert capfd.readouterr() == ("", said)


@pytest.mark.usefixtures("command")
def test_what_a_module_prints_while_it_is_imported_spoils_no_answer():
    shown = CliRunner().invoke(main, ["plugins", "show", "router:chatty", "--json"])
    assert json.loads(shown.stdout)["name"] == "chatty"


def test_a_component_that_ends_the_kit_is_told_so(doctor):
    code, found = doctor("router:abrupt", kit=True)
    assert code == 1
    assert found["kit"][0] == "problem"
    assert found["kit"][1].startswith("the kit ended with exit code 3 and no report:")


def test_the_kit_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(doctor_kit, "KIT_TIMEOUT_S", 0.01)
    report = doctor_kit.run_kit("router", "hotswap:round_robin", {})
    assert report.broken.startswith("the kit has not ended within 0.01 s")


def test_what_is_ended_leaves_nothing_behind_that_it_has_started(monkeypatch, tmp_path):
    """Its time begins here when it has said all that it has to say, however long it takes to start."""
    honest, over = subprocess.Popen.communicate, tmp_path / "over"

    def communicate(process, timeout):
        assert any(over.exists() or threading.Event().wait(0.02) for _ in range(1000))
        return honest(process, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    said = run_child(["sh", "-c", "sleep 60 & echo $!; printf '\\377'; : > over; wait"], 0.5, tmp_path)
    started, odd = said.out.split("\n")
    assert (said.code, odd) == (None, "\ufffd"), "bytes that are no text are told as such"
    assert any(ended(int(started)) for _ in range(100))


def ended(pid):
    """It is gone, or only waits for somebody who asks after it; looks at it for a while."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z" or threading.Event().wait(0.02)


@pytest.mark.parametrize(("name", "check", "health", "detail"), [
    ("bare", "documentation", "warning", "no docstring"),
    ("bare", "options", "warning", "no docstring behind seed"),
    ("unfilled", "documentation", "warning", "still says 'Choose it ...'"),
    ("wanting", "options", "skipped", "it must be told size: give --set size=VALUE"),
    ("silent", "description", "problem", "does not say why it requires 'fork'"),
    ("stranger", "description", "problem", "requires 'fork' of 'cache', which is no kind"),
    ("unbuildable", "options", "problem", "cannot be built: ValueError: no"),
    ("leaving", "description", "problem", "SystemExit: it has gone"),
    ("optionless", "contract", "problem", "no subclass of hotswap.core.interfaces.component.ComponentOptions"),
    ("undeclared", "contract", "warning", "router = \"v1\" under [project.entry-points.\"hotswap.contract\"]"),
    ("future", "contract", "problem", "was written for contract router/9"),
    ("broken", "import", "problem", "No module named 'no_such_module'"),
    ("broken", "import", "problem", "/broken.py:1)"),
    ("typo", "import", "problem", "/typo.py:2)"),
    ("inner", "import", "problem", "/inner.py:3)"),
    ("nameless", "import", "problem", "AttributeError: module 'nameless' has no attribute 'NoSuch'"),
    ("raw", "import", "warning", "it prints while it is imported"),
    ("chatty", "import", "warning", "it prints while it is imported"),
    ("buffered", "import", "warning", "it prints while it is imported"),
    ("latin", "import", "ok", " s"),
    ("leaver", "import", "problem", "importing leaver ends the interpreter, with exit code 0"),
    ("slow", "import", "warning", "import what takes long inside the methods that need it"),
])
def test_each_illness_is_named(doctor, name, check, health, detail):
    code, found = doctor(f"router:{name}")
    assert found[check][0] == health, found
    assert detail in found[check][1]
    assert code == (1 if health == "problem" else 0)


def test_a_module_whose_import_does_not_end_is_not_waited_for_for_ever(doctor, tmp_path, monkeypatch):
    install(tmp_path, "endless", "import time; time.sleep(60)", {"endless": "endless:X"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor_module, "IMPORT_TIMEOUT_S", 0.5)
    code, found = doctor("router:endless")
    assert (code, found) == (1, {"import": ("problem", "importing endless has not ended within 0.5 s")})


def test_code_of_another_contract_is_not_run(doctor):
    _, found = doctor("router:future")
    assert found["import"][0] == "skipped"


def test_options_that_json_does_not_know_reach_the_kit(doctor):
    code, found = doctor("router:dated", "--set", "day=2026-11-30", kit=True)
    assert (code, found["kit"][0]) == (0, "ok"), found


def test_options_are_given_with_set(doctor):
    code, found = doctor("router:wanting", "--set", "size=2")
    assert code == 0
    assert found["options"][0] == "ok"
    code, found = doctor("router:wanting", "--set", "size=many")
    assert code == 1
    assert "size" in found["options"][1]


def test_a_distribution_is_examined_whole(command):
    told = command("routers", "--no-kit").stdout
    assert all(f"router:{name}\n" in told for name in ROUTERS)
    assert told.splitlines()[-1] == "problem 5, warning 3, skipped 2"


def test_hotswap_s_own_parts_are_examined_only_where_they_are_named(command, monkeypatch):
    def examine(patient, kit):
        yield Finding(f"{patient.entry.kind}:{patient.entry.name}", "import", Health.OK, "")

    monkeypatch.setattr(plugins, "examine", examine)
    every = command().stdout
    assert "router:undeclared" in every
    assert "router:round_robin" not in every
    assert "router:round_robin" in command("hotswap").stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (("router:wel",), "Did you mean 'well'?"),
    (("routes",), "no distribution with components is called 'routes'. Did you mean 'routers'?"),
    (("routers", "--set", "size=2"), "--set is for one component"),
    (("router:well", "--set", "size"), "should be OPTION=VALUE"),
])
def test_what_cannot_be_examined_is_refused(command, arguments, message):
    done = command(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_without_pytest_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(doctor_kit, "find_spec", lambda name: None)
    report = doctor_kit.run_kit("router", "hotswap:round_robin", {})
    assert report.skipped == "pytest and hypothesis not installed: pip install 'hotswap[kit]'"
