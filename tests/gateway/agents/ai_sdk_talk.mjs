// One question to the Vercel AI SDK with two tools, whose thread goes on from file. The page's two lines stand before.
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const tools = {
  read_file: tool({
    description: "The text of a file.",
    inputSchema: z.object({ path: z.string() }),
    execute: ({ path }) => readFileSync(path, "utf8"),
  }),
  edit_file: tool({
    description: "Replace a text in a file.",
    inputSchema: z.object({ path: z.string(), old: z.string(), new: z.string() }),
    execute: (edit) => {
      writeFileSync(edit.path, readFileSync(edit.path, "utf8").replace(edit.old, edit.new));
      return "done";
    },
  }),
};
const before = existsSync("thread.json") ? JSON.parse(readFileSync("thread.json", "utf8")) : [];
const messages = [...before, { role: "user", content: process.argv[2] }];
const system = readFileSync("instructions.txt", "utf8");
const answer = await generateText({ model, system, messages, tools, stopWhen: stepCountIs(6) });
writeFileSync("thread.json", JSON.stringify([...messages, ...answer.response.messages]));
console.log(answer.text, JSON.stringify(answer.usage));
