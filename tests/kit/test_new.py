"""``hotswap plugins new``: for every kind a project that is complete, tested and selectable as it is written."""

import ast
import os
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml
from click.testing import CliRunner

from hotswap.core.config import load_config
from hotswap.core.config.check import check_config
from hotswap.core.interfaces.component import ComponentOptions, ComponentRef
from hotswap.core.registry import INTERFACES, Registry
from hotswap.core.testing.suites import SUITES
from hotswap.server.cli import main
from hotswap.server.commands.scaffold import SELECTED

ROOT = Path(__file__).parents[2]
KINDS = [interface.kind for interface in INTERFACES]
INI = """
[pytest]
addopts = --import-mode=importlib --strict-markers
filterwarnings =
    error
    ignore::DeprecationWarning
"""


def new(*arguments):
    return CliRunner().invoke(main, ["plugins", "new", *map(str, arguments)])


def test_there_is_a_template_and_a_suite_for_every_kind():
    assert SELECTED.keys() == SUITES.keys() == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_has_a_module_its_tests_an_entry_point_a_readme_and_a_config(projects, kind):
    folder = projects[kind]
    [module] = [path.stem for path in folder.glob("hotswap_*.py")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [f"{module}.py", f"test_{module}.py", "pyproject.toml", "README.md", "config.yaml"])
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]
    [(name, value)] = points[f"hotswap.{kind}"].items()
    [interface] = [interface for interface in INTERFACES if interface.kind == kind]
    assert points["hotswap.contract"] == {kind: f"v{interface.contract.rpartition('/')[2]}"}
    assert value.partition(":")[0] == module
    readme = (folder / "README.md").read_text()
    assert f"hotswap plugins show {kind}:{name}" in readme
    selected = yaml.safe_load(re.search(r"```yaml\n(.*?)```", readme, re.DOTALL)[1])
    assert name in str(selected)
    for path in folder.iterdir():
        assert not re.search(r"mypart|my-part", path.read_text(), re.IGNORECASE), f"{path.name} keeps a placeholder"
        assert "{" not in readme.replace("{use", "").replace('"extra": {', "").replace("{name", "") or kind in (
            "logits_processor",), "a placeholder of the README is left"


@pytest.mark.parametrize("kind", KINDS)
def test_a_test_file_is_a_subclass_with_a_fixture_and_something_of_its_own(projects, kind):
    [path] = projects[kind].glob("test_*.py")
    tree = ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert SUITES[kind].suite.partition(":")[2] in {base.id for node in classes for base in node.bases}
    methods = [item.name for item in classes[0].body if isinstance(item, ast.FunctionDef)]
    assert methods[0] == SUITES[kind].maker
    assert any(name.startswith("test_") for name in methods) or any(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in tree.body)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_options_of_its_own_each_with_a_default_and_a_sentence(projects, kind):
    points = tomllib.loads((projects[kind] / "pyproject.toml").read_text())["project"]["entry-points"]
    [name] = points[f"hotswap.{kind}"]
    part = Registry().load(kind, name)
    assert issubclass(part.Options, ComponentOptions)
    assert part.Options.__module__ == part.__module__, "it has none of its own"
    assert part.Options.model_fields
    for option, field in part.Options.model_fields.items():
        assert not field.is_required() and (field.description or "").endswith("."), option


def test_projects_are_lint_clean(projects):
    config = "line-length = 130\n[lint]\nselect = ['E', 'F', 'B', 'UP', 'SIM', 'RET', 'PIE']\nignore = ['E731']\n"
    home = next(iter(projects.values())).parent
    (home / "ruff.toml").write_text(config)
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", str(home / "ruff.toml"), *map(str, projects.values())],
        capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_all_of_them_pass_their_own_tests(projects, run, tmp_path, request):
    """In one process; without ``--whole`` with fewer random lives."""
    (tmp_path / "pytest.ini").write_text(INI)
    short = [] if request.config.getoption("--whole") else ["-p", "hotswap.core.testing.quick"]
    done = run("pytest", "-q", "-p", "no:cacheprovider", *short, "-c", tmp_path / "pytest.ini", *projects.values())
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def test_all_of_them_are_listed_and_each_config_selects_its_own(projects, run):
    listed = run("hotswap", "plugins")
    for kind, folder in projects.items():
        [name] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"][f"hotswap.{kind}"]
        assert re.search(rf"{kind} +{name} +hotswap-\S+ +0.1.0 +{kind}/1 +available", listed.stdout), listed.stdout


def labels(components):
    """Of components and of their parts."""
    for component in components:
        if isinstance(component, (list, tuple)):
            yield from labels(component)
        elif component is not None:
            yield component.label
            yield from labels(component.parts.values())


@pytest.fixture
def found(site, monkeypatch):
    """The projects can be imported here."""
    for path in site:
        monkeypatch.syspath_prepend(path)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "workload"])
@pytest.mark.parametrize("source", ["config.yaml", "README.md"])
def test_each_config_passes_the_check_and_names_the_part(projects, kind, source):
    given = (projects[kind] / source).read_text()
    if source == "README.md":
        given = "model: smollm2-135m-instruct\ndevice: cpu\n" + re.search(r"```yaml\n(.*?)```", given, re.DOTALL)[1]
        given = given if kind != "model" else given.partition("\n")[2]
    config = load_config(yaml.safe_load(given), environ={}).config
    registry = Registry()
    checked = check_config(config, registry)
    if kind == "model":  # is built with its checkpoint
        assert config.model.use == "GroveForCausalLM"
        assert registry.load("model", config.model.use).__name__ == "GroveForCausalLM"
    elif kind == "operators":  # a part of the model
        model = registry.build("model", ComponentRef(use="LlamaForCausalLM", **config.model.options), "model")
        assert "operators:my_operators" in labels([model])
    else:
        assert f"{kind}:my_{kind}" in labels(checked.built.values()), "the config selects another"


@pytest.mark.parametrize(("arguments", "message"), [
    (("schedular", "mine"), "there is no kind 'schedular'. Did you mean 'scheduler'?"),
    (("scheduler", "My-Part"), "'My-Part' is no name for a scheduler"),
    (("scheduler", "class"), "'class' is no name for a scheduler"),
    (("scheduler", "../evil"), "is no name for a scheduler"),
    (("scheduler", ""), "is no name for a scheduler"),
    (("model", "Some-Thing"), "as in MyForCausalLM"),
    (("model", "Ending_"), "as in MyForCausalLM"),
    (("scheduler", "null"), "'null' means something else in a config"),
    (("speculator", "off"), "'off' means something else in a config"),
    (("attention", "auto"), "'auto' means something else in a config"),
    (("scheduler", "row"), "the class would be called Row, as something that it needs"),
    (("queue_policy", "view"), "give the queue_policy another name, as view_queue_policy"),
    (("scheduler", "chunked"), "there is a scheduler 'chunked' of package hotswap"),
])
def test_what_cannot_be_made_is_refused_with_what_would_be_right(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = new(*arguments)
    assert refused.exit_code == 2
    assert message in refused.output
    assert not list(tmp_path.iterdir()), "something was written"


@pytest.mark.usefixtures("found")
def test_a_project_that_pip_would_put_in_the_place_of_another_is_refused(tmp_path):
    refused = new("scheduler", "my_router", "--dir", tmp_path / "mine")
    assert refused.exit_code == 2
    assert "in the place of another of that name, with the router 'my_router' of package hotswap-my-router" in (
        " ".join(refused.output.split()))


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for folder in ("mine", "file"):
        refused = new("scheduler", "mine", "--dir", tmp_path / folder)
        assert refused.exit_code == 2
        assert "is there and is no empty folder: give another one with --dir" in refused.output
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert new("scheduler", "mine", "--dir", tmp_path / "file" / "under").exit_code == 2, "a path through a file"


def test_without_dir_the_folder_is_named_after_the_part(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = new("queue_policy", "longest_first")
    assert written.exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["hotswap-longest-first"]
    assert "cd hotswap-longest-first && pip install --no-build-isolation -e . && pytest" in written.output


@pytest.mark.whole
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "workload"])
def test_each_config_serves_the_quickstart_model(projects, site, kind):
    """The tutorial's test serves the scheduler in every run."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *site])}
    process = subprocess.Popen(
        [sys.executable, "-m", "hotswap", "serve", str(projects[kind] / "config.yaml"), "--port", "0"],
        stderr=subprocess.PIPE, text=True, env=environment)
    told = []
    try:
        for line in process.stderr:
            told.append(line)
            if found := re.search(r"on (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(told))
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "smollm2-135m-instruct", "messages": question, "max_tokens": 12, "temperature": 0}
        for _ in range(2):
            answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        process.terminate()
        assert process.wait(60) == 0
        reader.join(10)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
