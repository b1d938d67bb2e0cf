// Opens pages in Chromium and prints what a person sees, as JSON. The argument is a list of
// {name, url, width, height, dark, script, stream, until, click, keyboard, shot, full}.
import { writeFile } from "node:fs/promises";
import { chromium } from "playwright-core";
import { draw } from "./draw.mjs";

const views = JSON.parse(process.argv[2]);
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
const seen = {};
for (const view of views) {
  const context = await browser.newContext({
    viewport: { width: view.width || 1280, height: view.height || 860 },
    colorScheme: view.dark ? "dark" : "light",
    javaScriptEnabled: view.script !== false,
  });
  context.setDefaultTimeout(300000); // The machine may be busy.
  const page = await context.newPage();
  const errors = [];
  page.on("console", (m) => { if (m.type() === "error") errors.push(m.text()); });
  page.on("pageerror", (e) => errors.push(String(e)));
  page.on("requestfailed", (r) => errors.push("request failed: " + r.url()));
  const response = await page.goto(view.url, { waitUntil: view.stream ? "commit" : "load" });
  if (view.stream) await page.waitForSelector(view.stream);
  if (view.until) await page.waitForFunction((text) => document.body.innerText.includes(text), view.until);
  if (view.click) {
    await page.click(view.click);
    await page.waitForURL(/result=/);
  }
  const facts = await page.evaluate(() => ({
    title: document.title,
    text: document.body.innerText,
    wide: document.documentElement.scrollWidth <= innerWidth ? "" :
      [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth).map((e) => e.tagName + "." + e.className).slice(-8).join(" ") || "unknown",
    background: getComputedStyle(document.body).backgroundColor,
  }));
  if (view.shot?.endsWith(".svg")) await writeFile(view.shot, await draw(page));
  else if (view.shot) await page.screenshot({ path: view.shot, fullPage: !!view.full });
  const focus = [];
  if (view.keyboard) {
    await page.keyboard.press("Tab");
    focus.push(await page.evaluate(() => document.activeElement.textContent || ""));
    await page.keyboard.press("/");
    focus.push(await page.evaluate(() => document.activeElement.name || ""));
  }
  seen[view.name] = { status: response.status(), csp: response.headers()["content-security-policy"] || "", errors, focus, ...facts };
  await context.close();
}
await browser.close();
console.log(JSON.stringify(seen));
