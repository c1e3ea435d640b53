"""What is wrong with an experiment, each with its path, and all of it at once."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from hotswap.core.errors import ConfigError
from hotswap.core.explain import Problem, join, problems_of, raise_problems

BASE = "base"
"""The path of the config that arms are changes of."""
Result = TypeVar("Result")


class Refusals:
    """Goes on behind what is refused. ``problems``: what was, so far."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._of_base: list[Problem] = []

    def attempt(self, path: str, job: Callable[[], Result]) -> Result | None:
        """What ``job`` returns; None where it is refused, which is noted below ``path``. What is wrong with the base is
        wrong with every arm, and told once."""
        try:
            return job()
        except ConfigError as error:
            found = problems_of(error)
            self.problems += [below(path, problem) for problem in found if problem not in self._of_base]
            if path == BASE:
                self._of_base += found
            return None


def below(path: str, problem: Problem) -> Problem:
    """``problem``, of what the config holds at ``path``."""
    return Problem(join(path, problem.path) if problem.path else path, problem.message)


@contextlib.contextmanager
def at(path: str) -> Iterator[None]:
    """Puts ``path`` before the path of what is refused inside."""
    try:
        yield
    except ConfigError as error:
        raise_problems([below(path, problem) for problem in problems_of(error)])
