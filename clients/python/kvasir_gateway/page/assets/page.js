// Renews the live turns while somebody looks, finds an open session from "/", and sends a code; all else works without it.
const region = document.querySelector("[data-live]");
const voice = document.querySelector("[data-live-says]");
const EVERY_MS = 2000;

async function renew() {
  const answer = await fetch(region.dataset.live, { credentials: "same-origin" });
  if (!answer.ok) return;
  const text = await answer.text();
  const focused = region.contains(document.activeElement) && document.activeElement.dataset.keeps;
  region.innerHTML = text; // our own template's answer, escaped there
  const again = focused && [...region.querySelectorAll("[data-keeps]")].find((each) => each.dataset.keeps === focused);
  if (again) again.focus();
  // Said only when it changes: ages change with every look.
  const said = region.querySelector("[data-says]")?.dataset.says ?? "";
  if (voice.textContent !== said) voice.textContent = said;
}

async function live() {
  if (!document.hidden) await renew().catch(() => {});
  setTimeout(live, EVERY_MS);
}

if (region && voice) setTimeout(live, EVERY_MS);

// The address of a session is a secret, which the storage of this origin keeps from other ports of the host.
const { session } = document.body.dataset;
const known = localStorage.getItem("session");
if (session) {
  localStorage.setItem("session", session);
} else if (known && location.pathname === "/") {
  localStorage.removeItem("session");
  location.replace(known);
}

// A code is sent by a form like a key.
document.querySelector("[data-open]")?.requestSubmit();
