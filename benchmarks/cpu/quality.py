"""What a quantization costs in quality: perplexity, KL divergence and agreement, against the same file unquantised.

    python benchmarks/cpu/quality.py
    python benchmarks/cpu/quality.py int8 'int8:keep=["*.down_proj"]' 'gguf:many_rows=null;q8_0=dense' --rows 4

The text is this repository's own: its documentation, then the sources of core, as many tokens of each, in windows.
Each model reads every window, ``--rows`` tokens a step, since a form may depend on the number of rows. The first model
is the reference: the file's weights in bfloat16, none of them quantised again.

KL divergence is that of the reference's next-token distribution to the other's, in nats a token; agreement is how often
both have the same most likely token.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from hotswap.core.execution.worker import model_for
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.quantization import Quantization
from hotswap.core.modeling.checkpoint import Checkpoint, open_checkpoint
from hotswap.core.modeling.mesh import LOCAL_MESH
from hotswap.core.modeling.packing import check_quantization
from hotswap.core.registry import Registry
from hotswap.core.testing.dense import logits_of

ROOT = Path(__file__).parents[2]
DEFAULT = ("int8", "int4", "gguf")
REFERENCE = "none"


@dataclass
class Scores:
    """Sums over the tokens that were predicted. ``divergences``: a tensor a window."""

    loss: float = 0.0
    tokens: int = 0
    agreed: int = 0
    divergences: list[torch.Tensor] = field(default_factory=list)

    def add(self, own: torch.Tensor, other: torch.Tensor, odds: torch.Tensor, ids: Sequence[int]) -> None:
        """``own``, ``other`` [T - 1, V] float32: log probabilities behind all of ``ids`` [T] but the last, which has no
        successor to predict. ``odds``: e to the power of ``other``, the reference's."""
        right = torch.tensor(ids[1:])[:, None]
        self.loss -= float(own.gather(1, right).double().sum())
        self.tokens += len(right)
        self.agreed += int((own.argmax(-1) == other.argmax(-1)).sum())
        self.divergences.append((other - own).mul_(odds).sum(-1))

    def summary(self) -> dict[str, float]:
        divergence = torch.cat(self.divergences)
        return {
            "perplexity": float(torch.tensor(self.loss / self.tokens).exp()), "kl": float(divergence.mean()),
            "kl_p99": float(divergence.quantile(0.99)), "agreement": self.agreed / self.tokens}


@dataclass
class Subject:
    name: str
    model: Model
    weight_bytes: int
    scores: Scores = field(default_factory=Scores)


def quantization(spec: str, registry: Registry) -> Quantization:
    """``NAME`` or ``NAME:OPTION=VALUE;OPTION=VALUE``, values as YAML."""
    name, _, options = spec.partition(":")
    pairs = (pair.partition("=") for pair in options.split(";") if pair)
    given = {key: yaml.safe_load(value) for key, _, value in pairs}
    built: Quantization = registry.build("quantization", ComponentRef(use=name, **given), spec)
    return built


def load(spec: str, checkpoint: Checkpoint, dtype: str, registry: Registry) -> Subject:
    model, packer = model_for(checkpoint), quantization(spec, registry)
    for note in check_quantization(packer, checkpoint, model, "cpu", dtype):
        print(note, file=sys.stderr)
    model.build(checkpoint.config, LOCAL_MESH, getattr(torch, dtype), "cpu")
    with checkpoint.weights() as weights:
        weights.quantization = packer
        model.load(weights)
    return Subject(spec, model, weights.num_bytes(getattr(torch, dtype)))


def windows(checkpoint: Checkpoint, tokens: int, window: int) -> Iterator[list[int]]:
    """Half of the tokens from the documentation, half from the sources."""
    for pattern in ("docs/**/*.md", "core/**/*.py"):
        text = "\n".join(path.read_text("utf-8") for path in sorted(ROOT.glob(pattern)))
        ids = checkpoint.tokenizer().encode_without_special_parsing(text)
        count = -(-tokens // (2 * window))
        if len(ids) < count * window:
            raise SystemExit(f"{pattern} has {len(ids)} tokens, fewer than {count * window}: ask for less")
        yield from (ids[start * window : (start + 1) * window] for start in range(count))


def measure(subjects: Sequence[Subject], texts: Sequence[Sequence[int]], rows: int) -> None:
    for number, ids in enumerate(texts):
        chunks = [min(rows, len(ids) - start) for start in range(0, len(ids), rows)]
        reference: tuple[torch.Tensor, torch.Tensor] | None = None
        for subject in subjects:
            own = logits_of(subject.model, ids, chunks)[:-1].float().log_softmax(-1)
            reference = reference or (own, own.exp())
            subject.scores.add(own, *reference, ids)
        print(f"window {number + 1} of {len(texts)}", end="\r", file=sys.stderr)


def table(results: Sequence[dict[str, Any]]) -> str:
    first = results[0]["perplexity"]
    lines = ["| quantization | weights, MB | perplexity | against the first | KL, mean | KL, p99 | agreement |",
             "|---|---|---|---|---|---|---|"]
    lines += [
        f"| `{each['name']}` | {each['weight_bytes'] / 1e6:.0f} | {each['perplexity']:.3f} | "
        f"{100 * (each['perplexity'] / first - 1):+.2f} % | {each['kl']:.4f} | {each['kl_p99']:.3f} | "
        f"{100 * each['agreement']:.1f} % |" for each in results]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantizations", nargs="*", default=DEFAULT, help="NAME or 'NAME:OPTION=VALUE;OPTION=VALUE'")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--window", type=int, default=512, help="tokens of a text")
    parser.add_argument("--rows", type=int, default=512, help="tokens of a step")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    asked = parser.parse_args()
    registry, checkpoint = Registry(), open_checkpoint(asked.model, progress=False)
    texts = list(windows(checkpoint, asked.tokens, asked.window))
    subjects = [load(spec, checkpoint, asked.dtype, registry) for spec in (REFERENCE, *asked.quantizations)]
    measure(subjects, texts, asked.rows)
    results = [
        {"name": subject.name, "weight_bytes": subject.weight_bytes, **subject.scores.summary()}
        for subject in subjects]
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]
    print(f"{asked.model} in {asked.dtype}, {sum(map(len, texts))} tokens (digest {digest}), "
          f"{asked.rows} rows a step\n\n{table(results)}")
    if asked.json:
        asked.json.write_text(json.dumps({"options": vars(asked) | {"json": None}, "text": digest, "results": results},
                                         indent=1, default=str))


if __name__ == "__main__":
    main()
