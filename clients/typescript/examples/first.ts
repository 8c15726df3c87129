// The first example of README.md: an agent is told something, and remembers it.
import { homedir } from "node:os";
import { Client, user } from "@kvasir/client";

const engine = new Client(`unix:${homedir()}/.kvasir/run/engine.sock`); // what `kvasir up` listens on
const reply = await engine.reply({ agentId: "ada", append: [user("My name is Anna. What is my name?")] });
console.log(reply.text, reply.started?.cachedTokens);

for await (const event of engine.generate({ append: [user("My dog is called Rex.")], agentId: "ada" })) {
  if (event.case === "delta") process.stdout.write(event.value.text);
}
engine.close();
