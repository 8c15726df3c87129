// Shows how far a move is.
import { eventsOf, post } from "./events.js";

const form = document.querySelector("[data-progress]");
const bar = form?.querySelector("progress");
const words = form?.querySelector("[data-progress-words]");
const button = form?.querySelector("button");

async function move() {
  button.disabled = true;
  let ended = false;
  try {
    for await (const [name, value] of eventsOf(await post(form.action, new FormData(form)))) {
      words.textContent = value.words ?? value.problem;
      bar.hidden = !value.total;
      if (value.total) [bar.max, bar.value] = [value.total, value.done];
      ended = name !== "moving";
    }
    if (!ended) throw new Error("it broke");
  } catch {
    words.textContent = "The connection broke. Move it again: it goes on where it was.";
  } finally {
    bar.hidden = true;
    button.disabled = false;
  }
}

form?.addEventListener("submit", (event) => {
  event.preventDefault();
  move();
});
