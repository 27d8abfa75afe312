import assert from "node:assert/strict";
import { test } from "node:test";
import { contrast, diverging, ink, rgb, type Rgb, sequential, step, STEPS, type Theme } from "../src/shared/colour.ts";
import { scale, ticks } from "../src/shared/canvas.tsx";
import { brief, fixed, percent, visible } from "../src/shared/format.ts";

const THEMES: Theme[] = ["light", "dark"];
// Machado, Oliveira, Fernandes 2009, full severity, on linear light.
const VISION: Record<string, number[][]> = {
  protan: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deutan: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritan: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};

const linear = (value: number) => (value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4);
function lab(colour: number[]): number[] {
  const [r, g, b] = colour;
  const f = (t: number) => (t > 0.008856 ? Math.cbrt(t) : 7.787 * t + 16 / 116);
  const [x, y, z] = [(0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b, (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089].map(f);
  return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
}
function seen(colour: Rgb, matrix?: number[][]): number[] {
  const light = colour.map(linear);
  return lab(matrix ? matrix.map((row) => Math.min(1, Math.max(0, row.reduce((sum, m, i) => sum + m * light[i], 0)))) : light);
}
const distance = (a: number[], b: number[]) => Math.hypot(...a.map((value, i) => value - b[i]));

test("ink can be read on every colour of both scales", () => {
  assert.equal(contrast([0, 0, 0], [255, 255, 255]).toFixed(1), "21.0");
  for (const theme of THEMES) {
    for (const colours of [diverging(theme), sequential(theme)]) {
      assert.equal(colours.length, STEPS);
      for (const colour of colours) assert.ok(contrast(colour, ink(theme)) >= 4.5, `${theme} ${colour}: ${contrast(colour, ink(theme))}`);
    }
  }
});

test("both ends differ from each other and from the middle with any kind of colour vision", () => {
  for (const theme of THEMES) {
    const colours = diverging(theme);
    for (const matrix of [undefined, ...Object.values(VISION)]) {
      const [low, middle, high] = [0, (STEPS - 1) / 2, STEPS - 1].map((i) => seen(colours[i], matrix));
      assert.ok(distance(low, high) > 40, `${theme}: ends ${distance(low, high)}`);
      assert.ok(Math.min(distance(low, middle), distance(high, middle)) > 15, `${theme}: middle`);
    }
  }
});

test("the scale goes from blue to orange, evenly", () => {
  const light = diverging("light");
  assert.deepEqual(light[0], rgb("#4f9fd6"));
  assert.deepEqual(light[STEPS - 1], rgb("#ee8434"));
  assert.deepEqual([step(0), step(0.5), step(1), step(-3), step(7), step(NaN)], [0, 64, 128, 0, 128, -1]);
});

test("ticks are round and within their range", () => {
  assert.deepEqual(ticks([0, 1]), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(ticks([-9, 9], 4), [-5, 0, 5]);
  assert.deepEqual(ticks([3, 3]), [3]);
  assert.equal(scale([0, 2], [10, 30])(1), 20);
});

test("numbers as readers see them", () => {
  assert.deepEqual([fixed(-0.0001, 2), fixed(-1.25, 1), fixed(NaN), fixed(Infinity)], ["0.00", "−1.3", "–", "∞"]);
  assert.deepEqual([percent(0.1234), percent(null), brief(0.12345), brief(-2)], ["12.3 %", "–", "0.1235", "−2"]);
  assert.equal(visible("a\n\u001b\u202e"), "a↵␛�");
});
