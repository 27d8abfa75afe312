/**
 * Colours of numbers. Blue is forward KL and orange is reverse KL, as in the report; the two can be told apart with any
 * common kind of colour vision. Text stands on these colours, so each of them leaves a contrast of 4.5 to the ink.
 */

export type Theme = "light" | "dark";
export type Rgb = readonly [number, number, number];

const ENDS: Record<Theme, { low: string; middle: string; high: string; spread: string; ink: string }> = {
  light: { low: "#4f9fd6", middle: "#f4f3ef", high: "#ee8434", spread: "#0f9c75", ink: "#1b1d21" },
  dark: { low: "#155f98", middle: "#23272e", high: "#9a4708", spread: "#0d7a5c", ink: "#eceef1" },
};
export const STEPS = 129;

export function ink(theme: Theme): Rgb {
  return rgb(ENDS[theme].ink);
}

/** From forward KL over an even mixture to reverse KL, in `STEPS` steps. */
export function diverging(theme: Theme): Rgb[] {
  const { low, middle, high } = ENDS[theme];
  const half = (STEPS - 1) / 2;
  return Array.from({ length: STEPS }, (_, i) =>
    i <= half ? between(rgb(low), rgb(middle), i / half) : between(rgb(middle), rgb(high), (i - half) / half),
  );
}

/** From nothing to much, in `STEPS` steps. */
export function sequential(theme: Theme): Rgb[] {
  const { middle, spread } = ENDS[theme];
  return Array.from({ length: STEPS }, (_, i) => between(rgb(middle), rgb(spread), i / (STEPS - 1)));
}

/** The step of a share of 0 to 1; -1 for what is not a number. */
export function step(share: number): number {
  return Number.isNaN(share) ? -1 : Math.round(Math.min(Math.max(share, 0), 1) * (STEPS - 1));
}

export function css([r, g, b]: Rgb): string {
  return `rgb(${r},${g},${b})`;
}

export function rgb(hex: string): Rgb {
  const value = parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

/** The contrast of two colours as WCAG 2 defines it. */
export function contrast(one: Rgb, other: Rgb): number {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function luminance(colour: Rgb): number {
  const [r, g, b] = colour.map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function linear(value: number): number {
  const share = value / 255;
  return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
}

function encoded(value: number): number {
  const share = value <= 0.0031308 ? 12.92 * value : 1.055 * value ** (1 / 2.4) - 0.055;
  return Math.round(255 * Math.min(Math.max(share, 0), 1));
}

/** Mixed in Oklab, where equal steps look equal. */
function between(from: Rgb, to: Rgb, share: number): Rgb {
  const [a, b] = [oklab(from), oklab(to)];
  return fromOklab(a.map((value, i) => value + (b[i] - value) * share));
}

function oklab(colour: Rgb): number[] {
  const [r, g, b] = colour.map(linear);
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromOklab([lightness, a, b]: number[]): Rgb {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    encoded(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    encoded(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    encoded(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}
