"""``commutator demo``: scripted conversations, and what happened to each request."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from attrs import define
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from commutator_scaffold.local_cluster import LocalCluster

SYSTEM = (
    "You are a helpful AI assistant for people who plan a journey. You know countries, their "
    "capitals, rivers and mountains. You answer in one short and simple sentence, you are kind, "
    "and you never make up facts. If you do not know something, you say so."
)
ROUNDS = (
    {
        "ann": "What is the capital of France?",
        "ben": "What is the capital of Germany?",
        "cleo": "What is the capital of Japan?",
    },
    {
        "ann": "What is the capital of Spain?",
        "ben": "What is the highest mountain in the world?",
        "cleo": "What is the largest ocean?",
    },
)
"""By user; those of a round are asked at the same time, so that every worker gets some."""


@define
class Answer:
    """What the front door reported about one request."""

    worker: str = ""
    reason: str = ""
    known_blocks: int | None = None
    """Of the prompt, cached at the worker when it was chosen; None: the policy did not look."""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    duration_s: float = 0.0


@click.command(epilog="Example: commutator demo examples/kv.yaml")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def demo(file: Path) -> None:
    """Start FILE's deployment on a free port, hold conversations, and show how they were routed."""
    console = Console()
    console.print(Text.assemble("Starting ", (str(file), "bold"), " ..."))
    started_s = time.perf_counter()
    with LocalCluster(file) as cluster:
        console.print(f"Ready after {time.perf_counter() - started_s:.1f} s at {cluster.url}\n")
        model = cluster.health()["models"][0]
        histories = {user: [{"role": "system", "content": SYSTEM}] for user in ROUNDS[0]}
        answers: list[tuple[str, Answer]] = []
        for number, questions in enumerate(ROUNDS):
            again = " again" if number else ""
            console.print(f"{len(questions)} users ask{again}, at the same time:\n")
            for user, answer in ask_together(cluster.url, model, histories, questions):
                console.print(f"[bold cyan]{user}[/]  {questions[user]}")
                print_answer(console, answer)
                answers.append((user, answer))
        console.print(summary(answers))


def ask_together(
    url: str,
    model: str,
    histories: Mapping[str, list[dict[str, str]]],
    questions: Mapping[str, str],
) -> Iterator[tuple[str, Answer]]:
    """Add the questions to the users' histories, and then each answer, in the order of users."""
    with ThreadPoolExecutor(len(questions)) as threads:
        asked = {}
        for user, question in questions.items():
            histories[user].append({"role": "user", "content": question})
            asked[user] = threads.submit(ask, url, model, user, histories[user])
        for user, answered in asked.items():
            answer = answered.result()
            histories[user].append({"role": "assistant", "content": answer.text})
            yield user, answer


def ask(url: str, model: str, user: str, messages: list[dict[str, str]]) -> Answer:
    """Stream one chat answer and record what the front door reports about it."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": user,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Commutator-Explain": "1"},
    )
    answer, started_s = Answer(), time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as response:
        decision = json.loads(response.headers["X-Commutator-Decision"])
        answer.worker, answer.reason = decision["worker_id"], decision["reason"]
        answer.known_blocks = decision["overlap_blocks"]
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if usage := chunk.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.generated_tokens = usage["completion_tokens"]
                answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    answer.ttft_s = answer.ttft_s or time.perf_counter() - started_s
                    answer.text += piece
    answer.duration_s = time.perf_counter() - started_s
    return answer


def print_answer(console: Console, answer: Answer) -> None:
    """Print the answer as text, not as markup: a model may write ``[/INST]``."""
    reused = f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens reused"
    if answer.known_blocks == 0 and answer.cached_tokens:
        reused += " (another request computed them meanwhile)"
    rate = answer.generated_tokens / max(answer.duration_s - answer.ttft_s, 1e-9)
    times = f"first token after {answer.ttft_s * 1000:.0f} ms, then {rate:.0f} tokens/s"
    lines = Text(answer.text.strip(), "green")
    for line in (f"{answer.worker}: {answer.reason}", f"{reused}; {times}"):
        lines.append(f"\n{line}", "dim")
    console.print(Padding(lines, (0, 0, 1, 5), expand=False))


def summary(answers: list[tuple[str, Answer]]) -> Table:
    """One row per request."""
    table = Table(title="What happened")
    for column in ("#", "who", "worker", "prompt", "reused", "answer", "first token"):
        table.add_column(column, justify="left" if column in ("who", "worker") else "right")
    for number, (user, answer) in enumerate(answers, 1):
        table.add_row(
            str(number),
            user,
            Text(answer.worker),
            f"{answer.prompt_tokens} tokens",
            f"{answer.cached_tokens / max(answer.prompt_tokens, 1):.0%}",
            f"{answer.generated_tokens} tokens",
            f"{answer.ttft_s * 1000:.0f} ms",
        )
    return table
