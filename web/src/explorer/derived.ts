/** What follows from the state. Each part is computed again only when what it depends on has changed. */

import type { Book } from "./data.ts";
import { type Columns, type Gate, gateText, lamOf, type Summary, summarise } from "./gate.ts";
import { type Filter, pages, selected, type State, tokensOf } from "./state.ts";

export interface Side {
  gate: Gate;
  /** λ of the selected tokens, in their order. */
  lam: Float64Array;
  summary: Summary;
}

export interface Derived {
  responses: Int32Array;
  tokens: Int32Array;
  /** Where pages of responses begin. */
  pages: number[];
  columns: Columns;
  a: Side;
  b: Side | null;
  /** Means of the signals over the selected tokens. */
  means: Record<string, number>;
}

export class Deriver {
  private selection: { key: string; responses: Int32Array; tokens: Int32Array; pages: number[] } | null = null;
  private sides = new Map<"a" | "b", { key: string; tokens: Int32Array; side: Side }>();
  private averages: { columns: Columns; tokens: Int32Array; means: Record<string, number> } | null = null;

  constructor(private readonly book: Book) {}

  of(state: State): Derived {
    const { responses, tokens, pages } = this.select(state);
    const columns = this.book.signals(state.k);
    return {
      responses,
      tokens,
      pages,
      columns,
      a: this.side("a", state.a, columns, tokens, state.k),
      b: state.b === null ? null : this.side("b", state.b, columns, tokens, state.k),
      means: this.means(columns, tokens),
    };
  }

  private select(state: State) {
    const { task, run, outcome, gold, label, from, to } = state;
    const filter: Filter = { task, run, outcome, gold, label, from, to };
    const key = JSON.stringify(filter);
    if (this.selection?.key !== key) {
      const responses = selected(this.book, filter);
      this.selection = { key, responses, tokens: tokensOf(this.book, responses), pages: pages(this.book, responses) };
    }
    return this.selection;
  }

  private side(name: "a" | "b", gate: Gate, columns: Columns, tokens: Int32Array, k: number): Side {
    const key = `${k} ${gateText(gate)}`;
    const known = this.sides.get(name);
    if (known?.key === key && known.tokens === tokens) return known.side;
    const lam = lamOf(gate, columns, tokens);
    const { bins, saturation } = this.book.data;
    const side = { gate, lam, summary: summarise(lam, tokens, this.book.forward, this.book.reverse, bins, saturation) };
    this.sides.set(name, { key, tokens, side });
    return side;
  }

  private means(columns: Columns, tokens: Int32Array): Record<string, number> {
    if (this.averages?.columns !== columns || this.averages.tokens !== tokens) {
      const means = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, mean(column, tokens)]));
      this.averages = { columns, tokens, means };
    }
    return this.averages.means;
  }
}

function mean(column: Float64Array, tokens: Int32Array): number {
  let [sum, known] = [0, 0];
  for (const token of tokens) {
    if (Number.isNaN(column[token])) continue;
    sum += column[token];
    known++;
  }
  return known ? sum / known : 0;
}
