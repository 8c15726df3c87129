// Sends what somebody says and shows the reply as it comes. All texts become text nodes: nothing of a model is markup.
import { eventsOf, post } from "./events.js";

const form = document.querySelector("[data-talk]");
const said = document.querySelector("[data-said]");
const facts = document.querySelector("[data-facts]");
const problem = document.querySelector("[data-problem]");
const state = document.querySelector("[data-state]");
const [send, stop] = ["[data-send]", "[data-stop]"].map((each) => document.querySelector(each));

// Keeps the end of a reply in sight, unless somebody reads further up.
function follow(reply, work) {
  const atEnd = reply.getBoundingClientRect().bottom < innerHeight;
  work();
  if (atEnd) reply.scrollIntoView({ block: "end" });
}

function begin(text) {
  const [asked, reply] = document.querySelector("[data-turn]").content.cloneNode(true).children;
  asked.querySelector(".text").textContent = text;
  reply.classList.add("coming");
  said.append(asked, reply);
  reply.scrollIntoView({ block: "end" });
  return { asked, reply, text: reply.querySelector(":scope > .text"), thought: reply.querySelector(".thought") };
}

function show(turn, { text, thought }) {
  follow(turn.reply, () => {
    turn.text.textContent += text;
    if (thought) {
      turn.thought.hidden = false;
      turn.thought.querySelector(".text").textContent += thought;
    }
  });
}

function note(reply, { notes, parted }) {
  const line = document.createElement("p");
  line.className = "note";
  line.textContent = notes.join(" · ");
  reply.append(line);
  if (!parted) return;
  const why = document.createElement("p");
  why.className = "note";
  why.textContent = parted;
  reply.append(why);
}

const fragment = async (name, fields) => {
  const answer = await fetch(`${form.dataset.at}${name}?${new URLSearchParams(fields)}`);
  return answer.ok ? answer.text() : null;
};

// The turn as the agent remembers it, with what may be done at each message, and the facts beside it.
async function settle(turn, ended) {
  const id = form.elements.id.value;
  const [messages, beside] = await Promise.all([
    fragment("said", { id, after: said.dataset.next }), fragment("facts", { id }),
  ]).catch(() => [null, null]);
  let reply = turn.reply;
  if (messages) {
    const made = document.createElement("template");
    made.innerHTML = messages; // our own template's answer, escaped there
    reply = made.content.querySelector(".message:last-of-type") ?? reply;
    const count = made.content.children.length;
    if (count) {
      turn.asked.remove();
      turn.reply.replaceWith(made.content);
      said.dataset.next = Number(said.dataset.next) + count;
    }
  }
  if (beside) {
    facts.innerHTML = beside; // as above
    const { title } = facts.querySelector("[data-title]").dataset;
    document.querySelector("#title").textContent = title;
    document.title = `${title} · Kvasir`;
  }
  note(reply, ended);
  reply.scrollIntoView({ block: "end" });
}

// What the form was filled for is done: what is said next follows it.
function goOn(id, head) {
  form.elements.head.value = head ?? "";
  delete form.dataset.again; // the same words are another turn now
  for (const name of ["keep", "version"]) form.elements[name]?.remove();
  form.elements.id.value = id;
  for (const each of document.querySelectorAll(".conversation .hint, [data-talk] details")) each.remove();
  history.replaceState(null, "", `${form.dataset.at}chat?${new URLSearchParams({ id })}`);
}

function busy(is) {
  send.hidden = is;
  stop.hidden = !is;
  said.setAttribute("aria-busy", is);
}

async function say(fields) {
  problem.hidden = true;
  busy(true);
  const turn = begin(fields.text);
  let id = fields.id;
  let ended = null;
  stop.onclick = () => post(`${form.dataset.at}cancel`, { form_token: fields.form_token, request_id: fields.request_id });
  try {
    for await (const [name, value] of eventsOf(await post(`${form.dataset.at}say`, fields))) {
      if (name === "begun") id = value.id;
      if (name === "reading") turn.text.dataset.reading = `reading ${value.done} of ${value.total} tokens`;
      if (name === "delta") show(turn, value);
      if (name === "ended") ended = value;
      if (name === "refused") throw new Error(value.problem);
    }
    if (!ended) throw new Error("the connection broke before the end of the reply");
    goOn(id, ended.head);
    state.textContent = `Reply: ${turn.text.textContent}`;
    await settle(turn, ended);
  } catch (error) {
    refused(turn, fields, error);
  } finally {
    turn.reply.classList.remove("coming");
    busy(false);
  }
}

// What was said is offered again under the same request, so that nothing is done twice.
function refused(turn, fields, error) {
  turn.asked.remove();
  turn.reply.remove();
  problem.textContent = error instanceof TypeError ? "The gateway does not answer. Send it again." : error.message;
  problem.hidden = false;
  form.elements.text.value = fields.text;
  form.dataset.again = fields.request_id;
  form.elements.text.focus();
}

form?.addEventListener("submit", (event) => {
  event.preventDefault();
  const fields = Object.fromEntries(new FormData(form));
  if (!send.hidden && fields.text.trim()) {
    const isAgain = form.dataset.again && form.dataset.saidBefore === fields.text;
    const words = crypto.getRandomValues(new Uint32Array(4));
    fields.request_id = isAgain ? form.dataset.again : [...words].map((word) => word.toString(16)).join("-");
    form.dataset.saidBefore = fields.text;
    form.elements.text.value = "";
    say(fields);
  }
});

form?.elements.text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

if (form) said.lastElementChild?.scrollIntoView({ block: "end" });
