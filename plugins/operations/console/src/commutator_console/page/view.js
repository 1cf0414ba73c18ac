// Renders snapshots of /admin/live. Rows are kept and changed in place, so focus stays where it is.

import { bar, bytes, clock, element, flowDiagram, number, percent, seconds, setText, sparkline, time } from "./charts.js";
import { partsOf, promptBlocks, scoreBars } from "./decision.js";
import { createTimeline } from "./timeline.js";

const HISTORY = 120, PAGE = 50, GONE_MS = 60000;
const get = (id) => document.getElementById(id);

/** `api(path, options)` is fetch at this front door with the page's key. */
export function createView(api) {
  const timeline = createTimeline(get("timeline").querySelector("svg"), get("timeline-text"), get("timeline-since"));
  let onlyModel = null, rolled = [];
  const history = {};
  const gone = new Map(); // workers that left: [row, when]
  let workers = new Map(), last = null, page = 0, sortBy = "worker_id", ascending = true, paused = false;
  const seen = new Set();
  let first = true;

  function note(name, value) {
    const values = (history[name] ??= []);
    values.push(value === null || value === undefined ? NaN : value);
    if (values.length > HISTORY) values.shift();
    return values;
  }

  function tile(name, digits, unit, sub, values, more) {
    const node = get(`tile-${name}`);
    setText(node.querySelector(".value span"), digits);
    setText(node.querySelector(".value small"), unit);
    setText(node.querySelector(".sub"), sub || "\u00a0");
    const svg = node.querySelector("svg");
    if (svg) sparkline(svg, values, more);
  }

  function tiles({ requests, cache }) {
    const { ttft, itl } = requests;
    const bad = [];
    if (requests.failed_per_s) bad.push(`${number(requests.failed_per_s)}/s failed`);
    if (requests.refused_per_s) bad.push(`${number(requests.refused_per_s)}/s refused`);
    tile("requests", number(requests.per_s), "/s", bad.join(", ") || "none failed", note("requests", requests.per_s));
    const waiting = requests.queued + requests.waiting;
    tile("running", number(requests.running), "", waiting ? `${number(waiting)} waiting` : "none waiting", note("running", requests.running));
    tile("ttft", ...seconds(ttft.p50_s), ttft.count ? `p95 ${time(ttft.p95_s)}` : "no first token lately", note("ttft", ttft.p50_s), note("ttft95", ttft.p95_s));
    tile("itl", ...seconds(itl.p50_s), itl.count ? `p95 ${time(itl.p95_s)}` : "no tokens lately", note("itl", itl.p50_s), note("itl95", itl.p95_s));
    tile("tokens", number(requests.output_tokens_per_s), "tokens/s", `${number(requests.prompt_tokens_per_s)} prompt tokens/s`, note("tokens", requests.output_tokens_per_s));
    tile("cache", percent(cache.hit_rate), "", "of prompt tokens", []);
    bar(get("hit-stack"), cache.by_tier.map((one, at) => [`k${Math.min(at, 4)}`, one.hit_rate]));
    keyed(get("hit-legend"), cache.by_tier, (one) => one.tier, () => element("li"), (node, one, at) => {
      node.className = `k${Math.min(at, 4)}`;
      setText(node, `${one.tier} ${percent(one.hit_rate)}`);
    });
  }

  // ----------------------------------------------------------------- workers

  const worth = {
    requests: (one) => one.requests,
    waiting: (one) => one.load?.waiting ?? -1,
    kv: (one) => (one.load?.kv_capacity_blocks ? one.load.kv_used_blocks / one.load.kv_capacity_blocks : -1),
    pid: (one) => one.pid ?? -1,
  };

  function workerRow() {
    const cells = {
      name: element("div", { class: "id" }), more: element("div", { class: "more" }), cause: element("div", { class: "more cause" }),
      state: element("span", { class: "dot" }), role: element("span", { class: "badge" }),
      requests: meter(), waiting: element("span"), kv: meter(), tiers: element("div"), process: element("span", { class: "more" }),
      drain: element("button", { type: "button", class: "small" }),
    };
    cells.drain.addEventListener("click", () => askToDrain(row.worker_));
    const label = (text, ...nodes) => element("td", text ? { data: { label: text } } : {}, ...nodes);
    const row = element("tr", {},
      label("", cells.name, cells.more, cells.cause), label("State", cells.state), label("Role", cells.role),
      label("In flight", cells.requests.node), label("Queue", cells.waiting), label("KV memory", cells.kv.node),
      label("Tiers", cells.tiers), label("Process", cells.process), label("", cells.drain));
    row.cells_ = cells;
    return row;
  }

  function unready(one) {
    if (one.state === "gone" || !one.since_unix_s) return "";
    const whole = (value) => Math.max(0, Math.round(value));
    const since = `${whole(last.time_unix_s - one.since_unix_s)} s`;
    const again = one.next_start_unix_s ? `; starts again in ${whole(one.next_start_unix_s - last.time_unix_s)} s` : "";
    return `${one.cause ? `${since} ago: ${one.cause.replace(/^was /, "")}` : `for ${since}`}${again}`;
  }

  function meter() {
    const track = element("div", { class: "bar" }), text = element("span");
    return { node: element("div", { class: "meter" }, track, text), track, text };
  }

  function fillWorker(row, one, most) {
    const cells = row.cells_;
    row.worker_ = one;
    cells.drain.hidden = !["ready", "draining"].includes(one.state);
    setText(cells.drain, one.state === "draining" ? "Take back" : "Drain");
    cells.drain.ariaLabel = `${cells.drain.textContent} ${one.worker_id}`;
    row.classList.toggle("gone", one.state === "gone");
    setText(cells.name, one.worker_id);
    setText(cells.more, `${one.model} · ${one.kind} ${one.version}`.trim());
    setText(cells.cause, unready(one));
    cells.cause.classList.toggle("bad", Boolean(one.cause));
    if (cells.state.dataset.state !== one.state) cells.state.dataset.state = one.state;
    setText(cells.state, one.state);
    setText(cells.role, one.role);
    cells.role.className = `badge ${one.role}`;
    bar(cells.requests.track, [["k0", one.requests / most]]);
    setText(cells.requests.text, number(one.requests));
    setText(cells.waiting, one.load ? number(one.load.waiting) : "–");
    const capacity = one.load?.kv_capacity_blocks;
    bar(cells.kv.track, capacity ? [["k0", one.load.kv_used_blocks / capacity], ["k0 faint", one.load.kv_cached_blocks / capacity]] : []);
    setText(cells.kv.text, capacity ? percent((one.load.kv_used_blocks + one.load.kv_cached_blocks) / capacity) : "–");
    cells.kv.node.title = [
      capacity ? `${one.load.kv_used_blocks} blocks in use, ${one.load.kv_cached_blocks} cached, of ${capacity}` : "",
      ...(one.sequence_bytes ?? []).map((kind) => [
        `${kind.layers}:`, kind.token ? `${number(kind.token)} bytes a token` : "", kind.most ? `at most ${number(kind.most)} bytes a sequence` : "",
      ].filter(Boolean).join(" ")),
    ].filter(Boolean).join("\n");
    keyed(cells.tiers, one.tiers, (tier) => tier.name, tierNode, (node, tier, at) => {
      node.classList.toggle("down", !tier.up);
      setText(node.children[0], tier.name);
      node.children[0].title = tier.name;
      bar(node.children[1], tier.capacity_blocks ? [[`k${Math.min(at + 1, 4)}`, tier.blocks / tier.capacity_blocks]] : []);
      setText(node.children[2], tier.up ? (tier.capacity_blocks ? percent(tier.blocks / tier.capacity_blocks) : number(tier.blocks)) : "down");
    });
    if (!one.tiers.length) setText(cells.tiers, "–");
    setText(cells.process, [one.pid ? `pid ${one.pid}` : "", one.host].filter(Boolean).join(" on ") || "–");
  }

  const tierNode = () => element("div", { class: "tier" }, element("span"), element("div", { class: "bar" }), element("span"));

  function showWorkers() {
    if (!last) return;
    const words = get("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = [...workers.values(), ...[...gone.values()].map(([one]) => one)];
    const found = all.filter((one) => {
      if (onlyModel && one.model !== onlyModel) return false;
      const text = `${one.worker_id} ${one.model} ${one.role} ${one.state} ${one.kind} ${one.host}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const value = worth[sortBy] ?? ((one) => one[sortBy]);
    const names = new Intl.Collator(undefined, { numeric: true });
    found.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const order = typeof x === "number" ? x - y : names.compare(String(x), String(y));
      return (ascending ? order : -order) || names.compare(a.worker_id, b.worker_id);
    });
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(page, pages - 1);
    const shown = found.slice(page * PAGE, (page + 1) * PAGE);
    const most = Math.max(1, ...all.map((one) => one.requests));
    keyed(get("workers").tBodies[0], shown, (one) => one.worker_id, workerRow, (row, one) => fillWorker(row, one, most));
    get("workers").hidden = !shown.length;
    get("workers-empty").hidden = shown.length > 0;
    setText(get("workers-empty"), words.length || onlyModel ? "No worker matches the filter." : "No worker is up.");
    get("pager").hidden = pages === 1;
    setText(get("page-of"), `Page ${page + 1} of ${pages}, ${number(found.length)} workers`);
    get("previous").disabled = page === 0;
    get("next").disabled = page === pages - 1;
    const states = {};
    for (const one of all) states[one.state] = (states[one.state] || 0) + 1;
    const text = Object.entries(states).map(([state, count]) => `${count} ${state}`).join(", ");
    const left = last.workers_left_out ? `, ${last.workers_left_out} more not shown` : "";
    setText(get("workers-count"), text + left);
  }

  function takeWorkers(snapshot) {
    const now = performance.now();
    const current = new Map(snapshot.workers.map((one) => [one.worker_id, one]));
    for (const [name, one] of workers) {
      if (!current.has(name)) gone.set(name, [{ ...one, cause: null, state: "gone", requests: 0, load: null, tiers: [] }, now]);
    }
    for (const [name, [, since]] of gone) {
      if (current.has(name) || now - since > GONE_MS) gone.delete(name);
    }
    workers = current;
    showWorkers();
  }

  get("filter").addEventListener("input", () => { page = 0; showWorkers(); });
  get("previous").addEventListener("click", () => { page -= 1; showWorkers(); });
  get("next").addEventListener("click", () => { page += 1; showWorkers(); });
  for (const button of document.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => {
      const same = sortBy === button.dataset.sort;
      ascending = same ? !ascending : !(button.dataset.sort in worth);
      sortBy = button.dataset.sort;
      for (const head of document.querySelectorAll("th[aria-sort]")) head.removeAttribute("aria-sort");
      button.closest("th").setAttribute("aria-sort", ascending ? "ascending" : "descending");
      showWorkers();
    });
  }

  // ----------------------------------------------------------------- drains, models, roll-outs

  let asked = null;

  function askToDrain(one) {
    asked = one;
    const back = one.state === "draining";
    setText(get("drain-title"), back ? `Let ${one.worker_id} take requests again?` : `Drain ${one.worker_id}?`);
    setText(get("drain-text"), back ? "It gets new requests from now on." : `${one.requests ? `It finishes the requests that it has (${number(one.requests)})` : "It has no requests now"}, and gets no new ones until you take it back.`);
    setText(get("drain-problem"), "");
    setText(get("drain-do"), back ? "Take back" : "Drain");
    get("drain-do").hidden = false;
    get("drain-dialog").showModal();
  }

  get("drain-cancel").addEventListener("click", () => get("drain-dialog").close());
  get("drain-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const what = asked.state === "draining" ? "undrain" : "drain";
    const answer = await api(`admin/workers/${encodeURIComponent(asked.worker_id)}/${what}`, { method: "POST" }).catch(() => null);
    if (answer?.ok) { get("drain-dialog").close(); return; }
    const said = answer ? (await answer.json().catch(() => null))?.error?.message ?? `${answer.status} ${answer.statusText}` : "The front door does not answer.";
    setText(get("drain-problem"), answer?.status === 403 ? `${said}\nThere: commutator worker ${what} ${asked.worker_id}` : said);
    get("drain-do").hidden = answer?.status === 403;
  });

  function models({ models: names, recent }) {
    get("models").hidden = names.length < 2;
    if (names.length < 2) { onlyModel = null; return; }
    const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
    keyed(get("models"), names, (name) => name, modelTile, (node, name) => {
      const own = [...workers.values()].filter((one) => one.model === name), rows = recent.filter((one) => one.model === name);
      const ready = own.filter((one) => one.state === "ready").length, sum = (of) => own.reduce((total, one) => total + (of(one) ?? 0), 0);
      const prompts = rows.filter((one) => one.cached_tokens !== null);
      const cached = prompts.length ? prompts.reduce((total, one) => total + one.cached_tokens, 0) / Math.max(1, prompts.reduce((total, one) => total + one.prompt_tokens, 0)) : null;
      node.ariaPressed = String(onlyModel === name);
      setText(node.children[0], name);
      setText(node.children[1], `${ready} of ${own.length} ready · ${number(sum((one) => one.requests))} in flight · ${number(sum((one) => one.load?.waiting))} queued`);
      setText(node.children[2], `lately: TTFT ${time(middle(rows.map((one) => one.ttft_s).filter((one) => one !== null)))} · ${percent(cached)} cached`);
    });
  }

  function modelTile(name) {
    const node = element("button", { type: "button", class: "model" }, element("span", { class: "id" }), element("span", { class: "more" }), element("span", { class: "more" }));
    node.addEventListener("click", () => {
      onlyModel = onlyModel === name ? null : name;
      page = 0;
      models(last);
      showWorkers();
      decisions(last);
    });
    return node;
  }

  const ROLL_SHOWN_S = 120;

  /** What /admin/rollout says; null where no roll-out runs. */
  function roll(status) {
    const recent = status && last && last.time_unix_s - status.when_unix_s < ROLL_SHOWN_S && status.generation > 1;
    get("roll-panel").hidden = !status || !(recent || status.state !== "complete" || status.canaries.length);
    if (!status) return;
    if (status.generation > 1) {
      const began = { kind: "roll", text: `generation ${status.generation} by ${status.who}${status.why ? `: ${status.why}` : ""}`, time_unix_s: status.when_unix_s };
      if (!rolled.some((one) => one.text === began.text)) rolled = [...rolled.slice(-50), began];
    }
    const there = status.workers, done = there.filter((one) => one.as_wanted && one.phase === "ready").length;
    setText(get("roll-state"), `generation ${status.generation}, ${status.paused ? "paused" : status.state}`);
    bar(get("roll-bar"), there.length ? [["k0", done / there.length]] : []);
    setText(get("roll-why"), [status.cause, ...status.waits].filter(Boolean).join("; ") || `${done} of ${there.length} workers as wanted`);
    const under = there.filter((one) => !one.as_wanted || one.phase !== "ready").slice(0, 12);
    keyed(get("roll-workers"), under, (one) => one.worker_id, () => element("li", {}, element("span", { class: "id" }), element("span")), (node, one) => {
      setText(node.children[0], one.worker_id);
      setText(node.children[1], [one.as_wanted ? "" : "leaves,", one.phase, one.cause].filter(Boolean).join(" "));
    });
  }

  // ----------------------------------------------------------------- decisions

  const HEADS = ["", "", "Prompt", "Cached", "TTFT", "State"];

  function decisionRow(one) {
    const cells = HEADS.map((head, at) => element("td", { class: at > 1 && at < 5 ? "right" : "", ...(head ? { data: { label: head } } : {}) }));
    const why = element("button", { type: "button", class: "id link" });
    why.addEventListener("click", () => showDecision(row.request_));
    cells[1].append(why, element("div", { class: "more" }));
    const row = element("tr", { class: first || seen.has(one.request_id) ? "" : "new" }, ...cells);
    seen.add(one.request_id);
    return row;
  }

  async function showDecision(one) {
    const block = workers.get(one.worker_id)?.block_size;
    setText(get("decision-title"), `Why ${one.worker_id}?`);
    setText(get("decision-reason"), [one.reason, one.disaggregation].filter(Boolean).join("; "));
    get("decision-scores").replaceChildren();
    const parts = block && one.cached_tokens !== null ? partsOf(one.prompt_tokens, one.cached_tokens, block, { elsewhere: one.prefill_worker ?? "" }) : [];
    get("decision-blocks").replaceChildren(...promptBlocks(block, parts));
    setText(get("decision-facts"), [
      `${one.model}, policy ${one.policy}`, `request ${one.request_id}`, one.principal ? `from ${one.principal}` : "",
      one.migrated_from.length ? `moved from ${one.migrated_from.join(", ")}` : "", one.duration_s === null ? "" : `${time(one.duration_s)} in all`, one.error ?? "",
    ].filter(Boolean).join(" · "));
    get("decision-dialog").showModal();
    const answer = await api(`admin/live/decision?request=${encodeURIComponent(one.request_id)}`).catch(() => null);
    if (!answer?.ok) return;
    const found = await answer.json();
    get("decision-scores").replaceChildren(...scoreBars(found.worker_id, found.scores, found.left_out));
  }

  function fillDecision(row, one) {
    row.request_ = one;
    const cells = row.children, chain = [...one.migrated_from, one.worker_id];
    setText(cells[0], clock(one.time_unix_s));
    const path = one.prefill_worker ? `${one.prefill_worker} ⇒ ${one.worker_id}` : chain.join(" → ");
    setText(cells[1].children[0], path);
    const who = one.principal ? ` · ${one.principal}` : "";
    const disagg = one.disaggregation ? ` · ${one.disaggregation}` : "";
    setText(cells[1].children[1], `${one.reason}${disagg}${who}`);
    row.title = `${one.model}, policy ${one.policy}, request ${one.request_id}`;
    setText(cells[2], number(one.prompt_tokens));
    setText(cells[3], one.cached_tokens === null ? "–" : percent(one.cached_tokens / Math.max(1, one.prompt_tokens)));
    setText(cells[4], time(one.ttft_s));
    setText(cells[5], one.state === "done" ? `${number(one.generated_tokens)} tokens` : one.state);
    cells[5].title = one.error || "";
    cells[5].className = one.state;
  }

  function decisions({ recent, requests }) {
    setText(get("decisions-count"), requests.routed_per_s ? `${number(requests.routed_per_s)}/s` : "");
    if (paused) return;
    const shown = onlyModel ? recent.filter((one) => one.model === onlyModel) : recent;
    keyed(get("decisions").tBodies[0], shown, (one) => one.request_id, decisionRow, fillDecision);
    if (seen.size > 2000) { seen.clear(); recent.forEach((one) => seen.add(one.request_id)); }
    first = false;
    get("decisions").hidden = !shown.length;
    get("decisions-empty").hidden = shown.length > 0;
  }

  get("pause").addEventListener("click", () => {
    paused = !paused;
    get("pause").setAttribute("aria-pressed", String(paused));
    setText(get("pause"), paused ? "Resume" : "Pause");
  });

  // ----------------------------------------------------------------- flows, principals, events

  function flow(snapshot) {
    const device = { used: 0, capacity: 0 }, tiers = new Map();
    for (const one of snapshot.workers) {
      if (one.load?.kv_capacity_blocks) {
        device.used += one.load.kv_used_blocks + one.load.kv_cached_blocks;
        device.capacity += one.load.kv_capacity_blocks;
      }
      for (const tier of one.tiers) {
        const sum = tiers.get(tier.name) ?? { blocks: 0, capacity: 0 };
        sum.blocks += tier.blocks;
        sum.capacity = tier.capacity_blocks === null || sum.capacity === null ? null : sum.capacity + tier.capacity_blocks;
        tiers.set(tier.name, sum);
      }
    }
    const nodes = [{ name: "device", part: device.capacity ? device.used / device.capacity : 0, note: device.capacity ? `${percent(device.used / device.capacity)} full` : "" }];
    for (const [name, sum] of tiers) nodes.push({ name, part: sum.capacity ? sum.blocks / sum.capacity : 0, note: `${number(sum.blocks)} blocks` });
    const edges = snapshot.flows.map((one) => ({ source: one.source, target: one.target, rate: one.blocks_per_s || 0, label: `${number(one.blocks_per_s)}/s` }));
    get("flow").hidden = nodes.length < 2;
    if (nodes.length > 1) flowDiagram(get("flow").querySelector("svg"), get("flow-text"), nodes, edges);
    const disaggregated = snapshot.workers.some((one) => one.role === "prefill");
    const nothing = nodes.length < 2 && !snapshot.handovers.length;
    get("flow-empty").hidden = !nothing;
    setText(get("flow-empty"), disaggregated ? "No prompt is prefilled elsewhere right now." : "KV stays in the workers' own memory: no storage tiers and no prefill workers are configured.");
    keyed(get("pairs"), snapshot.handovers.slice(0, 12), (one) => `${one.prefill}\n${one.decode}`, () => element("li", {}, element("span", { class: "id" }), element("span")), (node, one) => {
      setText(node.children[0], `${one.prefill} ⇒ ${one.decode}`);
      setText(node.children[1], `${number(one.per_s)}/s · ${bytes(one.bytes_per_s)}/s${one.failed ? ` · ${one.failed} failed` : ""}`);
    });
  }

  function principals(snapshot) {
    get("principals-panel").hidden = !snapshot.principals.length;
    setText(get("principals-count"), snapshot.principals_left_out ? `${snapshot.principals_left_out} more not shown` : "");
    keyed(get("principals").tBodies[0], snapshot.principals, (one) => one.name, () => element("tr", {}, ...[0, 1, 2, 3, 4].map(() => element("td"))), (row, one) => {
      const tokens = one.prompt_tokens_per_s === null ? null : one.prompt_tokens_per_s + one.output_tokens_per_s;
      [one.name, number(one.requests_per_s), number(tokens), percent(one.hit_rate), number(one.refused_per_s)].forEach((text, at) => setText(row.children[at], text));
    });
  }

  function planner({ planner: told }) {
    get("planner-panel").hidden = !told;
    if (!told) return;
    const known = told.kind !== undefined;
    setText(get("planner-does"), known ? `${told.kind} ${told.mode === "act" ? "acts" : "advises only"}, every ${number(told.interval_s)} s` : "");
    get("planner").hidden = !told.roles.length;
    keyed(get("planner").tBodies[0], told.roles, (one) => one.role, planRow, (row, one) => {
      setText(row.children[0].children[0], one.role);
      setText(row.children[0].children[1], one.reason);
      [one.desired, one.ready, one.starting, one.draining].forEach((count, at) => setText(row.children[at + 1], number(count)));
    });
    const lines = [
      ...told.warnings.map((text) => ({ text, at: "now" })),
      ...told.recent.map((one) => ({ text: one.text, at: clock(one.time) })),
    ];
    keyed(get("plans"), lines, (one) => `${one.at}\n${one.text}`, () => element("li", {}, element("time"), element("span")), (node, one) => {
      node.className = one.at === "now" ? "warning" : "";
      setText(node.children[0], one.at);
      setText(node.children[1], one.text);
    });
    get("plans-empty").hidden = known && lines.length > 0;
    setText(get("plans-empty"), known ? "Nothing has changed yet." : "No planner answers: it starts, or is away.");
  }

  const planRow = () => element("tr", {}, element("td", {}, element("div", { class: "id" }), element("div", { class: "more" })), ...[1, 2, 3, 4].map(() => element("td")));

  function events(snapshot) {
    const all = [
      ...snapshot.problems.map((text) => ({ kind: "problem", text, at: "now" })),
      ...snapshot.warnings.map((text) => ({ kind: "warning", text, at: "now" })),
      ...snapshot.events.map((one) => ({ ...one, at: clock(one.time_unix_s) })),
    ];
    keyed(get("events"), all, (one) => `${one.at}\n${one.kind}\n${one.text}`, () => element("li", {}, element("time"), element("span")), (node, one) => {
      node.className = one.at === "now" ? "warning" : "";
      setText(node.children[0], one.at);
      setText(node.children[1], `${one.kind}: ${one.text}`);
    });
    get("events-empty").hidden = all.length > 0;
  }

  function about(snapshot) {
    setText(get("version"), snapshot.version);
    const doors = snapshot.doors.map((one) => one.door).join(", ");
    const shown = snapshot.doors_not_shown
      ? `Shows only ${doors}; ${snapshot.doors_not_shown} other front doors serve this run, too, and do not answer here.`
      : snapshot.doors.length > 1 ? `Shows the whole run, all ${snapshot.doors.length} front doors: ${doors}.` : "Shows the whole run.";
    setText(get("foot"), `${shown} Rates are of the last ${Math.max(1, Math.round(snapshot.window_s))} s.`);
  }

  function happened(snapshot) {
    const { per_s: perS, failed_per_s: failed, refused_per_s: refused } = snapshot.requests;
    const planned = (snapshot.planner?.recent ?? []).map((one) => ({ kind: "planner", text: one.text, time_unix_s: one.time }));
    timeline.add(snapshot.time_unix_s, perS, (failed ?? 0) + (refused ?? 0), [...snapshot.events, ...planned, ...rolled]);
  }

  /** As if the page was opened now. */
  function forget() {
    for (const name of Object.keys(history)) delete history[name];
    gone.clear();
    workers = new Map();
    timeline.forget();
  }

  return {
    forget,
    roll,
    /** Tokens of a block at a worker; undefined if it is not known. */
    blockSize: (worker) => workers.get(worker)?.block_size,
    update(snapshot) {
      last = snapshot;
      tiles(snapshot);
      takeWorkers(snapshot);
      models(snapshot);
      happened(snapshot);
      decisions(snapshot);
      flow(snapshot);
      planner(snapshot);
      principals(snapshot);
      events(snapshot);
      about(snapshot);
    },
  };
}

/** Make the children of `parent` those of `items`, in order; nodes of items that stay are kept. */
function keyed(parent, items, keyOf, make, fill) {
  const known = (parent.nodes_ ??= new Map());
  if (!known.size && parent.firstChild) parent.replaceChildren();
  const wanted = new Set(items.map(keyOf));
  for (const [key, node] of known) {
    if (!wanted.has(key)) { node.remove(); known.delete(key); }
  }
  let next = parent.firstChild;
  items.forEach((item, at) => {
    const key = keyOf(item);
    let node = known.get(key);
    if (!node) { node = make(item); known.set(key, node); }
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
    fill(node, item, at);
  });
}
