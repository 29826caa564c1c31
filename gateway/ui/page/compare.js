// How far answers to one prompt differ. Pure: takes answers, gives groups and a verdict.
//
// An answer is `{tokens: [{id, text, logprob}], state}`; its state is one of "waiting", "streaming", "done", "failed".

/** Index of the first element in which two sequences differ, null where one is the beginning of the other. */
export function firstDifference(a, b, of = (token) => token.id) {
  const common = Math.min(a.length, b.length);
  for (let index = 0; index < common; index += 1) if (of(a[index]) !== of(b[index])) return index;
  return null;
}

/** The same for answers that have ended: then a missing token is a difference too. */
function difference(a, b, of) {
  const index = firstDifference(a.tokens, b.tokens, of);
  if (index !== null || a.tokens.length === b.tokens.length) return index;
  const [shorter] = a.tokens.length < b.tokens.length ? [a] : [b];
  return shorter.state === "done" ? shorter.tokens.length : null;
}

/**
 * The distinct answers, the most frequent first: `[{members, tokens}]`, the members being indices. An answer that is
 * still being written belongs to the first group it agrees with so far.
 */
export function groups(answers) {
  const begun = answers
    .map((answer, index) => ({ answer, index }))
    .filter(({ answer }) => answer.tokens.length > 0 && answer.state !== "failed");
  // Those that ended come first, then the longest: they can hold others, not the other way round.
  begun.sort(
    (a, b) =>
      (b.answer.state === "done") - (a.answer.state === "done") ||
      b.answer.tokens.length - a.answer.tokens.length ||
      a.index - b.index,
  );
  const found = [];
  for (const { answer, index } of begun) {
    const home = found.find(({ longest }) => difference(longest, answer) === null);
    if (home === undefined) found.push({ longest: answer, members: [index] });
    else home.members.push(index);
  }
  for (const group of found) group.members.sort((a, b) => a - b);
  found.sort((a, b) => b.members.length - a.members.length || a.members[0] - b.members[0]);
  return found.map(({ longest, members }) => ({ tokens: longest.tokens, ended: longest.state === "done", members }));
}

/** Where two groups part: the first token that differs, the end of one included. */
export function parting(a, b) {
  const index = firstDifference(a.tokens, b.tokens);
  return index ?? Math.min(a.tokens.length, b.tokens.length);
}

/** What can be said about a mode's answers. */
export function verdict(answers) {
  const distinct = groups(answers);
  const done = answers.filter((answer) => answer.state === "done");
  const scored = done.length > 0 && done.every((answer) => answer.tokens.every((token) => token.logprob !== null));
  const [reference, ...others] = distinct;
  const partings = others.map((group) => parting(reference, group));
  const versions = scored ? logprobVersions(done) : { count: null, first: null };
  return {
    groups: distinct,
    done: done.length,
    failed: answers.filter((answer) => answer.state === "failed").length,
    distinct: distinct.length,
    /** The first token, from 0, in which any two differ; null where none do. */
    firstDifference: partings.length ? Math.min(...partings) : null,
    scored,
    /** What answers are compared by: characters where they came without logprobs, and so without tokens. */
    unit: answers.some((answer) => answer.tokens.some((token) => token.logprob === null)) ? "character" : "token",
    /** Distinct answers, logprobs counted in; null where they came without. */
    bitwise: versions.count,
    firstLogprobDifference: versions.first,
    fingerprints: [...new Set(done.map((answer) => answer.said?.fingerprint).filter(Boolean))],
    unverified: done.filter((answer) => answer.said?.mode !== "verified").length,
    cached: done.filter((answer) => ["hit", "follow"].includes(answer.said?.cache)).length,
  };
}

function logprobVersions(done) {
  const bits = (token) => `${token.id}:${token.logprob}`;
  const all = new Set(done.map((answer) => answer.tokens.map(bits).join("|")));
  const firsts = done.slice(1).map((answer) => difference(done[0], answer, bits)).filter((index) => index !== null);
  return { count: all.size, first: firsts.length ? Math.min(...firsts) : null };
}
