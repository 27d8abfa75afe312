/** What the reader has chosen, which of it a link holds, and which responses it selects. */

import type { ThemeChoice } from "../shared/theme.ts";
import { THEME_CHOICES } from "../shared/theme.ts";
import type { Book } from "./data.ts";
import { COEFFICIENTS, type Gate, gateOf, gateText, parseGate } from "./gate.ts";

export const OUTCOMES = ["all", "right", "wrong", "unread"] as const;
export type Outcome = (typeof OUTCOMES)[number];
export const COLOURS = ["mean", "sd"] as const;

export interface State {
  a: Gate;
  b: Gate | null;
  /** K of h and u; 0: as recorded. */
  k: number;
  task: string;
  /** -1: all. */
  run: number;
  outcome: Outcome;
  gold: string;
  label: string;
  /** Steps from and to; -1: no end. */
  from: number;
  to: number;
  page: number;
  /** The token that is looked at; -1: none. */
  token: number;
  /** The token under the pointer, for as long as it is there; a link does not hold it. */
  hover: number;
  signal: string;
  x: string;
  y: string;
  colour: (typeof COLOURS)[number];
  metric: string;
  theme: ThemeChoice;
}

export function initial(book: Book): State {
  const first = book.gates.findIndex((gate, run) => gate !== null && book.data.runs[run].shown > 0);
  const run = Math.max(first, 0);
  return {
    a: book.start[0] ?? book.gates[run] ?? gateOf([4, 0, -1, 0]),
    b: book.start[1] ?? null,
    k: 0,
    task: book.data.runs[run].task,
    run: book.data.runs.length > 1 ? run : -1,
    outcome: "all",
    gold: "",
    label: "",
    from: -1,
    to: -1,
    page: 0,
    token: -1,
    hover: -1,
    signal: "h",
    x: "a",
    y: "d",
    colour: "mean",
    metric: "lam_mean",
    theme: "auto",
  };
}

// ---------------------------------------------------------------------------------------------------- links

/** The part of a state that differs from `start`, as the fragment of an address. */
export function toLink(state: State, start: State, book: Book): string {
  const found = new URLSearchParams();
  const put = (name: string, value: string, usual: string) => {
    if (value !== usual) found.set(name, value);
  };
  put("a", gateText(state.a), gateText(start.a));
  put("b", state.b === null ? "" : gateText(state.b), start.b === null ? "" : gateText(start.b));
  put("k", String(state.k), String(start.k));
  put("task", state.task, start.task);
  put("run", runName(state.run, book), runName(start.run, book));
  for (const name of ["outcome", "gold", "label", "signal", "x", "y", "colour", "metric", "theme"] as const) put(name, state[name], start[name]);
  for (const name of ["from", "to", "page"] as const) put(name, String(state[name]), String(start[name]));
  if (state.token >= 0) found.set("token", tokenName(state.token, book));
  return found.toString();
}

/** `start` changed as a link has it. What the link names and this page does not have is left as it was. */
export function fromLink(link: string, start: State, book: Book): State {
  const given = new URLSearchParams(link.replace(/^#/, ""));
  const state = { ...start };
  const one = <T extends string>(name: string, allowed: readonly T[], usual: T): T => {
    const value = given.get(name) as T | null;
    return value !== null && allowed.includes(value) ? value : usual;
  };
  const whole = (name: string, usual: number): number => {
    const value = given.get(name);
    return value !== null && /^-?\d{1,9}$/.test(value) ? Number(value) : usual;
  };
  const gate = (name: string): Gate | null => {
    const found = parseGate(given.get(name) ?? "");
    return found !== null && Object.keys(found.extra).every((signal) => book.data.signals.includes(signal)) ? found : null;
  };
  const axes = axisNames(book);
  state.a = gate("a") ?? start.a;
  state.b = given.get("b") === "" ? null : (gate("b") ?? start.b);
  state.k = Number(one("k", ["0", ...book.possibleK.map(String)], String(start.k)));
  state.task = one("task", ["", ...book.tasks], start.task);
  const run = book.data.runs.findIndex((one) => one.id === given.get("run"));
  state.run = given.get("run") === "" ? -1 : run >= 0 ? run : start.run;
  state.outcome = one("outcome", OUTCOMES, start.outcome);
  state.gold = given.get("gold") ?? start.gold;
  state.label = given.get("label") ?? start.label;
  state.from = whole("from", start.from);
  state.to = whole("to", start.to);
  state.page = Math.max(0, whole("page", start.page));
  state.signal = one("signal", book.data.signals, start.signal);
  state.x = one("x", axes, start.x);
  state.y = one("y", axes, start.y);
  if (state.x === state.y) [state.x, state.y] = [start.x, start.y];
  state.colour = one("colour", COLOURS, start.colour);
  state.metric = given.get("metric") ?? start.metric;
  state.theme = one("theme", THEME_CHOICES, start.theme);
  state.token = given.has("token") ? tokenOf(given.get("token")!, book) : -1;
  return state;
}

/** What can be an axis of the plane. */
export function axisNames(book: Book): string[] {
  return [...COEFFICIENTS, ...book.data.signals.filter((name) => !["h", "u", "gap"].includes(name))];
}

function runName(run: number, book: Book): string {
  return run < 0 ? "" : book.data.runs[run].id;
}

/** A token by its run, step, row and place: a page that was made anew, with more in it, still has it. */
function tokenName(token: number, book: Book): string {
  const response = book.responseOf[token];
  const { run, step, row } = book.data.responses;
  return [token - book.from(response), row[response], step[response], book.data.runs[run[response]].id].join(".");
}

function tokenOf(name: string, book: Book): number {
  const [place, row, step, ...id] = name.split(".");
  const of = book.data.responses;
  const run = book.data.runs.findIndex((one) => one.id === id.join("."));
  for (let r = 0; r < book.responseCount; r++) {
    if (of.run[r] !== run || of.step[r] !== Number(step) || of.row[r] !== Number(row)) continue;
    const token = book.from(r) + Number(place);
    return token >= book.from(r) && token < book.to(r) ? token : -1;
  }
  return -1;
}

// ---------------------------------------------------------------------------------------------------- selection

export type Filter = Pick<State, "task" | "run" | "outcome" | "gold" | "label" | "from" | "to">;

/** The responses that a filter lets through, in the order of the page's data. */
export function selected(book: Book, filter: Filter): Int32Array {
  const of = book.data.responses;
  const found: number[] = [];
  for (let r = 0; r < book.responseCount; r++) {
    const run = book.data.runs[of.run[r]];
    if (filter.run >= 0 ? of.run[r] !== filter.run : filter.task !== "" && run.task !== filter.task) continue;
    if (filter.outcome !== "all" && outcome(book, r) !== filter.outcome) continue;
    if (filter.gold !== "" && book.string(of.gold[r]) !== filter.gold) continue;
    if (filter.label !== "" && book.string(of.label[r]) !== filter.label) continue;
    if (filter.from >= 0 && of.step[r] < filter.from) continue;
    if (filter.to >= 0 && of.step[r] > filter.to) continue;
    found.push(r);
  }
  return Int32Array.from(found);
}

/** Whether a response says the right label; unread: no label could be read from it. */
export function outcome(book: Book, response: number): Exclude<Outcome, "all"> {
  const { gold, label } = book.data.responses;
  return label[response] < 0 ? "unread" : label[response] === gold[response] ? "right" : "wrong";
}

export function tokensOf(book: Book, responses: Int32Array): Int32Array {
  let size = 0;
  for (const r of responses) size += book.to(r) - book.from(r);
  const found = new Int32Array(size);
  let place = 0;
  for (const r of responses) for (let token = book.from(r); token < book.to(r); token++) found[place++] = token;
  return found;
}

/** Where pages begin within `responses`: each has whole responses, and at most so many tokens unless one has more. */
export function pages(book: Book, responses: Int32Array, tokens = 800, most = 12): number[] {
  const found = [0];
  let size = 0;
  responses.forEach((r, i) => {
    const length = book.to(r) - book.from(r);
    if (i - found.at(-1)! >= most || (size > 0 && size + length > tokens)) {
      found.push(i);
      size = 0;
    }
    size += length;
  });
  return found;
}

/** The page that a selected token is on; -1: it is not selected. */
export function pageOf(book: Book, responses: Int32Array, starts: readonly number[], token: number): number {
  const place = responses.indexOf(book.responseOf[token]);
  return place < 0 ? -1 : starts.findLastIndex((start) => start <= place);
}

/** The next selected token after `token` whose λ is among the highest tenth, in the order of reading; after the last, the first. */
export function nextHigh(tokens: Int32Array, lam: Float64Array, token: number): number {
  const known = lam.filter((value) => !Number.isNaN(value)).sort();
  if (known.length === 0) return -1;
  const least = known[Math.min(known.length - 1, Math.floor(0.9 * known.length))];
  const from = tokens.indexOf(token) + 1;
  for (let i = 0; i < tokens.length; i++) {
    const place = (from + i) % tokens.length;
    if (lam[place] >= least) return tokens[place];
  }
  return -1;
}

/** The token that a page opens on: of its first response, the one where teacher and student differ most; -1: none. */
export function opening(book: Book, state: State): number {
  const responses = selected(book, state);
  const starts = pages(book, responses);
  const shown = responses.subarray(starts[Math.min(state.page, starts.length - 1)]);
  const first = shown.find((response) => book.to(response) > book.from(response));
  if (first === undefined) return -1;
  const apart = (token: number) => book.forward[token] + book.reverse[token];
  return tokensOf(book, Int32Array.of(first)).reduce((best, token) => (apart(token) > apart(best) ? token : best));
}
