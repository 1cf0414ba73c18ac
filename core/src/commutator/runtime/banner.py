"""What `serve` prints once everything is ready."""

from __future__ import annotations

import json
import shlex
from ipaddress import ip_address

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from commutator.config.model import Config

__all__ = ["banner", "front_door_url"]


def front_door_url(config: Config, port: int) -> str:
    """Where clients on this machine reach the front door, without a slash at the end."""
    host = config.frontend.host
    try:
        address = ip_address(host)
    except ValueError:
        pass
    else:
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"  # noqa: PLR2004
        host = f"[{host}]" if ":" in host else host
    return f"{'https' if config.frontend.tls else 'http'}://{host}:{port}"


def banner(config: Config, url: str, *, colour: bool) -> str:
    """A box with the address, the models and the workers, and a command to paste below it."""
    console = Console(color_system="standard" if colour else None, force_terminal=colour)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("engine", "kind", "model", "workers"):
        table.add_column(column, justify="right" if column == "workers" else "left")
    for engine in config.engines:
        name = engine.name or engine.kind
        cells = (name, engine.kind, engine.model or "", str(engine.replicas))
        table.add_row(*map(Text, cells))  # a name may look like markup
    ready = Text.assemble(("Ready:", "bold green"), " ", (f"{url}/v1", "bold"))
    content = Group(ready, "", table)
    with console.capture() as captured:
        console.print(Panel(content, title="Commutator", title_align="left", expand=False))
        console.print("Try it:", style="dim")
        console.print(Text(_curl(config, url)), soft_wrap=True)
    return captured.get()


def _curl(config: Config, url: str) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": config.models[0].name, "messages": [question], "max_tokens": 64}
    parts = [f"curl -s {url}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if config.frontend.api_keys:
        key = config.frontend.api_keys[0]
        value = f"${key.env}" if key.env else f"$(cat {shlex.quote(str(key.file))})"
        parts.append(f'-H "Authorization: Bearer {value}"')
    if config.frontend.tls:
        parts.append(f"--cacert {shlex.quote(config.frontend.tls.cert_file)}")
    return " ".join([*parts, "-d", shlex.quote(json.dumps(body))])
