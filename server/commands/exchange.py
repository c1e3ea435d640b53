"""``hotswap exchange``."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

TIMEOUT_S = 900.0
"""For weights that are loaded beside serving."""


@click.command("exchange")
@click.option("--url", required=True, help="Of the server, such as http://127.0.0.1:8000.")
@click.option("--key", help="The server's server.admin_key. Other users of this machine may see it: see --key-file.")
@click.option("--key-file", type=click.Path(path_type=Path, allow_dash=True), help="A file with the key; - is stdin.")
@click.option("--replica", help="One engine of a deployment; by default all, one after the other.")
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as it is.")
@click.argument("sets", metavar="KEY=VALUE...", nargs=-1, required=True)
def command(
    url: str, key: str | None, key_file: Path | None, replica: str | None, as_json: bool, sets: tuple[str, ...],
) -> None:
    """Exchange parts of a server while it serves, as in scheduler=continuous kvcache=radix."""
    if (key is None) == (key_file is None):
        raise click.UsageError("give --key or --key-file: the server's server.admin_key.")
    if key_file is not None:
        key = _read(key_file)
    body = {"set": list(sets), "replica": replica}
    status, answer = _post(f"{url.rstrip('/')}/admin/components", _checked(key or ""), body)
    if status != 200:
        click.echo(f"hotswap: {_message(status, answer, key_file)}", err=True)
        raise SystemExit(2 if 400 <= status < 500 and status != 409 else 1)
    if not (isinstance(answer, dict) and isinstance(answer.get("engines"), list)):
        click.echo(f"hotswap: {url} is no hotswap server, it answers: {str(answer)[:500]}", err=True)
        raise SystemExit(1)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        for engine in answer["engines"]:
            click.echo("\n".join(_lines(engine)))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Would send the key to whoever the answer names."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def _message(status: int, answer: Any, key_file: Path | None) -> str:
    if 300 <= status < 400:
        return f"the server answers {status}, a redirect, which would take the key elsewhere; give the --url behind it"
    error = answer.get("error") if isinstance(answer, dict) else None
    match error.get("code") if isinstance(error, dict) else None:
        case "not_found" | "invalid_api_key":  # without an admin key the path is as any other that there is not
            return "this server takes no exchanges: it has no server.admin_key; start it with one"
        case "invalid_admin_key":
            given = "of --key" if key_file is None else "on stdin" if str(key_file) == "-" else f"in {key_file}"
            return f"the key {given} is not the server's admin key"
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or answer or f"the server answers {status}")


def _read(file: Path) -> str:
    try:
        with click.open_file(str(file)) as opened:
            key = str(opened.read()).strip()
    except OSError as error:
        raise click.UsageError(f"--key-file {file}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--key-file {file}: is no text.") from error
    return key


def _checked(key: str) -> str:
    """Before it is put into a header, whose error would show it."""
    if not key.isascii() or not key.isprintable() or not key:
        raise click.UsageError("the key should be one line of ASCII characters.")
    return key


def _post(url: str, key: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and answer. Exits with 1 where nobody answers, and 2 where ``url`` is none."""
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--url should begin with http:// or https://, not {url!r}.")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S) as response:
            return response.status, _parsed(response.read())
    except urllib.error.HTTPError as error:
        return error.code, _parsed(error.read())
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        click.echo(f"hotswap: {url} does not answer: {reason}", err=True)
        raise SystemExit(1) from error


def _parsed(raw: bytes) -> Any:
    """What a proxy on the way answers may be no JSON."""
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")[:500]


def _lines(engine: dict[str, Any]) -> list[str]:
    """For people."""
    name = f"engine {engine['replica']}: " if engine["replica"] else ""
    lines = [f"{name}{part['path']}: {part['old']} -> {part['new']}" for part in engine["exchanged"]]
    if lines:
        proven = "the new parts have come through their first steps" if engine["proven"] else (
            "on trial until their first steps have gone well")
        lines.append(
            f"{name}pause {engine['pause_ms']:.1f} ms; {engine['handed_over']} requests handed over, "
            f"{engine['recomputed']} computed again; {proven}")
    return [*lines, *(f"{name}note: {note}" for note in engine["notes"])]
