"""Runs the quick part of a kind's suite on an installed component, in a process of its own."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hotswap.core.testing.suites import SUITES
from hotswap.server.commands.strangers import run_child

NEEDED = ("pytest", "hypothesis")
KIT_TIMEOUT_S = 900.0
"""A suite that takes longer is taken for one that never ends."""

_TESTS = '''
"""Written by hotswap plugins doctor."""

import json
from pathlib import Path

import pytest

from hotswap.core.errors import ConfigError
from {module} import {suite}
from hotswap.core.testing.rig import build

NAME = {name!r}
OPTIONS = json.loads(Path(__file__).with_name("options.json").read_text())


class TestIt({suite}):
    def {maker}(self, **options):
        return build({kind!r}, {use!r}, **(OPTIONS | options))
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
    def write(self, folder):
        """Of the architecture that it is named after, where transformers knows it; else a Llama."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

        from hotswap.core.testing.checkpoints import transformers_checkpoint

        if NAME in KNOWN.values():
            transformers_checkpoint(folder, NAME)
        else:
            super().write(folder)

    @pytest.fixture(autouse=True)
    def family(self, checkpoint):
        try:
            self.make_model().facts(checkpoint.config)
        except (ConfigError, KeyError) as error:
            pytest.skip(f"it is none for the kit's tiny Llama; its own tests bring a checkpoint of its family: {error}")
'''

_BACKENDS = '''
    @pytest.fixture(autouse=True)
    def runs_here(self):
        try:
            self.make_backend().support()
        except ConfigError as error:
            pytest.skip(f"it does not run here: {error}")
'''

_STRATEGIES = '''
    @pytest.fixture(autouse=True)
    def fits(self, tmp_path):
        from hotswap.core.modeling.checkpoint import open_checkpoint
        from hotswap.core.testing.checkpoints import LLAMA, MIXTRAL, tiny_checkpoint

        refusals = []
        for config in (LLAMA, MIXTRAL):
            folder = tiny_checkpoint(tmp_path / config["model_type"], config)
            try:
                self.make_strategy().layout(self.facts(open_checkpoint(str(folder), progress=False)), self.inner)
            except ConfigError as error:
                refusals.append(str(error))
            else:
                self.config = config
                return
        pytest.skip(f"it does not fit the kit's tiny models; its own tests bring one that it fits: {refusals}")
'''

_MORE = {"attention": _BACKENDS, "logits_processor": _REQUESTS, "model": _MODELS, "shard": _STRATEGIES}
"""By kind, what a suite needs to know of a component that it cannot be asked."""

_INI = """
[pytest]
addopts = --import-mode=importlib
"""


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class KitReport(NamedTuple):
    """``checks`` that were run. ``skipped``: why none was. ``failures``: a cause each, and its tests. ``broken``: why
    the suite could not be run."""

    checks: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    failed: int = 0
    """Checks."""
    skipped: str = ""
    broken: str = ""


def place_in(trace: str, module: str) -> str:
    """"FILE:LINE" of the last frame in a traceback's text that lies in ``module`` or the package around it; of the file
    that is no Python, where that is the cause. Empty where there is none."""
    frames = _FRAME.findall(trace)
    if frames and re.search(r"^(SyntaxError|IndentationError|TabError):", trace, re.MULTILINE):
        return ":".join(frames[-1])
    spec = find_spec(module.partition(".")[0])
    roots = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin or ""])]
    own = [frame for frame in frames if any(Path(frame[0]).is_relative_to(root) for root in roots if root)]
    return ":".join(own[-1]) if own else ""


def at(place: str) -> str:
    """The end of a sentence."""
    return f" (at {place})" if place else ""


def run_kit(
    kind: str, use: str, options: Mapping[str, Any], offers: Collection[str] = (), home: str = "",
) -> KitReport:
    """``use`` is "distribution:name"; ``offers`` is what the component describes, ``home`` its module."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        return KitReport(skipped=f"{' and '.join(missing)} not installed: pip install 'hotswap[kit]'")
    part = SUITES[kind]
    module, _, suite = part.suite_for(offers).partition(":")
    text = _TESTS.format(
        module=module, suite=suite, maker=part.maker, kind=kind, use=use, name=use.partition(":")[2],
    ) + _MORE.get(kind, "")
    with TemporaryDirectory(prefix="hotswap-doctor-") as folder:
        path = Path(folder)
        (path / "test_it.py").write_text(text)
        (path / "options.json").write_text(json.dumps(dict(options), default=str))
        (path / "pytest.ini").write_text(_INI)
        return _run(path, home)


def _run(path: Path, home: str) -> KitReport:
    command = [
        sys.executable, "-u", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "hotswap.core.testing.quick",
        "--tb=native", "-o", "junit_logging=log", "--junitxml", str(path / "report.xml"), "test_it.py"]
    done = run_child(command, KIT_TIMEOUT_S, path)
    if done.code is None:
        last = done.out.strip().splitlines()[-1:]
        return KitReport(broken=f"the kit has not ended within {KIT_TIMEOUT_S:g} s; its last words: {' '.join(last)}")
    if not (path / "report.xml").exists():
        said = (done.out + done.err).strip().splitlines()[-20:]
        return KitReport(broken="\n".join([f"the kit ended with exit code {done.code} and no report:", *said]))
    return _read(path / "report.xml", home)


def _read(path: Path, home: str) -> KitReport:
    [suite] = ET.parse(path).getroot().iter("testsuite")
    causes: dict[str, list[tuple[str, str]]] = {}
    skips = []
    for case in suite.iter("testcase"):
        for found in (*case.iter("failure"), *case.iter("error")):
            message = (found.get("message") or "").strip().splitlines() or ["no message"]
            trace = "\n".join(text.text or "" for text in (found, *case.iter("system-out")))
            place = place_in(trace, home) if home else ""
            causes.setdefault(message[0], []).append((case.get("name", ""), at(place)))
        skips += [skip.get("message", "") for skip in case.iter("skipped")]
    count = int(suite.get("tests", 0)) - len(skips)
    if count <= 0:
        return KitReport(skipped=skips[0] if skips else "the suite has no test")
    return KitReport(count, float(suite.get("time", 0)), tuple(_folded(causes)), sum(map(len, causes.values())))


def _folded(causes: Mapping[str, list[tuple[str, str]]]) -> Iterator[str]:
    """A line each cause; one that several checks met is followed by their names."""
    for message, met in causes.items():
        place = next((place for _, place in met if place), "")
        if len(met) == 1:
            yield f"  {met[0][0]}: {message}{place}"
        else:
            yield f"  {len(met)} checks: {message}{place}"
            yield f"    {', '.join(name for name, _ in met)}"
