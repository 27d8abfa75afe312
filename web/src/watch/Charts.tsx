/** Loss, λ and score over the steps: chosen runs as lines of their own, all others faint behind them. */

import { Canvas, drawAxes, framed, polyline } from "../shared/canvas.tsx";
import { fixed, percent } from "../shared/format.ts";
import { colourOf } from "../shared/theme.ts";
import { type Curves, metricOf, type Row } from "./snapshot.ts";

const HEIGHT = 210;
const COLOURS = ["blue", "orange", "green", "pink", "ink", "muted"] as const;
const DASHES: readonly number[][] = [[], [7, 4], [2, 3]];

export interface Line {
  row: Row;
  curves: Curves;
  slot: number;
}

type Metric = "loss" | "lam" | "accuracy";
const METRICS: readonly { metric: Metric; title: string; axis: string; show: (value: number | null | undefined) => string }[] = [
  { metric: "loss", title: "Loss", axis: "loss", show: fixed },
  { metric: "lam", title: "Mean λ", axis: "λ", show: fixed },
  { metric: "accuracy", title: "", axis: "", show: percent },
];

export function look(slot: number): { colour: string; dash: number[] } {
  return { colour: COLOURS[slot % COLOURS.length], dash: DASHES[Math.floor(slot / COLOURS.length) % DASHES.length] };
}

export function named(row: Row): string {
  return row.seed === null ? row.point : `${row.point}, seed ${row.seed}`;
}

export function Charts({ lines, others }: { lines: readonly Line[]; others: readonly Curves[] }) {
  const score = metricOf(lines.map((line) => line.row));
  const title = `${score[0].toUpperCase()}${score.slice(1)} on validation`;
  return (
    <div class="charts">
      {METRICS.map((one) => (one.metric === "accuracy" ? { ...one, title, axis: score } : one)).map((one) => (
        <figure key={one.metric}>
          <figcaption>{one.title}</figcaption>
          <Chart {...one} lines={lines} others={others} />
        </figure>
      ))}
    </div>
  );
}

function Chart({ metric, title, axis, show, lines, others }: (typeof METRICS)[number] & { lines: readonly Line[]; others: readonly Curves[] }) {
  const xs = (curves: Curves) => (metric === "accuracy" ? curves.evaluated : curves.step);
  const all = [...lines.map((line) => line.curves), ...others];
  const last = lines.map(({ row, curves }) => `${named(row)} ${show(lastOf(curves[metric]))} at step ${xs(curves).at(-1) ?? 0}`);
  const from = Math.min(metric === "accuracy" ? 0 : 1, ...lines.map((line) => line.curves.step[0] ?? 1));
  const to = Math.max(from + 1, ...lines.map((line) => line.row.steps), ...all.map((curves) => xs(curves).at(-1) ?? 0));
  const range = extent(all.map((curves) => curves[metric]), metric === "lam" || metric === "accuracy");
  return (
    <Canvas
      height={HEIGHT}
      label={`${title} over the steps. ${last.length ? last.join("; ") : "No run is drawn"}.`}
      draw={(context, size) => {
        const frame = framed(size, 48);
        const { x, y } = drawAxes(context, frame, { x: [from, to], y: range, xLabel: "step", yLabel: axis, grid: true });
        context.lineJoin = "round";
        context.lineWidth = 1;
        context.strokeStyle = colourOf("line");
        context.globalAlpha = 0.35;
        for (const curves of others) polyline(context, xs(curves), curves[metric], x, y);
        context.globalAlpha = 1;
        context.lineWidth = 2;
        for (const { curves, slot } of lines) {
          const { colour, dash } = look(slot);
          context.strokeStyle = context.fillStyle = colourOf(colour);
          context.setLineDash(dash);
          polyline(context, xs(curves), curves[metric], x, y);
          context.setLineDash([]);
          // A single number has no line, and the newest is where one looks.
          xs(curves).forEach((step, i) => {
            const value = curves[metric][i];
            const end = i === xs(curves).length - 1;
            if (value !== null && (end || metric === "accuracy")) dot(context, x(step), y(value), end ? 3.5 : 2.5);
          });
        }
      }}
    />
  );
}

export function Swatch({ slot }: { slot: number }) {
  const { colour, dash } = look(slot);
  return (
    <svg class={`swatch ${colour}`} width="26" height="10" aria-hidden="true">
      <line x1="1" y1="5" x2="25" y2="5" stroke-dasharray={dash.join(" ")} />
    </svg>
  );
}

function dot(context: CanvasRenderingContext2D, x: number, y: number, radius: number): void {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

export function lastOf(values: readonly (number | null)[]): number | null {
  return values.findLast((value) => value !== null) ?? null;
}

/** Room for all numbers with a little air. Shares stay within 0 and 1, and differences of nothing are not blown up. */
export function extent(columns: readonly (readonly (number | null)[])[], isShare: boolean): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const column of columns) {
    for (const value of column) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return [0, 1];
  const air = Math.max((high - low) * 0.06, isShare ? 0.02 : Math.abs(high) * 0.02 || 0.02);
  return isShare ? [Math.max(0, low - air), Math.min(1, high + air)] : [low >= 0 ? Math.max(0, low - air) : low - air, high + air];
}
