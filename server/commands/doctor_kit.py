"""Runs the quick part of a kind's suite on an installed component, in a process of its own."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hotswap.core.testing.suites import SUITES

NEEDED = ("pytest", "hypothesis")

_TESTS = '''
"""Written by hotswap plugins doctor."""

import pytest

from {module} import {suite}
from hotswap.core.testing.rig import build


class TestIt({suite}):
    def {maker}(self, **options):
        return build({kind!r}, {use!r}, **({options!r} | options))
'''

_REQUESTS = '''
    def make_request(self, request_id, tokens, prompt_length, rng):
        from hotswap.core.testing.logits import any_request

        return any_request(self.make_processor(), request_id, tokens, prompt_length, rng)

    def wanted(self):
        processor = self.build()
        if not any(processor.wants(self.request(case)) for case in range(self.cases)):
            pytest.skip("it wants none of the kit's requests: only its own tests know what it wants")
        return super().wanted()
'''

_MODELS = '''
    @pytest.fixture(autouse=True)
    def family(self):
        try:
            self.make_model().facts(self.config)
        except Exception as error:
            pytest.skip(f"it is none for the kit's tiny Llama; its own tests bring a checkpoint of its family: {error}")
'''

_STRATEGIES = '''
    @pytest.fixture(autouse=True)
    def fits(self, checkpoint):
        try:
            self.make_strategy().layout(self.facts(checkpoint), self.inner)
        except Exception as error:
            pytest.skip(f"it does not fit the kit's tiny Llama; its own tests bring a model that it fits: {error}")
'''

_MORE = {"logits_processor": _REQUESTS, "model": _MODELS, "shard": _STRATEGIES}
"""By kind, what a suite needs to know of a component that it cannot be asked."""

_INI = """
[pytest]
addopts = --import-mode=importlib
"""


class KitReport(NamedTuple):
    """``checks`` that were run. ``skipped``: why none was. ``failures``: test and message, a line each."""

    checks: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    skipped: str = ""


def run_kit(kind: str, use: str, options: Mapping[str, Any], offers: Collection[str] = ()) -> KitReport:
    """``use`` is "distribution:name"; ``offers`` is what the component describes."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        return KitReport(skipped=f"{' and '.join(missing)} not installed: pip install 'hotswap[kit]'")
    part = SUITES[kind]
    module, _, suite = part.suite_for(offers).partition(":")
    text = _TESTS.format(
        module=module, suite=suite, maker=part.maker, kind=kind, use=use, options=dict(options)) + _MORE.get(kind, "")
    with TemporaryDirectory(prefix="hotswap-doctor-") as folder:
        path = Path(folder)
        (path / "test_it.py").write_text(text)
        (path / "pytest.ini").write_text(_INI)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "hotswap.core.testing.quick",
             "--junitxml", str(path / "report.xml"), "test_it.py"],
            cwd=path, capture_output=True, text=True, check=False)
        if not (path / "report.xml").exists():
            return KitReport(failures=(done.stdout[-2000:] + done.stderr[-2000:],))
        return _read(path / "report.xml")


def _read(path: Path) -> KitReport:
    [suite] = ET.parse(path).getroot().iter("testsuite")
    failures, skips = [], []
    for case in suite.iter("testcase"):
        for found in (*case.iter("failure"), *case.iter("error")):
            message = (found.get("message") or "").strip().splitlines() or ["no message"]
            failures.append(f"  {case.get('name')}: {message[0]}")
        skips += [skip.get("message", "") for skip in case.iter("skipped")]
    count = int(suite.get("tests", 0)) - len(skips)
    if count <= 0:
        return KitReport(skipped=skips[0] if skips else "the suite has no test")
    return KitReport(count, float(suite.get("time", 0)), tuple(failures))
