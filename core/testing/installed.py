"""Projects found as if pip had installed them, without an environment and without pip."""

import tomllib
from pathlib import Path


def write_metadata(project: Path, folder: Path) -> None:
    """What an installation of the ``project`` (with its pyproject.toml) tells of its name, version and entry points,
    into ``folder``: to be found on ``sys.path``, before all others that tell of it. Its modules are not there."""
    told = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / f"{told['name'].replace('-', '_')}-{told['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n", "utf-8")
    lines = [
        line for group, points in told.get("entry-points", {}).items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")
