"""Checks of a running deployment: a ladder from symptoms to causes, with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import Factory, frozen

from commutator_doctor.findings import Checks, Found, Severity
from commutator_doctor.metrics import Metrics


@frozen(kw_only=True)
class Trial:
    """Two equal greedy requests to a model."""

    model: str
    problem: str | None = None
    """The error of the first that failed."""
    texts: tuple[str, ...] = ()
    tokens: int = 0
    """Of the first answer."""
    seconds: float = 0.0
    """Of the first request."""


@frozen(kw_only=True)
class Deployment:
    """What a front door said."""

    url: str
    problem: str | None = None
    """Why it did not answer; all else is empty then."""
    closed: str | None = None
    """Why /health or /metrics may not be read, if so."""
    health: Mapping[str, Any] = Factory(dict)
    metrics: Metrics = Factory(lambda: Metrics({}))
    """Of a window, or since the start."""
    window_s: float | None = None
    """Of ``metrics``; None: since the start."""
    answer_s: float = 0.0
    """Until /live was answered."""
    templates: Mapping[str, bool] = Factory(dict)
    """Whether each model has a chat template."""
    trials: tuple[Trial, ...] = ()
    tiers: Mapping[str, Any] = Factory(dict)
    """The answer of /admin/tiers/statistics."""
    resumes_anywhere: Mapping[str, bool] = Factory(dict)
    """By model: false for those that keep states or windows; only for those that are known."""

    @property
    def workers(self) -> Sequence[Mapping[str, Any]]:
        """Those in the registry."""
        found: Sequence[Mapping[str, Any]] = self.health.get("workers", ())
        return found

    @property
    def unready(self) -> Sequence[Mapping[str, Any]]:
        """Those that are not."""
        found: Sequence[Mapping[str, Any]] = self.health.get("unready_workers", ())
        return found

    @property
    def when(self) -> str:
        """What the numbers cover, for people."""
        if self.window_s is None:
            return "since the front door's start"
        return f"in the last {self.window_s:.0f} s"


DEPLOYMENT: Checks[Deployment] = Checks("A running deployment")
_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

_OLD_VIEW_S = 15.0
_SLOW_LIVE_S = 0.25
_FEW = 20
"""Requests; of fewer nothing is said about rates."""
_PART = 0.05
_LARGE_PART = 0.3
_LOW_HITS = 0.2
_UNEVEN = 2.0
_SLOW_DECISION_S = 0.02
_REPEATED = 8
_STARTS = 3
_SHORT_PROMPTS = 2.0


def _served(facts: Deployment) -> float:
    return facts.metrics.sum("time_to_first_token_seconds_count")


@DEPLOYMENT.add(
    "no-answer",
    "reach",
    _ERROR,
    means="Nothing that is a front door answers at the URL.",
    remedy="Is `commutator serve` running, on this host, at this port? `frontend.host` is "
    "127.0.0.1 by default, which other machines do not reach.",
)
def _no_answer(facts: Deployment) -> Iterator[Found]:
    if facts.problem is not None:
        yield Found(f"{facts.url}: {facts.problem}")


@DEPLOYMENT.add(
    "not-allowed",
    "reach",
    _WARNING,
    means="/health and /metrics need a key with the permission `metrics`; without them little is "
    "known.",
    remedy="Set COMMUTATOR_API_KEY, or COMMUTATOR_ADMIN_URL where the deployment has "
    "`frontend.admin`.",
)
def _not_allowed(facts: Deployment) -> Iterator[Found]:
    if facts.closed is not None:
        yield Found(facts.closed)


@DEPLOYMENT.add(
    "door-drains",
    "503",
    _ERROR,
    means="The front door finishes its requests and takes no new ones: it is about to end.",
    remedy="Start it again, or send clients to another one.",
)
def _door_drains(facts: Deployment) -> Iterator[Found]:
    if facts.health.get("status") == "draining":
        yield Found("/health says draining")


@DEPLOYMENT.add(
    "model-not-ready",
    "503",
    _ERROR,
    means="A model has no worker that gets requests, so they are answered 503.",
    remedy="The causes below say why; `commutator worker ls` lists the workers, and the log has "
    "what they printed.",
)
def _model_not_ready(facts: Deployment) -> Iterator[Found]:
    for labels, ready in facts.metrics.each("model_ready"):
        model = labels.get("model", "")
        if not ready:
            states = [w["state"] for w in facts.workers if w.get("model") == model]
            states += [w["state"] for w in facts.unready if w.get("model") == model]
            text = ", ".join(sorted(states)) or "no worker is known"
            yield Found(f"its workers: {text}", {"workers": len(states)}, model)


@DEPLOYMENT.add(
    "worker-fails",
    "503",
    _ERROR,
    means="A worker ended before it was ready, or died, and is started again and again.",
    remedy="Read the cause, and what the worker printed before it; `commutator config check` finds "
    "what this machine lacks.",
)
def _worker_fails(facts: Deployment) -> Iterator[Found]:
    for one in facts.unready:
        if one["state"] in {"failing", "dead"}:
            text = f"{one['state']}: {one.get('cause') or 'no cause is known'}"
            failures = int(one.get("failures", 0))
            if failures >= _STARTS:
                text += f"; {failures} starts failed in a row"
            yield Found(text, {"failures": failures}, str(one["worker_id"]))


@DEPLOYMENT.add(
    "worker-starts",
    "503",
    _NOTE,
    means="A worker is being started, and gets no requests yet.",
    remedy="Wait; loading a large model takes minutes.",
)
def _worker_starts(facts: Deployment) -> Iterator[Found]:
    for one in facts.unready:
        if one["state"] == "starting":
            yield Found("starting", {}, str(one["worker_id"]))


@DEPLOYMENT.add(
    "worker-unreachable",
    "503",
    _ERROR,
    means="A worker is in the registry, and the front door cannot connect to it.",
    remedy="Is its host up, and is the port open? On several hosts: `cluster.host.advertise`.",
)
def _worker_unreachable(facts: Deployment) -> Iterator[Found]:
    for one in facts.workers:
        if one["state"] == "unreachable":
            where = f" on host {one['host']}" if one.get("host") else ""
            yield Found(f"{one.get('admin_address') or ''}{where}", {}, str(one["worker_id"]))


@DEPLOYMENT.add(
    "all-drain",
    "503",
    _ERROR,
    means="Every worker of a model is draining, so nobody takes new requests.",
    remedy="`commutator worker undrain ID`.",
)
def _all_drain(facts: Deployment) -> Iterator[Found]:
    for model in facts.health.get("models", ()):
        states = {w["state"] for w in facts.workers if w.get("model") == model}
        if states == {"draining"}:
            yield Found("all of its workers are draining", {}, str(model))


@DEPLOYMENT.add(
    "registry-old",
    "503",
    _ERROR,
    means="The front door's view of the workers is old: the registry does not answer it.",
    remedy="Look at the registry (the supervisor, or etcd). Known workers still serve requests.",
)
def _registry_old(facts: Deployment) -> Iterator[Found]:
    age = facts.health.get("registry_age_s")
    if age is not None and age > _OLD_VIEW_S:
        yield Found(f"{age:.0f} s old ({facts.health.get('registry')})", {"seconds": round(age, 1)})


@DEPLOYMENT.add(
    "door-says",
    "health",
    _WARNING,
    means="The front door itself names a problem in /health.",
    remedy="As the line says; the runbooks have more for each.",
)
def _door_says(facts: Deployment) -> Iterator[Found]:
    for problem in facts.health.get("problems", ()):
        yield Found(str(problem))


@DEPLOYMENT.add(
    "handovers-refused",
    "503",
    _WARNING,
    means="Prefill and decode workers cannot hand KV over to each other.",
    remedy="Give both the same engine version, model, dtype and block size.",
)
def _handovers_refused(facts: Deployment) -> Iterator[Found]:
    yield from (Found(str(pair)) for pair in facts.health.get("refused_handovers", ()))


@DEPLOYMENT.add(
    "errors",
    "503",
    _ERROR,
    means="Requests were answered with errors of the server.",
    remedy="The log has a line for each with its reason; then the findings above.",
)
def _errors(facts: Deployment) -> Iterator[Found]:
    codes = facts.metrics.by("requests_total", "code", lambda count: count > 0)
    failed = {code: n for code, n in codes.items() if code.startswith("5")}
    total = sum(n for code, n in codes.items() if code != "499")
    count = sum(failed.values())
    if count and count >= _PART * total:
        parts = ", ".join(f"{n:.0f} x {code}" for code, n in sorted(failed.items()))
        text = f"{parts} of {total:.0f} answers {facts.when}"
        yield Found(text, {"errors": int(count), "answers": int(total)})


@DEPLOYMENT.add(
    "rejections",
    "429",
    _WARNING,
    means="Requests were answered 429: a queue was full, every worker stayed busy, or a limit of a "
    "principal was reached.",
    remedy="`rate_limit_exceeded`: raise the principal's limits; others: add workers, or raise "
    "`frontend.max_queued_requests`.",
)
def _rejections(facts: Deployment) -> Iterator[Found]:
    reasons = facts.metrics.by("requests_rejected_total", "reason", lambda count: count > 0)
    total = facts.metrics.sum("requests_total")
    count = sum(reasons.values())
    if count > 0 and count >= _PART * total:
        parts = ", ".join(f"{n:.0f} x {reason}" for reason, n in sorted(reasons.items()))
        yield Found(f"{parts} of {total:.0f} requests {facts.when}", {"rejections": int(count)})


@DEPLOYMENT.add(
    "connections-dropped",
    "503",
    _WARNING,
    means="The front door closed connections of clients, or did not accept them.",
    remedy="`no_descriptors`: raise LimitNOFILE; `full`: more front doors (`frontend.replicas`); "
    "`unread_answer`, `headers_too_slow`: clients that stand still.",
)
def _connections_dropped(facts: Deployment) -> Iterator[Found]:
    reasons = facts.metrics.by("connections_dropped_total", "reason", lambda count: count > 0)
    if reasons:
        parts = ", ".join(f"{n:.0f} x {reason}" for reason, n in sorted(reasons.items()))
        yield Found(f"{parts} {facts.when}", {"connections": int(sum(reasons.values()))})


@DEPLOYMENT.add(
    "slow-front-door",
    "slow",
    _WARNING,
    means="The front door itself answers late: its process or its machine is busy.",
    remedy="Raise `frontend.replicas`, give it cores of its own, or install `fastokens`.",
)
def _slow_front_door(facts: Deployment) -> Iterator[Found]:
    if facts.answer_s > _SLOW_LIVE_S:
        yield Found(f"/live took {facts.answer_s:.2f} s", {"seconds": round(facts.answer_s, 3)})


@DEPLOYMENT.add(
    "slow-queue",
    "slow",
    _WARNING,
    means="Most of the time to the first token is waiting for a worker: there are too few.",
    remedy="Add workers (`replicas`, a planner), or raise what each takes at once.",
)
def _slow_queue(facts: Deployment) -> Iterator[Found]:
    ttft, served = facts.metrics.mean("time_to_first_token_seconds"), _served(facts)
    waited = facts.metrics.sum("router_queue_seconds_sum")
    if ttft and served >= _FEW and waited > _LARGE_PART * ttft * served:
        part = waited / (ttft * served)
        text = (
            f"{part:.0%} of {ttft:.3f} s to the first token, in the mean of {served:.0f} requests "
            f"{facts.when}"
        )
        yield Found(text, {"part": round(part, 3), "ttft_s": round(ttft, 4)})


@DEPLOYMENT.add(
    "slow-prefill",
    "slow",
    _NOTE,
    means="The time to the first token is hardly waiting: the workers compute prompts.",
    remedy="Raise the hit rate (below), use prefill workers for long prompts, or faster workers.",
)
def _slow_prefill(facts: Deployment) -> Iterator[Found]:
    ttft, served = facts.metrics.mean("time_to_first_token_seconds"), _served(facts)
    waited = facts.metrics.sum("router_queue_seconds_sum")
    if ttft and ttft > 1.0 and served >= _FEW and waited <= _LARGE_PART * ttft * served:
        prompt = facts.metrics.sum("prompt_tokens_total")
        cached = facts.metrics.sum("cached_tokens_total")
        text = (
            f"{ttft:.2f} s to the first token; {(prompt - cached) / served:.0f} tokens computed "
            f"for each of {served:.0f} prompts {facts.when}"
        )
        yield Found(text, {"ttft_s": round(ttft, 3)})


@DEPLOYMENT.add(
    "slow-decision",
    "slow",
    _WARNING,
    means="Choosing a worker takes long.",
    remedy="Give the front door a core of its own; with thousands of workers see "
    "docs/explanation/routing-cost.md.",
)
def _slow_decision(facts: Deployment) -> Iterator[Found]:
    mean = facts.metrics.mean("router_decision_seconds")
    if mean is not None and mean > _SLOW_DECISION_S and _served(facts) >= _FEW:
        yield Found(f"{mean * 1000:.0f} ms in the mean {facts.when}", {"seconds": round(mean, 4)})


@DEPLOYMENT.add(
    "slow-doors-queue",
    "slow",
    _WARNING,
    means="Requests wait in the front door itself, as it has as many as it takes.",
    remedy="Raise `frontend.max_concurrent_requests`, or add front doors or workers.",
)
def _slow_doors_queue(facts: Deployment) -> Iterator[Found]:
    queued = facts.metrics.sum("queued_requests")
    if queued > 0:
        text = f"{queued:.0f} wait, {facts.metrics.sum('active_requests'):.0f} are served"
        yield Found(text, {"queued": int(queued)})


@DEPLOYMENT.add(
    "slow-prefill-queue",
    "slow",
    _WARNING,
    means="Requests wait for a prefill worker.",
    remedy="Add prefill workers, or change the role of one: `commutator worker role ID prefill`.",
)
def _slow_prefill_queue(facts: Deployment) -> Iterator[Found]:
    for labels, age in facts.metrics.each("prefill_queue_age_seconds"):
        if age > 1.0:
            text = f"the oldest waits for {age:.1f} s"
            yield Found(text, {"seconds": round(age, 2)}, labels.get("model", ""))


@DEPLOYMENT.add(
    "load-uneven",
    "slow",
    _WARNING,
    means="One worker has far more requests than the others of its model.",
    remedy="Use a policy that looks at load: `least_loaded`, `kv`; for `session_affinity` and `kv` "
    "a few sessions may be most of the traffic.",
)
def _load_uneven(facts: Deployment) -> Iterator[Found]:
    loads: dict[tuple[str, str], dict[str, float]] = {}
    for labels, count in facts.metrics.each("worker_active_requests"):
        group = (labels.get("model", ""), labels.get("role", ""))
        loads.setdefault(group, {})[labels.get("worker", "")] = count
    for (model, _), counts in loads.items():
        mean = sum(counts.values()) / len(counts)
        worker, most = max(counts.items(), key=lambda item: item[1])
        if len(counts) > 1 and most >= _REPEATED and most > _UNEVEN * mean:
            text = f"{worker} has {most:.0f} requests, the mean of {len(counts)} is {mean:.1f}"
            yield Found(text, {"most": int(most), "mean": round(mean, 2)}, model)


@DEPLOYMENT.add(
    "answers-migrate",
    "slow",
    _WARNING,
    means="Answers had to be continued by another worker: workers die or stop answering.",
    remedy="Look at the workers' restarts in the log (memory, GPU errors).",
)
def _answers_migrate(facts: Deployment) -> Iterator[Found]:
    reasons = facts.metrics.by("migrations_total", "reason", lambda count: count > 0)
    count = sum(reasons.values())
    if count and count >= _PART / 5 * _served(facts):
        parts = ", ".join(f"{n:.0f} x {reason}" for reason, n in sorted(reasons.items()))
        yield Found(f"{parts} {facts.when}", {"migrations": int(count)})


@DEPLOYMENT.add(
    "handovers-fail",
    "slow",
    _WARNING,
    means="Hand-overs between prefill and decode workers fail, and prompts are computed again.",
    remedy="`commutator doctor FILE` on both hosts looks at NIXL, UCX and the interfaces.",
)
def _handovers_fail(facts: Deployment) -> Iterator[Found]:
    outcomes = facts.metrics.by("handover_legs_total", "outcome", lambda count: count > 0)
    total = sum(outcomes.values())
    failed = {k: n for k, n in outcomes.items() if k == "failed"}
    if failed and sum(failed.values()) >= _PART * total:
        parts = ", ".join(f"{n:.0f} {outcome}" for outcome, n in sorted(failed.items()))
        yield Found(f"{parts} of {total:.0f} {facts.when}", {"failed": int(sum(failed.values()))})


@DEPLOYMENT.add(
    "policy-fails",
    "slow",
    _ERROR,
    means="The routing policy raised errors, and requests went to the worker with the fewest.",
    remedy="The log has the policy's traceback.",
)
def _policy_fails(facts: Deployment) -> Iterator[Found]:
    count = facts.metrics.sum("router_fallbacks_total")
    if count > 0:
        yield Found(f"{count:.0f} requests {facts.when}", {"requests": int(count)})


@DEPLOYMENT.add(
    "tokenizer-differs",
    "garbage",
    _ERROR,
    means="The fast tokenizer, or the cache of prompts, gave other tokens than the exact one.",
    remedy="It is not used for that model any more; report the model. Answers before that may be "
    "of a wrong prompt.",
)
def _tokenizer_differs(facts: Deployment) -> Iterator[Found]:
    for labels, count in facts.metrics.each("tokenizer_differences_total"):
        if count > 0:
            yield Found(f"{count:.0f} times", {"times": int(count)}, labels.get("model", ""))


@DEPLOYMENT.add(
    "blocks-corrupt",
    "garbage",
    _ERROR,
    means="KV blocks in a tier had another checksum than when they were stored.",
    remedy="They are not used. Find the fault of the medium: `commutator kv verify`, memory tests, "
    "the disk's own log.",
)
def _blocks_corrupt(facts: Deployment) -> Iterator[Found]:
    for labels, count in facts.metrics.each("kv_failed_verification_total"):
        if count > 0:
            where = f"{labels.get('worker', '')} {labels.get('tier', '')}".strip()
            yield Found(f"{count:.0f} blocks", {"blocks": int(count)}, where)


@DEPLOYMENT.add(
    "engines-differ",
    "garbage",
    _WARNING,
    means="Workers of one model run different engines or versions, which answer differently.",
    remedy="Give a model one engine in one version, or migration may show a seam in answers.",
)
def _engines_differ(facts: Deployment) -> Iterator[Found]:
    versions: dict[str, set[str]] = {}
    for one in facts.workers:
        text = f"{one.get('kind')} {one.get('version')}"
        versions.setdefault(str(one.get("model")), set()).add(text)
    for model, found in versions.items():
        if len(found) > 1:
            yield Found(", ".join(sorted(found)), {"versions": len(found)}, model)


@DEPLOYMENT.add(
    "no-chat-template",
    "garbage",
    _WARNING,
    means="The model has no chat template: it is a base model, and chats are refused or senseless.",
    remedy="Serve the instruct variant, or set `models[].chat_template`.",
)
def _no_chat_template(facts: Deployment) -> Iterator[Found]:
    for model, there in facts.templates.items():
        if not there:
            yield Found("no chat template", {}, model)


@DEPLOYMENT.add(
    "request-fails",
    "503",
    _ERROR,
    means="A test request failed.",
    remedy="The error says why.",
)
def _request_fails(facts: Deployment) -> Iterator[Found]:
    for one in facts.trials:
        if one.problem is not None:
            yield Found(one.problem, {}, one.model)


@DEPLOYMENT.add(
    "answers-differ",
    "garbage",
    _WARNING,
    means="Two equal requests at temperature 0 were answered differently.",
    remedy="With one engine version this is numerics of batches, and harmless; else see "
    "`engines-differ`, and compare workers by `commutator route explain`.",
)
def _answers_differ(facts: Deployment) -> Iterator[Found]:
    for one in facts.trials:
        if len(set(one.texts)) > 1:
            yield Found(" and ".join(f'"{text[:40]}"' for text in one.texts), {}, one.model)


@DEPLOYMENT.add(
    "answer-degenerate",
    "garbage",
    _ERROR,
    means="A greedy answer is empty, or repeats one word.",
    remedy="Damaged weights, a wrong quantization or dtype, or a wrong chat template: ask the "
    "engine directly with the same prompt.",
)
def _answer_degenerate(facts: Deployment) -> Iterator[Found]:
    for one in facts.trials:
        for text in one.texts[:1]:
            words = text.split()
            if not text.strip() or (len(words) >= _REPEATED and len(set(words)) == 1):
                yield Found(f'"{text[:40]}"', {}, one.model)


@DEPLOYMENT.add(
    "hit-rate-low",
    "hit rate",
    _NOTE,
    means="Few prompt tokens were found in KV caches. The findings below say why, as far as "
    "counters tell.",
    remedy="Record a trace (observer `recording`), and run `commutator doctor --trace FILE`.",
)
def _hit_rate_low(facts: Deployment) -> Iterator[Found]:
    for model, prompt, cached in _low(facts):
        text = f"{cached / prompt:.1%} of {prompt:.0f} prompt tokens {facts.when}"
        yield Found(text, {"part": round(cached / prompt, 4)}, model)


@DEPLOYMENT.add(
    "router-blind",
    "hit rate",
    _WARNING,
    means="The routing policy does not look at KV caches, and there are several workers.",
    remedy="Use `router: {kind: kv}`, or `session_affinity` for long sessions.",
)
def _router_blind(facts: Deployment) -> Iterator[Found]:
    for model, _, _ in _low(facts):
        count = sum(1 for one in facts.workers if one.get("model") == model)
        looks = any(True for _ in facts.metrics.each("router_overlap_blocks_total", model=model))
        if count > 1 and not looks:
            yield Found(f"{count} workers", {"workers": count}, model)


@DEPLOYMENT.add(
    "hits-given-up",
    "hit rate",
    _WARNING,
    means="Requests went to workers that held less of the prompt than others did, for balance.",
    remedy="Raise `overlap_score_weight` of `kv`, or add workers: the others were too busy.",
)
def _hits_given_up(facts: Deployment) -> Iterator[Found]:
    for model, _, _ in _low(facts):
        given = facts.metrics.sum("router_given_up_blocks_total", model=model)
        held = facts.metrics.sum("router_overlap_blocks_total", model=model)
        if given > _LARGE_PART * (given + held):
            text = f"{given:.0f} blocks, beside {held:.0f} that the chosen workers held"
            yield Found(f"{text} {facts.when}", {"blocks": int(given)}, model)


@DEPLOYMENT.add(
    "index-wrong",
    "hit rate",
    _WARNING,
    means="Workers did not have what the front door thought they had: KV events were lost or "
    "wrong, or blocks were evicted in between.",
    remedy="/health names what is wrong with a worker's events under `warnings`; on vLLM and "
    "SGLang, are KV events switched on?",
)
def _index_wrong(facts: Deployment) -> Iterator[Found]:
    sizes = {str(one.get("model")): int(one.get("block_size") or 0) for one in facts.workers}
    for model, prompt, cached in _low(facts):
        blocks = facts.metrics.sum("router_overlap_blocks_total", model=model)
        thought = blocks * sizes.get(model, 0)
        if thought > _LOW_HITS * prompt and cached < thought / 2:
            text = f"{thought:.0f} tokens were thought to be cached, {cached:.0f} were"
            numbers = {"thought": int(thought), "cached": int(cached)}
            yield Found(f"{text} {facts.when}", numbers, model)


@DEPLOYMENT.add(
    "events-lost",
    "hit rate",
    _WARNING,
    means="KV events of a worker were lost, so the front door does not know its cache.",
    remedy="See the runbook CommutatorEventsLost: a slow front door, or a broken network.",
)
def _events_lost(facts: Deployment) -> Iterator[Found]:
    for labels, count in facts.metrics.each("router_event_messages_lost_total"):
        if count > 0:
            text = f"{count:.0f} messages {facts.when}"
            yield Found(text, {"messages": int(count)}, labels.get("worker", ""))


@DEPLOYMENT.add(
    "evictions",
    "hit rate",
    _WARNING,
    means="Blocks leave KV memory or tiers soon after they came: there is too little room for what "
    "would be reused.",
    remedy="Add a tier or make one larger: `commutator size` computes how large.",
)
def _evictions(facts: Deployment) -> Iterator[Found]:
    for tier, stored in facts.metrics.by("kv_stored_total", "tier").items():
        removed = facts.metrics.sum("kv_removed_total", tier=tier)
        if any(True for _ in _low(facts)) and stored >= _FEW and removed > stored / 2:
            text = f"{removed:.0f} of {stored:.0f} blocks that were stored left {facts.when}"
            yield Found(text, {"removed": int(removed), "stored": int(stored)}, tier)


@DEPLOYMENT.add(
    "tier-down",
    "hit rate",
    _ERROR,
    means="A storage tier cannot be used.",
    remedy="/health says why; see the runbook CommutatorTierDown.",
)
def _tier_down(facts: Deployment) -> Iterator[Found]:
    for labels, up in facts.metrics.each("kv_tier_up"):
        if not up:
            yield Found("down", {}, f"{labels.get('worker', '')} {labels.get('tier', '')}".strip())


@DEPLOYMENT.add(
    "tier-not-read",
    "hit rate",
    _NOTE,
    means="A tier had blocks that were computed instead of loaded.",
    remedy="`slower than recompute`: as measured, computing is faster; a faster disk or network "
    "helps. `commutator kv stats` has all reasons.",
)
def _tier_not_read(facts: Deployment) -> Iterator[Found]:
    for tier in facts.metrics.by("kv_not_loaded_total", "tier"):
        loaded = facts.metrics.sum("kv_loads_total", tier=tier, outcome="loaded")
        reasons: dict[str, float] = {}
        for labels, count in facts.metrics.each("kv_not_loaded_total", tier=tier):
            if count > 0:
                reason = labels.get("reason", "")
                reasons[reason] = reasons.get(reason, 0.0) + count
        if sum(reasons.values()) > max(_FEW, loaded):
            parts = ", ".join(f"{n:.0f} x {reason}" for reason, n in sorted(reasons.items()))
            yield Found(f"{parts}; {loaded:.0f} were loaded", {"loaded": int(loaded)}, tier)


@DEPLOYMENT.add(
    "prompts-short",
    "hit rate",
    _NOTE,
    means="Prompts are hardly longer than a block, and only full blocks are reused.",
    remedy="Nothing is wrong; short prompts cost little. Smaller blocks reuse more of them.",
)
def _prompts_short(facts: Deployment) -> Iterator[Found]:
    for model, _, _ in _low(facts):
        mean = facts.metrics.mean("input_sequence_tokens", model=model)
        size = max((int(w.get("block_size") or 0) for w in facts.workers), default=0)
        if mean is not None and size and mean < _SHORT_PROMPTS * size:
            text = f"{mean:.0f} tokens in the mean, blocks of {size}"
            yield Found(text, {"mean_tokens": round(mean, 1), "block_tokens": size}, model)


@DEPLOYMENT.add(
    "groups-resume-rarely",
    "hit rate",
    _NOTE,
    means="The model keeps recurrent states or sliding windows: its prompts resume only at places "
    "where these were kept, not at each block.",
    remedy="`commutator models SOURCE` says what it keeps; docs/explanation/kv.md where it "
    "resumes.",
)
def _groups_resume_rarely(facts: Deployment) -> Iterator[Found]:
    for model, _, _ in _low(facts):
        if facts.resumes_anywhere.get(model) is False:
            yield Found("states or windows", {}, model)


def _low(facts: Deployment) -> Iterator[tuple[str, float, float]]:
    """Models with a low hit rate, their prompt tokens, and the cached ones of them."""
    for labels, prompt in facts.metrics.each("prompt_tokens_total"):
        model = labels.get("model", "")
        cached = facts.metrics.sum("cached_tokens_total", model=model)
        served = facts.metrics.sum("time_to_first_token_seconds_count", model=model)
        if served >= _FEW and prompt > 0 and cached < _LOW_HITS * prompt:
            yield model, prompt, cached


def figures(facts: Deployment) -> dict[str, float | int | str]:
    """The numbers at which a person looks first; those without observations are left out."""
    metrics = facts.metrics
    prompt = metrics.sum("prompt_tokens_total")
    found: dict[str, float | int | str | None] = {
        "covers": facts.when,
        "requests": int(_served(facts)),
        "ttft_mean_s": metrics.mean("time_to_first_token_seconds"),
        "ttft_p95_at_most_s": metrics.quantile("time_to_first_token_seconds", 0.95),
        "itl_mean_s": metrics.mean("inter_token_latency_seconds"),
        "waited_for_worker_s": metrics.sum("router_queue_seconds_sum"),
        "decision_mean_s": metrics.mean("router_decision_seconds"),
        "prompt_tokens": int(prompt),
        "hit_rate": metrics.sum("cached_tokens_total") / prompt if prompt else None,
        "workers": len(facts.workers),
        "unready_workers": len(facts.unready),
    }
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None and value != float("inf")
    }
