"""Carries out what should run, beside the supervisor of one machine.

``_Roller`` accepts changes and writes the document; its loop looks at the document and at what
runs, and does what ``commutator_rollout.steps`` says. Front doors read a new configuration before
any worker changes, so they know every worker by the time it is announced.

    door -> supervisor                                supervisor -> door
    ["rollout", "door", name]                         ["rollout", "use", number, [worker id, ...]]
                                                      ["rollout", "watch", [model, ...]]
    ["rollout", "used", number, problem | nil]
    ["rollout", "seen", {model: what ended}]
    ["rollout", "ask", number, question, argument]    ["rollout", "answer", number, value]
                                                      ["rollout", "refused", number, [problem, ...],
                                                        where]
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from attrs import asdict, evolve, field, frozen

from commutator.config.load import Loaded, from_option, read_files
from commutator.config.model import Config
from commutator.config.tree import Node, from_plain, plain
from commutator.config.yaml_file import parse_value
from commutator.contract.engine import EngineConfig
from commutator.contract.operations import SupervisorContext
from commutator.contract.planner import WorkerPhase
from commutator.contract.registry import Registry
from commutator.contract.service import Connection, Receiver, Service
from commutator.errors import CommutatorError, ConfigError, RegistryError
from commutator.frontend.process import chosen_operations
from commutator.registry.memory import MemoryConfig
from commutator.supervisor.fleet import Agent, Fleet, Running
from commutator.supervisor.preflight import check_machine, fetch_models
from commutator.supervisor.specs import WorkerSpec
from commutator.supervisor.supervisor import Supervisor
from commutator_rollout.canaries import JUDGE, Court, Ran, aliases_of, not_ready_yet
from commutator_rollout.changes import Change, changes, doors_are_replaced
from commutator_rollout.document import (
    NAME,
    Desired,
    Generation,
    NamedChange,
    change,
    digest_of,
    inline_secrets,
    named_change,
    read,
)
from commutator_rollout.judge import Arm, Verdict
from commutator_rollout.observed import arm
from commutator_rollout.plugin import SERVICE, RolloutConfig
from commutator_rollout.steps import Cancel, Drain, Phase, Rules, Start, Steps, Want, Worker, steps
from commutator_traffic.config import AliasConfig, TableConfig

log = logging.getLogger(__name__)

_LOOK_S = 0.2
_DOORS_S = 60.0
"""For front doors that run to read a new configuration."""
_REGISTRY_S = 5.0
_PHASES = {
    WorkerPhase.STARTING: Phase.STARTING,
    WorkerPhase.READY: Phase.READY,
    WorkerPhase.DRAINING: Phase.DRAINING,
}


async def begin(context: SupervisorContext) -> Service:
    """The part beside a supervisor, which from now on is to run what the document says.

    Raises ConfigError when that cannot run here.
    """
    supervisor: Supervisor = context.supervisor
    if (reason := _why_not(supervisor)) is not None:
        for name, alias in aliases_of(supervisor.loaded.config).items():
            if alias.canary is not None:
                log.warning("traffic.aliases.%s.canary is judged by nobody: %s", name, reason)
        return _Refusing(reason)
    roller = _Roller(supervisor, context.registry)
    await roller.take_up()
    supervisor.on_hangup = roller.read_again
    return roller


def _why_not(supervisor: Supervisor) -> str | None:
    """Why this supervisor's deployment cannot be changed while it runs; None if it can."""
    config = supervisor.loaded.config
    if not supervisor.is_whole:
        return "this process runs a part of a deployment, which is changed by starting it again"
    if config.cluster.host.spans_hosts:
        return (
            "a deployment on several hosts is not changed while it runs yet: change the file of "
            "each host, and start its `commutator serve` again, one host after another"
        )
    if config.launcher.kind != "process":
        return (
            f"workers that the launcher {config.launcher.kind} places are changed by starting "
            "`commutator serve` again: it replaces them one after another"
        )
    if not _is_own(supervisor) and config.cluster.host.name is None:
        return "other processes may share this registry: give this one a name, cluster.host.name"
    return None


def _is_own(supervisor: Supervisor) -> bool:
    """Whether the registry is this process's own memory."""
    registry = supervisor.loaded.config.registry
    return isinstance(registry, MemoryConfig) and registry.address is None


class _Refusing(Service):
    """Says why nothing can be changed here."""

    name = SERVICE

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def connected(self, connection: Connection) -> Receiver:
        return _Door(connection, self._answer, lambda _: None, lambda _: None)

    async def _answer(self, question: str, argument: Any) -> Any:
        del question, argument
        raise CommutatorError(self._reason)

    async def run(self) -> None:
        await asyncio.Event().wait()


class _Door(Receiver):
    """One connection of a front door."""

    def __init__(
        self,
        connection: Connection,
        answer: Callable[[str, Any], Awaitable[Any]],
        changed: Callable[[_Door], None],
        seen: Callable[[Mapping[str, Arm]], None],
    ) -> None:
        self._send = connection.send
        self._answer = answer
        self._changed = changed
        self._seen = seen
        self._tasks: set[asyncio.Task[None]] = set()
        self.name = ""
        """Empty until it has said it."""
        self.used = 0
        """The number of the last configuration that it serves by, or has refused."""
        self.problem: str | None = None
        """Why it has refused that."""
        self.is_lost = False

    def on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, "door", str(name)]:
                self.name = name
                self._changed(self)
            case [_, "used", int(number), str() | None as problem]:
                self.used, self.problem = number, problem
                self._changed(self)
            case [_, "seen", dict() as arms]:
                self._seen({str(model): arm(packed) for model, packed in arms.items()})
            case [_, "ask", int(number), str(question), argument]:
                task = asyncio.create_task(self._ask(number, question, argument))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case _:
                raise ValueError("unknown frame")

    def on_lost(self) -> None:
        self.is_lost = True
        self._changed(self)

    def tell(self, number: int, workers: Sequence[str] = ()) -> None:
        """Have it serve by what was written, and say so once it is connected to ``workers``."""
        self._send([SERVICE, "use", number, list(workers)])

    def watch(self, models: Sequence[str]) -> None:
        """Have it tell what becomes of requests for ``models``, and of no others."""
        self._send([SERVICE, "watch", list(models)])

    async def _ask(self, number: int, question: str, argument: Any) -> None:
        try:
            answer = await self._answer(question, argument)
        except ConfigError as error:
            self._send([SERVICE, "refused", number, list(error.problems), error.where])
        except CommutatorError as error:
            self._send([SERVICE, "refused", number, [str(error)], ""])
        except Exception as error:
            log.exception("a question about the rollout failed")
            text = f"{type(error).__name__}: {error}; see the log of `commutator serve`"
            self._send([SERVICE, "refused", number, [text], ""])
        else:
            self._send([SERVICE, "answer", number, answer])


@frozen(kw_only=True)
class _Asked:
    """What people ask for, as front doors pass it on."""

    who: str = ""
    tree: Any = None
    """As ``_tree`` reads it; None: the file stays."""
    sets: list[str] = field(factory=list)
    source: str = ""
    why: str = ""
    forget: bool = False
    dry_run: bool = False
    to: int | None = None


@frozen
class _Candidate:
    """What somebody wants to run instead."""

    generation: Generation
    loaded: Loaded
    changes: list[Change]
    forgotten: list[NamedChange]
    """Named changes that do not apply any more, as their entries are gone."""


class _Roller(Service):
    """Owns what should run on this machine, and leads there."""

    name = SERVICE

    def __init__(self, supervisor: Supervisor, registry: Registry) -> None:
        self._supervisor = supervisor
        self._registry = registry
        self._document = NAME
        if not _is_own(supervisor):
            self._document += f"/{(supervisor.loaded.config.cluster.host.name or '').lower()}"
        self._desired: Desired | None = None
        self._shared = True
        """Whether the document is in the registry; else it is this process's own."""
        self._accepting = asyncio.Lock()
        self._wake = asyncio.Event()
        self._doors: set[_Door] = set()
        self._number = 1
        """Of the configuration that front doors are to serve by."""
        self._begun = 0
        """The generation of which the workers are being, or have been, started."""
        self._doors_config: Config = supervisor.loaded.config
        """What the processes of the front doors were started with."""
        self._wanted: Loaded = supervisor.loaded
        """What the generation says that was begun. Until it is complete, its new canaries get no
        requests."""
        self._held: set[str] = set()
        """The aliases of those canaries."""
        self._court = Court()
        self._leaving: dict[str, EngineConfig] = {}
        """Entries that are gone, of which workers may still run."""
        self._mine: set[str] = set()
        """Workers that were started for the present generation."""
        self._refused: dict[str, str] = {}
        """Why a start for the present generation can never succeed, by worker."""
        self._last = Steps()
        self._reading: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ the start

    async def take_up(self) -> None:
        """Find the document, or begin one; the supervisor is to run what it says.

        A file that is as it was changes nothing. One that was edited is what should run, but for
        named changes. Raises ConfigError when that cannot run here.
        """
        loaded, now_s = self._supervisor.loaded, time.time()
        file = plain(read_files(loaded.given.files, []))
        source = ", ".join(map(str, loaded.given.files)) or "the options of `commutator serve`"
        first = Generation(number=1, file=file, source=source, who="serve", when_unix_s=now_s)
        digest = digest_of(file)
        if secrets := inline_secrets(file):
            self._keep_to_itself(
                f"{', '.join(secrets)}: a secret stands in the file itself; write it as "
                "{env: NAME} or {file: PATH}"
            )

        def edit(known: Desired | None) -> Desired:
            if known is None:
                return Desired(generations=(first,), started_with=digest)
            if known.started_with == digest:
                return known
            edited = evolve(first, changes=known.latest.changes, why="the file was edited")
            return evolve(known.then(edited), started_with=digest, paused=False)

        try:
            async with asyncio.timeout(_REGISTRY_S):
                self._desired = await self._change(edit)
        except (RegistryError, TimeoutError) as error:
            self._desired = edit(None)
            self._keep_to_itself(f"the registry does not keep it: {str(error) or 'no answer'}")
        latest = self._desired.latest
        for one in latest.changes:
            log.info("%s is %s, as %s has set it%s", one.path, one.value, one.who,
                     f" ({one.why})" if one.why else "")  # fmt: skip
        if latest.number > 1:
            log.info("what should run is generation %d, from %s", latest.number, latest.source)
        if latest.file != file or latest.changes:
            made = await asyncio.to_thread(self._load, latest)
            await asyncio.to_thread(_check, made)
            self._supervisor.use(made)
        self._wanted = self._supervisor.loaded
        self._doors_config = self._wanted.config
        self._begun = latest.number

    def _keep_to_itself(self, reason: str) -> None:
        self._shared = False
        log.warning("what should run is not kept over a restart: %s", reason)

    def _load(self, generation: Generation) -> Loaded:
        origin = f"generation {generation.number}"
        overrides = generation.overrides()
        return self._supervisor.loaded.again(from_plain(generation.file, origin), overrides)

    async def _change(self, edit: Callable[[Desired | None], Desired]) -> Desired:
        if self._shared:
            self._desired = await change(self._registry, edit, self._document)
        else:
            self._desired = edit(self._desired)
        return self._desired

    @property
    def _known(self) -> Desired:
        assert self._desired is not None  # ``take_up`` comes first
        return self._desired

    def read_again(self) -> None:
        """The supervisor was told to (SIGHUP): apply the file that it was started with."""

        async def apply() -> None:
            given = self._supervisor.loaded.given
            try:
                tree = await asyncio.to_thread(read_files, given.files, list[str]())
                source = ", ".join(map(str, given.files))
                report = await self._apply(tree, [], "SIGHUP", source, "", forget=False, dry=False)
            except CommutatorError as error:
                log.error("the file was read again, and changes nothing: %s", error)  # noqa: TRY400
            else:
                log.info("the file was read again: %s", _summary(report))

        task = asyncio.create_task(apply())
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    # ------------------------------------------------------------------ questions

    def connected(self, connection: Connection) -> Receiver:
        return _Door(connection, self._answer, self._door_changed, self._court.add)

    def _door_changed(self, door: _Door) -> None:
        if door.is_lost:
            self._doors.discard(door)
        elif door.name and door not in self._doors:
            self._doors.add(door)
            door.tell(self._number)  # it may have started before it was written
            door.watch(self._court.watched)
        self._wake.set()

    async def _answer(self, question: str, argument: Any) -> Any:
        """The answer for people. Raises CommutatorError."""
        try:
            asked = msgspec.convert(argument or {}, _Asked)
        except msgspec.ValidationError as error:
            raise CommutatorError(str(error)) from error
        match question:
            case "apply":
                return await self._apply(
                    None if asked.tree is None else _tree(asked.tree),
                    asked.sets,
                    asked.who,
                    asked.source,
                    asked.why,
                    forget=asked.forget,
                    dry=asked.dry_run,
                )
            case "undo":
                return await self._undo(asked.who, asked.to, asked.why)
            case "pause" | "resume":
                return await self._pause(asked.who, question == "pause")
            case "status":
                return self._status()
            case "history":
                return [_generation_row(one) for one in reversed(self._known.generations)]
        raise CommutatorError(f"unknown question {question!r}")

    async def _apply(
        self,
        tree: Node | None,
        sets: list[str],
        who: str,
        source: str,
        why: str,
        *,
        forget: bool,
        dry: bool,
    ) -> dict[str, Any]:
        """Have ``tree`` run instead, or what runs with other values; ``sets`` are named changes."""
        async with self._accepting:
            if self._shared and (found := await read(self._registry, self._document)) is not None:
                self._desired = found
            latest = self._known.latest
            file = latest.file if tree is None else plain(tree)
            named: dict[tuple[str, ...], NamedChange] = {}
            for one in () if forget else latest.changes:
                named[one.steps] = one
            now_s = time.time()
            for text in sets:
                made = _named(file, text, who, now_s, why)
                named[made.steps] = made
            generation = Generation(
                number=latest.number + 1,
                file=file,
                changes=tuple(named.values()),
                source=source or latest.source,
                who=who,
                when_unix_s=now_s,
                why=why,
            )
            candidate = await self._candidate(generation, tree)
            report = self._report(candidate)
            same = file == latest.file and generation.changes == latest.changes
            if dry or (same and not candidate.changes):
                return report | {"generation": latest.number, "accepted": False}
            await self._accept(candidate)
            return report | {"generation": self._known.latest.number, "accepted": True}

    async def _undo(self, who: str, to: int | None, why: str) -> dict[str, Any]:
        async with self._accepting:
            latest = self._known.latest
            last = self._known.last_complete(latest.number)
            back = last if to is None else self._known.find(to)
            if back is None:
                kept = ", ".join(str(one.number) for one in self._known.generations)
                raise CommutatorError(
                    f"generation {to} is not kept; there are: {kept}"
                    if to is not None
                    else "no generation before this one has run completely; name one by --to, of "
                    f"{kept}"
                )
            reason = why or f"back to generation {back.number}"
            again = evolve(back, who=who, when_unix_s=time.time(), why=reason)
            candidate = await self._candidate(again, None)
            await self._accept(candidate)
            return self._report(candidate) | {
                "generation": self._known.latest.number,
                "accepted": True,
            }

    async def _pause(self, who: str, paused: bool) -> dict[str, Any]:
        await self._change(lambda known: evolve(known or self._known, paused=paused))
        log.info("%s: the rollout is %s", who, "paused" if paused else "resumed")
        self._wake.set()
        return self._status()

    async def _candidate(self, generation: Generation, tree: Node | None) -> _Candidate:
        """Check what is to run. Raises ConfigError with every problem; nothing has changed."""
        if secrets := inline_secrets(generation.file):
            problem = (
                "a secret must not stand in the file itself: write {env: NAME} or {file: PATH}"
            )
            raise ConfigError([f"{path}: {problem}" for path in secrets], generation.source)
        overrides = generation.overrides()
        written = from_plain(generation.file, generation.source) if tree is None else tree
        try:
            made = await asyncio.to_thread(self._supervisor.loaded.again, written, overrides)
        except ConfigError as error:
            raise ConfigError(error.problems, generation.source) from None
        found = changes(self._wanted.config, made.config)
        if problems := [*_unchangeable(found, self._wanted.config)]:
            raise ConfigError(problems, generation.source)
        await asyncio.to_thread(_check, made)
        gone = [one for one in generation.changes if not _applies(generation, one)]
        return _Candidate(generation, made, found, gone)

    async def _accept(self, candidate: _Candidate) -> None:
        new = candidate.generation

        def edit(known: Desired | None) -> Desired:
            return evolve((known or self._known).then(new), paused=False)

        await self._change(edit)
        log.info("generation %d, by %s: %s", self._known.latest.number, new.who,
                 ", ".join(one.path for one in candidate.changes) or "nothing changes")  # fmt: skip
        self._wake.set()

    # -------------------------------------------------------------------- the loop

    async def run(self) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                self._wake.clear()
                try:
                    await self._look()
                except RegistryError as error:
                    log.debug("%s", error)  # it is tried again; the fleet says that it is away
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()
        finally:
            tasks = [watching, *self._reading]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Others may write the document, too."""
        if not self._shared:
            return
        async for document in self._registry.watch_document(self._document):
            if document is not None:
                async with self._accepting:
                    if (found := await read(self._registry, self._document)) is not None:
                        self._desired = found
                self._wake.set()

    async def _look(self) -> None:
        latest = self._known.latest
        if self._known.paused or latest.state == "failed":
            return
        if latest.number != self._begun:
            try:
                await self._begin(latest)
            except CommutatorError as error:
                await self._failed(latest, str(error))
                return
        fleet = self._supervisor.fleet
        if not isinstance(fleet, Fleet) or fleet.workers() is None:
            return
        running = fleet.running()
        if (cause := self._failure(running)) is not None and latest.state == "rolling":
            await self._failed(latest, cause)
            return
        if (verdict := self._judged(latest, running)) is not None:
            await self._decided(latest, *verdict)
            return
        self._last = steps(self._wants(), [_seen(one) for one in running], self._rules())
        for step in self._last.now:
            self._do(fleet, step)
        if self._last.settled and latest.state == "rolling" and self._all_doors_ready():
            await self._complete(latest, running)

    async def _begin(self, latest: Generation) -> None:
        """Have the front doors serve by it. Raises CommutatorError when they cannot."""
        made = await asyncio.to_thread(self._load, latest)
        before, self._wanted = self._wanted.config, made
        self._held = not_ready_yet(aliases_of(before), aliases_of(made.config), self._held)
        made = _without(self._held, made)
        names = {engine.name for engine in made.config.engines}
        self._leaving |= {str(one.name): one for one in before.engines if one.name not in names}
        self._leaving = {name: one for name, one in self._leaving.items() if name not in names}
        self._supervisor.use(made, list(self._leaving.values()))
        self._begun, self._mine, self._refused = latest.number, set(), {}
        await self._tell_doors()
        doors = self._supervisor.doors
        assert doors is not None
        if doors_are_replaced(self._doors_config, made.config):
            await doors.replace()
        self._doors_config = made.config
        await doors.scale(made.config.frontend.replicas)

    async def _tell_doors(self, workers: Sequence[str] = ()) -> None:
        """Have all front doors serve by what was written. Raises CommutatorError.

        Returns once they are connected to ``workers``, or those have taken too long.
        """
        self._number += 1
        number = self._number
        for door in self._doors:
            door.tell(number, workers)
        deadline_s = time.monotonic() + _DOORS_S
        while waiting := self._doors_before(number):
            if time.monotonic() > deadline_s:
                raise CommutatorError(
                    f"{', '.join(waiting)} did not read the configuration within {_DOORS_S:g} s"
                )
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()
        for door in self._doors:
            if door.problem is not None:
                raise CommutatorError(f"{door.name} cannot serve by it: {door.problem}")

    def _doors_before(self, number: int) -> list[str]:
        """The front doors that are ready and have not read a configuration yet."""
        doors = self._supervisor.doors
        ready = {
            one.name for one in ([] if doors is None else doors.agents()) if one.ready.is_set()
        }
        done = {door.name for door in self._doors if door.used >= number}
        return sorted(ready - done)

    def _all_doors_ready(self) -> bool:
        doors = self._supervisor.doors
        return doors is not None and all(one.ready.is_set() for one in doors.agents())

    async def _complete(self, latest: Generation, running: Sequence[Running]) -> None:
        """It is complete once front doors route to all of its workers."""
        if self._leaving or self._supervisor.loaded is not self._wanted:
            self._leaving, self._held = {}, set()
            self._supervisor.use(self._wanted)
        ready = [one.spec.worker_id for one in running if _seen(one).phase is Phase.READY]
        try:
            await self._tell_doors(ready)
        except CommutatorError as error:
            log.warning("generation %d: %s", latest.number, error)
            return
        number = latest.number
        await self._change(lambda known: (known or self._known).ended(number, "complete"))
        log.info("generation %d runs completely", number)

    def _failure(self, running: list[Running]) -> str | None:
        """Why the present generation cannot run; None while it may."""
        for worker_id, cause in self._refused.items():
            return f"{worker_id} cannot start: {cause}"
        most = self._config().max_failed
        for one in running:
            if one.spec.worker_id in self._mine and one.failures >= most:
                return f"{one.spec.worker_id} failed {one.failures} times to start: {one.cause}"
        return None

    def _judged(
        self, latest: Generation, running: Sequence[Running]
    ) -> tuple[str, AliasConfig, Verdict] | None:
        """A canary that is decided: the name of its alias, that alias, and the verdict."""
        aliases = aliases_of(self._wanted.config)
        if self._court.use(aliases):
            for door in self._doors:
                door.watch(self._court.watched)
        return self._court.look(
            [
                Ran(
                    worker_id=one.spec.worker_id,
                    model=one.spec.model.name,
                    phase=_seen(one).phase,
                    cause=one.cause,
                )
                for one in running
            ],
            serves=latest.state == "complete",
            now_s=time.monotonic(),
        )

    async def _decided(
        self, latest: Generation, name: str, alias: AliasConfig, verdict: Verdict
    ) -> None:
        """Promote a canary, or take it back."""
        judged = alias.judged
        assert judged is not None
        text = f"{judged.model} of {name}: {verdict.why}"
        if name in self._held and latest.state == "rolling":
            await self._failed(latest, text)
            return
        log.log(logging.INFO if verdict.good else logging.ERROR, "the canary %s", text)
        if not verdict.good or judged.when_good == "promote":
            await self._shift(name, alias, judged.model, verdict, text)
        self._court.decided(name, verdict, time.monotonic())

    async def _shift(
        self, name: str, alias: AliasConfig, model: str, verdict: Verdict, why: str
    ) -> None:
        """Give the canary ``model`` all the weight of its alias, or none."""
        weights = {model: 0.0}
        if verdict.good:
            weights = {**dict.fromkeys(alias.models, 0.0), model: sum(alias.models.values())}
        async with self._accepting:
            latest, now_s = self._known.latest, time.time()
            named = {one.steps: one for one in latest.changes}
            for one, weight in weights.items():
                steps_to = ("traffic", "aliases", name, "models", one)
                named[steps_to] = NamedChange(
                    path=".".join(steps_to), steps=steps_to, value=weight, who=JUDGE,
                    when_unix_s=now_s, why=verdict.why,
                )  # fmt: skip
            new = evolve(
                latest, changes=tuple(named.values()), who=JUDGE, when_unix_s=now_s, why=why
            )
            try:
                await self._accept(await self._candidate(new, None))
            except ConfigError as error:  # as where the file on disk has become wrong meanwhile
                log.error("the weights of %s stay as they are: %s", name, error)  # noqa: TRY400

    async def _failed(self, latest: Generation, cause: str) -> None:
        """Go back to what ran before, or stop here."""
        number, back = latest.number, self._known.last_complete(latest.number)
        undoes = self._config().on_failure == "undo" and back is not None
        log.error("generation %d has failed: %s; %s", number, cause,
                  f"back to generation {back.number}" if undoes and back is not None
                  else "nothing more is done until somebody decides")  # fmt: skip

        def edit(known: Desired | None) -> Desired:
            ended = (known or self._known).ended(number, "failed", cause)
            if not undoes or back is None or ended.latest.number != number:
                return ended
            why = f"generation {number} failed"
            return ended.then(evolve(back, who="commutator", when_unix_s=time.time(), why=why))

        await self._change(edit)
        self._wake.set()

    def _do(self, fleet: Fleet, step: Start | Drain | Cancel) -> None:
        match step:
            case Start(engine, devices):
                spec = evolve(self._supervisor.prototypes()[engine], devices=devices)
                worker_id = fleet.start(spec, self._on_refused)
                self._mine.add(worker_id)
                log.info("%s starts (generation %s)", worker_id, spec.generation)
            case Drain(worker_id):
                log.info("%s", fleet.drain(worker_id).text)
            case Cancel(worker_id):
                log.info("%s", fleet.cancel(worker_id).text)

    def _on_refused(self, agent: Agent, error: BaseException | None) -> None:
        if agent.name in self._mine:
            self._refused[agent.name] = str(error) if error is not None else "it ended"
        self._wake.set()

    # ----------------------------------------------------------------- what is seen

    def _config(self) -> RolloutConfig:
        loaded = self._supervisor.loaded
        for one in chosen_operations(loaded.host, loaded.config.operations):
            if isinstance(one, RolloutConfig):
                return one
        return RolloutConfig(kind=SERVICE)

    def _rules(self) -> Rules:
        config = self._config()
        return Rules(
            surge=config.surge,
            unavailable=config.unavailable,
            may_interrupt=config.may_interrupt,
        )

    def _wants(self) -> list[Want]:
        config = self._supervisor.loaded.config
        planned = config.planner is not None and config.planner.mode == "act"
        replicas = {str(one.name): one.replicas for one in config.engines}
        return [
            Want(
                engine=name,
                group=_group(spec),
                generation=spec.generation,
                replicas=None if planned else replicas[name],
                device_sets=spec.device_sets,
            )
            for name, spec in self._supervisor.prototypes().items()
        ]

    def _report(self, candidate: _Candidate) -> dict[str, Any]:
        """What a change does, as plain data."""
        before, after = self._wanted.config, candidate.loaded.config
        fleet = self._supervisor.fleet
        running = fleet.running() if isinstance(fleet, Fleet) else []
        specs = self._supervisor.specs_of(candidate.loaded)
        wanted = {str(spec.config.name): spec for spec in reversed(specs)}
        rows = []
        for name in dict.fromkeys([*wanted, *(str(one.spec.config.name) for one in running)]):
            mine = [one for one in running if str(one.spec.config.name) == name]
            mine = [one for one in mine if one.phase is not WorkerPhase.DRAINING]
            spec = wanted.get(name)
            count = 0 if spec is None else sum(str(one.config.name) == name for one in specs)
            old = [one for one in mine if spec is None or one.spec.generation != spec.generation]
            replaced = min(len(old), count)
            kept = len(mine) - len(old)
            rows.append(
                {
                    "engine": name,
                    "replaced": replaced,
                    "started": max(0, count - kept - replaced),
                    "drained": max(0, len(mine) - count),
                    "kept": min(kept, count),
                    "leaving": sorted(one.spec.worker_id for one in old),
                    "devices_each": 0 if spec is None else len(spec.devices),
                }
            )
        return {
            "changes": [asdict(one) for one in candidate.changes],
            "workers": [row for row in rows if row["replaced"] or row["started"] or row["drained"]],
            "doors_replaced": doors_are_replaced(before, after),
            "named_changes": [_named_row(one) for one in candidate.generation.changes],
            "forgotten_changes": [one.path for one in candidate.forgotten],
            "surge": self._config().surge,
        }

    def _status(self) -> dict[str, Any]:
        latest, fleet = self._known.latest, self._supervisor.fleet
        running = fleet.running() if isinstance(fleet, Fleet) else []
        specs = self._supervisor.prototypes()
        workers = [
            {
                "worker_id": one.spec.worker_id,
                "engine": str(one.spec.config.name),
                "phase": str(_seen(one).phase),
                "generation": one.spec.generation,
                "as_wanted": (spec := specs.get(str(one.spec.config.name))) is not None
                and spec.generation == one.spec.generation,
                "failures": one.failures,
                "cause": one.cause,
            }
            for one in running
        ]
        return _generation_row(latest) | {
            "paused": self._known.paused,
            "workers": sorted(workers, key=lambda one: str(one["worker_id"])),
            "waits": list(self._last.waits),
            "named_changes": [_named_row(one) for one in latest.changes],
            "kept_over_restarts": self._shared,
            "canaries": self._court.status(time.monotonic()),
        }


def _without(names: set[str], made: Loaded) -> Loaded:
    """``made`` without requests for the canaries of these aliases."""
    table = made.config.traffic
    if not names or not isinstance(table, TableConfig):
        return made
    return evolve(made, config=evolve(made.config, traffic=table.held(names)))


def _check(loaded: Loaded) -> None:
    """Raises ConfigError with what this machine lacks."""
    fetch_models(loaded.config)
    check_machine(loaded.config, loaded.host)
    table = loaded.config.traffic
    if isinstance(table, TableConfig) and (missing := list(table.missing())):
        raise ConfigError([f"traffic.{path}: {text}" for path, text in missing])


def _applies(generation: Generation, one: NamedChange) -> bool:
    return bool(evolve(generation, changes=(one,)).overrides())


def _unchangeable(found: list[Change], before: Config) -> list[str]:
    """Why some changes cannot be made while the deployment runs."""
    problems = []
    planner = before.planner
    for one in found:
        if one.takes_effect == "never":
            hint = "start `commutator serve` again to change it"
            if one.path.startswith("models[") and one.path.endswith(".source"):
                hint = "streams never continue on other weights: add a model of another name"
            elif one.path.startswith("engines[") and one.path.endswith(".kind"):
                hint = "name the new entry otherwise, and its workers replace the old ones"
            problems.append(f"{one.path}: stays as it is while the deployment runs; {hint}")
        elif planner is not None and planner.mode == "act" and one.path.endswith("].replicas"):
            problems.append(
                f"{one.path}: the planner owns it, within planner.bounds; leave it as it is"
            )
    return problems


def _named(file: Mapping[str, Any], text: str, who: str, now_s: float, why: str) -> NamedChange:
    """Raises ConfigError for what is no assignment."""
    try:
        assignment = from_option(text)
        value = plain(parse_value(assignment.text, assignment.origin))
    except ValueError as error:
        raise ConfigError([str(error)], "--set") from error
    return named_change(file, assignment, value, who, now_s, why)


def _group(spec: WorkerSpec) -> str:
    prefill = spec.config.role == "prefill"
    return f"{spec.model.name}, prefill" if prefill else spec.model.name


def _seen(one: Running) -> Worker:
    return Worker(
        worker_id=one.spec.worker_id,
        engine=str(one.spec.config.name),
        group=_group(one.spec),
        generation=one.spec.generation,
        phase=Phase.HELD if one.held else _PHASES[one.phase],
        devices=one.spec.devices,
    )


def _generation_row(one: Generation) -> dict[str, Any]:
    return {
        "generation": one.number,
        "state": one.state,
        "cause": one.cause,
        "source": one.source,
        "who": one.who,
        "when_unix_s": one.when_unix_s,
        "why": one.why,
        "named": len(one.changes),
    }


def _named_row(one: NamedChange) -> dict[str, Any]:
    return {
        "path": one.path,
        "value": one.value,
        "who": one.who,
        "when_unix_s": one.when_unix_s,
        "why": one.why,
    }


def _summary(report: Mapping[str, Any]) -> str:
    if not report["accepted"]:
        return "nothing changes"
    paths = ", ".join(str(one["path"]) for one in report["changes"])
    return f"generation {report['generation']}: {paths or 'nothing changes'}"


def _tree(packed: Any) -> Node:
    """A tree as commands send it: [value, origin] of each node. Raises CommutatorError."""
    match packed:
        case [dict() as inside, str(origin)]:
            return Node({str(key): _tree(item) for key, item in inside.items()}, origin)
        case [list() as inside, str(origin)]:
            return Node([_tree(item) for item in inside], origin)
        case [value, str(origin)]:
            return Node(value, origin)
    raise CommutatorError("the configuration was not sent as `commutator apply` sends it")
