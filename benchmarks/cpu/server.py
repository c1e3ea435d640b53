"""What the server costs: the same requests, as many at a time, through it and without it, for several configs in turns.

    python benchmarks/cpu server --arm one:execution.depth=1 --arm two:execution.depth=2
    python benchmarks/cpu server --arm threads: --arm processes:execution.use=processes      # who computes the steps
    python benchmarks/cpu server --tiny                       # next to no model: what is left is the server

``server, µs/token`` is the CPU time of the engine's processes for an output token, less that of the same engine without
a server in the same round. What waits spinning counts, too: on a full machine that is where a server is felt.
"""

import itertools
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.cpu.figures import Run, Spread, share_of_offline
from benchmarks.cpu.peers import Engine
from benchmarks.cpu.table import shown
from benchmarks.workloads import LAST_ID
from hotswap.core.errors import ConfigError
from hotswap.lab.commands.assignments import assignments

LOADS = "offline16,http"
IDLE_S = 5.0
TINY = {"kvcache.memory": "64MiB"}
"""Config keys for the tiny model, of whose pages a million would fit where SmolLM2's cache is."""
COLUMNS = (
    "arm", "of offline", "server, µs/token", "client, µs/token", "ITL p50, ms", "ITL p99, ms", "p99/p50", "idle CPU, %")


def arms_of(ours: Engine, texts: Sequence[str], config: Path, tiny: Path | None) -> list[Engine]:
    """``NAME:KEY=VALUE,KEY=VALUE`` each, on top of ``config``; none: ``config`` as it is. ``tiny``: the model's folder.
    ConfigError for what is no arm."""
    own = {} if tiny is None else {"model": str(tiny), **TINY}
    arms = []
    for text in texts or (f"{ours.name}:",):
        name, colon, sets = text.partition(":")
        if not (name and colon) or name in [arm.name for arm in arms]:
            raise ConfigError(
                f"{text!r} should be a name of its own, a colon, and keys, such as one:execution.depth=1", "--arm")
        options = {**ours.setup.options, **own, **assignments("--arm", filter(None, sets.split(",")))}
        arms.append(replace(ours, name=name, setup=replace(ours.setup, model=str(config), options=options)))
    return arms


@contextmanager
def tiny_model(asked: bool) -> Iterator[Path | None]:
    """A folder with a Llama of one narrow layer and SmolLM2's number of tokens; None where none is asked for."""
    with TemporaryDirectory(prefix="hotswap-tiny-") if asked else nullcontext() as folder:
        yield None if folder is None else write_tiny(Path(folder))


def write_tiny(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from hotswap.core.testing.checkpoints import LLAMA, tiny_checkpoint

    width, size = 64, LAST_ID + 1152
    tiny_checkpoint(folder, LLAMA | {
        "vocab_size": size, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": width, "max_position_embeddings": 4096,
        "tie_word_embeddings": True})
    words = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    tokens = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), words)
    vocabulary = {token: id for id, token in enumerate(itertools.islice(tokens, size))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def summary(runs: Sequence[Run]) -> dict[str, dict[str, Spread | None]]:
    """By arm, a spread for each column but the first, over the rounds that count."""
    return {name: _of_arm([run for run in runs if run.engine == name], name)
            for name in dict.fromkeys(run.engine for run in runs)}


def _of_arm(runs: Sequence[Run], name: str) -> dict[str, Spread | None]:
    by_load: dict[str, dict[int, Mapping[str, float]]] = {}
    for run in runs:
        if run.counts:
            by_load.setdefault(run.load, {})[run.round] = run.figures
    http, offline = by_load.get("http", {}), by_load.get("offline16", {})
    both = sorted(http.keys() & offline.keys())

    def of_http(figure: str) -> Spread | None:
        return Spread.of([figures[figure] for figures in http.values()])

    values = (
        share_of_offline(runs, name),
        Spread.of([http[number]["cpu_us_tok"] - offline[number]["cpu_us_tok"] for number in both]),
        of_http("client_us_tok"), of_http("itl_p50_ms"), of_http("itl_p99_ms"),
        Spread.of([  # without those in which most tokens came with others
            figures["itl_p99_ms"] / figures["itl_p50_ms"] for figures in http.values() if figures["itl_p50_ms"]]),
        Spread.of([figures["idle_percent"] for figures in by_load.get("idle", {}).values()]))
    return dict(zip(COLUMNS[1:], values, strict=True))


def told(found: Mapping[str, Mapping[str, Spread | None]]) -> str:
    """A row an arm."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *((name, *map(shown, row.values())) for name, row in found.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
