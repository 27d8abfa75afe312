/** The live page of a study or a run. */

import { render } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { Store } from "../shared/store.ts";
import { followSystemTheme, resolveTheme, showTheme, THEME_CHOICES } from "../shared/theme.ts";
import { Choice } from "../shared/widgets.tsx";
import "../shared/theme.css";
import { Charts, type Line, named, Swatch } from "./Charts.tsx";
import { Client, type Link } from "./client.ts";
import { Alarms, Connection, Failures, Nothing, Overview } from "./Overview.tsx";
import { Runs } from "./Runs.tsx";
import { counted, merged, type Snapshot } from "./snapshot.ts";
import { drawn, fromLink, Looks, type State, toLink } from "./state.ts";
import "./watch.css";

interface Seen {
  snapshot: Snapshot | null;
  link: Link;
}

const choices = new Store<State>(fromLink(location.hash));
const seen = new Store<Seen>({ snapshot: null, link: "asking" });
const token = new URLSearchParams(location.search).get("token") ?? "";

function App() {
  const [, redraw] = useState(0);
  useLayoutEffect(() => {
    const ends = [choices, seen].map((store) => store.follow(() => redraw((value) => value + 1)));
    return () => ends.forEach((end) => end());
  }, []);
  const looks = useRef(new Looks());
  const state = choices.get();
  const { snapshot, link } = seen.get();
  showTheme(resolveTheme(state.theme));
  const rows = snapshot === null ? [] : drawn(snapshot.rows, snapshot.curves, state.chosen);
  const slots = looks.current.of(rows.map((row) => row.id));
  return (
    <>
      <a class="skip" href="#runs" onClick={(event) => (event.preventDefault(), document.getElementById("runs")?.focus())}>
        to the runs
      </a>
      <header class="top">
        <div>
          <h1>{snapshot?.title ?? "gatespace watch"}</h1>
          <p class="muted">gatespace watch{snapshot ? ` · ${snapshot.folder}` : ""}</p>
        </div>
        <div class="fields">
          <Choice label="theme" value={state.theme} options={THEME_CHOICES.map((value) => ({ value, text: value }))} change={(theme) => choices.set({ theme })} />
        </div>
      </header>
      <main>
        <Connection link={link} problem={snapshot?.problem ?? ""} />
        {snapshot !== null && snapshot.kind === "nothing" && <Nothing snapshot={snapshot} />}
        {snapshot !== null && snapshot.kind !== "nothing" && (
          <>
            <Overview snapshot={snapshot} />
            <Failures snapshot={snapshot} />
            <Alarms snapshot={snapshot} />
            <Drawn snapshot={snapshot} rows={rows} slots={slots} />
            <Runs snapshot={snapshot} state={state} change={(change) => choices.set(change)} slots={slots} />
          </>
        )}
      </main>
    </>
  );
}

function Drawn({ snapshot, rows, slots }: { snapshot: Snapshot; rows: Snapshot["rows"]; slots: ReadonlyMap<string, number> }) {
  const lines: Line[] = rows.map((row) => ({ row, curves: snapshot.curves[row.id], slot: slots.get(row.id)! }));
  // Making a model has another loss: it is not the background of distillations.
  const others = snapshot.rows.filter((row) => !slots.has(row.id) && row.kind !== "preparation" && snapshot.curves[row.id] !== undefined);
  const tasks = new Set(snapshot.rows.map((row) => row.task)).size;
  return (
    <section class="card" aria-labelledby="curves">
      <h2 id="curves">Curves</h2>
      <Charts lines={lines} others={others.map((row) => snapshot.curves[row.id])} />
      <ul class="key">
        {lines.map(({ row, slot }) => (
          <li key={row.id}>
            <Swatch slot={slot} /> {tasks > 1 ? `${row.task} ` : ""}
            {named(row)}
          </li>
        ))}
        {others.length > 0 && <li class="muted">{others.length} more in the background</li>}
        {lines.length === 0 && <li class="muted">{Object.keys(snapshot.curves).length > 0 ? "Choose runs in the table." : "No steps have been recorded yet."}</li>}
      </ul>
    </section>
  );
}

const client = new Client(
  (since) => `snapshot?${new URLSearchParams({ token, since })}`,
  () => seen.get().snapshot?.version ?? "",
  (next) => seen.set({ snapshot: merged(seen.get().snapshot, next) }),
  (link) => seen.set({ link }),
);

seen.follow(() => {
  const { snapshot } = seen.get();
  if (snapshot === null) return;
  const counts = counted(snapshot.rows);
  const total = snapshot.rows.length;
  const ahead = total > 0 ? `${counts.failed ? "✗ " : ""}${counts.done}/${total} · ` : "";
  document.title = `${ahead}${snapshot.title} – gatespace watch`;
});

choices.follow(() => {
  const fragment = toLink(choices.get());
  history.replaceState(null, "", location.href.replace(/#.*$/, "") + (fragment ? `#${fragment}` : ""));
});
addEventListener("hashchange", () => choices.set(fromLink(location.hash)));
followSystemTheme(() => choices.set({}));

const app = document.getElementById("app")!;
app.textContent = "";
render(<App />, app);
void client.ask();
