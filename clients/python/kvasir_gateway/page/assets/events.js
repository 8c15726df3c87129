// Sends a form as a script, and reads the answer's events as they come.
export function post(address, fields) {
  return fetch(address, { method: "POST", body: new URLSearchParams(fields), headers: { accept: "text/event-stream" } });
}

// The events of an answer, as [name, value].
export async function* eventsOf(answer) {
  let rest = "";
  for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + piece).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(event) ?? [];
      if (name) yield [name, JSON.parse(data)];
    }
  }
}
