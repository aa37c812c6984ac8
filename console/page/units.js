// Numbers for people.

function scaled(value, units) {
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  const digits = at === 0 || Math.abs(value) >= 99.95 ? 0 : 1;
  return [value.toFixed(digits), units[at]];
}

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

export function count(value) {
  if (value == null || !Number.isFinite(value)) return "-";
  if (Math.abs(value) < 9999.5) return String(Math.round(value));
  return scaled(value, PREFIXES).join(" ").trim();
}

export function bytes(value) {
  if (value == null || !Number.isFinite(value)) return "-";
  const [number, unit] = scaled(value, PREFIXES);
  return `${number} ${unit}B`;
}

export function byteRate(value) {
  return value == null ? "-" : `${bytes(value)}/s`;
}

// Of bits a second, as operators write links and caps.
export function bitRate(value) {
  if (value == null) return "-";
  const [number, unit] = scaled(value, PREFIXES);
  return `${number} ${unit}bit/s`;
}

export function time(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "-";
  if (seconds < 1) {
    const [number, unit] = scaled(seconds * 1e9, ["ns", "us", "ms", "s"]);
    return `${number} ${unit}`;
  }
  return age(seconds);
}

export function age(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString();
}

export function percent(part) {
  return Number.isFinite(part) ? `${Math.round(100 * part)}%` : "-";
}

export function plural(number, one, more = `${one}s`) {
  return `${number} ${number === 1 ? one : more}`;
}
