/**
 * λ = σ(a·h + b·u + c + d·gap + Σ e_i·signal_i), as `gatespace.gating.coefficients` has it: λ weighs reverse KL, and 1-λ
 * weighs forward KL.
 */

export const COEFFICIENTS = ["a", "b", "c", "d"] as const;
export type Coefficient = (typeof COEFFICIENTS)[number];

export interface Gate {
  readonly a: number;
  readonly b: number;
  readonly c: number;
  readonly d: number;
  readonly extra: Readonly<Record<string, number>>;
}

/** The signal that a coefficient weighs; c weighs none. */
export const SIGNAL_OF: Readonly<Record<string, string | undefined>> = { a: "h", b: "u", d: "gap" };

export function gateOf(abcd: readonly number[], extra: Readonly<Record<string, number>> = {}): Gate {
  const [a, b, c, d] = abcd;
  const kept = Object.entries(extra).filter(([, weight]) => weight !== 0);
  return { a, b, c, d, extra: Object.fromEntries(kept.sort(([one], [other]) => (one < other ? -1 : 1))) };
}

/** 1 / (1 + e^-x) without overflow. */
export function sigmoid(x: number): number {
  if (x >= 0) return 1 / (1 + Math.exp(-x));
  const e = Math.exp(x);
  return e / (1 + e);
}

export function logit(share: number): number {
  return Math.log(share) - Math.log1p(-share);
}

export function staticGate(lam: number): Gate {
  return gateOf([0, 0, lam <= 0 ? -Infinity : lam >= 1 ? Infinity : logit(lam), 0]);
}

/** A coefficient of the four, or of a further signal by its name. */
export function coefficient(gate: Gate, name: string): number {
  return (COEFFICIENTS as readonly string[]).includes(name) ? gate[name as Coefficient] : (gate.extra[name] ?? 0);
}

/** The gate with one coefficient at `value`. An infinite c leaves no room for a signal, so it ends when one comes in. */
export function withCoefficient(gate: Gate, name: string, value: number): Gate {
  const four = COEFFICIENTS.map((one) => (one === name ? value : gate[one]));
  const extra = (COEFFICIENTS as readonly string[]).includes(name) ? gate.extra : { ...gate.extra, [name]: value };
  const changed = gateOf(four, extra);
  return Number.isFinite(changed.c) || isStatic(changed) ? changed : { ...changed, c: 0 };
}

export function isStatic(gate: Gate): boolean {
  return gate.a === 0 && gate.b === 0 && gate.d === 0 && Object.keys(gate.extra).length === 0;
}

export function sameGate(one: Gate | null, other: Gate | null): boolean {
  return one === other || (one !== null && other !== null && gateText(one) === gateText(other));
}

// ---------------------------------------------------------------------------------------------------- as text

/** Text that Python's `Gate.parse` and `parseGate` read back to an equal gate. */
export function gateText(gate: Gate): string {
  const further = Object.entries(gate.extra).map(([name, weight]) => `${name}=${numberText(weight)}`);
  return [...COEFFICIENTS.map((name) => numberText(gate[name])), ...further].join(",");
}

export function parseGate(text: string): Gate | null {
  const parts = text.split(",");
  const four = parts.slice(0, 4).map(numberOf);
  if (four.length < 4 || four.some(Number.isNaN)) return null;
  const extra: Record<string, number> = {};
  for (const part of parts.slice(4)) {
    const [name, value] = part.split("=");
    const weight = numberOf(value ?? "");
    if (!/^[A-Za-z_]\w*$/.test(name) || !Number.isFinite(weight)) return null;
    extra[name] = weight;
  }
  const gate = gateOf(four, extra);
  if (![gate.a, gate.b, gate.d].every(Number.isFinite) || (!Number.isFinite(gate.c) && !isStatic(gate))) return null;
  return gate;
}

export function numberText(value: number): string {
  return Number.isFinite(value) ? String(value === 0 ? 0 : value) : value > 0 ? "inf" : "-inf";
}

export function numberOf(text: string): number {
  const plain = text.trim();
  if (/^[-+]?inf(inity)?$/i.test(plain)) return plain.startsWith("-") ? -Infinity : Infinity;
  return plain === "" ? NaN : Number(plain);
}

/** The paper's name of a gate, else its coefficients. */
export function gateLabel(gate: Gate, points: ReadonlyMap<string, Gate>): string {
  for (const [name, point] of points) if (sameGate(gate, point)) return name;
  if (isStatic(gate)) return `static:${short(sigmoid(gate.c))}`;
  if (Object.keys(gate.extra).length === 0) {
    if (gate.a < 0 && gate.b === 0 && gate.c === 0 && gate.d === 0) return `entropy-only(${short(gate.a)})`;
    if (gate.a === 0 && gate.b === 0 && gate.c === 0) return `gap-only(${gate.d > 0 ? "+" : ""}${short(gate.d)})`;
  }
  return gateText(gate);
}

function short(value: number): string {
  return String(Number(value.toPrecision(12)));
}

/** What goes into the configuration of a training at this gate. */
export function configText(gate: Gate, k: number): string {
  const value = isStatic(gate) && !Number.isFinite(gate.c) ? `static:${gate.c > 0 ? 1 : 0}` : gateText(gate);
  return `objective:\n  method: gated\n  gate: "${value}"\n  top_k: ${k}\n`;
}

// ---------------------------------------------------------------------------------------------------- restrictions

export type Restriction = { gate: Gate; why?: undefined } | { gate: null; why: string };

/** (-|a|, 0, 0, 0): high entropy goes to forward KL. */
export function entropyOnly(gate: Gate): Restriction {
  return gate.a === 0 ? { gate: null, why: "a = 0" } : { gate: gateOf([-Math.abs(gate.a), 0, 0, 0]) };
}

/** (0, 0, 0, d), its sign kept. */
export function gapOnly(gate: Gate): Restriction {
  return gate.d === 0 ? { gate: null, why: "d = 0" } : { gate: gateOf([0, 0, 0, gate.d]) };
}

// ---------------------------------------------------------------------------------------------------- over tokens

/** Signal → a number for each token; NaN where it was not recorded. */
export type Columns = Readonly<Record<string, Float64Array>>;

/** λ of the tokens `which`, in their order; NaN where a signal that the gate reads is not known. */
export function lamOf(gate: Gate, columns: Columns, which: Int32Array, out = new Float64Array(which.length)): Float64Array {
  const terms = weights(gate).filter(([, weight]) => weight !== 0);
  out.fill(0);
  // In the order of Python's sum, so that both round alike: a·h + b·u + c + d·gap + further ones.
  let biased = false;
  const bias = () => {
    for (let i = 0; i < out.length; i++) out[i] += gate.c;
    biased = true;
  };
  for (const [signal, weight] of terms) {
    if (!biased && signal !== "h" && signal !== "u") bias();
    const column = columns[signal];
    for (let i = 0; i < out.length; i++) out[i] += weight * (column ? column[which[i]] : NaN);
  }
  if (!biased) bias();
  for (let i = 0; i < out.length; i++) out[i] = sigmoid(out[i]);
  return out;
}

/** Signals with their weights, the paper's first. */
export function weights(gate: Gate): [signal: string, weight: number][] {
  return [["h", gate.a], ["u", gate.b], ["gap", gate.d], ...Object.entries(gate.extra)];
}

export interface Summary {
  /** Tokens that have a λ. */
  count: number;
  mean: number;
  sd: number;
  saturated: number;
  /** Σ λ·RKL / Σ RKL: the constant λ that gives reverse KL the same total weight. */
  rklMean: number;
  /** What reverse KL has of the loss: Σ λ·RKL / Σ (λ·RKL + (1-λ)·FKL). */
  rklShare: number;
  hist: number[];
}

export function summarise(lam: Float64Array, which: Int32Array, forward: Float64Array, reverse: Float64Array, bins: number, saturation: number): Summary {
  let [count, sum, saturated, rklWeighed, rkl, fklWeighed] = [0, 0, 0, 0, 0, 0];
  const hist = new Array<number>(bins).fill(0);
  for (let i = 0; i < lam.length; i++) {
    const one = lam[i];
    if (Number.isNaN(one)) continue;
    count++;
    sum += one;
    if (Math.min(one, 1 - one) <= saturation) saturated++;
    hist[Math.min(Math.max(Math.floor(one * bins), 0), bins - 1)]++;
    const [r, f] = [reverse[which[i]], forward[which[i]]];
    if (Number.isFinite(r) && Number.isFinite(f)) {
      rkl += r;
      rklWeighed += one * r;
      fklWeighed += (1 - one) * f;
    }
  }
  const mean = sum / count;
  let squares = 0;
  for (const one of lam) if (!Number.isNaN(one)) squares += (one - mean) ** 2;
  return {
    count,
    mean,
    sd: Math.sqrt(squares / count),
    saturated: saturated / count,
    rklMean: rklWeighed / rkl,
    rklShare: rklWeighed / (rklWeighed + fklWeighed),
    hist,
  };
}

// ---------------------------------------------------------------------------------------------------- h for another K

/** Entropy of the first k probabilities, renormalised over themselves, divided by log k; NaN where there are fewer. */
export function entropyOfTop(probabilities: Float64Array, start: number, k: number): number {
  let total = 0;
  for (let i = 0; i < k; i++) total += probabilities[start + i];
  if (Number.isNaN(total) || total <= 0) return NaN;
  let entropy = 0;
  for (let i = 0; i < k; i++) {
    const p = probabilities[start + i] / total;
    if (p > 0) entropy -= p * Math.log(p);
  }
  return Math.min(Math.max(k === 1 ? 0 : entropy / Math.log(k), 0), 1);
}
