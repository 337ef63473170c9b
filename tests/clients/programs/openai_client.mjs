// node openai_client.mjs URL: chat, stream, typed answer, tool call, completion and Responses with the npm package.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Weather in Oslo?" }];
const asked = { model: "tiny", messages, seed: 7, max_completion_tokens: 12, loops: 3 };
const form = (properties) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false,
});

const models = (await client.models.list()).data.map((model) => model.id);
const whole = await client.chat.completions.create(asked);
const stream = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
let streamed = "";
stream.on("content", (piece) => (streamed += piece));
const tokens = [whole.usage.completion_tokens, (await stream.totalUsage()).completion_tokens];

const schema = form({ sky: { enum: ["clear", "rain"] }, windy: { type: "boolean" } });
const typed = await client.chat.completions.parse({
  model: "tiny", messages, seed: 7, response_format: { type: "json_schema", json_schema: { name: "weather", schema } },
});
const called = await client.chat.completions.create({
  model: "tiny", messages, seed: 7, tool_choice: "required", parallel_tool_calls: false,
  tools: [{ type: "function", function: { name: "weather", parameters: form({ city: { enum: ["Oslo", "Rome"] } }) } }],
});
const calls = called.choices[0].message.tool_calls.map((call) => [
  call.function.name, JSON.parse(call.function.arguments),
]);
const completed = await client.completions.create({ model: "tiny", prompt: "Oslo", max_tokens: 5, ignore_eos: true });
const plain = completed.usage.completion_tokens;
const question = { model: "tiny", input: "Weather in Oslo?", temperature: 0, max_output_tokens: 12 };
const responses = [(await client.responses.create(question)).output_text, ""];
for await (const event of await client.responses.create({ ...question, stream: true })) {
  if (event.type === "response.output_text.delta") responses[1] += event.delta;
}
const refused = await client.chat.completions.create({ ...asked, loops: 99 }).catch((error) => error.param);
console.log(JSON.stringify({
  models, whole: whole.choices[0].message.content, streamed, tokens, loops: whole.tinyloop.loops_granted,
  typed: JSON.parse(typed.choices[0].message.content), calls, plain, responses, refused,
}));
