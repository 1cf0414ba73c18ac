// Vercel's AI SDK with three of its providers.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const models = {
  "openai-compatible": createOpenAICompatible({
    name: "local", baseURL, apiKey: "x", supportsStructuredOutputs: true,
  })(model),
  openai: createOpenAI({ baseURL, apiKey: "x" })(model),
  anthropic: createAnthropic({ baseURL, apiKey: "x" })(model),
};
const getWeather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const asks = {
  streamText: async (model) => {
    const answer = streamText({ model, prompt: "Say hello. (hello)", maxRetries: 0 });
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    return text;
  },
  "generateText, tools": async (model) => {
    const answer = await generateText({
      model,
      prompt: "How is the weather in Zürich? (weather)",
      tools: { get_weather: getWeather },
      stopWhen: stepCountIs(3),
      maxRetries: 0,
    });
    return answer.text;
  },
  "Output.object": async (model) => {
    const answer = await generateText({
      model,
      prompt: "Who wrote the first program? (person)",
      output: Output.object({ schema: z.object({ name: z.string(), age: z.number() }) }),
      maxRetries: 0,
    });
    return answer.output;
  },
};
for (const [provider, chosen] of Object.entries(models)) {
  for (const [name, ask] of Object.entries(asks)) {
    const line = { ask: `${provider}: ${name}` };
    try {
      line.got = await ask(chosen);
    } catch (error) {
      line.error = `${error.name}: ${error.message} ${error.responseBody ?? ""}`.slice(0, 600);
    }
    console.log(JSON.stringify(line));
  }
}
