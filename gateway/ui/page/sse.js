// Server-sent events out of a response's body: the data of each, comments left out.

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      // The events of OpenAI's streams are of one line each.
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trimStart();
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
