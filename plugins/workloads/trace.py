"""What readers of published traces have in common: lines, scaling to small models, order, and errors with the line."""

import csv
import json
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext
from hotswap.plugins.workloads.draws import tokens


class Lines:
    """The lines of a text file, one at a time; knows where it is, for errors."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0

    def __iter__(self) -> Iterator[str]:
        """Each line that is not blank."""
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                for self.number, line in enumerate(file, 1):
                    if line.strip():
                        yield line
        except (OSError, UnicodeDecodeError) as error:
            self.refuse(f"cannot be read: {error}.")

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"{self.path}:{self.number}: {why}", "path")

    def objects(self) -> Iterator[dict[str, Any]]:
        """Each line as a JSON object."""
        for line in self:
            try:
                value = json.loads(line)
            except ValueError as error:
                self.refuse(f"is no JSON: {error}.")
            if not isinstance(value, dict):
                self.refuse(f"should be a JSON object, not {line.strip()[:60]}.")
            yield value

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, str]]:
        """Each line of a CSV file by its head, which must have at least ``columns``."""
        reader = csv.DictReader(self)
        try:
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                self.refuse(f"the head has no column {missing[0]!r}; expected are {', '.join(columns)}.")
            for row in reader:
                if any(row[name] is None for name in columns):
                    self.refuse(f"has fewer than the {len(reader.fieldnames or ())} columns of the head.")
                yield row
        except csv.Error as error:
            self.refuse(f"is no line of a CSV file: {error}.")

    def number_of(self, value: Any, name: str) -> float:
        """``value`` as a finite number that is not negative."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = -1.0
        if not 0 <= number < float("inf") or isinstance(value, bool):
            self.refuse(f"{name} should be a number of at least 0, not {value!r}.")
        return number


def existing(path: Path) -> Path:
    """``path``, refused before anything is started where there is no such file."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.", "path")
    return path


class Row(NamedTuple):
    """A request of a trace: its time in seconds on the trace's clock, its lengths in tokens, and the ids of the blocks
    of its prompt, where the trace tells them."""

    time: float
    prompt: float
    output: float
    blocks: Sequence[int] = ()


class TraceOptions(ComponentOptions):
    path: Path
    """The file."""
    scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor for all lengths, so that a small model can take them. Arrivals and what is shared stay as they are."""
    max_prompt: Annotated[int, Field(ge=1)] | None = None
    """Longer prompts are cut to this many tokens, after scaling."""
    max_output: Annotated[int, Field(ge=1)] | None = None
    """Longer outputs are cut to this many tokens, after scaling."""
    speed: Annotated[float, Field(gt=0)] = 1.0
    """Factor for the trace's clock; 2 makes requests arrive twice as fast."""


class Trace(Workload):
    """Base of readers: turns rows into requests, in order, with the first due at once."""

    Options = TraceOptions
    block_size: int = 0
    """Tokens of a block, before scaling; 0 where the trace tells of none."""

    @abstractmethod
    def rows(self, lines: Lines) -> Iterator[Row]:
        """The trace's requests, in the order of the file."""

    def items(self, context: WorkloadContext) -> Iterator[WorkItem]:
        return self._items(context, Lines(existing(self.options.path)))

    def _items(self, context: WorkloadContext, lines: Lines) -> Iterator[WorkItem]:
        begin = last = None
        for row in self.rows(lines):
            begin = row.time if begin is None else begin
            if last is not None and row.time < last:
                lines.refuse("is earlier than the line before it: sort the file by time.")
            last = row.time
            yield self._item(row, row.time - begin, context, lines)

    def _item(self, row: Row, time: float, context: WorkloadContext, lines: Lines) -> WorkItem:
        options = self.options
        prompt = self._scaled(row.prompt, options.max_prompt)
        output = self._scaled(row.output, options.max_output)
        if prompt + output > context.max_model_len:
            lines.refuse(
                f"a prompt of {prompt} and an output of {output} tokens do not fit the model's context of "
                f"{context.max_model_len}. Set scale (now {options.scale:g}) to {_scale(row, context)} or less, or cut "
                "with max_prompt and max_output.")
        content = self._content(row, prompt, context)
        content += tokens(context, f"line {lines.number}", prompt - len(content))
        return WorkItem(
            content, output, at=time / options.speed, key=f"block {row.blocks[0]}" if row.blocks else "",
            shared=min(prompt, self._boundary(1)) if row.blocks else 0)

    def _scaled(self, length: float, most: int | None) -> int:
        scale: float = self.options.scale
        scaled = max(1, round(length * scale))
        return scaled if most is None else min(scaled, most)

    def _boundary(self, blocks: int) -> int:
        """Where the block number ``blocks`` begins once scaled. Since it depends on the number alone, prompts that
        begin with the same blocks begin with the same tokens, whatever the scale."""
        scale: float = self.options.scale
        return round(blocks * self.block_size * scale)

    def _content(self, row: Row, length: int, context: WorkloadContext) -> tuple[int, ...]:
        """The tokens of the blocks, at most ``length``."""
        content: list[int] = []
        for number, block in enumerate(row.blocks):
            if len(content) >= length:
                break
            content += tokens(context, f"block {block}", self._boundary(number + 1) - self._boundary(number))
        return tuple(content[:length])


def _scale(row: Row, context: WorkloadContext) -> str:
    """With which a request fits, in two digits."""
    fits = max(1, context.max_model_len - 1) / (row.prompt + row.output)  # both lengths may be rounded up
    step = 10.0 ** (math.floor(math.log10(fits)) - 1)
    return f"{math.floor(fits / step) * step:.2g}"
