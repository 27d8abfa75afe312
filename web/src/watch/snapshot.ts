/** What the server says: how everything stands, and the curves that have changed since the last time. */

export const SCHEMA = 1;

export type RunState = "done" | "running" | "failed" | "waiting" | "stopped" | "blocked";
export const STATES: readonly RunState[] = ["running", "failed", "stopped", "blocked", "done", "waiting"];

export interface Row {
  id: string;
  title: string;
  task: string;
  point: string;
  /** ``preparation`` for a model that is made or evaluated before any run. */
  kind: string;
  seed: number | null;
  state: RunState;
  step: number;
  steps: number;
  loss: number | null;
  lam: number | null;
  /** On validation: that, or the score of a text task. */
  accuracy: number | null;
  /** What `accuracy` is, e.g. rouge_l; "" before the first evaluation. */
  metric: string;
  seconds: number | null;
  error: string;
  details: string;
  when: string;
  /** Those that were raised, in order. */
  alarms: { step: number | null; alarm: string; text: string }[];
}

export interface Curves {
  step: number[];
  loss: (number | null)[];
  lam: (number | null)[];
  evaluated: number[];
  accuracy: (number | null)[];
}

export interface Snapshot {
  schema: number;
  version: string;
  /** Whether the curves are all there are, and not only those that have changed. */
  whole: boolean;
  kind: "study" | "run" | "runs" | "nothing";
  title: string;
  folder: string;
  alive: boolean;
  state: "running" | "done" | "failed" | "stopped" | "nothing";
  workers: number;
  seconds_left: number | null;
  behind: boolean;
  problem: string;
  rows: Row[];
  curves: Record<string, Curves>;
}

/** The next snapshot with the curves of all before it. Those of runs that are gone are left out. */
export function merged(before: Snapshot | null, next: Snapshot): Snapshot {
  if (next.schema !== SCHEMA) throw new Error(`the server speaks schema ${next.schema}, and this page ${SCHEMA}`);
  const curves = before === null || next.whole ? next.curves : { ...before.curves, ...next.curves };
  const known = new Set(next.rows.map((row) => row.id));
  return { ...next, curves: Object.fromEntries(Object.entries(curves).filter(([id]) => known.has(id))) };
}

/** What the scores of these runs are called together. */
export function metricOf(rows: readonly Row[]): string {
  const names = new Set(rows.map((row) => row.metric).filter((name) => name !== ""));
  return names.size === 1 ? [...names][0] : "score";
}

export type Counts = Record<RunState, number>;

export function counted(rows: readonly Row[]): Counts {
  const counts: Counts = { done: 0, running: 0, failed: 0, waiting: 0, stopped: 0, blocked: 0 };
  for (const row of rows) counts[row.state]++;
  return counts;
}

/** How much of the work is behind us, with the steps of what is under way. */
export function share(rows: readonly Row[]): number {
  if (rows.length === 0) return 0;
  const part = (row: Row) => (row.state === "done" ? 1 : row.state === "running" || row.state === "stopped" ? row.step / (row.steps || Infinity) : 0);
  return rows.reduce((sum, row) => sum + part(row), 0) / rows.length;
}

/** One line: how many are done, under way, failed. */
export function headline(counts: Counts, total: number): string {
  const parts = [`${counts.done} of ${total} done`, `${counts.running} running`];
  for (const [state, text] of [["failed", "failed"], ["stopped", "stopped on the way"], ["blocked", "cannot be done"], ["waiting", "waiting"]] as const) {
    if (counts[state] > 0) parts.push(`${counts[state]} ${text}`);
  }
  return parts.join(" · ");
}

export function duration(seconds: number | null): string {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return whole < 600 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
