/** How λ is distributed over the selected tokens, and how it depends on one signal. */

import { Canvas, drawAxes, framed, polyline } from "../shared/canvas.tsx";
import { STEPS } from "../shared/colour.ts";
import { fixed, percent } from "../shared/format.ts";
import { colourOf } from "../shared/theme.ts";
import { Choice } from "../shared/widgets.tsx";
import type { View } from "./context.ts";
import type { Side } from "./derived.ts";
import { gateLabel, sigmoid, weights } from "./gate.ts";

const HEIGHT = 200;
const DOTS = 600;

export function Histogram({ view }: { view: View }) {
  const { a, b } = view.derived;
  const { bins } = view.book.data;
  const shares = (side: Side) => side.summary.hist.map((value) => value / (side.summary.count || 1));
  const [of, other] = [shares(a), b && shares(b)];
  const top = Math.max(0.05, ...of, ...(other ?? []));
  return (
    <section class="card" aria-labelledby="histogram">
      <h2 id="histogram">λ of the selected tokens</h2>
      <Canvas
        height={HEIGHT + 28}
        label={`Histogram of λ. ${described("A", a, view)}${b ? ` ${described("B", b, view)}` : ""}`}
        draw={(context, size) => {
          const frame = framed(size, 46);
          const { x, y } = drawAxes(context, frame, { x: [0, 1], y: [0, top * 1.06], xLabel: "λ  (0: forward KL, 1: reverse KL)", yLabel: "share of tokens" });
          context.strokeStyle = colourOf("line");
          of.forEach((share, i) => {
            if (share === 0) return;
            context.fillStyle = view.tints[Math.round(((i + 0.5) / bins) * (STEPS - 1))];
            const [left, right] = [x(i / bins) + 1, x((i + 1) / bins) - 1];
            context.fillRect(left, y(share), right - left, frame.bottom - y(share));
            context.strokeRect(left + 0.5, y(share) + 0.5, right - left - 1, frame.bottom - y(share));
          });
          if (other) {
            context.strokeStyle = colourOf("pink");
            context.lineWidth = 2;
            context.setLineDash([5, 3]);
            context.beginPath();
            context.moveTo(x(0), y(0));
            other.forEach((share, i) => {
              context.lineTo(x(i / bins), y(share));
              context.lineTo(x((i + 1) / bins), y(share));
            });
            context.lineTo(x(1), y(0));
            context.stroke();
            context.setLineDash([]);
          }
          mean(context, x(a.summary.mean), frame, colourOf("ink"), "A");
          if (b) mean(context, x(b.summary.mean), frame, colourOf("pink"), "B");
        }}
      />
      <p class="muted">
        <Key pair={b !== null} what={["bars", "dashed line"]} /> The mark at the top is E[λ].
      </p>
    </section>
  );
}

export function Curve({ view }: { view: View }) {
  const { book, state, derived, store } = view;
  const { signal } = state;
  const column = derived.columns[signal];
  const range: [number, number] = ["h", "u", "gap"].includes(signal) ? [0, 1] : extent(column);
  const xs = Array.from({ length: 101 }, (_, i) => range[0] + ((range[1] - range[0]) * i) / 100);
  const along = ({ gate }: Side) => {
    const rest = gate.c + weights(gate).reduce((sum, [name, weight]) => (name === signal || weight === 0 ? sum : sum + weight * (derived.means[name] ?? 0)), 0);
    const own = weights(gate).find(([name]) => name === signal)?.[1] ?? 0;
    return xs.map((value) => sigmoid(rest + (own === 0 ? 0 : own * value)));
  };
  const [ys, others] = [along(derived.a), derived.b && along(derived.b)];
  return (
    <section class="card" aria-labelledby="curve">
      <div class="head">
        <h2 id="curve">λ against a signal</h2>
        <Choice label="signal" value={signal} options={book.data.signals.map((name) => ({ value: name, text: name }))} change={(value) => store.set({ signal: value })} />
      </div>
      <Canvas
        height={HEIGHT}
        label={`λ against ${signal}, the other signals at their means. Gate A goes from ${fixed(ys[0])} to ${fixed(ys.at(-1))}${
          others ? `, gate B from ${fixed(others[0])} to ${fixed(others.at(-1))}` : ""
        }.`}
        draw={(context, size) => {
          const frame = framed(size);
          const { x, y } = drawAxes(context, frame, { x: range, y: [0, 1], xLabel: signal, yLabel: "λ", grid: true });
          context.strokeStyle = colourOf("line");
          const stride = Math.max(1, Math.ceil(derived.tokens.length / DOTS));
          for (let i = 0; i < derived.tokens.length; i += stride) {
            const lam = derived.a.lam[i];
            const value = column[derived.tokens[i]];
            if (Number.isNaN(lam) || Number.isNaN(value)) continue;
            context.fillStyle = view.tints[Math.round(lam * (STEPS - 1))];
            context.fillRect(x(value) - 2.5, y(lam) - 2.5, 5, 5);
            context.strokeRect(x(value) - 2.5, y(lam) - 2.5, 5, 5);
          }
          context.lineWidth = 2.5;
          context.strokeStyle = colourOf("ink");
          polyline(context, xs, ys, x, y);
          if (others) {
            context.strokeStyle = colourOf("pink");
            context.setLineDash([6, 4]);
            polyline(context, xs, others, x, y);
            context.setLineDash([]);
          }
        }}
      />
      <p class="muted">
        <Key pair={derived.b !== null} what={["line", "dashed line"]} /> Other signals at their means; dots are tokens under A.
      </p>
    </section>
  );
}

function Key({ pair, what }: { pair: boolean; what: [string, string] }) {
  if (!pair) return null;
  return (
    <>
      A: {what[0]}; <b class="b">B: {what[1]}</b>.
    </>
  );
}

function described(name: string, side: Side, view: View): string {
  const { mean, sd, saturated } = side.summary;
  return `Gate ${name}, ${gateLabel(side.gate, view.book.points)}: mean ${fixed(mean)}, spread ${fixed(sd)}, saturated ${percent(saturated)}.`;
}

function mean(context: CanvasRenderingContext2D, x: number, frame: { top: number }, colour: string, name: string): void {
  if (Number.isNaN(x)) return;
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(x - 5, frame.top - 8);
  context.lineTo(x + 5, frame.top - 8);
  context.lineTo(x, frame.top);
  context.fill();
  context.textAlign = "left";
  context.textBaseline = "top";
  context.fillText(name, x + 6, frame.top - 9);
}

function extent(column: Float64Array): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const value of column) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low < high ? [low, high] : [0, 1];
}
