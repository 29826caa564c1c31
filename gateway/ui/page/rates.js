// From looks at a gateway's sums to rates. Pure; its clock is the gateway's own (`up_s`), so a late look is no error.

/** How many looks are kept: at one a second, two minutes. */
export const KEPT = 121;

/** The looks so far. One that is younger than the one before it is another run of the gateway's, and begins anew. */
export function remember(looks, look) {
  const begins = looks.length > 0 && look.up_s <= looks.at(-1).up_s;
  return [...(begins ? [] : looks), look].slice(-KEPT);
}

/** What `pick` sums up, per second, at each look: over the `over` looks before it. Null where there is none before. */
export function rates(looks, pick, over = 10) {
  return looks.map((look, index) => {
    const before = looks[Math.max(0, index - over)];
    return look === before ? null : (pick(look) - pick(before)) / (look.up_s - before.up_s);
  });
}

/** What came to a sum over all looks that are kept. */
export function gained(looks, pick) {
  return looks.length < 2 ? 0 : pick(looks.at(-1)) - pick(looks[0]);
}

/** The same for a histogram; null where nothing came. */
export function gainedHistogram(looks, pick) {
  const now = looks.length > 0 ? pick(looks.at(-1)) : null;
  if (!now) return null;
  const before = pick(looks[0]);
  const counts = before ? now.counts.map((count, index) => count - before.counts[index]) : now.counts;
  return counts.some((count) => count > 0) ? { bounds: now.bounds, counts } : null;
}

/** An estimate, by the straight line within a bucket; above all bounds the last bound. */
export function quantile(histogram, share) {
  const target = share * total(histogram);
  let below = 0;
  for (const [index, bound] of histogram.bounds.entries()) {
    const count = histogram.counts[index];
    const floor = index > 0 ? histogram.bounds[index - 1] : 0;
    if (count > 0 && below + count >= target) return floor + ((bound - floor) * (target - below)) / count;
    below += count;
  }
  return histogram.bounds.at(-1);
}

export function total(histogram) {
  return histogram.counts.reduce((sum, count) => sum + count, 0);
}

export function sum(counts) {
  return Object.values(counts ?? {}).reduce((all, count) => all + count, 0);
}

/** The bars of a histogram of whole numbers, without the empty ones at its end: `[{range, label, count}]`. */
export function bars({ bounds, counts }) {
  const all = counts.map((count, index) => {
    const from = index === 0 ? 0 : bounds[index - 1] + 1;
    if (index === bounds.length) return { range: `${from} and on`, label: `>${bounds.at(-1)}`, count };
    const range = from >= bounds[index] ? `${bounds[index]}` : `${from} to ${bounds[index]}`;
    return { range, label: from >= bounds[index] ? range : `≤${bounds[index]}`, count };
  });
  const last = all.findLastIndex(({ count }) => count > 0);
  return all.slice(0, Math.max(last + 1, Math.min(8, all.length)));
}
