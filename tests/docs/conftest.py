"""The pages as fixtures. A test that asks for ``python_block``, ``yaml_block``, ``toml_block``, ``json_block``,
``shell_line`` or ``page`` runs once for each."""

import importlib.util
import sys
from pathlib import Path

import pytest

from hotswap.core.registry import Registry

_SPEC = importlib.util.spec_from_file_location("docs_pages", Path(__file__).with_name("pages.py"))
_PAGES = sys.modules["docs_pages"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_PAGES)


def pytest_generate_tests(metafunc):
    for language in ("python", "yaml", "toml", "json"):
        if f"{language}_block" in metafunc.fixturenames:
            found = _PAGES.blocks(language)
            metafunc.parametrize(f"{language}_block", found, ids=map(str, found))
    if "shell_line" in metafunc.fixturenames:
        lines = [
            (f"{block}", line) for block in _PAGES.blocks("sh") if not block.mark.startswith("tutorial")
            for line in block.code.splitlines() if line.strip()]  # tests/kit/test_tutorial.py runs the tutorial's
        metafunc.parametrize("shell_line", [line for _, line in lines], ids=[where for where, _ in lines])
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", _PAGES.PAGES, ids=[page.name for page in _PAGES.PAGES])


@pytest.fixture
def pages():
    """The helpers of pages.py."""
    return _PAGES


@pytest.fixture(scope="session")
def registry():
    return Registry()


@pytest.fixture(scope="session")
def routes():
    """path -> method of every route of the HTTP application."""
    from hotswap.core.config.schema import ServerSection
    from hotswap.server.app import create_app
    from hotswap.server.served import Served

    app = create_app(Served("m", None, _NoTokenizer(), 1, 1), ServerSection(admin_key="k"))
    methods = {route.path: next(iter(route.methods - {"HEAD"})) for route in app.routes}
    return {path.replace(":path", ""): method for path, method in methods.items()}


class _NoTokenizer:
    special_ids = frozenset()

    def encode_without_special_parsing(self, text):
        return [0]

    def decode(self, token_ids, skip_special_tokens=True):
        return ""
