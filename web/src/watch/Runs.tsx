/** The table of all runs. */

import { fixed, percent } from "../shared/format.ts";
import { Choice } from "../shared/widgets.tsx";
import { named, Swatch } from "./Charts.tsx";
import { duration, metricOf, type Row, type Snapshot, STATES } from "./snapshot.ts";
import { listed, type Sort, type State } from "./state.ts";

const COLUMNS: readonly { sort: Sort; text: string; number?: boolean; wide?: boolean }[] = [
  { sort: "point", text: "point" },
  { sort: "task", text: "task", wide: true },
  { sort: "seed", text: "seed", number: true, wide: true },
  { sort: "state", text: "state" },
  { sort: "step", text: "step", number: true },
  { sort: "lam", text: "λ", number: true },
  { sort: "loss", text: "loss", number: true },
  { sort: "accuracy", text: "", number: true },
  { sort: "seconds", text: "time", number: true, wide: true },
];

export interface Props {
  snapshot: Snapshot;
  state: State;
  change: (change: Partial<State>) => void;
  slots: ReadonlyMap<string, number>;
}

export function Runs({ snapshot, state, change, slots }: Props) {
  const rows = listed(snapshot.rows, state);
  const tasks = [...new Set(snapshot.rows.map((row) => row.task))];
  const toggle = (id: string) => {
    const now = [...slots.keys()];
    change({ chosen: now.includes(id) ? now.filter((one) => one !== id) : [...now, id] });
  };
  return (
    <section class="card" aria-labelledby="runs">
      <h2 id="runs" tabIndex={-1}>
        Runs
      </h2>
      <div class="fields">
        {tasks.length > 1 && (
          <Choice label="task" value={state.task} options={[{ value: "", text: "all" }, ...tasks.map((value) => ({ value, text: value }))]} change={(task) => change({ task })} />
        )}
        <Choice label="state" value={state.state} options={[{ value: "", text: "all" }, ...STATES.map((value) => ({ value, text: value }))]} change={(value) => change({ state: value })} />
        <div class="field">
          <label for="find">name has</label>
          <input id="find" type="text" autocomplete="off" value={state.text} onInput={(event) => change({ text: event.currentTarget.value })} />
        </div>
        <button type="button" aria-pressed={state.chosen === null} onClick={() => change({ chosen: state.chosen === null ? [...slots.keys()] : null })}>
          Draw what is running
        </button>
        <span class="muted">
          {rows.length} of {snapshot.rows.length} shown
        </span>
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label="table of all runs">
        <table>
          <thead>
            <tr>
              <th scope="col">
                <span class="offscreen">drawn</span>
              </th>
              {COLUMNS.map((column) => (
                <Head key={column.sort} {...column} text={column.text || metricOf(rows)} state={state} change={change} />
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <Line key={row.id} row={row} drawable={snapshot.curves[row.id] !== undefined} slot={slots.get(row.id)} toggle={toggle} />
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Head({ sort, text, number, wide, state, change }: (typeof COLUMNS)[number] & { state: State; change: Props["change"] }) {
  const sorted = state.sort === sort;
  // Up, down, and back to the order of the plan.
  const next = !sorted ? { sort, down: false } : state.down ? { sort: "plan" as const, down: false } : { down: true };
  return (
    <th scope="col" class={`${number ? "n" : ""} ${wide ? "wide" : ""}`} aria-sort={sorted ? (state.down ? "descending" : "ascending") : "none"}>
      <button type="button" class="sort" onClick={() => change(next)}>
        {text}
        <span aria-hidden="true">{sorted ? (state.down ? " ▾" : " ▴") : ""}</span>
      </button>
    </th>
  );
}

function Line({ row, drawable, slot, toggle }: { row: Row; drawable: boolean; slot: number | undefined; toggle: (id: string) => void }) {
  return (
    <tr data-run={row.id} class={slot === undefined ? "" : "drawn"}>
      <td class="draw">
        {drawable && (
          <label>
            <input type="checkbox" checked={slot !== undefined} aria-label={`curves of ${row.task} ${named(row)}`} onChange={() => toggle(row.id)} />
            {slot !== undefined && <Swatch slot={slot} />}
          </label>
        )}
      </td>
      <th scope="row">
        {row.point}
        <small class="narrow">
          {row.task}
          {row.seed === null ? "" : `, seed ${row.seed}`}
        </small>
      </th>
      <td class="wide">{row.task}</td>
      <td class="n wide">{row.seed ?? ""}</td>
      <td>
        <span class={`state ${row.state}`} title={row.state === "blocked" ? row.error : undefined}>
          {row.state}
        </span>
      </td>
      <td class="n step">
        {row.steps > 0 ? `${row.step}/${row.steps}` : ""}
        {row.steps > 0 && row.state === "running" && <progress value={row.step} max={row.steps} aria-label={`steps of ${row.title}`} />}
      </td>
      <td class="n">{row.lam === null ? "" : fixed(row.lam)}</td>
      <td class="n">{row.loss === null ? "" : fixed(row.loss)}</td>
      <td class="n" title={row.metric || undefined}>
        {row.accuracy === null ? "" : percent(row.accuracy)}
      </td>
      <td class="n wide">{row.seconds === null ? "" : duration(row.seconds)}</td>
    </tr>
  );
}
