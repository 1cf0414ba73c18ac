"""``commutator route explain``: which worker would get a prompt, and why."""

from __future__ import annotations

import json
from typing import Any

import click

from commutator_console.door import own_socket, prompt_body, prompt_options
from commutator_console.front_door import FrontDoor, front_door_options
from commutator_console.preview import PREVIEW_PATH


@click.group()
def route() -> None:
    """Ask a running deployment about its routing."""


@route.command(
    short_help="Show where PROMPT is routed, and why.",
    epilog='Example: commutator route explain "Once upon a time"',
)
@prompt_options
@front_door_options
@click.option("--run", is_flag=True, help="Send the request, for one token, and show what came.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a list.")
def explain(
    prompt: str, model: str | None, chat: bool, door: FrontDoor, run: bool, as_json: bool
) -> None:
    """Show which worker PROMPT would get now: every candidate, its scores, and the reason.

    Nothing is sent to a worker and nothing is counted, unless --run asks for it.
    """
    body = prompt_body(door, prompt, model, chat=chat)
    if run:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        headers, _ = door.call(path, {"max_tokens": 1, **body}, explain=True)
        decision: dict[str, Any] = json.loads(headers["X-Commutator-Decision"])
    else:
        tokens = door.call("/tokenize", body)[1]["tokens"]
        question = {"model": body["model"], "token_ids": tokens}
        with door.ask(PREVIEW_PATH, question, at_admin=True, local=own_socket(door)) as answer:
            decision = json.load(answer)
    if as_json:
        click.echo(json.dumps(decision, indent=2))
    else:
        show(decision)


def show(decision: dict[str, Any]) -> None:
    """Print one line for the decision and one for each candidate."""
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
        load, cached = candidate["load"], _cached(candidate, decision["policy"])
        click.echo(
            f"{mark} {candidate['worker_id']:<16} cached: {cached}; "
            f"in flight: {load['active_requests']} requests, "
            f"{load['active_prefill_tokens']} prefill tokens, "
            f"{load['active_decode_blocks']} blocks"
            + (f"; busy by {candidate['busy']}" if candidate["busy"] else "")
        )
        scores = "  ".join(f"{term} {value:.2f}" for term, value in candidate["scores"].items())
        if scores:
            click.echo(f"{'':<19}{scores}")
    not_scored = decision.get("not_scored", 0)
    if not_scored:
        click.echo(f"  and {not_scored} more that were not scored, as none could be better")
    if (others := decision.get("left_out", 0) - not_scored) > 0:
        click.echo(f"  and {others} more")
    for threshold, count in decision.get("too_busy", {}).items():
        click.echo(f"  and {count} busy by {threshold}")


def _cached(candidate: dict[str, Any], policy: str) -> str:
    overlap = candidate["overlap_blocks"]
    if overlap is None:
        return f"not known ({policy} ignores caches)"
    found = " ".join(f"{tier}={blocks}" for tier, blocks in overlap.items() if blocks) or "nothing"
    return f"{found} (a guess)" if candidate["guessed"] else found


def _show_disaggregation(apart: dict[str, Any]) -> None:
    elsewhere = f"at {apart.get('prefill_worker_id') or 'a prefill worker'}"
    where = elsewhere if apart["separate"] else "locally"
    outcome = f"; {apart['outcome']}" if "outcome" in apart else ""
    click.echo(f"  prefill {where}: {apart['reason']}{outcome}")
    terms = "  ".join(f"{term} {value:g}" for term, value in apart["terms"].items())
    if terms:
        click.echo(f"{'':<4}{terms}")
    for failed in apart.get("failed", ()):
        click.echo(f"    {failed['prefill_worker']} failed: {failed['reason']}")
