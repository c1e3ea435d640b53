"""The measured tables of the documentation, made from the raw data that is kept beside the benchmarks.

    hotswap ab examples/techniques --out results/techniques
    python -m benchmarks.tables --keep results/techniques

The first measures, 40 minutes on a machine of its own; the second packs each result, with all samples, into
``benchmarks/techniques``, and writes every table anew. Without ``--keep`` the tables are made of what is kept already,
the runs of ``benchmarks/experiment/real_runs.py`` included.

A table stands on its page between two comments that name it, and nobody edits it there: tests/benchmarks/test_tables.py
holds the pages against the data.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.figures import Run
from benchmarks.cpu.table import tables
from benchmarks.experiment import real_runs
from benchmarks.packed import pack, read_packed
from hotswap.lab.records import Result
from hotswap.lab.report.overview import render_overview

HERE = Path(__file__).parent
ROOT = HERE.parent
TECHNIQUES = HERE / "techniques"
PEERS = "cpu-peers*.json"
"""In ``results``: what ``python benchmarks/cpu --out`` has written, once for each choice of engines and loads."""

BFLOAT16 = ("hotswap", "vllm", "openvino-f16", "llamacpp-bf16")
BEST_PRECISION = ("hotswap-gguf", "hotswap-int8", "vllm", "openvino-q4_0", "llamacpp-q4_0")
"""Engines that are compared with the first of them."""

PACKED = ".json.gz"
NOTHING = "Not measured yet."


def keep(folder: Path, into: Path = TECHNIQUES) -> None:
    """The results of ``hotswap ab FOLDER --out folder``, in the place of those before. Paths begin at ``folder`` or at
    the repository."""
    found = sorted(folder.glob("*/result.json"))
    if not found:
        raise SystemExit(f"there is no result of an experiment (*/result.json) in {folder}")
    into.mkdir(exist_ok=True)
    for old in into.glob(f"*{PACKED}"):
        old.unlink()
    for plain in found:
        pack(plain, into / f"{plain.parent.name}{PACKED}", [folder, folder.resolve(), ROOT])


def kept(folder: Path = TECHNIQUES) -> dict[str, Result]:
    """By the experiment's name, in the order of their files."""
    results = {}
    for file in sorted(folder.glob(f"*{PACKED}")):
        result = read_packed(file)
        results[str(result.experiment.get("name") or file.name.removesuffix(PACKED))] = result
    return results


def techniques(results: Mapping[str, Result]) -> str:
    return f"{machine(list(results.values()))}\n\n{render_overview(results)}" if results else NOTHING


def runs(found: Sequence[real_runs.Run]) -> str:
    return f"{machine([run.result for run in found])}\n\n{real_runs.table(found)}" if found else NOTHING


def peers(engines: Sequence[str], folder: Path = HERE / "results") -> str:
    found = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob(PEERS))]
    if not found:
        return NOTHING
    runs = []
    for number, one in enumerate(found):
        for run in one["runs"]:
            if run["engine"] in engines:
                run["round"] += 1000 * number  # the first ones of two files are no pair
                run.pop("disturbed")
                runs.append(Run(**run))
    environments = " ".join(dict.fromkeys(told(one["environment"]) for one in found))
    return f"{environments}\n\n{tables(runs, engines[0])}"


def machine(results: Sequence[Result]) -> str:
    """What they were measured on; once where it was the same."""
    return " ".join(dict.fromkeys(told(result.environment) for result in results))


def told(environment: Mapping[str, Any]) -> str:
    return (
        f"Measured on {environment['cores']} cores of {environment['processor']}, torch "
        f"{environment['versions']['torch']}.")


@dataclass(frozen=True)
class Table:
    """``page``: from the repository on."""

    name: str
    page: str
    make: Callable[[], str]


TABLES = (
    Table("techniques", "docs/techniques.md", lambda: techniques(kept())),
    Table("equal arms", "docs/statistics.md", lambda: runs(real_runs.kept("null"))),
    Table("peers, bfloat16", "docs/benchmarks.md", lambda: peers(BFLOAT16)),
    Table("peers, best precision", "docs/benchmarks.md", lambda: peers(BEST_PRECISION)),
    Table("slowdown", "docs/statistics.md", lambda: runs(real_runs.kept("power"))),
)


def stands(page: str, name: str) -> str:
    """What a page has between the comments of a table."""
    found = _place(name).search(page)
    if found is None:
        raise SystemExit(f"the page has no place for the table: <!-- table: {name} --> … <!-- end of table: {name} -->")
    return found[2].strip()


def put(page: str, name: str, text: str) -> str:
    """The page with the table in its place."""
    stands(page, name)
    return _place(name).sub(lambda found: f"{found[1]}\n{text.strip()}\n\n{found[3]}", page)


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- table: {name} -->\n)(.*?)(<!-- end of table: {name} -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of 'hotswap ab examples/techniques --out FOLDER'")
    given = parser.parse_args()
    if given.keep is not None:
        keep(given.keep)
    for table in TABLES:
        path = ROOT / table.page
        path.write_text(put(path.read_text("utf-8"), table.name, table.make()), "utf-8")
        print(f"written: the table '{table.name}' in {table.page}")


if __name__ == "__main__":
    main()
