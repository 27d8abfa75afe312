/** What the reader has chosen. It stands in the address, so that a reload keeps it. */

import { THEME_CHOICES, type ThemeChoice } from "../shared/theme.ts";
import { type Curves, type Row, STATES } from "./snapshot.ts";

export const SORTS = ["plan", "point", "task", "seed", "state", "step", "lam", "loss", "accuracy", "seconds"] as const;
export type Sort = (typeof SORTS)[number];

export interface State {
  /** Runs whose curves are drawn; null: whatever is running. */
  chosen: readonly string[] | null;
  task: string;
  state: string;
  text: string;
  sort: Sort;
  down: boolean;
  theme: ThemeChoice;
}

export const START: State = { chosen: null, task: "", state: "", text: "", sort: "plan", down: false, theme: "auto" };
/** That many runs are followed at once, so that lines can be told apart. */
export const FOLLOWED = 6;

export function toLink(state: State): string {
  const link = new URLSearchParams();
  if (state.chosen !== null) link.set("runs", state.chosen.join(","));
  for (const name of ["task", "state", "text", "sort", "theme"] as const) if (state[name] !== START[name]) link.set(name, state[name]);
  if (state.down) link.set("down", "1");
  return link.toString();
}

/** The state of a link; what this page does not know is left as it is. */
export function fromLink(hash: string): State {
  const link = new URLSearchParams(hash.replace(/^#/, ""));
  const one = <T extends string>(name: string, known: readonly T[], start: T): T => (known.includes(link.get(name) as T) ? (link.get(name) as T) : start);
  return {
    chosen: link.has("runs") ? link.get("runs")!.split(",").filter((id) => id !== "") : null,
    task: link.get("task") ?? "",
    state: one("state", ["", ...STATES], ""),
    text: link.get("text") ?? "",
    sort: one("sort", SORTS, "plan"),
    down: link.get("down") === "1",
    theme: one("theme", THEME_CHOICES, "auto"),
  };
}

/** Rows that the filters let through, in the wanted order. */
export function listed(rows: readonly Row[], state: State): Row[] {
  const text = state.text.trim().toLowerCase();
  const found = rows.filter(
    (row) => (state.task === "" || row.task === state.task) && (state.state === "" || row.state === state.state) && (text === "" || row.title.toLowerCase().includes(text) || row.point.toLowerCase().includes(text)),
  );
  if (state.sort !== "plan") {
    const key = state.sort;
    found.sort((a, b) => compared(a, b, key, state.down));
  } else if (state.down) found.reverse();
  return found;
}

/** What has no value comes last, whichever way the others go. */
function compared(a: Row, b: Row, key: Exclude<Sort, "plan">, down: boolean): number {
  const [left, right] = key === "state" ? [STATES.indexOf(a.state), STATES.indexOf(b.state)] : [a[key], b[key]];
  if (left === null || right === null) return left === right ? 0 : left === null ? 1 : -1;
  const order = typeof left === "string" ? left.localeCompare(String(right), "en", { numeric: true }) : left - Number(right);
  return down ? -order : order;
}

/** The runs whose curves are drawn: those chosen, or those under way, filled up with those that ended last. */
export function drawn(rows: readonly Row[], curves: Readonly<Record<string, Curves>>, chosen: readonly string[] | null): Row[] {
  const known = rows.filter((row) => curves[row.id] !== undefined);
  if (chosen !== null) return known.filter((row) => chosen.includes(row.id));
  const running = known.filter((row) => row.state === "running");
  const rest = known.filter((row) => row.state !== "running" && row.kind !== "preparation").reverse();
  const ids = new Set([...running, ...rest].slice(0, FOLLOWED).map((row) => row.id));
  return known.filter((row) => ids.has(row.id));
}

/** A look for each line: a run keeps its own for as long as it is drawn. */
export class Looks {
  private slots = new Map<string, number>();

  of(ids: readonly string[]): Map<string, number> {
    this.slots = new Map([...this.slots].filter(([id]) => ids.includes(id)));
    for (const id of ids) {
      if (this.slots.has(id)) continue;
      const taken = new Set(this.slots.values());
      let slot = 0;
      while (taken.has(slot)) slot++;
      this.slots.set(id, slot);
    }
    return this.slots;
  }
}
