/** What stands in the page, and the same in a form that is quick to compute with. `gatespace.addons.pages.explore` writes it. */

import { type Columns, entropyOfTop, type Gate, gateOf, numberOf } from "./gate.ts";

export const SCHEMA = 1;

type Abcd = (number | "inf" | "-inf")[];
export interface GateRecord {
  abcd: Abcd;
  extra: Record<string, number>;
}
export interface ScoreRecord {
  accuracy: number;
  correct: number;
  count: number;
  low: number;
  high: number;
  macro_f1: number | null;
  best_constant: number | null;
}
export interface RunRecord {
  id: string;
  label: string;
  task: string;
  /** What its responses are judged by: accuracy of labels, or the metric of free text. */
  metric: string;
  kind: string;
  seed: number;
  gate: GateRecord | null;
  top_k: number;
  entropy: string;
  steps: number;
  done: boolean;
  shown: number;
  recorded: number;
  lam: { mean: number; sd: number | null; saturated: number | null; rkl_mean: number | null; tokens: number | null } | null;
  scores: Record<string, ScoreRecord>;
  course: Record<string, (number | null)[]>;
}
export interface MarkRecord {
  label: string;
  task: string;
  kind: string;
  gate: GateRecord | null;
  runs: number[];
  split: string | null;
  accuracy: number | null;
  low: number | null;
  high: number | null;
  interval: string;
}
export interface Payload {
  schema: number;
  version: string;
  title: string;
  kind: "study" | "run" | "runs";
  saturation: number;
  bins: number;
  points: Record<string, GateRecord>;
  start: GateRecord[];
  runs: RunRecord[];
  marks: MarkRecord[];
  signals: string[];
  strings: string[];
  responses: Record<"run" | "step" | "row" | "text" | "gold" | "label" | "source" | "ended" | "start", number[]>;
  tokens: Record<string, (number | null)[]>;
  top: { count: number; teacher: number[]; teacher_p: (number | null)[]; student: number[]; student_p: (number | null)[] };
}

export interface Choice {
  text: string;
  p: number;
}

/** The recorded tokens of all runs, and what belongs to them. */
export class Book {
  readonly points: ReadonlyMap<string, Gate>;
  readonly gates: readonly (Gate | null)[];
  readonly start: readonly Gate[];
  readonly tokenCount: number;
  readonly responseCount: number;
  readonly forward: Float64Array;
  readonly reverse: Float64Array;
  /** λ as it was in training. */
  readonly trained: Float64Array;
  /** The response of each token. */
  readonly responseOf: Int32Array;
  readonly tasks: readonly string[];
  /** K for which h and u can be computed from the recorded choices of the teacher. */
  readonly possibleK: readonly number[];
  private readonly recorded: Columns;
  private readonly teacherP: Float64Array;
  private readonly perK = new Map<number, Columns>();

  constructor(readonly data: Payload) {
    this.points = new Map(Object.entries(data.points).map(([name, record]) => [name, readGate(record)]));
    this.gates = data.runs.map((run) => (run.gate === null ? null : readGate(run.gate)));
    this.start = data.start.map(readGate);
    this.tokenCount = data.tokens.text.length;
    this.responseCount = data.responses.run.length;
    this.forward = column(data.tokens.forward_kl);
    this.reverse = column(data.tokens.reverse_kl);
    this.trained = column(data.tokens.lam);
    this.recorded = Object.fromEntries(data.signals.map((name) => [name, column(data.tokens[name])]));
    this.teacherP = column(data.top.teacher_p);
    this.possibleK = this.kFromChoices();
    this.responseOf = new Int32Array(this.tokenCount);
    for (let r = 0; r < this.responseCount; r++) this.responseOf.fill(r, this.from(r), this.to(r));
    this.tasks = [...new Set(data.runs.map((run) => run.task))];
  }

  /** First token of a response. */
  from(response: number): number {
    return this.data.responses.start[response];
  }

  /** Whether a response is free text, and not a label. */
  isText(response: number): boolean {
    return this.data.runs[this.data.responses.run[response]].metric !== "accuracy";
  }

  /** One past its last. */
  to(response: number): number {
    return response + 1 < this.responseCount ? this.data.responses.start[response + 1] : this.tokenCount;
  }

  string(index: number): string | null {
    return index < 0 ? null : this.data.strings[index];
  }

  text(token: number): string {
    return this.data.strings[this.data.tokens.text[token]!];
  }

  top(who: "teacher" | "student", token: number): Choice[] {
    const { count } = this.data.top;
    const texts = this.data.top[who].slice(token * count, (token + 1) * count);
    const shares = this.data.top[`${who}_p`].slice(token * count, (token + 1) * count);
    return texts.flatMap((text, i) => (text < 0 ? [] : [{ text: this.data.strings[text], p: shares[i]! }]));
  }

  private kFromChoices(): number[] {
    if (this.data.runs.some((run) => run.entropy !== "top_k")) return [];
    let most = this.data.top.count;
    while (most >= 2 && this.teacherP.some((p, i) => i % this.data.top.count < most && Number.isNaN(p))) most--;
    return Array.from({ length: Math.max(0, most - 1) }, (_, i) => i + 2);
  }

  /** The K with which signals were recorded; null where runs differ in it. */
  get recordedK(): number | null {
    const all = new Set(this.data.runs.map((run) => run.top_k));
    return all.size === 1 ? [...all][0] : null;
  }

  /** The signals as recorded (k = 0), or with h and u for another K. */
  signals(k: number): Columns {
    if (k === 0) return this.recorded;
    const known = this.perK.get(k);
    if (known) return known;
    const [h, u] = [new Float64Array(this.tokenCount), new Float64Array(this.tokenCount)];
    for (let token = 0; token < this.tokenCount; token++) h[token] = entropyOfTop(this.teacherP, token * this.data.top.count, k);
    for (let token = 0; token < this.tokenCount; token++) u[token] = h[this.from(this.responseOf[token])];
    const columns = { ...this.recorded, h, u };
    this.perK.set(k, columns);
    return columns;
  }
}

export function readGate(record: GateRecord): Gate {
  return gateOf(record.abcd.map((value) => (typeof value === "number" ? value : numberOf(value))), record.extra);
}

function column(values: readonly (number | null)[] | undefined): Float64Array {
  return Float64Array.from(values ?? [], (value) => value ?? NaN);
}
