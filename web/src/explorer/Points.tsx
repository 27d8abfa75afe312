/** What runs found: a table of points with their accuracies, and the course of training. */

import { Canvas, drawAxes, framed, polyline } from "../shared/canvas.tsx";
import { fixed } from "../shared/format.ts";
import { colourOf } from "../shared/theme.ts";
import { Choice } from "../shared/widgets.tsx";
import type { View } from "./context.ts";
import { gateText, sameGate } from "./gate.ts";
import { accuracyText, choose } from "./Plane.tsx";

const METRICS: Record<string, string> = {
  lam_mean: "E[λ]",
  lam_sd: "spread of λ",
  lam_saturated: "saturated share",
  loss: "loss",
  forward_kl: "forward KL",
  reverse_kl: "reverse KL",
  h: "h",
  u: "u",
  gap: "gap",
  grad_norm: "gradient norm",
};

export function Points({ view }: { view: View }) {
  const { book, state } = view;
  const several = book.tasks.length > 1;
  const rows = book.data.marks.filter((mark) => state.task === "" || mark.task === state.task);
  const metrics = new Set(rows.flatMap((mark) => mark.runs.map((run) => book.data.runs[run].metric)));
  const metric = metrics.size === 1 ? [...metrics][0] : "score";
  return (
    <section class="card" aria-labelledby="points">
      <h2 id="points">What runs found</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of points">
        <table>
          <thead>
            <tr>
              <th scope="col">point</th>
              {several && <th scope="col">task</th>}
              <th scope="col">a, b, c, d</th>
              <th scope="col" class="n">seeds</th>
              <th scope="col" class="n">{metric}, %</th>
              <th scope="col" class="n">E[λ]</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((mark) => {
              const gate = book.gates[mark.runs.find((run) => book.gates[run] !== null) ?? -1] ?? null;
              const means = mark.runs.flatMap((run) => book.data.runs[run].lam?.mean ?? []);
              const here = gate !== null && sameGate(gate, state.a);
              const run = mark.runs.find((one) => book.data.runs[one].shown > 0);
              return (
                <tr key={`${mark.task} ${mark.label} ${mark.kind}`} class={here ? "here" : ""}>
                  <th scope="row">
                    <button
                      type="button"
                      aria-pressed={here}
                      disabled={gate === null && run === undefined}
                      onClick={() => (gate ? choose(view, { label: mark.label, gate, found: mark }) : view.store.set({ run: run!, page: 0, hover: -1 }))}
                    >
                      {mark.label}
                    </button>
                  </th>
                  {several && <td>{mark.task}</td>}
                  <td>{gate ? <code>{shortText(gateText(gate))}</code> : <span class="muted">no gate</span>}</td>
                  <td class="n">{mark.runs.length}</td>
                  <td class="n" title={accuracyText(mark)}>
                    {mark.accuracy === null ? "–" : fixed(100 * mark.accuracy, 1)}
                    {mark.low !== null && mark.high !== null && <small> [{fixed(100 * mark.low, 1)}, {fixed(100 * mark.high, 1)}]</small>}
                  </td>
                  <td class="n">{means.length ? fixed(means.reduce((sum, one) => sum + one, 0) / means.length) : "–"}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      <p class="muted">
        Accuracies are of trained runs, with 95 % intervals (over seeds; for one seed, over texts). E[λ] is that of their training. λ of another gate on this page is what it would have said of the same tokens, not what training with it would have led to.
      </p>
    </section>
  );
}

function shortText(text: string): string {
  return text.replace(/-?\d+\.\d{4,}(e-?\d+)?/g, (number) => String(Number(Number(number).toPrecision(4))));
}

export function Course({ view }: { view: View }) {
  const { book, state, store } = view;
  const runs = book.data.runs.map((run, index) => ({ run, index })).filter(({ run }) => state.task === "" || run.task === state.task);
  const known = Object.keys(METRICS).filter((name) => runs.some(({ run }) => run.course[name]));
  const metric = known.includes(state.metric) ? state.metric : (known[0] ?? "loss");
  const lines = runs.filter(({ run }) => run.course[metric]);
  const chosen = lines.find(({ index }) => index === state.run) ?? (lines.length === 1 ? lines[0] : undefined);
  const values = lines.flatMap(({ run }) => run.course[metric].filter((value) => value !== null));
  const last = chosen?.run.course[metric].at(-1);
  if (known.length === 0) return null;
  return (
    <section class="card" aria-labelledby="course">
      <div class="head">
        <h2 id="course">Course of training</h2>
        <Choice label="number" value={metric} options={known.map((name) => ({ value: name, text: METRICS[name] }))} change={(value) => store.set({ metric: value })} />
      </div>
      <Canvas
        height={220}
        label={`${METRICS[metric]} over the steps of ${lines.length} runs.${chosen ? ` ${chosen.run.label}, seed ${chosen.run.seed}, ends at ${fixed(last ?? NaN)}.` : ""}`}
        draw={(context, size) => {
          const frame = framed(size, 50);
          const steps = lines.flatMap(({ run }) => [run.course.step[0] ?? 0, run.course.step.at(-1) ?? 1] as number[]);
          const low = Math.min(0, ...values);
          const { x, y } = drawAxes(context, frame, {
            x: [Math.min(...steps), Math.max(...steps)],
            y: [low, Math.max(...values, low + 1e-9)],
            xLabel: "step",
            yLabel: METRICS[metric],
            grid: true,
          });
          context.strokeStyle = colourOf("line");
          context.globalAlpha = lines.length > 12 ? 0.35 : 0.7;
          for (const { run } of lines) polyline(context, run.course.step as number[], run.course[metric], x, y);
          context.globalAlpha = 1;
          if (chosen) {
            context.strokeStyle = colourOf("blue");
            context.lineWidth = 2.5;
            polyline(context, chosen.run.course.step as number[], chosen.run.course[metric], x, y);
          }
        }}
      />
      <p class="muted">{chosen ? `Strong: ${chosen.run.label}, seed ${chosen.run.seed}.` : "Choose a run to see its line."} As recorded in training, whatever the gates above are.</p>
    </section>
  );
}
