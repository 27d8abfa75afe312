/** Which responses are looked at. */

import { count } from "../shared/format.ts";
import { Choice } from "../shared/widgets.tsx";
import type { View } from "./context.ts";
import { OUTCOMES, type Outcome, type State } from "./state.ts";

const OUTCOME_NAMES: Record<Outcome, string> = { all: "all", right: "right label", wrong: "wrong label", unread: "no legal label" };

export function Filters({ view }: { view: View }) {
  const { book, state, store, derived } = view;
  const { runs } = book.data;
  const change = (filter: Partial<State>) => store.set({ ...filter, page: 0, hover: -1 });
  const inTask = runs.map((run, index) => ({ run, index })).filter(({ run }) => state.task === "" || run.task === state.task);
  const of = book.data.responses;
  const within = Array.from(of.run, (_, i) => i).filter((i) => (state.run >= 0 ? of.run[i] === state.run : state.task === "" || runs[of.run[i]].task === state.task));
  const steps = [...new Set(within.map((i) => of.step[i]))].sort((a, b) => a - b);
  const texts = (column: number[]) => [...new Set(within.map((i) => book.string(column[i])).filter((text) => text !== null))].sort();
  const named = (all: string[]) => [{ value: "", text: "all" }, ...all.map((text) => ({ value: text, text }))];
  const stepped = (text: string) => [{ value: "-1", text }, ...steps.map((step) => ({ value: String(step), text: String(step) }))];
  const labelled = !within.some((response) => book.isText(response));
  const left = runs.reduce((sum, run) => sum + run.recorded - run.shown, 0);
  return (
    <div>
      <div class="fields" role="group" aria-label="Filter">
        {book.tasks.length > 1 && <Choice label="task" value={state.task} options={named([...book.tasks])} change={(task) => change({ task, run: -1 })} />}
        {runs.length > 1 && (
          <Choice
            label="run"
            value={String(state.run)}
            options={[
              { value: "-1", text: `all ${inTask.length} runs` },
              ...inTask.map(({ run, index }) => ({ value: String(index), text: `${run.label}, seed ${run.seed}${run.done ? "" : " (not done)"}`, disabled: run.shown === 0 })),
            ]}
            change={(run) => change({ run: Number(run) })}
          />
        )}
        {labelled && (
          <>
            <Choice label="response" value={state.outcome} options={OUTCOMES.map((value) => ({ value, text: OUTCOME_NAMES[value] }))} change={(outcome) => change({ outcome })} />
            <Choice label="gold label" value={state.gold} options={named(texts(of.gold))} change={(gold) => change({ gold })} />
            <Choice label="predicted label" value={state.label} options={named(texts(of.label))} change={(label) => change({ label })} />
          </>
        )}
        <Choice label="from step" value={String(state.from)} options={stepped("first")} change={(from) => change({ from: Number(from) })} />
        <Choice label="to step" value={String(state.to)} options={stepped("last")} change={(to) => change({ to: Number(to) })} />
      </div>
      <p class="muted" role="status">
        {count(derived.responses.length, "response")}, {count(derived.tokens.length, "token")} selected
        {left > 0 && `; ${count(left, "recorded response")} left out of this page`}
      </p>
    </div>
  );
}
