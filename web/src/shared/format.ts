/** Numbers as readers see them. */

const MINUS = "−";
const NOTHING = "–";

export function fixed(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || Number.isNaN(value)) return NOTHING;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : `${MINUS}∞`;
  return value.toFixed(digits).replace(/^-(?=0\.?0*$)/, "").replace("-", MINUS);
}

export function percent(value: number | null | undefined, digits = 1): string {
  return value === null || value === undefined || Number.isNaN(value) ? NOTHING : `${fixed(100 * value, digits)} %`;
}

/** A number in as few digits as it needs, at most `digits` significant ones. */
export function brief(value: number, digits = 4): string {
  if (!Number.isFinite(value)) return fixed(value);
  return String(Number(value.toPrecision(digits))).replace("-", MINUS);
}

export function count(value: number, one: string, many = `${one}s`): string {
  return `${value.toLocaleString("en-US").replaceAll(",", "\u202f")} ${value === 1 ? one : many}`;
}

/** The text of a token with blanks, line ends and control characters made visible. */
export function visible(text: string): string {
  return text
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, "␡")
    .replace(/[\u0080-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "�");
}
