// A chat to try a model: streams answers and says who gave them.

import { element, number, percent, time } from "./charts.js";
import { partsOf, promptBlocks, scoreBars } from "./decision.js";
import { markdown } from "./markdown.js";

const get = (id) => document.getElementById(id);

/** Copies a text, and says on the button whether it did; without a secure address browsers refuse. */
async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

/** The request as a command for a POSIX shell. The key is left for the reader to set. */
function curl(body, withKey) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const parts = [`curl ${quoted(new URL("v1/chat/completions", document.baseURI).href)}`, "-H 'Content-Type: application/json'"];
  if (withKey) parts.push('-H "Authorization: Bearer $API_KEY"');
  return [...parts, `-d ${quoted(body)}`].join(" \\\n  ");
}

/** `api` as in `createView`; `blockSize(worker)` is the number of tokens of a block there, if it is known. */
export function startChat(api, hasKey, askForKey, blockSize) {
  const conversation = [];
  let stopping = null, names = [], asked = false;

  function models(found) {
    if (JSON.stringify(found) === JSON.stringify(names)) return;
    names = found;
    const chosen = get("model").value;
    get("model").replaceChildren(...names.map((name) => element("option", { value: name, textContent: name })));
    if (names.includes(chosen)) get("model").value = chosen;
  }

  /** Without the live view, as a key without the permission, the API says which models there are. */
  async function refresh() {
    if (document.documentElement.dataset.key === "yes" && !hasKey()) return;
    const answer = await api("v1/models");
    if (answer.ok) models((await answer.json()).data.map((one) => one.id));
    else if (answer.status === 401) askForKey("This deployment has keys. The chat needs one; the live view needs one with the permission “admin”.");
  }

  function say(role, text) {
    get("chat-empty").hidden = true;
    const node = element("div", { class: `message ${role}` }, document.createTextNode(text));
    get("messages").append(node);
    toEnd();
    return node;
  }

  function toEnd() {
    get("messages").scrollTop = get("messages").scrollHeight;
  }

  function button(name, text) {
    const made = element("button", { type: "button", class: "small", textContent: name });
    made.addEventListener("click", () => copy(text, made));
    return element("li", { class: "action" }, made);
  }

  function facts(found, answerText) {
    const list = element("ul", { class: "facts" });
    const add = (name, value) => list.append(element("li", {}, `${name} `, element("strong", { textContent: value })));
    if (found.worker) add("worker", found.worker);
    if (found.usage) {
      const { prompt_tokens: prompt, completion_tokens: answer, prompt_tokens_details: details } = found.usage;
      const cached = details?.cached_tokens ?? 0;
      add("cached", `${number(cached)} of ${number(prompt)} prompt tokens (${percent(cached / Math.max(1, prompt))})`);
      const spent = found.totalS - found.ttftS;
      add("answer", `${number(answer)} tokens${answer > 1 && spent > 0 ? `, ${number((answer - 1) / spent)}/s` : ""}`);
    }
    if (found.ttftS) add("TTFT", time(found.ttftS));
    if (found.decision) list.append(element("li", { class: "why" }, why(found)));
    if (answerText) list.append(button("Copy answer", answerText));
    list.append(button("Copy as curl", curl(found.body, hasKey())));
    get("messages").append(list);
    toEnd();
  }

  const send = (body, headers = {}, signal = null) => api("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json", ...headers }, body, signal });

  /** The reason in a line, and behind it the candidates' scores and where the prompt's blocks were. */
  function why({ decision, usage, worker }) {
    const candidates = decision.candidates ?? [];
    const summary = element("summary", { textContent: `Why this worker: ${decision.reason}` });
    const scores = Object.fromEntries(candidates.filter((one) => Object.keys(one.scores ?? {}).length).map((one) => [one.worker_id, one.scores]));
    const size = blockSize(worker), nodes = scoreBars(decision.worker_id, scores, decision.left_out ?? 0);
    if (usage && size) {
      const overlap = candidates.find((one) => one.worker_id === decision.worker_id)?.overlap_blocks ?? {};
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      nodes.push(...promptBlocks(size, partsOf(usage.prompt_tokens, cached, size, { overlap })));
    }
    return element("details", {}, summary, ...nodes);
  }

  async function ask(text) {
    say("user", text);
    conversation.push({ role: "user", content: text });
    const node = say("assistant", "…");
    const found = { worker: "", decision: null, usage: null, ttftS: 0, totalS: 0, body: "" };
    let answerText = "", drawing = 0;
    const draw = () => {
      drawing = 0;
      node.replaceChildren(...markdown(answerText, copy));
      toEnd();
    };
    stopping = new AbortController();
    get("send").textContent = "Stop";
    const began = performance.now();
    try {
      const body = JSON.stringify({
        model: get("model").value, messages: conversation, stream: true, stream_options: { include_usage: true },
        max_tokens: Number(get("max-tokens").value) || 256, temperature: Number(get("temperature").value) || 0,
      });
      found.body = body;
      let answer = await send(body, { "X-Commutator-Explain": "1" }, stopping.signal);
      if (answer.status === 403) answer = await send(body, {}, stopping.signal); // a key without the permission "explain"
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      found.worker = answer.headers.get("X-Commutator-Worker") || "";
      const decision = answer.headers.get("X-Commutator-Decision");
      if (decision) found.decision = JSON.parse(decision);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          if (!line.startsWith("data: {")) continue;
          const chunk = JSON.parse(line.slice(6));
          if (chunk.error) throw new Error(chunk.error.message);
          if (chunk.usage) found.usage = chunk.usage;
          const piece = chunk.choices?.[0]?.delta?.content;
          if (piece) {
            found.ttftS ||= (performance.now() - began) / 1000;
            answerText += piece;
            if (!drawing) drawing = requestAnimationFrame(draw);
          }
        }
        toEnd();
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        node.classList.add("error");
        answerText = answerText ? `${answerText}\n${error.message}` : error.message;
      }
    }
    found.totalS = (performance.now() - began) / 1000;
    cancelAnimationFrame(drawing);
    if (node.classList.contains("error")) node.replaceChildren(answerText);
    else { answerText ||= "(no text)"; draw(); }
    if (node.classList.contains("error")) conversation.pop();
    else conversation.push({ role: "assistant", content: answerText });
    facts(found, node.classList.contains("error") ? "" : answerText);
    stopping = null;
    get("send").textContent = "Send";
    get("question").focus();
  }

  get("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (stopping) { stopping.abort(); return; }
    const text = get("question").value.trim();
    if (!text) return;
    get("question").value = "";
    ask(text);
  });
  get("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!stopping) get("ask").requestSubmit();
    }
  });
  get("clear").addEventListener("click", () => {
    if (stopping) stopping.abort();
    conversation.length = 0;
    get("messages").replaceChildren(get("chat-empty"));
    get("chat-empty").hidden = false;
    get("question").focus();
  });

  /** One short request, to see something move. Raises an Error with what was refused. */
  async function test() {
    const body = JSON.stringify({ model: names[0], messages: [{ role: "user", content: "Hello! Count to five." }], max_tokens: 16 });
    const answer = await send(body);
    if (!answer.ok) throw new Error((await answer.json()).error.message);
  }

  const narrow = matchMedia("(max-width: 720px)");
  const unfold = () => { get("chat-options").open = !narrow.matches; };
  narrow.addEventListener("change", unfold);
  unfold();

  return {
    models,
    refresh,
    test,
    opened() {
      if (!asked) { asked = true; refresh(); }
      get("question").focus();
    },
  };
}
