// Sends a form as a script, and reads the answer's events as they come.
export function post(address, fields) {
  return fetch(address, { method: "POST", body: new URLSearchParams(fields), headers: { accept: "text/event-stream" } });
}

// The events of an answer, as [name, value]. By a reader: many a Safari has no loop over a stream.
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      const events = (rest + piece.value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(event) ?? [];
        if (name) yield [name, JSON.parse(data)];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever reads no further leaves the answer
  }
}
