// Walks the operator's page in headless Chromium: axe-core on every page in both themes and two widths, the keyboard
// alone, the live turns, no script at all, and no request to another host. Ends with 1 when anything is wrong.
import { createRequire } from "node:module";
import axe from "axe-core";
import { chromium } from "playwright-core";

const { KVASIR_URL: URL_, KVASIR_KEY: KEY, KVASIR_OUT: OUT, CHROMIUM } = process.env;
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
  const page = await context.newPage();
  page.on("request", (request) => request.url().startsWith(`${URL_}/`) || wrong.push(`request to ${request.url()}`));
  page.on("dialog", (dialog) => { wrong.push("a dialog: text became script"); dialog.dismiss(); });
  page.on("console", (line) => line.type() === "error" && !/status of 40[0-9]/.test(line.text()) && wrong.push(`console: ${line.text()}`));
  return page;
}

async function signIn(page) {
  await page.goto(URL_);
  await page.getByLabel("API key").fill(KEY);
  await page.keyboard.press("Enter");
  await page.waitForSelector("#agents");
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

const browser = await chromium.launch({ executablePath: CHROMIUM, args: QUIET });
console.log(`Chromium ${browser.version()}, axe-core ${version}`);
try {
  const page = await look(browser, { viewport: { width: 1000, height: 800 } });
  await signIn(page);
  await page.reload();
  await tabThrough(page, "overview");
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
  await page.waitForSelector("#agents");
  expect(/\/page\/[^/]+\/$/.test(page.url()), "from the root a session goes on at its own address");

  for (const colorScheme of ["light", "dark"]) {
    for (const width of [1280, 360]) {
      const page = await look(browser, { colorScheme, viewport: { width, height: 900 } });
      const name = (what) => `${what}, ${colorScheme}, ${width} px`;
      await page.goto(URL_);
      await audit(page, name("sign in"));
      await signIn(page);
      await audit(page, name("overview"));
      await page.screenshot({ path: `${OUT}/overview-${colorScheme}-${width}.png`, fullPage: true });
      await page.getByRole("link", { name: "page/ada", exact: true }).click();
      await page.waitForSelector(".tree");
      await audit(page, name("agent"));
      await page.screenshot({ path: `${OUT}/agent-${colorScheme}-${width}.png`, fullPage: true });
      await page.getByRole("link", { name: /^Read/ }).first().click();
      await page.waitForSelector(".messages");
      await audit(page, name("messages"));
      await page.screenshot({ path: `${OUT}/messages-${colorScheme}-${width}.png`, fullPage: true });
      await page.goto(new URL(`.?prefix=${encodeURIComponent("<script>")}`, page.url()).href);
      await audit(page, name("hostile names"));
      await page.goto(new URL("agent?id=nobody", page.url()).href);
      await audit(page, name("an error"));
      await page.context().close();
    }
  }

  const plain = await look(browser, { javaScriptEnabled: false });
  await plain.goto(URL_);
  await plain.getByLabel("API key").fill(KEY);
  await plain.getByRole("button", { name: "Sign in" }).click();
  await plain.getByLabel("Name begins with").fill("page/");
  await plain.getByRole("button", { name: "Search" }).click();
  await plain.getByRole("link", { name: "page/ada", exact: true }).click();
  await plain.locator("input[name=name]").fill("page/without scripts");
  await plain.getByRole("button", { name: "Fork" }).click();
  expect((await plain.locator("h1").textContent()).trim() === "page/without scripts", "without scripts an agent is found and forked");
} finally {
  await browser.close();
}
for (const claim of wrong) console.log(`WRONG ${claim}`);
process.exitCode = wrong.length ? 1 : 0;
