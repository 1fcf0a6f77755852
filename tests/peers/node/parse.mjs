// The helper of OpenAI's SDK that parses an answer by its JSON schema.
// node parse.mjs BASE_URL MODEL MESSAGES prints one JSON object.
import OpenAI from "openai";

const [baseURL, model, given] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = JSON.parse(given);
const schema = {
  type: "object",
  properties: { city: { enum: ["Boston", "Lisbon"] }, count: { enum: [1, 2, 3] } },
  required: ["city", "count"],
  additionalProperties: false,
};
const asked = { model, messages, temperature: 0, max_tokens: 200 };

const parsed = await client.chat.completions.parse({
  ...asked,
  response_format: {
    type: "json_schema",
    json_schema: { name: "place", schema, strict: true },
  },
});

console.log(JSON.stringify(parsed.choices[0].message.parsed));
