// Function calling with OpenAI's SDK for JavaScript: a forced call whole, streamed, run by the SDK.
// node tools.mjs BASE_URL MODEL MESSAGES prints one JSON object.
import OpenAI from "openai";

const [baseURL, model, given] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const parameters = {
  type: "object",
  properties: {
    city: { enum: ["Boston", "Lisbon"] },
    count: { enum: [1, 2, 3] },
    note: { enum: ["long ".repeat(100)] }, // the stream lasts longer than a pause of the machine
  },
  required: ["city", "count", "note"],
  additionalProperties: false,
};
const place = { type: "function", function: { name: "place", parameters } };
const asked = {
  model,
  messages: JSON.parse(given),
  tools: [place],
  tool_choice: { type: "function", function: { name: "place" } },
  temperature: 0,
  seed: 3,
  max_tokens: 800,
};

const whole = (await client.chat.completions.create(asked)).choices[0];

const stream = client.chat.completions.stream(asked);
let parts = 0;
stream.on("tool_calls.function.arguments.delta", () => (parts += 1));
const streamed = (await stream.finalChatCompletion()).choices[0];

// The SDK calls the function and sends its result back.
const called = [];
const run = (value) => {
  called.push(value);
  return "done";
};
const runner = client.chat.completions.runTools(
  {
    ...asked,
    tool_choice: { type: "function", function: { name: "place" } },
    tools: [{ type: "function", function: { ...place.function, function: run, parse: JSON.parse } }],
  },
  { maxChatCompletions: 2 },
);
await runner.done();

console.log(JSON.stringify({ whole, streamed, parts, called, turns: runner.messages.length }));
