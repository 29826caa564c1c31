// Says in words what was found. Pure: takes a mode's verdict (compare.js), gives `{tone, headline, why}`.

import { plural } from "./dom.js";

/** `asked` is how many answers there will be, `running` whether more are to come. */
export function say(mode, found, asked, running) {
  if (found.done === 0 && found.distinct === 0) {
    if (running) return { tone: "plain", headline: "Asking…", why: "" };
    return found.failed > 0
      ? { tone: "broken", headline: "No answer", why: "" }
      : { tone: "plain", headline: "Not asked yet", why: PROMISES[mode] };
  }
  if (running) {
    const so = found.distinct === 1 ? "1 answer so far" : `${found.distinct} different answers so far`;
    return { tone: found.distinct > 1 ? tones(mode) : "plain", headline: so, why: where(found) };
  }
  const missing = found.done < asked ? ` ${found.done} of ${asked} came to their end.` : "";
  return { ...finished(mode, found), why: finished(mode, found).why + missing };
}

export const PROMISES = {
  off: "The server as it is: whatever is fastest for the batch at hand. Nothing is promised.",
  verified: "The same tokens and the same logprobs, to the last bit, whatever else the server is doing.",
};

function finished(mode, found) {
  const count = Math.max(found.done, 1);
  if (mode === "verified" && found.unverified > 0) {
    const why = "No verifier was there, and the policy has such requests answered without. Nothing is promised.";
    return { tone: "broken", headline: `${plural(found.unverified, "answer")} not verified`, why };
  }
  if (found.distinct > 1) {
    const headline = `${found.distinct} different answers`;
    if (mode === "off") return { tone: "bad", headline, why: where(found) };
    return { tone: "broken", headline, why: `${where(found)} ${cause(found)}` };
  }
  if (found.bitwise !== null && found.bitwise > 1) {
    const why = `The words agree this time; the logprobs differ from token ${found.firstLogprobDifference + 1} on.`;
    const headline = `1 answer, but ${found.bitwise} sets of logprobs`;
    if (mode === "off") return { tone: "bad", headline, why };
    return { tone: "broken", headline, why: `${why} ${cause(found)}` };
  }
  if (count === 1) return { tone: "plain", headline: "1 answer", why: "One alone cannot be compared." };
  if (!found.scored) {
    return { tone: "plain", headline: `1 answer, ${count} times`, why: "Compared by their text: they came without logprobs." };
  }
  if (mode === "off") {
    const why = "Equal to the last bit, this time. Nothing promises it in this mode: other company may change it.";
    return { tone: "plain", headline: `1 answer, ${count} times`, why };
  }
  const cached = found.cached > 0 ? ` ${found.cached} of them came out of the commit log.` : "";
  const why = `Every token and every logprob is equal, to the last bit.${cached}`;
  return { tone: "good", headline: `1 answer, ${count}\u00a0times, bit\u00a0for\u00a0bit`, why };
}

function where(found) {
  if (found.firstDifference === null) return "";
  const logprobs = found.firstLogprobDifference;
  const earlier = logprobs !== null && logprobs < found.firstDifference;
  return `First differs at ${found.unit} ${found.firstDifference + 1}.${earlier ? ` Logprobs differ from token ${logprobs + 1} on.` : ""}`;
}

function cause(found) {
  return found.fingerprints.length > 1
    ? `They come from ${found.fingerprints.length} fingerprints, between which nothing is promised.`
    : "This breaks the guarantee: please report it, with the fingerprint and the request.";
}

function tones(mode) {
  return mode === "verified" ? "broken" : "bad";
}
