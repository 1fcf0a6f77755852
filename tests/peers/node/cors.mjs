// A page of another origin in headless Chromium that calls the door with fetch.
// node cors.mjs CHROMIUM MODEL MESSAGES prints the origin, reads a line with the URLs of two doors,
// of which the first lets this origin in, and prints one JSON object.
import { createServer } from "node:http";
import { chromium } from "playwright-core";
import { createInterface } from "node:readline";

const [executablePath, model, given] = process.argv.slice(2);
const server = createServer((_, response) => {
  response.setHeader("content-type", "text/html");
  response.end("<title>another origin</title>");
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const origin = `http://127.0.0.1:${server.address().port}`;
console.log(origin);

const words = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const [ours, other] = JSON.parse((await words.next()).value);
const flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"];
const quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath, args: [...flags, ...quiet] });
const page = await browser.newPage();
await page.goto(origin);
const body = {
  model,
  messages: JSON.parse(given),
  temperature: 0,
  max_tokens: 40,
  stream: true,
};
const ask = (url, last) =>
  page.evaluate(
    async ([url, body, last]) => {
      const headers = { "content-type": "application/json", authorization: "Bearer none" };
      if (last !== null) headers["last-event-id"] = last;
      try {
        const response = await fetch(`${url}/v1/chat/completions`, {
          method: "POST",
          headers,
          body: JSON.stringify(body),
        });
        const id = response.headers.get("x-request-id");
        return { status: response.status, id, text: await response.text() };
      } catch (error) {
        return { refused: error.name };
      }
    },
    [url, body, last],
  );
const whole = await ask(ours, null);
const ids = (whole.text ?? "").split("\n").filter((line) => line.startsWith("id: "));
const resumed = await ask(ours, (ids[0] ?? "id: ").slice(4));
const refused = await ask(other, null);
console.log(JSON.stringify({ whole, resumed, refused }));
await browser.close();
server.close();
