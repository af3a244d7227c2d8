// What the steps of a record say of its own rows.

/** [{step, rows of this request}] of the steps in which it had some of `kind`. */
export function ownRows(record, kind) {
  return (record.steps ?? [])
    .map((step) => ({
      step,
      rows: step.rows.filter((row) => row.mine && (!kind || row.kind === kind)),
    }))
    .filter(({ rows }) => rows.length);
}

/** Tokens of a step by whose they are and what for. */
export function shares(step) {
  const sums = { mine_decode: 0, mine_prefill: 0, other_decode: 0, other_prefill: 0 };
  for (const row of step.rows) sums[`${row.mine ? "mine" : "other"}_${row.kind}`] += row.count;
  return sums;
}
