// Numbers as people read them.

/** 1234567 -> 1.23M; small ones as they are. */
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [size, sign] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (Math.abs(value) >= size) return trim(value / (sign === "k" ? 1e3 : size)) + sign;
  }
  return Number.isInteger(value) ? String(value) : trim(value);
}

/** Milliseconds: 0.42 ms, 18 ms, 2.31 s. */
export function ms(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 1e4) return `${trim(value / 1e3)} s`;
  return `${trim(value)} ms`;
}

/** Bytes in powers of 1024. */
export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, value)) / 10)));
  return `${trim(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** A share of 1 as a percentage. */
export function percent(value) {
  return Number.isFinite(value) ? `${trim(value * 100)} %` : "–";
}

/** The time of day of a moment in seconds since 1970. */
export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

/** A metric as /ui/api/stages gives it, short: a number, or the median of a histogram. */
export function metric(name, value) {
  if (value === null || value === undefined) return "";
  const seconds = name.endsWith("_seconds");
  if (typeof value === "number") return seconds ? ms(value * 1e3) : count(value);
  const middle = value.p50;
  if (middle === null || middle === undefined) return "";
  return seconds ? ms(middle * 1e3) : count(middle);
}

/** The same in full, for the head of a stage. */
export function metricWhole(name, value) {
  if (value === null || value === undefined) return "nothing yet";
  if (typeof value === "number") return metric(name, value);
  const as = (one) => (name.endsWith("_seconds") ? ms(one * 1e3) : count(one));
  const known = ["p50", "p90", "p99"].filter((one) => Number.isFinite(value[one]));
  const parts = known.map((one) => `${one} ${as(value[one])}`);
  if (Number.isFinite(value.count)) parts.push(`of ${count(value.count)}`);
  return known.length ? parts.join("  ") : "nothing yet";
}

/** A sampling value: probabilities and logits keep four digits that count. */
export function draw(value) {
  if (!Number.isFinite(value)) return String(value);
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(2);
  return Math.abs(value) >= 100 ? value.toFixed(1) : value.toPrecision(4);
}

function trim(value) {
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return String(Number(value.toFixed(digits)));
}
