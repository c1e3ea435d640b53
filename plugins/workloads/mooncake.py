"""Traces that tell which blocks of their prompts are alike: Mooncake's and Bailian's."""

from collections.abc import Iterator
from typing import ClassVar

from hotswap.plugins.workloads.trace import Lines, Row, Trace


class MooncakeTrace(Trace):
    """Mooncake's traces of Kimi (Qin et al., FAST 2025): a JSON line a request with timestamp in milliseconds,
    input_length, output_length and hash_ids, one for each 512 tokens of the prompt: equal ids, equal blocks.

    Choose it to judge prefix caches, routing by prefix and eviction: it has the reuse of a real service. Blocks keep
    their identity under ``scale``, and shrink with the lengths.
    """

    block_size = 512
    second: ClassVar[float] = 1000.0
    """The unit of the trace's clock, as a part of a second."""

    def rows(self, lines: Lines) -> Iterator[Row]:
        for value in lines.objects():
            time, prompt, output = (
                lines.number_of(value.get(name), name) for name in ("timestamp", "input_length", "output_length"))
            blocks = value.get("hash_ids", [])
            if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
                lines.refuse(f"hash_ids should be a list of whole numbers, not {str(blocks)[:60]}.")
            yield Row(time / self.second, prompt, output, blocks)


class BailianTrace(MooncakeTrace):
    """Traces of Qwen models on Alibaba's Bailian (qwen-bailian-usagetraces-anon; Wang et al., "KVCache Cache in the
    Wild", ATC 2025): as Mooncake's, with a hash id for each 16 tokens and the timestamp in seconds. Turns of a
    conversation are requests of their own, at the time at which they came.

    Choose it for reuse between the turns of chats and between calls of programs, at the grain of a page.
    """

    block_size = 16
    second = 1.0
