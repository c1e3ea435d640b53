"""Two commits against each other: each brings its own modules and components, and a verdict needs a difference."""

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import distributions

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.testing.installed import write_metadata


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits, whose file says which it is."""
    from benchmarks.cpu import compare

    root = tmp_path / "repository"

    def git(*words):
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", root, *words], check=True, text=True,
            capture_output=True).stdout

    root.mkdir()
    git("init", "-q")
    for text in ("first", "second"):
        (root / "file").write_text(text)
        git("add", ".")
        git("commit", "-qm", text)
    monkeypatch.setattr(compare, "ROOT", root)
    return git


def test_a_commit_is_there_as_long_as_it_is_compared(repository, tmp_path):
    from benchmarks.cpu.compare import ROOT, checked_out

    with checked_out("HEAD~1", tmp_path / "base") as tree, checked_out(".", tmp_path / "changed") as here:
        assert (tree / "file").read_text() == "first" and here == ROOT
    assert not (tmp_path / "base").exists() and len(repository("worktree", "list").splitlines()) == 1


def test_a_commit_that_there_is_not_is_refused(repository, tmp_path):
    from benchmarks.cpu.compare import checked_out

    with pytest.raises(ConfigError, match="compare: 'nonsense' cannot be checked out: .*nonsense"):
        checked_out("nonsense", tmp_path / "x").__enter__()


def test_the_components_of_a_commit_are_those_of_its_own_project_file(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "hotswap"\nversion = "9"\n[project.entry-points."hotswap.attention"]\nnew = "a.b:C"\n')
    write_metadata(tmp_path, tmp_path / "told")
    found, = distributions(path=[str(tmp_path / "told")])
    assert (found.metadata["Name"], found.version) == ("hotswap", "9")
    assert [(point.group, point.name, point.value) for point in found.entry_points] == [
        ("hotswap.attention", "new", "a.b:C")]


def rounds(factor, disturbed=()):
    """Twelve rounds of tokens/s, the changed tree ``factor`` times as fast, on a machine that drifts."""
    from benchmarks.cpu.figures import Run

    runs = []
    for number in range(1, 13):
        order = ["base", "changed"] if number % 4 in (1, 0) else ["changed", "base"]
        for engine in order:
            speed = (100 + number) * (factor if engine == "changed" else 1) * (1 + number % 3 / 1000)
            others = 1.0 if number in disturbed else 0.0
            runs.append(Run(engine, "offline", "mixed", number, {"out_tok_s": speed}, others))
    return runs


@pytest.mark.parametrize(("factor", "outcome"), [(1.2, "better"), (0.8, "worse"), (1.0, "no difference")])
def test_a_verdict_says_which_is_faster(factor, outcome):
    from benchmarks.cpu.compare import compared, verdicts

    found = compared(rounds(factor), "base", "changed")
    assert found["mixed"].outcome.value == outcome and found["mixed"].effect == pytest.approx(factor - 1, abs=1e-6)
    assert f"{factor - 1:+.1%}" in verdicts(found, "base", "changed") and outcome in verdicts(found, "base", "changed")


def test_rounds_beside_neighbours_give_no_verdict():
    from benchmarks.cpu.compare import compared, verdicts

    found = compared(rounds(1.2, disturbed=range(2, 13)), "base", "changed")
    assert found["mixed"].outcome.value == "not enough data"
    assert "| mixed | output tok/s | – | – | – | not enough data |" in verdicts(found, "base", "changed")


def test_without_any_run_there_is_nothing_to_compare():
    from benchmarks.cpu.compare import compared

    assert compared([], "base", "changed") == {}


def test_the_command_runs_both_trees_in_turns_and_ends_in_verdicts(monkeypatch, capsys):
    from benchmarks.cpu import commands, compare

    asked = []

    def measure(engines, count, given, quick_rounds):
        asked.extend([*engines, count])
        names = dict(zip(("base", "changed"), (engine.name for engine in engines), strict=True))
        return [replace(run, engine=names[run.engine]) for run in rounds(1.2)]

    monkeypatch.setattr(compare, "checked_out", lambda commit, folder: nullcontext(compare.ROOT))
    monkeypatch.setattr(commands, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["benchmarks/cpu", "compare", "HEAD~1", ".", "--rounds", "11"])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    base, changed, count = asked
    assert (ended.value.code, base.name, changed.name, count) == (0, "HEAD~1", "this tree", 12)
    assert base.env["PYTHONPATH"] != changed.env["PYTHONPATH"] and str(compare.ROOT / "src") in base.env["PYTHONPATH"]
    told = capsys.readouterr().out
    assert "this tree is better by" in told and "| +20.0% (+" in told and told.strip().endswith("| better |")
