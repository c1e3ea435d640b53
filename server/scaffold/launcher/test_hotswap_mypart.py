"""The kit starts processes with it that fail, hang and look for the secret; then what is its own."""

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.testing.launcher import LauncherSuite
from hotswap_mypart import MyPart


class TestMyPart(LauncherSuite):
    def make_launcher(self) -> MyPart:
        return MyPart(MyPart.Options(command=["env"]))

    def test_a_command_that_does_not_exist_is_a_config_error(self) -> None:
        with pytest.raises(ConfigError, match="no-such-command"):
            MyPart(MyPart.Options(command=["no-such-command"])).start("module:function", [{}])
