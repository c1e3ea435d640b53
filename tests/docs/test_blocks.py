"""Every command and every block of code in the documentation is run, or at least parsed, as it stands."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib

import click
import pytest
from click.testing import CliRunner

from hotswap.core.config import load_config
from hotswap.core.config.check import check_config
from hotswap.core.config.files import parse_yaml, read_file
from hotswap.core.interfaces.component import Component
from hotswap.core.registry import Registry
from hotswap.lab.commands.ab import short
from hotswap.lab.experiment import load_experiment, overrides
from hotswap.server.cli import main
from hotswap.server.http.admin import ComponentsBody
from hotswap.server.protocol.chat import ChatBody
from hotswap.server.protocol.common import Body
from hotswap.server.protocol.completions import CompletionBody

BODIES = {
    "/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/admin/components": ComponentsBody}
OTHER_COMMANDS = {"python3", ".venv/bin/pip", ".venv/bin/pytest", "pytest", "ruff", "mypy", "lint-imports"}


def parse(arguments: list[str]) -> list[click.Context]:
    """The contexts of a command line, outermost first; a UsageError where it is wrong. Calls no command."""
    command, name, contexts = main, "hotswap", []
    while True:
        context = command.make_context(name, list(arguments), parent=contexts[-1] if contexts else None)
        contexts.append(context)
        rest = [*context._protected_args, *context.args]
        if not isinstance(command, click.Group) or not rest:
            return contexts
        name, command, arguments = command.resolve_command(context, rest)


def hotswap_commands(line: str) -> list[list[str]]:
    """The arguments of each hotswap command in a line of commands joined with ``&&``."""
    words = [shlex.split(part, comments=True) for part in line.split("&&")]
    return [command[1:] for command in words if command and command[0].rpartition("/")[2] == "hotswap"]


def test_every_command_is_known(shell_line):
    words = [shlex.split(part, comments=True) for part in shell_line.split("&&")]
    programs = [command[0] for command in words if command]
    assert all(program in OTHER_COMMANDS | {"curl"} or program.endswith("hotswap") for program in programs)


def test_hotswap_commands_parse_and_their_configs_hold(shell_line, pages):
    for arguments in hotswap_commands(shell_line):
        values = parse(arguments)[-1].params
        if values.get("config"):
            config = pages.ROOT / values["config"]
            load_config(config, values.get("sets", ()), environ={})
        if "arms" in values:
            source = pages.ROOT / values["source"]
            for file in sorted(source.glob("*.yaml")) if source.is_dir() else [source]:
                given = short(file, values["arms"], values["urls"]) if values["arms"] else read_file(file)
                check_experiment(given, file.parent)


def test_commands_that_only_look_are_run_as_they_stand(shell_line, pages, monkeypatch):
    monkeypatch.chdir(pages.ROOT)
    for arguments in hotswap_commands(shell_line):
        looks = arguments[0] == "config" or arguments[:2] == ["plugins", "show"] or arguments in (
            ["plugins"], ["plugins", "--json"])
        if looks:
            done = CliRunner().invoke(main, arguments)
            assert done.exit_code == 0, done.output
            assert done.stdout.strip()


def check_experiment(given, folder):
    """The file is one, and each of its arms a config that can work."""
    experiment = load_experiment(given, folder)
    for arm in experiment.arms.values():
        check_config(load_config(experiment.base, list(overrides(arm)), environ={}).config, Registry())


def test_curl_lines_name_routes_and_fields_that_exist(shell_line, routes):
    words = shlex.split(shell_line)
    if words[0] != "curl":
        return
    path = next(word for word in words if word.startswith("http://")).removeprefix("http://127.0.0.1:8000")
    assert path in routes
    if "-d" in words:
        body = BODIES[path].model_validate(json.loads(words[words.index("-d") + 1]))
        if isinstance(body, Body):  # else it forbids what it does not know
            body.refuse_unsupported()
            assert not body.unknown_fields()


def test_yaml_blocks_are_configs_that_pass_the_check(yaml_block, registry, pages):
    if yaml_block.mark == "experiment":
        check_experiment(parse_yaml(yaml_block.code), pages.ROOT)
        return
    config = load_config(parse_yaml(yaml_block.code), environ={}).config
    if yaml_block.mark != "plugin":  # those name a component of a package that the page describes
        check_config(config, registry)


def test_toml_blocks_parse(toml_block):
    assert tomllib.loads(toml_block.code)


def test_json_blocks_parse(json_block):
    for line in json_block.code.splitlines():
        json.loads(line)


def test_python_blocks_parse_and_what_they_import_exists(python_block):
    tree = ast.parse(textwrap.dedent(python_block.code))
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] == "hotswap":
            module = __import__(statement.module, fromlist=["_"])
            missing = [alias.name for alias in statement.names if not hasattr(module, alias.name)]
            assert not missing, f"{statement.module} has no {missing}"


def test_classes_of_the_pages_define_all_that_their_kind_asks_for(python_block):
    """A class whose base is one of our interfaces can be built."""
    if not python_block.mark.startswith("plugin=") and "QueuePolicy" not in python_block.code:
        return
    if python_block.mark.startswith("plugin=test_"):
        return
    namespace: dict[str, object] = {"__name__": "builtins"}
    exec(compile(python_block.code, str(python_block), "exec"), namespace)
    ours = [value for value in namespace.values() if isinstance(value, type) and issubclass(value, Component)
            and value.__module__ == "builtins"]
    assert ours
    assert all(cls().describe() for cls in ours)


@pytest.fixture
def package(pages, tmp_path, monkeypatch):
    """The folder of what docs/writing-a-plugin.md makes, found as if pip had installed it; and its configs."""
    page, points, modules = pages.ROOT / "docs/writing-a-plugin.md", {}, []
    for block in pages.blocks("python", page):
        if block.mark.startswith("plugin="):
            modules.append(block.mark.removeprefix("plugin="))
            (tmp_path / modules[-1]).write_text(block.code)
    for block in pages.blocks("toml", page):
        for group, entries in tomllib.loads(block.code)["project"]["entry-points"].items():
            points.setdefault(group, {}).update(entries)
    metadata = tmp_path / "hotswap_smallest_first-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hotswap-smallest-first\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in entries.items())
        for group, entries in points.items()))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path, [block.code for block in pages.blocks("yaml", page) if block.mark == "plugin"]
    for module in modules:
        sys.modules.pop(module.removesuffix(".py"), None)


def hotswap(*arguments):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_package_of_the_page_on_plugins_is_found_and_its_configs_choose_its_parts(package):
    folder, configs = package
    row = r"queue_policy +smallest_first +hotswap-smallest-first +1.0 +queue_policy/1"
    assert re.search(row, hotswap("plugins"))
    checked = []
    for number, config in enumerate(configs):
        (folder / f"{number}.yaml").write_text(config)
        checked.append(hotswap("config", "check", folder / f"{number}.yaml"))
    for name in (
        "queue_policy:ageing", "logits_processor:steer", "eviction_policy:newest_first", "observer:slow_steps",
    ):
        assert any(name in listing for listing in checked), name


def test_the_package_of_the_page_on_plugins_passes_the_tests_of_the_page(package, pages):
    folder, _ = package
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(pages.ROOT / "src")])}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "hotswap.core.testing.quick",
         "test_mine.py"],
        capture_output=True, text=True, cwd=folder, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
