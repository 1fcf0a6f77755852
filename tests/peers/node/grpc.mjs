// The gRPC door through @grpc/grpc-js, from the .proto files as they are.
// node grpc.mjs PROTOS ADDRESS MESSAGES prints one JSON object, then "left" after a cancelled call.
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { createInterface } from "node:readline";

const [protos, address, given] = process.argv.slice(2);
const options = { includeDirs: [protos], longs: String, enums: String, defaults: false };
const loaded = grpc.loadPackageDefinition(loadSync("kvrelay/v1/router.proto", options));
const { RouterService } = loaded.kvrelay.v1;
const client = new RouterService(address, grpc.credentials.createInsecure());

function generate(request, onResponse = () => {}) {
  const call = client.Generate(request);
  const ended = new Promise((resolve) => {
    call.on("data", (response) => onResponse(response, call));
    call.on("error", (error) => resolve({ code: error.code, details: error.details }));
    call.on("end", () => resolve(null));
  });
  return ended;
}

const answer = { tokens: [], text: "", finish: null, usage: null };
const chat = { messages: JSON.parse(given) };
const error = await generate(
  { chat, maxTokens: 40, sampling: { temperature: 0 } },
  (response) => {
    for (const token of response.tokens ?? []) answer.tokens.push(token.id);
    answer.text += response.text ?? "";
    answer.finish = response.finishReason ?? answer.finish;
    answer.usage = response.usage ?? answer.usage;
  },
);
const refused = await generate({ prompt: "The", maxTokens: 0 });
console.log(JSON.stringify({ answer, error, refused }));

const words = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
let begun = false;
const endless = { prompt: "The", maxTokens: 4000, sampling: { ignoreEos: true } };
const left = await generate(endless, async (_response, call) => {
  if (begun) return;
  begun = true;
  console.log("first");
  await words.next();
  call.cancel();
});
console.log(JSON.stringify({ left }));
await words.next();
client.close();
