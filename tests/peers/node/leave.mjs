// A stream of OpenAI's SDK that is left after its first chunk.
// node leave.mjs BASE_URL MODEL prints "first", waits for a line, leaves, prints "left".
import OpenAI from "openai";
import { createInterface } from "node:readline";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const stream = await client.completions.create({
  model,
  prompt: "The",
  max_tokens: 4000,
  ignore_eos: true,
  stream: true,
});
const words = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
for await (const chunk of stream) {
  console.log("first");
  await words.next();
  stream.controller.abort();
  break;
}
console.log("left");
await words.next();
