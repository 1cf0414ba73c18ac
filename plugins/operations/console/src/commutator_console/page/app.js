// Connects to /admin/live and shows what comes; the page's key, theme and tabs.

import { startChat } from "./chat.js";
import { readRecording } from "./recording.js";
import { createView } from "./view.js";

const STALE_MS = 4000, HIDDEN_MS = 30000, PAUSES_MS = [300, 600, 1000, 1500];
const ROLL_EVERY_MS = 2000;
const get = (id) => document.getElementById(id);

// ------------------------------------------------------------------- the key

const STORE = "commutator.key";
let key = sessionStorage.getItem(STORE) || "";

const authorization = () => (key ? { Authorization: `Bearer ${key}` } : {});
const recorded = document.documentElement.dataset.recording; // in the documentation's copy
const recording = recorded ? readRecording(recorded) : null;
const api = async (path, options = {}) => recording ? (await recording).answer(path, options) : fetch(path, { ...options, headers: { ...authorization(), ...options.headers }, cache: "no-store", credentials: "omit" });
const view = createView(api);

function askForKey(reason) {
  if (reason) get("key-reason").textContent = key ? "This key is not valid." : reason;
  if (!get("key-dialog").open) get("key-dialog").showModal();
  get("key").value = key;
  get("key").select();
}

get("key-button").addEventListener("click", () => askForKey(""));
get("key-cancel").addEventListener("click", () => get("key-dialog").close());
get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = get("key").value.trim();
  if (key && get("keep").checked) sessionStorage.setItem(STORE, key);
  else sessionStorage.removeItem(STORE);
  get("key-dialog").close();
  connect();
  chat.refresh();
});

// ------------------------------------------------------------------- theme and tabs

const THEMES = ["auto", "light", "dark"];
function useTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  get("theme").textContent = `Theme: ${name}`;
  localStorage.setItem("commutator.theme", name);
}
const kept = localStorage.getItem("commutator.theme");
useTheme(THEMES.includes(kept) ? kept : "auto");
get("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || "auto";
  useTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});

const hasChat = document.documentElement.dataset.chat === "yes";
get("tab-chat").hidden = !hasChat;
function showTab() {
  const chosen = location.hash === "#chat" && hasChat ? "chat" : "live";
  for (const name of ["live", "chat"]) {
    get(name).hidden = name !== chosen;
    if (name === chosen) get(`tab-${name}`).setAttribute("aria-current", "page");
    else get(`tab-${name}`).removeAttribute("aria-current");
  }
  if (chosen === "chat") chat.opened();
}
const chat = startChat(api, () => Boolean(key), askForKey, view.blockSize);
get("test-request").addEventListener("click", () => chat.test().catch((error) => notice(error.message)));
addEventListener("hashchange", showTab);
showTab();

addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, dialog");
  if (event.key === "/" && !typing && !get("live").hidden) {
    event.preventDefault();
    get("filter").focus();
  }
});

// ------------------------------------------------------------------- the stream

let running = null, failures = 0, lastMs = 0, retry = 0;

function show(state, text) {
  const pill = get("status");
  if (pill.dataset.state !== state) pill.dataset.state = state;
  if (pill.textContent !== text) pill.textContent = text;
  get("live").classList.toggle("stale", state === "lost");
}

function notice(text) {
  get("notice").hidden = !text;
  get("notice").textContent = text;
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function connect() {
  clearTimeout(retry);
  if (running) running.abort();
  const mine = (running = new AbortController());
  let pauseMs = null;
  lastMs = performance.now();
  if (!key && document.documentElement.dataset.key === "yes") {
    show("lost", "no key");
    askForKey("");
    return;
  }
  try {
    await follow(mine.signal);
  } catch (error) {
    if (mine !== running) return; // another connection has taken its place
    if (error instanceof Refused) {
      show("lost", error.status === 401 || error.status === 403 ? "no access" : "refused");
      if (error.status !== 401) notice(error.message);
      else askForKey("This deployment has keys. The live view needs that of a principal with the permission “admin”.");
      if (error.status === 401 || error.status === 403 || error.status === 404) return; // until another key is given
      pauseMs = 5000;
    }
  }
  if (mine !== running || document.hidden) return;
  if (pauseMs === null) show("lost", "reconnecting");
  pauseMs ??= PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)];
  failures += 1;
  retry = setTimeout(connect, pauseMs);
}

async function follow(signal) {
  const answer = await api("admin/live", { signal });
  if (!answer.ok) {
    let message = `${answer.status} ${answer.statusText}`;
    try { message = (await answer.json()).error.message; } catch { /* not a front door's answer */ }
    throw new Refused(answer.status, message);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", first = true;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    const last = events.filter((one) => one.startsWith("event: snapshot\n")).pop();
    if (last) {
      const snapshot = JSON.parse(last.slice(last.indexOf("data: ") + 6));
      lastMs = performance.now();
      failures = 0;
      notice("");
      show(snapshot.status, snapshot.status);
      if (first) { rolls = snapshot.supervised; first = false; }
      view.update(snapshot);
      chat.models(snapshot.models);
      get("test-request").hidden = !hasChat || snapshot.recent.length > 0 || !snapshot.models.length;
    }
  }
}

setInterval(() => {
  if (running && performance.now() - lastMs > STALE_MS && failures === 0 && get("status").dataset.state !== "lost") connect();
}, 1000);

// Roll-outs are asked for beside the stream: another part of the front door knows them, if it is there.
let rolls = false;
setInterval(async () => {
  if (!rolls || document.hidden || get("status").dataset.state === "lost" || get("live").hidden) return;
  const answer = await api("admin/rollout").catch(() => null);
  if (answer?.ok) view.roll(await answer.json());
  else { rolls = false; view.roll(null); } // until the next connection
}, ROLL_EVERY_MS);

// A page that nobody looks at costs the front door nothing.
let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (recording) return;
  if (document.hidden) {
    hiding = setTimeout(() => { if (running) running.abort(); }, HIDDEN_MS);
  } else if (!running || running.signal.aborted) connect();
});

async function playRecording() {
  get("key-button").hidden = true;
  const play = (snapshot) => { show(snapshot.status, `a recording: ${snapshot.status}`); view.update(snapshot); };
  (await recording).play(play, view.forget);
}

if (recording) playRecording().catch((error) => { show("lost", "no recording"); notice(error.message); });
else connect();
