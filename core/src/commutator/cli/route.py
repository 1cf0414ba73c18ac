"""``commutator route explain``: which worker would get a prompt, and why."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException
from typing import Any

import click

from commutator.cli.options import front_door_options
from commutator.errors import CommutatorError

__all__ = ["route"]


@click.group()
def route() -> None:
    """Ask a running deployment about its routing."""


@route.command(epilog='Example: commutator route explain "Once upon a time"')
@click.argument("prompt")
@click.option("--model", help="The model; not needed when only one is served.")
@click.option("--chat", is_flag=True, help="The prompt is a user's message to the chat template.")
@front_door_options
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as JSON.")
def explain(
    prompt: str, model: str | None, chat: bool, url: str, api_key: str | None, as_json: bool
) -> None:
    """Send PROMPT for one token, and show every candidate, its scores, and why one won."""
    body: dict[str, Any] = {"max_tokens": 1, "model": model or only_model(url, api_key)}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    path = "chat/completions" if chat else "completions"
    decision = ask(f"{url}/v1/{path}", body, api_key)
    if as_json:
        click.echo(json.dumps(decision, indent=2))
    else:
        show(decision)


def ask(url: str, body: dict[str, Any], api_key: str | None) -> dict[str, Any]:
    """The decision about one request. Raises CommutatorError with what the front door says."""
    headers, _ = call(url, api_key, body)
    decision: dict[str, Any] = json.loads(headers["X-Commutator-Decision"])
    return decision


def only_model(url: str, api_key: str | None) -> str:
    """The model that is served there. Raises CommutatorError when there are several."""
    _, models = call(f"{url}/v1/models", api_key)
    names = [model["id"] for model in models["data"]]
    if len(names) != 1:
        known = ", ".join(names)
        raise CommutatorError(f"{url} serves several models; add --model, one of: {known}")
    return str(names[0])


def call(
    url: str, api_key: str | None, body: dict[str, Any] | None = None
) -> tuple[Message, dict[str, Any]]:
    """Headers and body of a JSON answer; GET without a body, POST with one.

    Raises CommutatorError with what the front door says, or why nothing of it is to be had.
    """
    headers = {"Content-Type": "application/json", "X-Commutator-Explain": "1"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.headers, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise CommutatorError(f"{url} answered {error.code}: {_message(error)}") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise CommutatorError(f"{url}: {reason}; is `commutator serve` running?") from error
    except ValueError as error:
        raise CommutatorError(f"{url} is not answered by a front door: {error}") from error


def _message(error: urllib.error.HTTPError) -> str:
    """A front door answers in OpenAI's shape; what else may listen there, in any."""
    text = error.read()
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.reason}; is that a front door?"


def show(decision: dict[str, Any]) -> None:
    """One line for the decision, one for each candidate."""
    click.secho(f"{decision['worker_id']}", bold=True, nl=False)
    waited = f" (waited {decision['waited_s']:.3f} s)" if decision["waited_s"] else ""
    click.echo(f"  by {decision['policy']}: {decision['reason']}{waited}")
    for moved in decision.get("migrations", ()):
        click.echo(
            f"  {moved['from_worker']} before it, for {moved['generated_tokens']} tokens: "
            f"{moved['reason']}"
        )
    if (apart := decision.get("disaggregation")) is not None:
        _show_disaggregation(apart)
    for candidate in decision["candidates"]:
        mark = "*" if candidate["worker_id"] == decision["worker_id"] else " "
        load = candidate["load"]
        click.echo(
            f"{mark} {candidate['worker_id']:<16} cached: {_cached(candidate)}; "
            f"in flight: {load['active_requests']} requests, "
            f"{load['active_prefill_tokens']} prefill tokens, "
            f"{load['active_decode_blocks']} blocks"
            + (f"; busy by {candidate['busy']}" if candidate["busy"] else "")
        )
        scores = "  ".join(f"{term} {value:.2f}" for term, value in candidate["scores"].items())
        if scores:
            click.echo(f"{'':<19}{scores}")
    if left_out := decision.get("left_out"):
        click.echo(f"  and {left_out} more, whose scores are too long for an answer's header")


def _cached(candidate: dict[str, Any]) -> str:
    overlap = candidate["overlap_blocks"]
    if overlap is None:
        return "unknown, as the policy does not look"
    found = " ".join(f"{tier}={blocks}" for tier, blocks in overlap.items() if blocks) or "nothing"
    return f"{found} (a guess)" if candidate["guessed"] else found


def _show_disaggregation(apart: dict[str, Any]) -> None:
    where = f"at {apart['prefill_worker_id']}" if apart.get("prefill_worker_id") else "locally"
    outcome = f"; {apart['outcome']}" if "outcome" in apart else ""
    click.echo(f"  prefill {where}: {apart['reason']}{outcome}")
    terms = "  ".join(f"{term} {value:g}" for term, value in apart["terms"].items())
    if terms:
        click.echo(f"{'':<4}{terms}")
    for failed in apart.get("failed", ()):
        click.echo(f"    {failed['prefill_worker']} failed: {failed['reason']}")
