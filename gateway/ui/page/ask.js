// Sends one chat request and reads its answer as it streams.
//
// A token is its bytes, as the answer's logprobs spell them; where an answer brings none, characters stand in. A
// logprob is the text of its JSON number: equal texts are equal bits.

import { authorization } from "./keys.js";
import { events } from "./sse.js";

/** What went wrong with a request. `status` is 0 where nobody answered, or the answer broke off. */
export class AskError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** The models a caller sees. */
export async function listModels(key) {
  const response = await answered(fetch("v1/models", { headers: authorization(key) }));
  return (await json(response)).data.map((model) => model.id);
}

/**
 * Ask; `onTokens` gets each piece as it comes: `[{id, text, logprob}]`. Resolves to what the answer's headers say.
 * Rejects with an `AskError`, or an `AbortError` where `signal` was raised.
 */
export async function ask({ model, prompt, maxTokens, temperature, seed, key, mode, signal }, onTokens) {
  const body = {
    model,
    messages: [{ role: "user", content: prompt }],
    max_tokens: maxTokens,
    temperature,
    seed,
    logprobs: true,
    stream: true,
    is_deterministic: mode === "verified",
  };
  // Computed each time: an answer out of the log would be equal without proving anything.
  const headers = { "content-type": "application/json", "cache-control": "no-store", ...authorization(key) };
  const request = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await answered(fetch("v1/chat/completions", request));
  const spell = speller();
  const all = [];
  let content = "";
  let finished = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        finished = true;
        break;
      }
      const chunk = parse(data);
      if (chunk.error) throw new AskError(chunk.error.message, { status: response.status, code: chunk.error.code });
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const tokens = spell(choice);
      content += choice.delta?.content ?? "";
      all.push(...tokens);
      onTokens(tokens);
    }
  } catch (error) {
    if (error instanceof AskError || error.name === "AbortError") throw error;
    throw new AskError("The answer broke off: the connection was lost.", { status: 0 });
  }
  if (!finished) throw new AskError("The answer broke off before its end.", { status: 0 });
  cut(all, content);
  return {
    mode: response.headers.get("x-verbatim-determinism"),
    degraded: response.headers.has("x-verbatim-degraded"),
    cache: response.headers.get("x-verbatim-cache"),
    fingerprint: response.headers.get("x-verbatim-fingerprint"),
  };
}

/** The response, if it is one of those that bring an answer. */
export async function answered(pending) {
  let response;
  try {
    response = await pending;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new AskError("The gateway does not answer. Is it running?");
  }
  if (response.ok) return response;
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // No envelope: somebody between us and the gateway said it.
  }
  throw new AskError(said.message ?? response.statusText, {
    status: response.status,
    code: said.code ?? null,
    retryAfter: response.headers.get("retry-after"),
  });
}

/** Takes from the last tokens the text that is no part of the answer: an end-of-text token has a name but no text. */
function cut(tokens, content) {
  let excess = tokens.reduce((sum, token) => sum + token.text.length, 0) - content.length;
  for (const token of tokens.toReversed()) {
    if (excess <= 0) return;
    const cut = Math.min(excess, token.text.length);
    token.text = token.text.slice(0, token.text.length - cut);
    token.ends = token.text === "";
    excess -= cut;
  }
}

async function json(response) {
  try {
    return await response.json();
  } catch {
    throw new AskError("The gateway's answer cannot be read.", { status: response.status });
  }
}

function parse(data) {
  try {
    return JSON.parse(data, (name, value, context) =>
      name === "logprob" && typeof value === "number" ? (context?.source ?? String(value)) : value,
    );
  } catch {
    throw new AskError("The answer holds an event that is no JSON.");
  }
}

/** Turns a stream's choices into tokens. A character whose bytes are spread over tokens is shown by the last one. */
function speller() {
  const decoder = new TextDecoder();
  return (choice) => {
    const scored = choice.logprobs?.content;
    if (scored) {
      return scored.map(({ token, bytes, logprob }) => ({
        id: (bytes ?? [...token]).join(" "),
        text: bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token,
        logprob,
      }));
    }
    return [...(choice.delta?.content ?? "")].map((character) => ({ id: character, text: character, logprob: null }));
  };
}
