// A page in headless Chromium that reads the door's events with fetch, as EventSource would read
// them if it could POST. The page is of the door's own origin.
// node page.mjs CHROMIUM BASE_URL MODEL MESSAGES prints one JSON object, then waits for lines.
import { chromium } from "playwright-core";
import { createInterface } from "node:readline";

const [executablePath, url, model, given] = process.argv.slice(2);
const flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"];
const quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath, args: [...flags, ...quiet] });
const page = await browser.newPage();
await page.goto(`${url}/health`);
await page.evaluate(() => {
  // Events of a stream as {id, data}; stops after `most` of them and closes the connection.
  globalThis.read = async (path, body, last, most) => {
    const controller = new AbortController();
    const headers = { "content-type": "application/json", accept: "text/event-stream" };
    const response = await fetch(path, {
      method: "POST",
      headers: last === null ? headers : { ...headers, "last-event-id": last },
      body: JSON.stringify(body),
      signal: controller.signal,
    });
    const type = response.headers.get("content-type");
    if (!response.ok) return { status: response.status, error: (await response.json()).error };
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = [];
    let text = "";
    let id = null;
    while (events.length < most) {
      const { done, value } = await reader.read();
      if (done) break;
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("id: ")) id = line.slice(4);
          if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length && events.length < most) events.push({ id, data: data.join("\n") });
      }
    }
    controller.abort();
    return { status: response.status, type, events };
  };
});

const path = "/v1/chat/completions";
const body = {
  model,
  messages: JSON.parse(given),
  temperature: 0,
  max_tokens: 40,
  stream: true,
  stream_options: { include_usage: true },
};
const read = (...words) => page.evaluate((all) => globalThis.read(...all), words);
const whole = await read(path, body, null, 1000);
const begun = await read(path, body, null, 2);
const resumed = await read(path, body, begun.events.at(-1).id, 1000);
const refused = await read(path, { ...body, top_p: 7 }, null, 1);
console.log(JSON.stringify({ version: browser.version(), whole, begun, resumed, refused }));

// Streams that end with the page: aborted by its program, then by closing the tab.
const words = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const endless = { model, prompt: "The", max_tokens: 4000, ignore_eos: true, stream: true };
for (const leave of ["abort", "close"]) {
  await page.evaluate(async (asked) => {
    globalThis.controller = new AbortController();
    const response = await fetch("/v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(asked),
      signal: globalThis.controller.signal,
    });
    await response.body.getReader().read();
  }, endless);
  console.log("first");
  await words.next();
  if (leave === "abort") await page.evaluate(() => globalThis.controller.abort());
  else await page.close();
  console.log("left");
  await words.next();
}
await browser.close();
