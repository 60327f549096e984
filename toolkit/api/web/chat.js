
// The page: conversations, the model's answers, figures of the server, settings.

const $ = (id) => document.getElementById(id);
const MAX_PASTE = 2000; // characters; longer pasted text becomes an attachment
const MAX_FILE = 2 ** 20; // bytes of a text file
const MAX_SIDE = 2048; // pixels of a picture; larger ones are made smaller
const POLL = 1000; // milliseconds between two readings of the server's load
const MIN_TIME = 20; // milliseconds of an answer whose speed is shown
const MAX_SILENCE = 5; // readings of the load without word of an answer that another tab gets
const SAVE = 1000; // milliseconds between two savings of an answer that grows
const KEPT = 0.5; // part of the context that is sent once the oldest turns are left out
const RESERVED = 0.125; // part of the context for the answer
const IDEAS = [
  "What is a KV cache?",
  "Write a Python function that merges two sorted lists",
  "Compare TTFT and throughput in a table",
];

let store; // Store
let models = []; // model cards of the server
let conversations = []; // the newest first
let current; // the conversation on the screen; in `conversations` once it has a turn
let attached = []; // {name, text} and {name, picture} of the message being written
let editing = null; // index of the turn whose question is being edited
let failure = ""; // to read the server's load
let isFollowing = true; // the end of the conversation stays in view
const jobs = new Map(); // id of a conversation: AbortController, while this tab gets its answer
const views = new WeakMap(); // turn: TurnView
const silence = new WeakMap(); // conversation: readings since it came from another tab
const settings = readStorage("localStorage", "tk-settings", {});

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  svg.setAttribute("aria-hidden", "true");
  return svg;
}

function iconButton(name, label, onclick, kind = "") {
  const attributes = { type: "button", class: `icon ${kind}`, "aria-label": label, title: label };
  return el("button", { ...attributes, onclick }, icon(name));
}

function announce(text) {
  $("announced").textContent = text;
}

/** Show a message for some seconds, with a way back. */
function toast(text, undo) {
  const box = $("toast");
  const hide = () => (box.hidden = true);
  box.replaceChildren(text);
  if (undo) {
    box.append(el("button", { class: "small", onclick: () => (hide(), undo()) }, "Undo"));
  }
  box.hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(hide, 6000);
}

// Models

function chosen() {
  return models.find((one) => one.id === $("model").value) ?? models[0];
}

const takesPictures = () => Boolean(chosen()?.input_modalities.includes("image"));
const canChat = () => Boolean(chosen()?.tasks.includes("chat"));
const canAnswer = () => Boolean(chosen()?.tasks.includes("generate"));

async function loadModels() {
  models = (await (await send("v1/models")).json()).data;
  const options = (cards) => cards.map((one) => el("option", { value: one.id }, one.id));
  const bases = models.filter((one) => one.parent === null);
  const groups = bases
    .map((base) => [base.id, models.filter((one) => one.parent === base.id)])
    .filter(([, adapters]) => adapters.length);
  $("model").replaceChildren(...options(bases), ...groups.map(([name, adapters]) =>
    el("optgroup", { label: `Adapters of ${name}` }, ...options(adapters))));
  $("model").disabled = models.length < 2;
  chooseModel(current.model ?? settings.model);
}

function chooseModel(name) {
  if (models.some((one) => one.id === name)) $("model").value = name;
  showModel();
}

/** Show what the chosen model can do. */
function showModel() {
  const model = chosen();
  if (!model) return;
  document.title = `${model.id} · tk`;
  const facts = [`${model.max_model_len.toLocaleString("en")} tokens of context`];
  if (model.parent) facts.unshift(`adapter of ${model.parent}`);
  if (takesPictures()) facts.push("takes pictures");
  if (!canAnswer()) facts.push((model.tasks.includes("transcription") ?
    "transcribes sound" : "makes no text") + ": use its API");
  else if (!canChat()) facts.push("no chat template: it continues your text");
  $("empty-name").textContent = model.id;
  $("empty-facts").textContent = facts.join(" · ");
  $("text").placeholder = canChat() || !canAnswer() ? `Message ${model.id}` : "The sea is";
  $("text").disabled = $("attach").disabled = !canAnswer();
  $("ideas").replaceChildren(...(canChat() ? IDEAS : []).map((text) =>
    el("button", { onclick: () => ask(text, []) }, text)));
  showSend();
}

// Conversations

function newConversation() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "New conversation", updated: 0, model: null, skipped: 0, turns: [] };
}

const answerOf = (turn) => turn?.answers[turn.shown];

/** Return whether a conversation is being answered, in this tab or another. */
const isRunning = ({ turns }) => answerOf(turns.at(-1))?.state === "running";

function show(conversation) {
  isFollowing ||= conversation.id !== current.id;
  current = conversation;
  const hash = conversation.turns.length ? `#${conversation.id}` : location.pathname;
  history.replaceState(null, "", hash);
  if (models.length) chooseModel(conversation.model ?? $("model").value);
  $("turns").replaceChildren(...conversation.turns.map((turn) => viewOf(turn).node));
  for (const turn of conversation.turns) viewOf(turn).update();
  cancelEdit();
  showList();
  showSend();
  showFigures();
  follow();
}

/** Open a conversation, and be ready to write. On a touch screen that would open the keyboard. */
function enter(conversation) {
  show(conversation);
  openSide(false);
  write();
}

function write() {
  if (!isTouch()) $("text").focus();
}

const isTouch = () => matchMedia("(pointer: coarse)").matches;

function showList() {
  $("empty").hidden = current.turns.length > 0;
  $("list").replaceChildren(...conversations.map((one) => el("li", {},
    el("button", {
      class: isRunning(one) ? "open busy" : "open",
      "aria-current": one === current ? "true" : undefined, onclick: () => enter(one),
    }, el("span", {}, one.title)),
    iconButton("edit", `Rename ${one.title}`, () => rename(one)),
    iconButton("delete", `Delete ${one.title}`, () => remove([one])))));
}

function rename(conversation) {
  conversation.title = prompt("Title", conversation.title)?.trim() || conversation.title;
  save(conversation);
  showList();
}

async function save(conversation) {
  conversation.updated = Date.now();
  list([conversation]);
  try {
    await store.put(conversation);
  } catch {
    toast("The browser's storage is full: this conversation is not kept.");
  }
}

/** Put conversations in the place of those with their ids, the newest first. */
function list(changed) {
  const ids = changed.map((one) => one.id);
  conversations = conversations.filter((one) => !ids.includes(one.id));
  conversations.push(...changed.filter((one) => one.turns));
  conversations.sort((a, b) => b.updated - a.updated);
}

async function remove(gone) {
  for (const one of gone) receive({ id: one.id });
  write();
  for (const one of gone) await store.remove(one.id);
  toast(gone.length === 1 ? "Conversation deleted." : "Conversations deleted.", async () => {
    list(gone);
    showList();
    for (const one of gone) await store.put(one);
  });
}

/** Take over a conversation that another tab has changed, stopped or deleted. */
function receive(found) {
  const isDeleted = !found.turns;
  const job = jobs.get(found.id);
  if (isDeleted || !isRunning(found)) job?.abort();
  if (job && !isDeleted) { // this tab has more of the answer
    conversations.find(({ id }) => id === found.id).title = found.title;
    return showList();
  }
  list([found]);
  if (found.id === current.id) show(isDeleted ? newConversation() : found);
  else showList();
}

/** Ask the other tabs for the answers that they get. One that no tab has is lost. */
function askTabs() {
  const theirs = conversations.filter((one) => isRunning(one) && !jobs.has(one.id));
  if (theirs.length) store.tabs.postMessage(null);
  for (const one of theirs) {
    silence.set(one, (silence.get(one) ?? 0) + 1);
    if (silence.get(one) > MAX_SILENCE) {
      answerOf(one.turns.at(-1)).state = "lost";
      receive(one);
    }
  }
}

// Turns

function viewOf(turn) {
  if (!views.has(turn)) views.set(turn, new TurnView(turn));
  return views.get(turn);
}

/** Nodes of a question and of the answer that is shown. */
class TurnView {
  constructor(turn) {
    this.turn = turn;
    const markdown = () => new MarkdownView(el("div", { class: "md", dir: "auto" }));
    this.thoughts = markdown();
    this.summary = el("summary");
    this.folded = el("details", { class: "thoughts" }, this.summary, this.thoughts.node);
    this.text = markdown();
    this.note = el("p", { class: "note" });
    this.error = el("p", { class: "error" });
    this.waiting = el("span", { class: "waiting" });
    this.bar = el("div", { class: "bar" });
    this.answer = el("article", { class: "answer" },
      this.folded, this.text.node, this.waiting, this.note, this.error, this.bar);
    this.node = el("div", { class: "turn" }, this.question(), this.answer);
    this.update();
  }

  question() {
    const { text, files, pictures } = this.turn.question;
    const parts = files.map((one) => el("details", {}, el("summary", {}, one.name),
      el("pre", { tabindex: 0 }, one.text)));
    if (pictures.length) {
      parts.unshift(el("div", { class: "pictures" }, ...pictures.map((one) =>
        el("img", { src: one.picture, alt: one.name }))));
    }
    if (text) parts.push(el("div", { class: "body", dir: "auto" }, text));
    return el("article", { class: "question", "aria-label": "You" }, ...parts,
      el("div", { class: "bar" },
        iconButton("copy", "Copy question", (event) => copy(event, text)),
        iconButton("edit", "Edit question", () => edit(this.turn))));
  }

  /** Show the answer as it is now. */
  update() {
    const answer = answerOf(this.turn);
    if (!answer) return;
    const isRunning = answer.state === "running";
    this.answer.setAttribute("aria-label", `Answer of ${answer.model}`);
    this.answer.setAttribute("aria-busy", isRunning);
    this.folded.hidden = !answer.reasoning;
    this.summary.textContent = isRunning && !answer.text ? "Reasoning …" : "Reasoning";
    if (answer.reasoning) this.thoughts.update(answer.reasoning);
    this.text.update(answer.text);
    this.waiting.hidden = !isRunning || Boolean(answer.text);
    this.note.textContent = NOTES[answer.state] ?? "";
    this.note.hidden = !this.note.textContent;
    this.error.textContent = answer.error ?? "";
    this.error.hidden = !answer.error;
    if (this.buttonsOf !== answer || this.wasRunning !== isRunning) this.makeBar(answer, isRunning);
    [this.buttonsOf, this.wasRunning] = [answer, isRunning];
    this.facts.textContent = factsOf(answer);
  }

  makeBar(answer, isRunning) {
    const { answers, shown } = this.turn;
    this.facts = el("span", { class: "facts" });
    const turnTo = (step) => () => {
      this.turn.shown += step;
      this.update();
      this.bar.querySelector(".version:not(:disabled)").focus();
      save(current);
    };
    const versions = answers.length < 2 ? [] : [
      iconButton("left", "Answer before", turnTo(-1), "version"),
      el("span", {}, `${shown + 1}/${answers.length}`),
      iconButton("right", "Answer after", turnTo(1), "version"),
    ];
    if (versions.length) {
      versions[0].disabled = shown === 0;
      versions[2].disabled = shown === answers.length - 1;
    }
    this.bar.replaceChildren(...(isRunning ? [] : [
      iconButton("copy", "Copy answer", (event) => copy(event, answer.text)),
      iconButton("retry", "Answer again", () => regenerate(this.turn), "retry"),
      ...versions,
    ]), this.facts);
  }
}

const NOTES = {
  stopped: "Stopped.",
  cut: "Cut at the maximum number of tokens, or the end of the context.",
  lost: "This answer was interrupted.",
};

function factsOf(answer) {
  const facts = [];
  if (models.length > 1) facts.push(answer.model);
  if (answer.speed) facts.push(`${number(answer.speed)} tok/s`);
  if (answer.ttft !== undefined) facts.push(`TTFT ${time(answer.ttft)}`);
  if (answer.tokens) facts.push(`${answer.tokens.toLocaleString("en")} tokens`);
  if (answer.prompt && answer.context) {
    const used = (answer.prompt + answer.tokens) / answer.context;
    facts.push(`context ${Math.round(100 * used)}%`);
  }
  if (answer.skipped) facts.push(`${answer.skipped} oldest left out`);
  return facts.join(" · ");
}

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const time = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

async function copy(event, text) {
  const button = event.currentTarget;
  const before = button.firstChild;
  await copyText(text);
  button.replaceChildren(icon("check"));
  announce("Copied");
  setTimeout(() => button.replaceChildren(before), 1500);
}

function follow() {
  if (isFollowing) $("talk").scrollTop = $("talk").scrollHeight;
}

// Asking

function ask(text, attachments) {
  const files = attachments.filter((one) => one.text !== undefined);
  const pictures = attachments.filter((one) => one.picture);
  const question = { text, files, pictures };
  const conversation = current;
  if (editing !== null) conversation.turns.length = editing;
  conversation.skipped = Math.min(conversation.skipped, conversation.turns.length);
  if (!conversation.turns.length) {
    const title = text || attachments[0].name;
    conversation.title = title.trim().split("\n")[0].slice(0, 80);
  }
  const turn = { question, answers: [], shown: 0 };
  conversation.turns.push(turn);
  show(conversation);
  answerTurn(conversation, turn);
}

function regenerate(turn) {
  if (isRunning(current)) return;
  $("talk").focus();
  answerTurn(current, turn);
}

/** Get an answer, and show it while it grows. */
async function answerTurn(conversation, turn) {
  isFollowing = true;
  const card = chosen();
  const answer = { text: "", reasoning: "", model: card.id, state: "running",
    context: card.max_model_len };
  const job = new AbortController();
  jobs.set(conversation.id, job);
  turn.answers = turn.answers.filter((one) => one.text || one.reasoning); // without failed ones
  turn.shown = turn.answers.push(answer) - 1;
  conversation.model = settings.model = card.id;
  writeStorage("localStorage", "tk-settings", settings);
  $("turns").append(viewOf(turn).node);
  const update = () => {
    viewOf(turn).update();
    if (current === conversation) {
      showFigures();
      follow();
    }
  };
  update();
  save(conversation);
  history.replaceState(null, "", `#${conversation.id}`);
  showList();
  showSend();
  announce("Answering");
  let isDrawing = false, saved = performance.now();
  const draw = () => {
    if (isDrawing) return;
    isDrawing = true;
    requestAnimationFrame(() => ((isDrawing = false), update()));
  };
  try {
    await readAnswer(conversation, answer, job.signal, () => {
      draw();
      if (performance.now() - saved > SAVE && conversations.includes(conversation)) {
        saved = performance.now();
        save(conversation);
      }
    });
  } catch (error) {
    answer.state = error.name === "AbortError" ? "stopped" : "failed";
    if (answer.state === "failed") answer.error = error.message;
    if (error.status === 401) askKey();
  }
  jobs.delete(conversation.id);
  update();
  if (conversations.includes(conversation)) await save(conversation);
  showList();
  showSend();
  if (current === conversation) {
    announce(answer.error ?? `Answer: ${viewOf(turn).text.node.textContent.slice(0, 2000)}`);
  }
}

/** Add the stream of an answer to it. Raises ServerError, or AbortError if it is stopped. */
async function readAnswer(conversation, answer, signal, changed) {
  const began = performance.now();
  const response = await sendTurns(conversation, signal);
  answer.skipped = conversation.skipped;
  let first, before = 0, state = "done";
  for await (const event of readEvents(response)) {
    const choice = event.choices[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    const reasoning = choice?.delta?.reasoning_content ?? "";
    const now = performance.now();
    answer.tokens = event.usage?.completion_tokens ?? answer.tokens;
    answer.prompt = event.usage?.prompt_tokens ?? answer.prompt;
    if (text || reasoning) {
      if (first === undefined) {
        [first, before] = [now, answer.tokens];
        answer.ttft = first - began;
      } else if (now - first > MIN_TIME && answer.tokens > before) {
        answer.speed = (1000 * (answer.tokens - before)) / (now - first);
      }
      answer.text += text;
      answer.reasoning += reasoning;
    }
    if (choice?.finish_reason) {
      const states = { length: "cut", abort: "stopped" };
      state = states[choice.finish_reason] ?? "done";
    }
    changed();
  }
  answer.state = state;
}

/** Send a conversation. The oldest turns are left out if the context is too short for all. */
async function sendTurns(conversation, signal) {
  const card = chosen();
  const { turns } = conversation;
  const last = answerOf(turns.at(-2));
  if (last?.prompt && last.context === card.max_model_len) {
    let size = last.prompt + last.tokens + Math.ceil(textOf(turns.at(-1).question).length / 3);
    if (size > (1 - RESERVED) * card.max_model_len) {
      while (size > KEPT * card.max_model_len && conversation.skipped < turns.length - 1) {
        const sent = turns.slice(conversation.skipped++);
        size -= (size * lengthOf(sent[0])) / sent.reduce((sum, one) => sum + lengthOf(one), 1);
      }
    }
  }
  for (;;) {
    try {
      return await send(...request(card.id, turns.slice(conversation.skipped), signal));
    } catch (error) {
      const isLong = error.code === "context_length_exceeded";
      if (!isLong || conversation.skipped >= turns.length - 1) throw error;
      conversation.skipped++;
    }
  }
}

function lengthOf(turn) {
  return textOf(turn.question).length + (answerOf(turn)?.text.length ?? 0);
}

/** Return the path and the options of a request for the last turn's answer. */
function request(model, turns, signal) {
  const body = {
    model, stream: true, ...sampling(),
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  const before = (turn) => turn !== turns.at(-1) && answerOf(turn)?.text;
  if (!canChat()) {
    body.prompt = turns.map((one) => textOf(one.question) + (before(one) || "")).join("");
    body.max_tokens ??= 256;
    delete body.reasoning_effort;
    return ["v1/completions", { body, signal }];
  }
  body.messages = turns.flatMap((turn) => [
    { role: "user", content: contentOf(turn.question) },
    ...(before(turn) ? [{ role: "assistant", content: before(turn) }] : []),
  ]);
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  return ["v1/chat/completions", { body, signal }];
}

function textOf({ text, files }) {
  const parts = files.map((one) => {
    const marks = one.text.match(/`{3,}/g) ?? [];
    const fence = "`".repeat(Math.max(3, ...marks.map((mark) => mark.length + 1)));
    return `${one.name}:\n${fence}\n${one.text}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

function contentOf(question) {
  const text = textOf(question);
  if (!question.pictures.length) return text;
  const pictures = question.pictures.map((one) => (
    { type: "image_url", image_url: { url: one.picture } }));
  return text ? [...pictures, { type: "text", text }] : pictures;
}

function sampling() {
  const body = {};
  for (const field of $("sampling").querySelectorAll("[name]")) {
    const value = settings[field.name];
    if (value === undefined || value === "") continue;
    if (field.name === "stop") body.stop = value.split("\n").filter(Boolean);
    else body[field.name] = field.type === "number" ? Number(value) : value;
  }
  return body;
}

// The message being written

function showSend() {
  const isBusy = isRunning(current);
  const button = $("send");
  button.setAttribute("aria-label", isBusy ? "Stop" : "Send");
  button.title = isBusy ? "Stop (Esc)" : "Send (Enter)";
  button.querySelector("use").setAttribute("href", isBusy ? "#i-stop" : "#i-send");
  button.disabled = !isBusy && (!canAnswer() || (!$("text").value.trim() && !attached.length));
  $("hint").textContent = failure ||
    (isBusy ? "Esc stops" : "Enter sends, Shift+Enter starts a line");
}

/** Stop the answer. If another tab gets it, that tab stops when it receives the change. */
function stop() {
  const job = jobs.get(current.id);
  if (job) return job.abort();
  answerOf(current.turns.at(-1)).state = "stopped";
  save(current);
  show(current);
}

function submit() {
  if (isRunning(current)) return stop();
  const text = $("text").value.trim();
  if ((!text && !attached.length) || !canAnswer()) return;
  ask(text, attached);
  draft("", []);
}

/** Fit the height to the text, in browsers without field-sizing. */
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight}px`;
}

function draft(text, attachments) {
  $("text").value = text;
  attached = attachments;
  grow();
  showChips();
}

function edit(turn) {
  if (isRunning(current)) return;
  editing = current.turns.indexOf(turn);
  $("editing").hidden = false;
  draft(turn.question.text, [...turn.question.files, ...turn.question.pictures]);
  $("text").focus();
}

function cancelEdit() {
  if (editing === null) return;
  editing = null;
  $("editing").hidden = true;
  draft("", []);
}

function showChips() {
  $("chips").replaceChildren(...attached.map((one) => el("li", {},
    ...(one.picture ? [el("img", { src: one.picture, alt: "" })] : []),
    el("span", {}, one.name),
    iconButton("close", `Remove ${one.name}`, () => {
      attached = attached.filter((other) => other !== one);
      showChips();
      $("text").focus();
    }))));
  showSend();
}

async function attach(files) {
  for (const file of files) {
    try {
      attached.push(await (file.type.startsWith("image/") ? readPicture(file) : readText(file)));
    } catch (error) {
      toast(error.message);
    }
  }
  showChips();
}

async function readText(file) {
  if (file.size > MAX_FILE) throw new Error(`${file.name} is larger than 1 MiB.`);
  const text = await file.text();
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file.`);
  return { name: file.name, text };
}

async function readPicture(file) {
  const name = file.name || "Picture";
  if (!takesPictures()) throw new Error(`${chosen().id} takes no pictures.`);
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw new Error(`${name} is not a picture that this browser reads.`);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && /^image\/(png|jpeg|webp|gif)$/.test(file.type)) {
    const reader = new FileReader();
    reader.readAsDataURL(file);
    await new Promise((resolve) => (reader.onload = resolve));
    return { name, picture: reader.result };
  }
  const canvas = el("canvas");
  [canvas.width, canvas.height] = [bitmap.width * scale, bitmap.height * scale];
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return { name, picture: canvas.toDataURL("image/jpeg", 0.9) };
}

// Figures

function showFigures() {
  const answer = answerOf(current.turns.at(-1));
  $("figure-speed").textContent = answer?.speed ? number(answer.speed) : "–";
  $("figure-ttft").textContent = answer?.ttft === undefined ? "–" : time(answer.ttft);
}

/** Read the server's load as long as the page can be seen. */
async function poll() {
  if (!document.hidden && models.length) {
    const shown = { running: "–", queue: "–", kv: "–" };
    try {
      const load = await (await send("load")).json();
      shown.running = load.num_requests_running;
      shown.queue = load.num_requests_waiting;
      shown.kv = `${Math.round(100 * load.kv_cache_usage)}%`;
      if (failure) connect(); // it may serve another model
      failure = "";
    } catch (error) {
      failure = error.message;
    }
    askTabs();
    showSend();
    for (const [name, value] of Object.entries(shown)) $(`figure-${name}`).textContent = value;
  }
  setTimeout(poll, POLL);
}

// Settings and key

async function showSettings() {
  for (const field of $("settings").querySelectorAll("[name]")) {
    field.value = field.name === "key" ? readKey() : settings[field.name] ?? "";
  }
  $("settings").showModal();
  const shown = await send("api/show", { body: { model: chosen()?.id } }).catch(() => null);
  const defaults = {}; // of the model
  for (const line of shown ? (await shown.json()).parameters.split("\n") : []) {
    const [name, value] = line.split(" ");
    defaults[name.replace("repeat_", "repetition_")] = value;
  }
  for (const input of $("sampling").querySelectorAll("input")) {
    input.placeholder = defaults[input.name] ?? "Default";
  }
}

function applyTheme() {
  document.documentElement.dataset.theme = settings.theme ?? "";
}

function changeSetting({ target }) {
  if (!target.name || !target.validity.valid) return;
  if (target.name === "key") return writeKey(target.value);
  settings[target.name] = target.value;
  writeStorage("localStorage", "tk-settings", settings);
  applyTheme();
}

function askKey() {
  $("login-error").textContent = readKey() ? "The server refuses this key." : "";
  if (!$("login").open) $("login").showModal();
  $("login-key").select();
}

/** Load the models; ask for a key if the server needs one. */
async function connect() {
  try {
    await loadModels();
    $("login").close();
  } catch (error) {
    const isLocked = error.status === 401;
    $("empty-facts").textContent = isLocked ? "Settings take the server's key." : error.message;
    clearTimeout(connect.timer);
    if (isLocked) askKey();
    else connect.timer = setTimeout(connect, POLL);
  }
}

/** Open or close the conversations, which lie over the page if it is narrow. */
function openSide(isOpen) {
  const wasOpen = $("side").classList.contains("open");
  $("side").classList.toggle("open", isOpen);
  $("side-open").setAttribute("aria-expanded", isOpen);
  document.querySelector("main").inert = isOpen;
  if (isOpen) $("new").focus();
  else if (wasOpen) $("side-open").focus();
}

function listen() {
  const on = (id, event, listener) => $(id).addEventListener(event, listener);
  on("new", "click", () => enter(newConversation()));
  on("side-open", "click", () => openSide(true));
  for (const id of ["side-close", "shade"]) on(id, "click", () => openSide(false));
  on("model", "change", () => {
    current.model = $("model").value;
    showModel();
  });
  new ResizeObserver(follow).observe($("talk"));
  on("talk", "scroll", () => {
    const { scrollHeight, scrollTop, clientHeight } = $("talk");
    isFollowing = scrollHeight - scrollTop - clientHeight < 48;
    $("latest").hidden = isFollowing;
  });
  on("latest", "click", () => {
    isFollowing = true;
    follow();
    $("text").focus();
  });
  on("composer", "submit", (event) => {
    event.preventDefault();
    submit();
  });
  on("text", "input", () => (grow(), showSend()));
  on("text", "keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch()) {
      event.preventDefault();
      if (!isRunning(current)) submit();
    } else if (event.key === "ArrowUp" && !$("text").value && current.turns.length) {
      event.preventDefault();
      edit(current.turns.at(-1));
    }
  });
  on("text", "paste", (event) => {
    const { files } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    if (!text && files.length) {
      event.preventDefault();
      attach([...files]);
    } else if (text.length > MAX_PASTE) {
      event.preventDefault();
      attached.push({ name: `Pasted text, ${text.split("\n").length} lines`, text });
      showChips();
    }
  });
  on("attach", "click", () => $("files").click());
  on("files", "change", async () => {
    await attach([...$("files").files]);
    $("files").value = "";
    $("text").focus();
  });
  const drop = (isOver) => $("composer").classList.toggle("drop", isOver);
  addEventListener("dragover", (event) => (event.preventDefault(), drop(true)));
  addEventListener("dragleave", (event) => event.relatedTarget ?? drop(false));
  addEventListener("drop", (event) => {
    event.preventDefault();
    drop(false);
    const text = event.dataTransfer.getData("text/plain");
    if (event.dataTransfer.files.length) attach([...event.dataTransfer.files]);
    else if (text.length > MAX_PASTE) attach([new File([text], "Dropped text")]);
    else $("text").setRangeText(text);
    $("text").focus();
    showSend();
  });
  on("editing-cancel", "click", () => (cancelEdit(), $("text").focus()));
  on("settings-open", "click", showSettings);
  on("settings", "change", changeSetting);
  on("settings", "close", () => (connect(), write()));
  on("sampling-reset", "click", () => {
    for (const field of $("sampling").querySelectorAll("[name]")) {
      field.value = "";
      delete settings[field.name];
    }
    writeStorage("localStorage", "tk-settings", settings);
  });
  on("delete-all", "click", () => ($("settings").close(), remove([...conversations])));
  on("login-form", "submit", (event) => {
    event.preventDefault();
    writeKey($("login-key").value);
    connect();
  });
  addEventListener("keydown", (event) => {
    const isWriting = event.target.closest("input, textarea, select, dialog");
    if (event.isComposing) return;
    if (event.key === "Escape" && !event.target.closest("dialog")) {
      if ($("side").classList.contains("open")) openSide(false);
      else if (isRunning(current)) stop();
      else cancelEdit();
    } else if (event.key === "/" && !isWriting && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      $("text").focus();
    } else if (event.code === "KeyN" && event.altKey && !event.target.closest("dialog")) {
      event.preventDefault();
      enter(newConversation());
    }
  });
  addEventListener("visibilitychange", () => {
    if (!document.hidden) connect();
  });
  addEventListener("pagehide", () => {
    for (const one of conversations.filter(({ id }) => jobs.has(id))) {
      answerOf(one.turns.at(-1)).state = "lost";
      store.put(one);
    }
  });
}

async function main() {
  applyTheme();
  current = newConversation();
  listen();
  store = await Store.open((found) => (found ? receive(found) : conversations.forEach((one) => {
    if (jobs.has(one.id)) store.tabs.postMessage(one);
  })));
  if (!store.isKept) $("keeping").textContent = "This browser keeps no data: conversations end " +
    "with this page.";
  conversations = await store.all();
  for (const turn of conversations.flatMap((one) => one.turns)) {
    for (const answer of turn.answers) if (answer.state === "running") answer.state = "lost";
  }
  store.tabs.postMessage(null);
  const asked = location.hash.slice(1);
  show(conversations.find((one) => one.id === asked) ?? current);
  await connect();
  $("text").focus();
  poll();
}

main();
