"""Sockets in a private directory, and a crew of ranks that are Python functions of these tests."""

import pytest


@pytest.fixture
def secret():
    return bytes(range(32))
