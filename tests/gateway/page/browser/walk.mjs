// Walks the operator's page in headless Chromium: axe-core on every page in both themes and two widths, the keyboard
// alone, the live turns, an operated home, no script at all, and no request to another host. Ends with 1 when anything is wrong.
import { execFileSync } from "node:child_process";
import { createRequire } from "node:module";
import axe from "axe-core";
import { chromium } from "playwright-core";

const { KVASIR_URL: URL_, KVASIR_KEY: KEY, KVASIR_OUT: OUT, CHROMIUM } = process.env;
// A home that runs, its owner's key, and how another home takes a code.
const { KVASIR_HOME_URL: HOME_URL, KVASIR_HOME_KEY: HOME_KEY, KVASIR_PAIR: PAIR } = process.env;
const QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const RULES = { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"] };
const wrong = [];
const version = createRequire(import.meta.url)("axe-core/package.json").version;

function expect(is, claim) {
  console.log(`${is ? "ok   " : "WRONG"} ${claim}`);
  if (!is) wrong.push(claim);
}

async function look(browser, options) {
  const context = await browser.newContext(options);
  context.setDefaultTimeout(90000); // a page that runs a command takes its time beside other work
  const page = await context.newPage();
  page.on("request", (request) => [URL_, HOME_URL].some((own) => request.url().startsWith(`${own}/`)) || wrong.push(`request to ${request.url()}`));
  page.on("dialog", (dialog) => { wrong.push("a dialog: text became script"); dialog.dismiss(); });
  page.on("console", (line) => line.type() === "error" && !/status of 40[0-9]|ERR_FAILED/.test(line.text()) && wrong.push(`console: ${line.text()}`));
  return page;
}

async function signIn(page, url = URL_, key = KEY) {
  await page.goto(url);
  await page.getByLabel("API key").fill(key);
  await page.keyboard.press("Enter");
  await page.waitForSelector("[data-list]");
}

async function audit(page, name) {
  await page.evaluate(axe.source);
  const found = await page.evaluate((rules) => globalThis.axe.run(document, rules), RULES);
  for (const each of found.violations) {
    for (const node of each.nodes) console.log(`      ${each.id}: ${node.target} ${node.failureSummary.replaceAll("\n", " ")}`);
  }
  expect(found.violations.length === 0, `${name}: axe finds nothing (${found.passes.length} rules pass)`);
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  expect(overflow <= 0, `${name}: nothing lies beyond the window's edge`);
}

// Tab from the top: every stop is seen, and has a mark of focus.
async function tabThrough(page, name) {
  await page.keyboard.press("Tab");
  const first = await page.evaluate(() => document.activeElement.className);
  expect(first === "skip", `${name}: the first stop skips to the content`);
  let stops = 0;
  for (; stops < 200; stops += 1) {
    const stop = await page.evaluate(() => {
      const element = document.activeElement;
      if (element === document.body) return null;
      const box = element.getBoundingClientRect();
      const style = getComputedStyle(element);
      const inside = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
      return { html: element.outerHTML.slice(0, 80), fine: inside && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 };
    });
    if (stop === null) break;
    if (!stop.fine) expect(false, `${name}: the focus is not seen at ${stop.html}`);
    await page.keyboard.press("Tab");
  }
  expect(stops > 5 && stops < 200, `${name}: Tab reaches ${stops} places and leaves again`);
}

// A task that a newcomer has: what is pressed and typed is counted.
async function task(page, name, most, work) {
  let count = 0;
  const act = {
    open: async (label) => { count += 1; await page.getByText(label).first().click(); },
    press: async (role, label) => { count += 1; await page.getByRole(role, { name: label }).first().click(); },
    type: async (label, text) => { count += 1; await page.waitForLoadState(); await page.getByLabel(label, { exact: true }).fill(text); },
    enter: async () => { count += 1; await page.keyboard.press("Enter"); },
  };
  try {
    expect(await work(act), `${name}, in ${count} actions`);
    if (count > most) expect(false, `${name}: at most ${most} actions`);
  } catch (error) {
    expect(false, `${name}: ${error.message.split("\n")[0]}`);
  }
}

const SAY = "What you say";
const at = (page) => page.url().replace(/(\/page\/[^/]+\/).*/, "$1");
const reply = async (page) => {
  await page.waitForSelector("[data-said] > li:last-child .note", { timeout: 30000 });
  return page.locator("[data-said] > li:last-child > .text").textContent();
};
const said = (page) => page.locator("[data-said] > li > .text").allTextContents();

async function tasks(page) {
  await task(page, "talk, and be remembered", 5, async ({ press, type, enter }) => {
    await press("link", "New conversation");
    await type(SAY, "My dog is called Rex.");
    await enter();
    await reply(page);
    const title = await page.locator("h1").textContent();
    await type(SAY, "What is my dog called?");
    await enter();
    return (await reply(page)) === "Your dog is called Rex." && title === "My dog is called Rex.";
  });
  await task(page, "edit a message, and go on as a branch", 3, async ({ press, type, enter }) => {
    await press("link", /^Edit message 1$/);
    await type(SAY, "My dog is called Luna.");
    await enter();
    await reply(page);
    return (await said(page)).join() === "My dog is called Luna.,I will remember that.";
  });
  await task(page, "find the other branch again", 3, async ({ press }) => {
    await press("link", "History and more");
    await press("link", /^Read what version 2 /);
    return (await said(page)).includes("Your dog is called Rex.");
  });
  await task(page, "fork from a reply", 2, async ({ press }) => {
    await page.goto(`${at(page)}chat?id=page/ada`);
    await press("button", /^Fork from here.*message 2$/);
    await page.waitForSelector(".done");
    return (await page.locator("h1").textContent()) === "page/ada-2" && (await said(page)).length === 2;
  });
  await task(page, "give a conversation a title", 4, async ({ open, type, enter }) => {
    await open("Rename");
    await type(/^Title/, "Kennel of last Tuesday");
    await enter();
    await page.waitForSelector(".done");
    return (await page.locator("h1").textContent()) === "Kennel of last Tuesday";
  });
  await task(page, "find last Tuesday's conversation", 4, async ({ press, type, enter }) => {
    await press("link", "Conversations");
    await type("Words of a title, a name or a label", "tuesday");
    await enter();
    await press("link", "Kennel of last Tuesday");
    return (await page.locator("h1").textContent()) === "Kennel of last Tuesday";
  });
  await task(page, "see what a turn reused, and why not more", 1, async ({ press }) => {
    await page.goto(`${at(page)}chat?id=page/ada&keep=2&edit=1`);
    await page.getByLabel(SAY).fill("My cat is called Tom.");
    await page.keyboard.press("Enter");
    await reply(page);
    await press("link", "History and more");
    return (await page.locator(".rows").first().textContent()).includes("in place of “dog is called Rex.");
  });
  await task(page, "export a version", 1, async ({ press }) => {
    const download = page.waitForEvent("download");
    await press("link", "Export version 1");
    return (await download).suggestedFilename() === "page-ada-1.kva";
  });
  await task(page, "move to another Mac, with progress", 3, async ({ press, type }) => {
    await page.goto(`${at(page)}chat?id=page/ada-2`);
    await press("link", "History and more");
    await type("Peer", "laptop");
    await press("button", "Move");
    await page.waitForFunction(() => /has moved/.test(document.querySelector("[data-progress-words]").textContent));
    return true;
  });
  await task(page, "send again what did not arrive, and say the same once more", 5, async ({ type, enter }) => {
    await page.goto(`${at(page)}chat`);
    await page.route("**/say", (route) => route.abort(), { times: 1 });
    await type(SAY, "My name is Anna.");
    await enter();
    await page.locator("[data-problem]").waitFor();
    await enter();
    await reply(page);
    // As after a reply that the store has not taken: no version tells the two apart.
    await page.evaluate(() => { document.querySelector("[data-talk]").elements.head.value = ""; });
    await type(SAY, "My name is Anna.");
    await enter();
    await page.waitForFunction(() => /Version\s*2/.test(document.querySelector("[data-facts]").textContent), null, { timeout: 10000 });
    return (await said(page)).length === 4;
  });
  // Its first turn runs, so that the next one waits.
  await task(page, "stop a turn", 3, async ({ press, type, enter }) => {
    await page.goto(`${at(page)}chat`);
    await page.getByText("Name and instructions").click();
    await page.getByLabel(/^Name of the agent/).fill("page/endless");
    await type(SAY, "Hello.");
    await enter();
    await press("button", "Stop");
    await page.getByRole("button", { name: "Send" }).waitFor();
    return /cancelled/.test(await page.locator("[data-problem]").textContent());
  });
}

const inPage = (page, words) => page.waitForFunction((text) => document.querySelector("main")?.textContent.includes(text), words, { timeout: 90000 });

// What an operator does with a home: each by the page alone, but for the other home's side of a pairing.
async function operate(page) {
  await task(page, "see how full the disk is, and that all memories are stored", 1, async ({ press }) => {
    await press("link", "Operate");
    await inPage(page, "free of");
    return /Memories not stored\s+none/.test(await page.locator("main").textContent());
  });
  await task(page, "make a token", 4, async ({ press, type }) => {
    await press("link", "Tokens");
    await type("Name", "laptop-app");
    await type("Namespace", "lab");
    await press("button", "Make it");
    await inPage(page, "shown this once");
    return /^[\w-]{43}$/.test(await page.locator("main .name code").textContent());
  });
  await task(page, "revoke it", 2, async ({ press }) => {
    await press("link", "All tokens");
    await press("button", "Revoke laptop-app");
    await inPage(page, "Its calls have ended");
    return true;
  });
  await task(page, "pair with another home", 3, async ({ press }) => {
    await press("link", "Peers");
    await press("button", "Show a code");
    await inPage(page, "kvasir-pair:");
    const line = (await page.locator("main").textContent()).match(/kvasir-pair:[^\s.]+(\.\d+){3}:\d+/)[0];
    const [program, ...words] = JSON.parse(PAIR);
    execFileSync(program, [...words, line]);
    await inPage(page, "Paired with laptop");
    await press("link", "Look again");
    return (await page.locator(".row").first().textContent()).includes("laptop");
  });
  await task(page, "unpair", 1, async ({ press }) => {
    await press("button", "Unpair laptop");
    await inPage(page, "no peer any more");
    return true;
  });
  await task(page, "fetch a model, with progress", 3, async ({ press, type }) => {
    await press("link", "Models");
    await type("Repository, as OWNER/NAME", "kvasir/tiny");
    await press("button", "Fetch");
    await inPage(page, "kvasir/tiny is on this machine");
    return true;
  });
  await task(page, "unload a model, and load it again", 2, async ({ press }) => {
    await press("button", /^Unload/);
    await inPage(page, "The model is unloaded");
    await press("button", /^Load/);
    await inPage(page, "The model is loaded");
    return true;
  });
  await task(page, "back the home up again", 2, async ({ press }) => {
    await press("link", "Operate");
    await press("button", "Back up now");
    await inPage(page, "The backup is whole");
    return (await page.locator("main").textContent()).includes("every file was whole");
  });
  await task(page, "see what needs attention, and all", 3, async ({ press }) => {
    await press("link", "Audit");
    const few = await page.locator("tbody tr").count();
    await press("checkbox", "routine, too");
    await press("button", "Show");
    await inPage(page, "reload");
    return (await page.locator("tbody tr").count()) >= few;
  });
  await task(page, "see which keys seal what, and how they change", 1, async ({ press }) => {
    await press("link", "Keys");
    return (await page.locator("main").textContent()).includes("keys rotate");
  });
}

const OPERATED = ["home", "tokens", "peers", "keys", "models", "audit"];

async function operateInAllLooks(browser) {
  const page = await look(browser, { viewport: { width: 1000, height: 800 } });
  await signIn(page, HOME_URL, HOME_KEY);
  await operate(page);
  await page.goto(`${at(page)}tokens`);
  await tabThrough(page, "tokens");
  await page.goto(`${at(page)}peers`);
  await page.getByRole("button", { name: "Show a code" }).click();
  await inPage(page, "kvasir-pair:");
  for (const colorScheme of ["light", "dark"]) {
    for (const width of [1280, 360]) {
      const page = await look(browser, { colorScheme, viewport: { width, height: 900 } });
      await signIn(page, HOME_URL, HOME_KEY);
      const home = page.url();
      for (const what of OPERATED) {
        await page.goto(home + (what === "audit" ? "audit?all=yes" : what));
        await audit(page, `${what}, ${colorScheme}, ${width} px`);
        await page.screenshot({ path: `${OUT}/operate-${what}-${colorScheme}-${width}.png`, fullPage: true });
      }
      await page.context().close();
    }
  }
  await page.getByRole("button", { name: "Stop" }).click();
  await inPage(page, "it was stopped");
  expect(true, "a pairing that waits is stopped");
  await page.context().close();
  const plain = await look(browser, { javaScriptEnabled: false });
  await plain.goto(HOME_URL);
  await plain.getByLabel("API key").fill(HOME_KEY);
  await plain.getByRole("button", { name: "Sign in" }).click();
  await plain.getByRole("link", { name: "Operate" }).click();
  await plain.getByRole("button", { name: "Back up now" }).click();
  for (let looks = 0; looks < 60 && (await plain.getByRole("button", { name: "Stop" }).count()); looks += 1) {
    await plain.getByRole("link", { name: "Look again" }).click();
  }
  expect((await plain.locator("main").textContent()).includes("The backup is whole"), "without scripts a home is backed up");
  await plain.context().close();
}

const browser = await chromium.launch({ executablePath: CHROMIUM, args: QUIET });
console.log(`Chromium ${browser.version()}, axe-core ${version}`);
try {
  const page = await look(browser, { viewport: { width: 1000, height: 800 } });
  await signIn(page);
  await page.reload();
  await tabThrough(page, "conversations");
  await tasks(page);
  await page.goto(`${at(page)}status`);
  await tabThrough(page, "status");
  const age = () => page.evaluate(() => document.querySelector("[data-live] tbody").textContent);
  const cancel = page.getByRole("button", { name: /^Cancel/ });
  const before = await age();
  await cancel.focus();
  await page.waitForFunction((was) => document.querySelector("[data-live] tbody")?.textContent !== was, before, { timeout: 15000 });
  expect(true, "the live turns renew themselves");
  expect(await cancel.evaluate((button) => button === document.activeElement), "the focus stays on its button meanwhile");
  expect(/1 running/.test(await page.locator("[data-live-says]").textContent()), "and a reader is told in words");
  await audit(page, "a live turn");
  await cancel.focus();
  await page.keyboard.press("Enter");
  await page.waitForSelector(".done");
  expect((await page.locator(".done").textContent()).includes("ended"), "a turn is cancelled by keyboard");
  await page.goto(new URL("agent?id=page/ada", page.url()).href);
  await tabThrough(page, "agent");
  await page.goto(URL_);
  await page.waitForSelector("[data-list]");
  expect(/\/page\/[^/]+\/$/.test(page.url()), "from the root a session goes on at its own address");

  for (const colorScheme of ["light", "dark"]) {
    for (const width of [1280, 360]) {
      const page = await look(browser, { colorScheme, viewport: { width, height: 900 } });
      const name = (what) => `${what}, ${colorScheme}, ${width} px`;
      await page.goto(URL_);
      await audit(page, name("sign in"));
      await signIn(page);
      const home = page.url();
      for (const [what, path] of [
        ["conversations", ""],
        ["new", "chat"],
        ["chat", "chat?id=page/ada"],
        ["edit", "chat?id=page/ada&keep=2&edit=1"],
        ["agent", "agent?id=page/ada"],
        ["status", "status"],
        ["hostile names", `?q=${encodeURIComponent("<script>")}`],
        ["an error", "agent?id=nobody"],
      ]) {
        await page.goto(home + path);
        await audit(page, name(what));
        await page.screenshot({ path: `${OUT}/${what.replaceAll(" ", "-")}-${colorScheme}-${width}.png`, fullPage: what !== "chat" });
      }
      await page.context().close();
    }
  }

  const plain = await look(browser, { javaScriptEnabled: false });
  await plain.goto(URL_);
  await plain.getByLabel("API key").fill(KEY);
  await plain.getByRole("button", { name: "Sign in" }).click();
  await plain.getByRole("link", { name: "New conversation" }).click();
  await plain.getByLabel(SAY).fill("My name is Anna.");
  await plain.getByRole("button", { name: "Send" }).click();
  expect((await said(plain)).includes("I will remember that."), "without scripts an agent is talked with");
  await plain.getByRole("button", { name: /^Fork from here/ }).first().click();
  expect((await plain.locator("h1").textContent()) === "My name is Anna. (2)", "and forked");
  await operateInAllLooks(browser); // last: the turn that is watched and ended above has an end of its own
} finally {
  await browser.close();
}
for (const claim of wrong) console.log(`WRONG ${claim}`);
process.exitCode = wrong.length ? 1 : 0;
