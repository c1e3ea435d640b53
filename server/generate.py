"""``hotswap generate``: a file of prompts in, a file of completions out, in the same order.

A line of the input is a JSON object with ``prompt`` (text or token ids) or ``messages``, sampling fields beside it, and
an optional ``id``, which is passed through. All lines are checked before any work starts.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from hotswap.core.config import ResolvedConfig
from hotswap.core.engine.build import build_engine
from hotswap.core.errors import ConfigError, RequestError
from hotswap.core.request import FinishReason, Request
from hotswap.server.frontend import Frontend, Prompt
from hotswap.server.http.logprobs import by_token
from hotswap.server.offline import run_all
from hotswap.server.protocol.common import SAMPLING_FIELDS
from hotswap.server.results import Choice
from hotswap.server.served import Served, served_by
from hotswap.server.text.tokens import TokenTexts

_OWN_FIELDS = frozenset({"id", "prompt", "messages"})


class Line(NamedTuple):
    """One line of the input, parsed: its number, its ``id`` or number, and what it asks for."""

    number: int
    id: Any
    fields: dict[str, Any]


def generate_file(resolved: ResolvedConfig, source: Path, target: Path, *, progress: bool = True) -> int:
    """Returns how many lines failed; each has an ``error`` in the output. ConfigError for a file that cannot be used."""
    lines = read_lines(source)
    if target.resolve() == source.resolve():
        raise ConfigError(f"{target} is the input; choose another file for the output", "--output")
    built = build_engine(resolved, progress=progress)
    try:
        served = served_by(built)
        jobs = prepare(Frontend(served), lines, source)
        with _opened(target) as out:
            return run(served, jobs, out, progress=progress)
    finally:
        built.engine.stop()


def read_lines(source: Path) -> list[Line]:
    """The lines of a JSONL file; empty ones are skipped. ConfigError names each line that is no such object."""
    try:
        text = source.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}", "--input") from error
    lines, problems = [], []
    for number, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            fields = json.loads(raw)
            lines.append(Line(number, fields.get("id", number), _checked(fields)))
        except (ValueError, AttributeError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else "expected a JSON object"
            problems.append(f"line {number}: {reason}")
    _raise_all(source, problems)
    if not lines:
        raise ConfigError(f"{source} has no lines", "--input")
    return lines


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    if unknown := fields.keys() - _OWN_FIELDS - SAMPLING_FIELDS:
        raise ValueError(f"unknown field {min(unknown)!r}; expected prompt or messages, id, and sampling fields")
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError("expected either 'prompt' or 'messages'")
    return fields


class Job(NamedTuple):
    line: Line
    prompt: Prompt
    requests: list[Request]


def prepare(frontend: Frontend, lines: list[Line], source: Path) -> list[Job]:
    """Prompts encoded and requests checked. ConfigError names each line that cannot be served."""
    jobs, problems = [], []
    for line in lines:
        try:
            prompt = _prompt(frontend, line.fields)
            sampling = frontend.sampling({k: v for k, v in line.fields.items() if k in SAMPLING_FIELDS})
            jobs.append(Job(line, prompt, frontend.requests(f"line{line.number}", [prompt], sampling)))
        except RequestError as error:
            problems.append(f"line {line.number}: {error}")
    _raise_all(source, problems)
    return jobs


def _prompt(frontend: Frontend, fields: dict[str, Any]) -> Prompt:
    match fields:
        case {"prompt": str(text)}:
            return Prompt(frontend.encode(text), text)
        case {"prompt": [*ids]} if all(type(id) is int for id in ids):
            return Prompt(ids)
        case {"messages": [*messages]} if messages and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        ):
            return Prompt(frontend.encode_chat(messages))
    raise RequestError(
        "expected prompt as a text or a list of token ids, or messages as a list of {role, content}", "prompt")


def _raise_all(source: Path, problems: list[str]) -> None:
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ConfigError(f"{source} cannot be used:\n{shown}{more}", "--input")


def _opened(target: Path) -> TextIO:
    try:
        return target.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}", "--output") from error


def run(served: Served, jobs: list[Job], out: TextIO, *, progress: bool = True) -> int:
    """Write one line a job, in order, as soon as it and those before it have ended; returns how many failed."""
    failed = 0
    bar = tqdm(total=len(jobs), unit="prompt", disable=None if progress else True)
    with bar:
        for answer in _in_order(jobs, _ended(served, jobs, bar)):
            failed += "error" in answer
            out.write(json.dumps(answer, ensure_ascii=False) + "\n")
            out.flush()
    return failed


def _ended(served: Served, jobs: list[Job], bar: "tqdm[Any]") -> Iterator[tuple[int, dict[str, Any]]]:
    """(position, answer) of each job as it ends."""
    choices = {request.id: Choice(request) for job in jobs for request in job.requests}
    position_of = {request.id: position for position, job in enumerate(jobs) for request in job.requests}
    left = [len(job.requests) for job in jobs]
    texts = TokenTexts(served.tokenizer)
    for output in run_all(served.engine, [request for job in jobs for request in job.requests]):
        choices[output.request_id].add(output)
        if output.finish_reason is not None:
            position = position_of[output.request_id]
            left[position] -= 1
            if not left[position]:
                bar.update()
                yield position, _answer(jobs[position], [choices[r.id] for r in jobs[position].requests], texts)


def _in_order(jobs: list[Job], ended: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    early: dict[int, dict[str, Any]] = {}
    following = 0
    for position, answer in ended:
        early[position] = answer
        while following in early:
            yield early.pop(following)
            following += 1


def _answer(job: Job, choices: list[Choice], texts: TokenTexts) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": job.line.id}
    bad = [c for c in choices if c.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)]
    if bad:
        return {**answer, "error": bad[0].error or "the request was aborted"}
    if job.prompt.text is not None:
        answer["prompt"] = job.prompt.text
    if choices[0].prompt_logprobs is not None:
        answer["prompt_logprobs"] = by_token(choices[0].prompt_logprobs, texts)
    usage = {
        "prompt_tokens": len(job.prompt.token_ids), "completion_tokens": sum(c.n_tokens for c in choices),
        "cached_tokens": choices[0].cached_tokens,
    }
    return {**answer, "outputs": [_output(choice, texts) for choice in choices], "usage": usage}


def _output(choice: Choice, texts: TokenTexts) -> dict[str, Any]:
    output: dict[str, Any] = {
        "text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason}
    if choice.request.sampling.logprobs is not None:
        output["logprobs"] = by_token(choice.logprobs, texts)
    return output
