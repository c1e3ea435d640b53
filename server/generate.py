"""``hotswap generate``: a file of prompts in, a file of completions out, in the same order.

A line of the input is a JSON object with ``prompt`` (text or token ids) or ``messages``, sampling fields beside it, and
an optional ``id``, which is passed through; without one it is the line's number, from 1. All fields of all lines are
checked before the model is loaded; what needs the model (lengths, token ids, the chat template) before anything is
generated.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from hotswap.core.config import ResolvedConfig
from hotswap.core.errors import ConfigError, RequestError
from hotswap.core.request import FinishReason, Request
from hotswap.server.frontend import Frontend, Prompt, sampling_of
from hotswap.server.http.logprobs import by_token
from hotswap.server.offline import run_all
from hotswap.server.problems import shown
from hotswap.server.protocol.chat import plain_messages
from hotswap.server.protocol.common import SAMPLING_FIELDS
from hotswap.server.results import Choice
from hotswap.server.served import Served, loaded, served_by
from hotswap.server.text.tokens import TokenTexts

_OWN_FIELDS = frozenset({"id", "prompt", "messages"})


class Line(NamedTuple):
    """One line of the input, parsed: its number, its ``id`` or number, and what it asks for."""

    number: int
    id: Any
    fields: dict[str, Any]


def generate_file(resolved: ResolvedConfig, source: Path, target: Path, *, progress: bool = True) -> int:
    """Returns how many lines failed; each has an ``error`` in the output. ConfigError for an unusable file."""
    lines = read_lines(source)
    if target.resolve() == source.resolve():
        raise ConfigError(f"{target} is the input; choose another file for the output", "--output")
    with loaded(resolved, progress=progress) as built:
        served = served_by(built)
        jobs = prepare(Frontend(served), lines, source)
        with _opened(target) as out:
            return run(served, jobs, out, progress=progress)


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
            fields = _object(raw)
            _check(fields)
            lines.append(Line(number, fields.get("id", number), fields))
        except RequestError as error:
            problems.append(f"line {number}: {error}")
    _raise_all(source, problems)
    if not lines:
        raise ConfigError(f"{source} has no lines", "--input")
    return lines


def _object(raw: str) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except json.JSONDecodeError as error:
        raise RequestError(f"not valid JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError("holds a number with too many digits, or is nested too deeply") from error
    if not isinstance(fields, dict):
        raise RequestError("expected a JSON object")
    return fields


def _check(fields: dict[str, Any]) -> None:
    """RequestError for what is wrong whatever the model."""
    if unknown := fields.keys() - _OWN_FIELDS - SAMPLING_FIELDS:
        raise RequestError(f"unknown field {min(unknown)!r}; expected prompt or messages, id, and sampling fields")
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("expected either 'prompt' or 'messages'")
    sampling_of(_sampling(fields))
    match fields:
        case {"prompt": prompt}:
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and set(map(type, prompt)) == {int}):
                raise RequestError(f"prompt: expected a text or a list of token ids, got {shown(prompt)}")
        case {"messages": [*messages]}:
            plain_messages(messages)
        case _:
            raise RequestError(f"messages: expected a list of objects, got {shown(fields['messages'])}")


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in SAMPLING_FIELDS}


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
            sampling = frontend.sampling(_sampling(line.fields))
            jobs.append(Job(line, prompt, frontend.requests(f"line{line.number}", [prompt], sampling)))
        except RequestError as error:
            problems.append(f"line {line.number}: {error}")
    _raise_all(source, problems)
    return jobs


def _prompt(frontend: Frontend, fields: dict[str, Any]) -> Prompt:
    if "messages" in fields:
        return Prompt(frontend.encode_chat(plain_messages(fields["messages"])))
    prompt = fields["prompt"]
    return Prompt(frontend.encode(prompt), prompt) if isinstance(prompt, str) else Prompt(prompt)


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
