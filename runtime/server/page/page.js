// The chat page: sends the conversation, shows the answer as it streams, and draws what each token cost.
// Text of the model goes into text nodes only. Nothing is kept but the settings, in this browser.
"use strict";

const MAX_TOKENS_SHOWN = 200;
const by = (id) => document.getElementById(id);
const dom = Object.fromEntries(
  ["model", "state", "new", "settings", "system", "temperature", "limit", "key", "chat", "empty", "messages", "times",
    "bytes", "tiers", "speed", "ttft", "hits", "read", "form", "progress", "bar", "progress-text", "error", "input",
    "send", "stop", "origin"].map((id) => [id, by(id)]),
);

let conversation = []; // what is sent: {role, content, reasoning_content?}
let running = null; // the AbortController of the answer in work
let tokens = []; // figures of each pass, the newest last

// ---- talking to the server ----

function headers() {
  const key = dom.key.value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const frames = held.split("\n\n");
    held = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue; // a keep-alive
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function look() {
  try {
    const response = await fetch("status", { headers: headers() });
    if (!response.ok) throw new Error(await errorOf(response));
    const status = await response.json();
    const waiting = status.queue.waiting.length;
    const busy = status.queue.running ? ` · ${status.queue.running.phase}${waiting ? `, ${waiting} waiting` : ""}` : "";
    show(status.state === "ready", `${status.state}${status.engine ? ` · ${status.engine.device}` : ""}${busy}`);
    if (!dom.model.options.length) await listModels();
  } catch (error) {
    show(false, error.message === "Failed to fetch" ? "the server cannot be reached" : error.message);
  }
}

function show(isReady, text) {
  dom.state.className = `state ${isReady ? "ready" : "off"}`;
  if (dom.state.textContent !== text) dom.state.textContent = text;
}

async function listModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) return;
  const wanted = localStorage.getItem("model");
  for (const { id } of (await response.json()).data) {
    dom.model.add(new Option(id, id, false, id === wanted));
  }
}

// ---- the conversation ----

function addMessage(role, text) {
  dom.empty.hidden = true;
  const item = document.createElement("li");
  item.className = `message ${role}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "You: " : "Model: ";
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  item.append(who, body);
  dom.messages.append(item);
  scrollDown(true);
  return item;
}

function reasoningOf(item) {
  let fold = item.querySelector(".reasoning");
  if (!fold) {
    fold = document.createElement("details");
    fold.className = "reasoning";
    const title = document.createElement("summary");
    title.textContent = "Reasoning";
    const text = document.createElement("div");
    text.className = "text";
    fold.append(title, text);
    item.insertBefore(fold, item.querySelector(":scope > .text"));
  }
  return fold;
}

function scrollDown(always) {
  const box = dom.chat.scrollHeight > dom.chat.clientHeight + 4 ? dom.chat : dom.chat.parentElement;
  const isNearEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 120;
  if (always || isNearEnd) (box === dom.chat ? box : dom.messages.lastElementChild).scrollIntoView?.({ block: "end" });
  if (box === dom.chat && (always || isNearEnd)) box.scrollTop = box.scrollHeight;
}

async function answer() {
  const item = addMessage("assistant", "");
  item.classList.add("writing");
  dom.error.hidden = true;
  running = new AbortController();
  setBusy(true);
  tokens = [];
  draw();
  const started = performance.now();
  const state = { content: "", reasoning: "", first: null, timings: null, reason: null, error: null };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(requestBody()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      take(chunk, item, state, started);
    }
    if (!state.reason) throw new Error("the answer broke off: the connection was closed");
  } catch (error) {
    if (error.name === "AbortError") state.reason = "stopped";
    else state.error = error.message;
  }
  finish(item, state);
}

function requestBody() {
  const system = dom.system.value.trim();
  const temperature = dom.temperature.value;
  const limit = Number(dom.limit.value);
  return {
    model: dom.model.value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    stream: true, timings_per_token: true, return_progress: true,
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    ...(limit > 0 ? { max_tokens: limit } : {}),
  };
}

function take(chunk, item, state, started) {
  if (chunk.prompt_progress) showProgress(chunk.prompt_progress);
  const choice = chunk.choices[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning } = choice.delta;
  if ((content || reasoning) && state.first === null) {
    state.first = performance.now() - started;
    dom.progress.hidden = true;
    dom.ttft.textContent = seconds(state.first);
  }
  if (reasoning) {
    state.reasoning += reasoning;
    reasoningOf(item).querySelector(".text").textContent = state.reasoning;
  }
  if (content) {
    state.content += content;
    item.querySelector(":scope > .text").textContent = state.content;
  }
  if (content || reasoning) scrollDown(false);
  if (choice.finish_reason) {
    state.reason = choice.finish_reason;
    state.timings = chunk.timings;
  } else if (chunk.timings) {
    tokens.push(chunk.timings);
    scheduleDraw();
  }
}

function finish(item, state) {
  running = null;
  setBusy(false);
  dom.progress.hidden = true;
  item.classList.remove("writing");
  const isEmpty = !state.content && !state.reasoning;
  if (isEmpty && !state.reason) {
    item.remove(); // an error and nothing else: the question stays, Retry asks it again
  } else {
    conversation.push({ role: "assistant", content: state.content,
      ...(state.reasoning ? { reasoning_content: state.reasoning } : {}) });
    note(item, state);
  }
  if (state.error) fail(state.error, item.isConnected ? item : null);
  draw();
  dom.input.focus();
}

function note(item, state) {
  const line = document.createElement("p");
  line.className = "note";
  const facts = [];
  const t = state.timings;
  if (t) {
    facts.push(`${t.predicted_n} tokens`, `${t.predicted_per_second.toFixed(1)} tok/s`,
      `first after ${seconds(t.ttft_ms)}`, `prompt ${t.cache_n + t.prompt_n} tokens, ${t.cache_n} cached`);
  }
  if (state.reason === "length") facts.push("cut at the limit");
  if (state.reason === "stopped") facts.push("stopped");
  if (!state.reason) facts.push("broken off");
  line.append(facts.join(" · "));
  const retry = document.createElement("button");
  retry.type = "button";
  retry.textContent = "Retry";
  retry.addEventListener("click", () => again(item));
  line.append(retry);
  for (const old of dom.messages.querySelectorAll(".note button")) old.remove();
  item.append(line);
  scrollDown(false);
}

function again(item) {
  if (running) return;
  if (item) {
    item.remove();
    conversation.pop();
  }
  answer();
}

function fail(message, item) {
  const retry = document.createElement("button");
  retry.type = "button";
  retry.textContent = "Retry";
  retry.addEventListener("click", () => again(item));
  dom.error.replaceChildren(`${message} `, retry);
  dom.error.hidden = false;
}

function setBusy(isBusy) {
  dom.send.hidden = isBusy;
  dom.stop.hidden = !isBusy;
}

function showProgress(progress) {
  dom.progress.hidden = false;
  if (progress.queued_behind !== undefined) {
    dom.bar.removeAttribute("value");
    dom["progress-text"].textContent = `waiting behind ${progress.queued_behind}`;
    return;
  }
  dom.bar.value = progress.processed / progress.total;
  dom["progress-text"].textContent = `reading the prompt: ${progress.processed} of ${progress.total} tokens`;
}

// ---- the picture ----

let isDrawScheduled = false;

function scheduleDraw() {
  if (isDrawScheduled) return;
  isDrawScheduled = true;
  requestAnimationFrame(() => {
    isDrawScheduled = false;
    draw();
  });
}

function draw() {
  const shown = tokens.slice(-MAX_TOKENS_SHOWN);
  stack(dom.times, shown, [["host_ms", "--host"], ["device_ms", "--device"], ["rows_ms", "--rows"],
    ["drive_ms", "--drive"]], (value) => `${value.toFixed(value < 10 ? 1 : 0)} ms`);
  stack(dom.bytes, shown, [["pcie_nbytes", "--device"], ["drive_nbytes", "--drive"]], nbytes);
  const sum = (key) => tokens.reduce((total, token) => total + token[key], 0);
  const tiers = { vram: sum("vram_hits"), ram: sum("ram_hits"), late: sum("late"), drive: sum("misses") };
  const all = Object.values(tiers).reduce((a, b) => a + b, 0);
  dom.tiers.replaceChildren();
  for (const [tier, count] of Object.entries(tiers)) {
    by(`tier-${tier}`).textContent = all ? `${((100 * count) / all).toFixed(1)} %` : "–";
    if (!count) continue;
    const part = document.createElement("span");
    part.className = tier;
    part.style.width = `${(100 * count) / all}%`;
    dom.tiers.append(part);
  }
  const made = sum("tokens");
  const ms = sum("total_ms");
  dom.speed.textContent = ms ? `${((1000 * made) / ms).toFixed(1)} tok/s` : "–";
  dom.hits.textContent = all ? `${((100 * (tiers.vram + tiers.ram)) / all).toFixed(1)} %` : "–";
  dom.read.textContent = made ? nbytes(sum("drive_nbytes") / made) : "–";
  if (!tokens.length && !running) dom.ttft.textContent = "–";
}

function stack(canvas, shown, parts, format) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 300;
  const height = Number(canvas.getAttribute("height-css") || canvas.height / (canvas.dataset.scale || 1));
  canvas.dataset.scale = scale;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.clearRect(0, 0, width, height);
  const top = Math.max(...shown.map((token) => parts.reduce((s, [key]) => s + token[key], 0)), 0);
  const floor = height - 2;
  pen.strokeStyle = colour("--line");
  pen.beginPath();
  pen.moveTo(0, floor + 1.5);
  pen.lineTo(width, floor + 1.5);
  pen.stroke();
  if (!top) return;
  const step = Math.min(12, width / shown.length);
  shown.forEach((token, i) => {
    let y = floor;
    for (const [key, name] of parts) {
      const h = (token[key] / top) * (floor - 16);
      pen.fillStyle = colour(name);
      pen.fillRect(i * step, y - h, Math.max(1, step - (step > 3 ? 1 : 0)), h);
      y -= h;
    }
  });
  pen.fillStyle = colour("--quiet");
  pen.font = "12px system-ui, sans-serif";
  pen.fillText(`most: ${format(top)}`, 2, 11);
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

function nbytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  while (count >= 1024 && i < units.length - 1) {
    count /= 1024;
    i += 1;
  }
  return `${count.toFixed(i && count < 100 ? 1 : 0)} ${units[i]}`;
}

// ---- what a person does ----

function send() {
  const text = dom.input.value;
  if (running || !text.trim()) return;
  // a question that got no answer is asked anew with this one
  dom.input.value = "";
  grow();
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  answer();
}

function stop() {
  running?.abort();
}

function grow() {
  dom.input.style.height = "auto";
  dom.input.style.height = `${dom.input.scrollHeight + 2}px`;
}

dom.form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
dom.input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
dom.input.addEventListener("input", grow);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
dom.stop.addEventListener("click", stop);
dom.new.addEventListener("click", () => {
  stop();
  conversation = [];
  tokens = [];
  dom.messages.replaceChildren();
  dom.empty.hidden = false;
  dom.error.hidden = true;
  draw();
  dom.input.focus();
});
for (const name of ["system", "temperature", "limit", "key"]) {
  const kept = name === "key" ? sessionStorage : localStorage;
  dom[name].value = kept.getItem(name) ?? dom[name].value;
  dom[name].addEventListener("change", () => {
    kept.setItem(name, dom[name].value);
    if (name === "key") look();
  });
}
dom.model.addEventListener("change", () => localStorage.setItem("model", dom.model.value));
window.addEventListener("resize", scheduleDraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", scheduleDraw);
dom.origin.textContent = location.origin;
draw();
look();
setInterval(look, 3000);
