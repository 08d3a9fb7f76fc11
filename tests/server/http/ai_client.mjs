// Calls a server with the AI SDK: `node ai_client.mjs BASE_URL KEY CALL LATE`, bodies as JSON.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [baseURL, apiKey, ...bodies] = process.argv.slice(2);
const [call, late] = bodies.map((body) => JSON.parse(body));
const provider = createOpenAICompatible({ name: "tpengine", baseURL, apiKey });

function settings(body) {
  const { temperature, seed, messages } = body;
  const model = provider(body.model);
  return { model, temperature, seed, messages, maxOutputTokens: body.max_tokens, maxRetries: 0 };
}

const { name, parameters } = call.tools[0].function;
const answer = await generateText({
  ...settings(call),
  tools: { [name]: tool({ inputSchema: jsonSchema(parameters) }) },
  toolChoice: { type: "tool", toolName: name },
});
const [made] = answer.toolCalls;
let text = "";
const fail = ({ error }) => { throw error; };
for await (const part of streamText({ ...settings(late), onError: fail }).textStream) {
  text += part;
}
console.log(JSON.stringify([made.toolName, made.input, text]));
