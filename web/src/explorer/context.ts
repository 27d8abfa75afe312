/** What every view of the explorer is given. */

import type { Rgb, Theme } from "../shared/colour.ts";
import type { Store } from "../shared/store.ts";
import type { Book } from "./data.ts";
import type { Derived } from "./derived.ts";
import type { State } from "./state.ts";

export interface View {
  book: Book;
  store: Store<State>;
  state: State;
  derived: Derived;
  theme: Theme;
  /** Colours of λ, and the same as CSS has them. */
  colours: readonly Rgb[];
  tints: readonly string[];
}
