// OpenAI's SDK for JavaScript: a chat whole, streamed, refused, and left in the middle.
// node chat.mjs BASE_URL MODEL MESSAGES prints one JSON object.
import OpenAI from "openai";

const [baseURL, model, given] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: JSON.parse(given), temperature: 0, max_tokens: 40 };

const whole = await client.chat.completions.create(asked);

const streamed = { text: "", chunks: 0, finish: null, usage: null };
const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed.chunks += 1;
  streamed.text += chunk.choices[0]?.delta.content ?? "";
  streamed.finish = chunk.choices[0]?.finish_reason ?? streamed.finish;
  streamed.usage = chunk.usage ?? streamed.usage;
}

const refused = await client.chat.completions.create({ ...asked, top_p: 7 }).then(
  () => null,
  (error) => ({ name: error.constructor.name, status: error.status, param: error.param }),
);

const models = [];
for await (const one of client.models.list()) models.push(one.id);

console.log(JSON.stringify({ whole, streamed, refused, models }));
