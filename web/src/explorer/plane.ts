/** The arithmetic of the gate plane: E[λ] or its spread where two coefficients vary and the others stay. */

import { type Columns, type Gate, SIGNAL_OF, sigmoid, weights } from "./gate.ts";

/** What a gate reads of one token, split into both axes and the rest. */
export interface Split {
  x: Float64Array;
  y: Float64Array;
  rest: Float64Array;
}

/** Tokens at even distances, at most so many: a mean over them is near that over all. */
export function sample(tokens: Int32Array, most: number): Int32Array {
  const stride = Math.max(1, tokens.length / most);
  return Int32Array.from({ length: Math.min(tokens.length, most) }, (_, i) => tokens[Math.floor(i * stride)]);
}

export function split(gate: Gate, columns: Columns, tokens: Int32Array, xName: string, yName: string): Split {
  const [xSignal, ySignal] = [SIGNAL_OF[xName] ?? xName, SIGNAL_OF[yName] ?? yName];
  const value = (signal: string, token: number) => (signal === "c" ? 1 : columns[signal][token]);
  const others = weights(gate).filter(([signal, weight]) => weight !== 0 && signal !== xSignal && signal !== ySignal);
  // An infinite c would hide everything else; in the plane it counts as 0.
  const bias = xSignal === "c" || ySignal === "c" || !Number.isFinite(gate.c) ? 0 : gate.c;
  const part = (of: (token: number) => number) => Float64Array.from(tokens, of);
  return {
    x: part((token) => value(xSignal, token)),
    y: part((token) => value(ySignal, token)),
    rest: part((token) => others.reduce((sum, [signal, weight]) => sum + weight * columns[signal][token], bias)),
  };
}

/** Mean and spread of λ over the tokens with both coefficients at these values. */
export function momentsAt(of: Split, x: number, y: number): { mean: number; sd: number } {
  let [sum, squares, count] = [0, 0, 0];
  for (let i = 0; i < of.x.length; i++) {
    const lam = sigmoid(of.rest[i] + x * of.x[i] + y * of.y[i]);
    if (Number.isNaN(lam)) continue;
    sum += lam;
    squares += lam * lam;
    count++;
  }
  const mean = sum / count;
  return { mean, sd: Math.sqrt(Math.max(0, squares / count - mean * mean)) };
}

export interface Spot<T> {
  x: number;
  y: number;
  members: T[];
}

/** Marks that stand at one place are one spot. */
export function spots<T>(marks: readonly T[], at: (mark: T) => [number, number]): Spot<T>[] {
  const found = new Map<string, Spot<T>>();
  for (const mark of marks) {
    const [x, y] = at(mark);
    const key = `${x.toFixed(2)} ${y.toFixed(2)}`;
    const spot = found.get(key);
    if (spot) spot.members.push(mark);
    else found.set(key, { x, y, members: [mark] });
  }
  return [...found.values()];
}

/** Lines along which a grid of `size` × `size` values has the value `level`, in grid units. */
export function contour(values: Float64Array, size: number, level: number): [number, number, number, number][] {
  const found: [number, number, number, number][] = [];
  for (let row = 0; row + 1 < size; row++) {
    for (let column = 0; column + 1 < size; column++) {
      const corners = [
        [column, row], [column + 1, row], [column + 1, row + 1], [column, row + 1],
      ].map(([x, y]) => ({ x, y, value: values[y * size + x] - level }));
      const crossed: [number, number][] = [];
      for (let i = 0; i < 4; i++) {
        const [one, other] = [corners[i], corners[(i + 1) % 4]];
        if (one.value < 0 === other.value < 0) continue;
        const share = one.value / (one.value - other.value);
        crossed.push([one.x + (other.x - one.x) * share, one.y + (other.y - one.y) * share]);
      }
      for (let i = 0; i + 1 < crossed.length; i += 2) found.push([...crossed[i], ...crossed[i + 1]]);
    }
  }
  return found;
}
