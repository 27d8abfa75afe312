/** The explorer. */

import { render } from "preact";
import { useLayoutEffect, useMemo, useState } from "preact/hooks";
import { css, diverging } from "../shared/colour.ts";
import { embedded } from "../shared/embedded.ts";
import { count } from "../shared/format.ts";
import { Store } from "../shared/store.ts";
import { followSystemTheme, resolveTheme, showTheme, THEME_CHOICES } from "../shared/theme.ts";
import { Choice, CopyButton } from "../shared/widgets.tsx";
import "../shared/theme.css";
import { Curve, Histogram } from "./Charts.tsx";
import type { View } from "./context.ts";
import { Book, type Payload, SCHEMA } from "./data.ts";
import { Deriver } from "./derived.ts";
import "./explorer.css";
import { Filters } from "./Filters.tsx";
import { GateCard } from "./GateCard.tsx";
import { gateOf, sameGate } from "./gate.ts";
import { Inspector } from "./Inspector.tsx";
import { Plane } from "./Plane.tsx";
import { Course, Points } from "./Points.tsx";
import { Rollouts } from "./Rollouts.tsx";
import { fromLink, initial, opening, pages, selected, type State, toLink } from "./state.ts";

const book = new Book(embedded<Payload>(SCHEMA));
const start = initial(book);
const deriver = new Deriver(book);
const store = new Store<State>(opened(location.hash));

/**
 * The state of a link. A token that it names is shown even where the link has another page of responses; without one a
 * token is explained at once, but for narrow windows, where the panel would cover what it is about.
 */
function opened(hash: string): State {
  const state = fromLink(hash, start, book);
  if (state.token < 0) return matchMedia("(max-width: 56rem)").matches ? state : { ...state, token: opening(book, state) };
  const responses = selected(book, state);
  const place = responses.indexOf(book.responseOf[state.token]);
  return place < 0 ? state : { ...state, page: pages(book, responses).findLastIndex((first) => first <= place) };
}

function App() {
  const [, redraw] = useState(0);
  useLayoutEffect(() => store.follow(() => redraw((value) => value + 1)), []);
  const state = store.get();
  const theme = resolveTheme(state.theme);
  const colours = useMemo(() => diverging(theme), [theme]);
  const tints = useMemo(() => colours.map(css), [colours]);
  showTheme(theme);
  const derived = deriver.of(state);
  const view: View = { book, store, state, derived, theme, colours, tints };
  const { task, run, outcome, gold, label, from, to } = state;
  // What a moving slider does not change is not made again.
  const filters = useMemo(() => <Filters view={view} />, [task, run, outcome, gold, label, from, to]);
  const points = useMemo(() => <Points view={view} />, [task, run, state.a]);
  const course = useMemo(() => <Course view={view} />, [task, run, state.metric, theme]);
  const tinted = useMemo(() => <Scale view={view} />, [tints]);
  const inspector = useMemo(() => <Inspector view={view} />, [state.hover, state.token, state.a, state.b, state.k]);
  return (
    <>
      <a class="skip" href="#rollouts-title">
        to the responses
      </a>
      <header class="top">
        <div>
          <h1>{book.data.title}</h1>
          <p class="muted">
            gatespace explorer {book.data.version} · {count(book.data.runs.length, "run")}, {count(book.tokenCount, "recorded token")} · λ = σ(a·h + b·u + c + d·gap) weighs reverse KL, 1−λ
            forward KL
          </p>
        </div>
        <div class="fields">
          <KChoice view={view} />
          <Choice label="theme" value={state.theme} options={THEME_CHOICES.map((value) => ({ value, text: value }))} change={(value) => store.set({ theme: value })} />
          <CopyButton text={link}>Copy link</CopyButton>
        </div>
      </header>
      <main>
        <div class="gates">
          <GateCard view={view} side={derived.a} name="a" />
          {derived.b ? (
            <GateCard view={view} side={derived.b} name="b" />
          ) : (
            <button type="button" class="add" onClick={() => store.set({ b: sameGate(state.a, book.points.get("G5") ?? null) ? gateOf([0, 0, 0, 0]) : (book.points.get("G5") ?? gateOf([0, 0, 0, 0])) })}>
              + compare with a gate B
            </button>
          )}
        </div>
        <div class="views">
          <div class="pair">
            <Histogram view={view} />
            <Curve view={view} />
          </div>
          <section class="card" aria-labelledby="rollouts-title">
            <h2 id="rollouts-title" tabIndex={-1}>
              Responses
            </h2>
            {filters}
            {tinted}
            <div class="reading">
              <Rollouts view={view} />
              {inspector}
            </div>
          </section>
          <div class="pair wide">
            <Plane view={view} />
            {points}
          </div>
          {course}
        </div>
      </main>
    </>
  );
}

/** What the tints mean. */
function Scale({ view }: { view: View }) {
  return (
    <p class="scale" aria-hidden="true">
      forward KL{" "}
      {[0, 0.25, 0.5, 0.75, 1].map((lam) => (
        <span key={lam} class="token" style={{ backgroundColor: view.tints[Math.round(lam * (view.tints.length - 1))] }}>
          λ = {lam}
        </span>
      ))}{" "}
      reverse KL
    </p>
  );
}

function KChoice({ view }: { view: View }) {
  const possible = view.book.possibleK;
  const recorded = view.book.recordedK;
  if (possible.length === 0) return null;
  return (
    <Choice
      label="K of h and u"
      value={String(view.state.k)}
      options={[
        { value: "0", text: recorded === null ? "as recorded" : `${recorded} (recorded)` },
        ...possible.filter((k) => k !== recorded).map((k) => ({ value: String(k), text: String(k) })),
      ]}
      change={(k) => store.set({ k: Number(k) })}
    />
  );
}

function link(): string {
  const fragment = toLink(store.get(), start, book);
  return location.href.replace(/#.*$/, "") + (fragment ? `#${fragment}` : "");
}

// The address follows the state, though not every frame of it: browsers refuse too many changes.
let timer = 0;
store.follow(() => {
  clearTimeout(timer);
  timer = window.setTimeout(() => history.replaceState(null, "", link()), 250);
});
addEventListener("hashchange", () => store.set(opened(location.hash)));
followSystemTheme(() => store.set({}));

/** For a console, and for tests: the state, and λ of the selected tokens. */
Object.assign(window, {
  explorer: {
    state: () => store.get(),
    lam: (side: "a" | "b" = "a") => [...(deriver.of(store.get())[side]?.lam ?? [])],
    tokens: () => [...deriver.of(store.get()).tokens],
  },
});

const app = document.getElementById("app")!;
app.textContent = "";
render(<App />, app);
