// Vercel's AI SDK with @ai-sdk/openai-compatible: streamText and generateText.
// node vercel.mjs BASE_URL REQUESTS_FILE, in a directory with both packages installed.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, tool, jsonSchema } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const [baseURL, file] = process.argv.slice(2);

function toolsOf(request) {
  const tools = {};
  for (const { function: f } of request.tools ?? []) {
    tools[f.name] = tool({ description: f.description, inputSchema: jsonSchema(f.parameters) });
  }
  return request.tools ? { tools } : {};
}

async function read(request) {
  const provider = createOpenAICompatible({
    name: "m1serve",
    baseURL,
    includeUsage: "stream_options" in request,
    transformRequestBody: (body) => (request.n ? { ...body, n: request.n } : body),
  });
  const options = {
    model: provider(request.model),
    messages: request.messages,
    maxRetries: 0,
    maxOutputTokens: request.max_tokens,
    stopSequences: request.stop,
    ...toolsOf(request),
  };
  let failure;
  const onError = ({ error }) => {
    failure = error;
  };
  const result = request.stream
    ? streamText({ ...options, onError })
    : await generateText(options);
  if (request.stream) await result.consumeStream({ onError: (error) => (failure = error) });
  if (failure) throw failure;
  const calls = await result.toolCalls;
  const usage = await result.usage;
  const reason = await result.finishReason;
  return {
    choices: [
      {
        content: await result.text,
        reasoning: (await result.reasoningText) ?? "",
        calls: calls.map((call) => [call.toolName, call.input]),
        call_ids: calls.map((call) => call.toolCallId),
        finish_reason: reason.replace("tool-calls", "tool_calls"),
      },
    ],
    usage:
      usage.inputTokens === undefined
        ? null
        : { prompt_tokens: usage.inputTokens, completion_tokens: usage.outputTokens },
  };
}

const results = {};
for (const { name, request } of JSON.parse(readFileSync(file, "utf8"))) {
  try {
    results[name] = await read(request);
  } catch (error) {
    results[name] = { error: `${error?.name ?? "error"}: ${error?.message ?? error}`.slice(0, 300) };
  }
}
const manifest = require.resolve("@ai-sdk/openai-compatible/package.json");
const { version } = JSON.parse(readFileSync(manifest, "utf8"));
console.log(JSON.stringify({ version, results }));
