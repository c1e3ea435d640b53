"""Puts the stand-ins in the place of the packages, for a device that is none."""

import importlib
import sys
from importlib import metadata
from pathlib import Path

from hotswap.plugins.attention import flash, flash_packages


def install(monkeypatch, capability, versions):
    """``versions`` by distribution; any other is not installed. Returns the stand-in's list of calls."""

    def version(distribution):
        if distribution not in versions:
            raise metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    forget()
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(flash_packages, "installed_version", version)
    monkeypatch.setattr(flash, "device_capability", lambda: capability)
    monkeypatch.setattr(flash, "DEVICES", ("cpu",))
    return importlib.import_module("flash_stand_in").calls


def forget():
    for name in [name for name in sys.modules if name.startswith(("flash_attn", "flash_stand_in"))]:
        del sys.modules[name]
