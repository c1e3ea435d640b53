"""Ranks prepare what will be exchanged, and one that hangs keeps nobody waiting for good."""

from threading import Event

import pytest

from hotswap.core.engine import preparing as preparing_module
from hotswap.core.engine.preparing import Preparing
from hotswap.core.errors import ConfigError, ExchangeError


class Ranks:
    """An executor whose ranks do what they are told when they may."""

    label = "executor:slow"

    def __init__(self):
        self.may, self.asked, self.error = Event(), [], None

    def prepare(self, parts):
        self.asked.append(dict(parts))
        assert self.may.wait(10)
        if self.error is not None:
            raise self.error
        return len(self.asked)


def test_ranks_that_do_not_let_go_keep_nobody_waiting_and_get_nothing_new_before_they_have(monkeypatch, caplog):
    monkeypatch.setattr(preparing_module, "LET_GO_TIMEOUT_S", 0.01)
    ranks = Ranks()
    preparing = Preparing(ranks, "engine 3: ")
    preparing.let_go()
    assert "engine 3: the exchange has failed, and the ranks have not let go within 0.01 s" in caplog.text
    with pytest.raises(ExchangeError, match="the ranks have yet to let go"):
        preparing.check_free()
    thread = preparing._letting_go
    ranks.may.set()
    thread.join(10)
    monkeypatch.undo()
    preparing.check_free()
    preparing.let_go()
    assert ranks.asked == [{}, {}]
    assert preparing._letting_go is None


def test_ranks_that_hang_while_they_prepare_keep_nobody_waiting_and_let_go_what_comes_too_late(monkeypatch):
    monkeypatch.setattr(preparing_module, "LOAD_TIMEOUT_S", 0.01)
    monkeypatch.setattr(preparing_module, "LET_GO_TIMEOUT_S", 0.01)
    ranks = Ranks()
    preparing = Preparing(ranks)
    with pytest.raises(ExchangeError, match="have not prepared the new parts within 0.01 s; the old ones serve on"):
        preparing.load({"attention": 1})
    with pytest.raises(ExchangeError, match="the ranks have yet to let go"):
        preparing.check_free()
    assert ranks.asked == [{"attention": 1}], "nothing is asked of ranks that have not answered yet"
    thread = preparing._letting_go
    ranks.may.set()
    thread.join(10)
    assert ranks.asked == [{"attention": 1}, {}]
    preparing.check_free()


def test_what_ranks_say_of_parts_that_they_prepare_is_told_as_it_was_said():
    ranks = Ranks()
    ranks.may.set()
    assert Preparing(ranks).load({"attention": 1}) == 1
    ranks.error = ConfigError("planted", "attention")
    with pytest.raises(ConfigError, match="planted") as caught:
        Preparing(ranks).load({"attention": 1})
    assert caught.value is ranks.error
    assert ranks.asked == [{"attention": 1}] * 2
