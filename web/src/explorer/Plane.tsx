/** The gate plane: what E[λ] or its spread would be for other gates on these tokens, and where points and runs are. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Canvas, drawAxes, framed, line, type Scale, scale } from "../shared/canvas.tsx";
import { css, sequential, step as colourStep } from "../shared/colour.ts";
import { brief, fixed, percent } from "../shared/format.ts";
import { colourOf } from "../shared/theme.ts";
import { Choice } from "../shared/widgets.tsx";
import type { View } from "./context.ts";
import type { MarkRecord } from "./data.ts";
import { coefficient, type Gate, gateText, sameGate, withCoefficient } from "./gate.ts";
import { contour, momentsAt, sample, type Split, split, type Spot, spots } from "./plane.ts";
import { axisNames, COLOURS } from "./state.ts";

const HEIGHT = 400;
const WHILE_MOVING = { grid: 21, tokens: 250 };
const AT_REST = { grid: 41, tokens: 4000 };
const SPREAD_TOP = 0.5;

export interface Mark {
  label: string;
  gate: Gate;
  /** What runs at this point reached; null for a point of the paper that no run was at. */
  found: MarkRecord | null;
}

/** The points of the paper and those of the runs. */
export function marksOf(view: View): Mark[] {
  const { book, state } = view;
  const marks: Mark[] = [];
  for (const record of book.data.marks) {
    if (state.task !== "" && record.task !== state.task) continue;
    const gate = book.gates[record.runs.find((run) => book.gates[run] !== null) ?? -1];
    if (gate) marks.push({ label: record.label, gate, found: record });
  }
  for (const [label, gate] of book.points) if (!marks.some((mark) => mark.label === label)) marks.push({ label, gate, found: null });
  return marks;
}

export function choose(view: View, mark: Mark): void {
  const run = mark.found?.runs.find((one) => view.book.data.runs[one].shown > 0);
  view.store.set({ a: mark.gate, ...(run === undefined || view.book.data.runs.length === 1 ? {} : { run, page: 0, hover: -1 }) });
}

/** The accuracy of a mark with its interval, in words. */
export function accuracyText(found: MarkRecord | null): string {
  if (!found || found.accuracy === null) return found ? "not evaluated yet" : "no run here";
  const ends = found.low === null || found.high === null ? "" : ` [${fixed(100 * found.low, 1)}, ${fixed(100 * found.high, 1)}]`;
  return `${percent(found.accuracy)}${ends} on ${found.split}${ends ? ", 95 % interval" : ""} ${found.interval}`;
}

interface Field {
  size: number;
  values: Float64Array;
}

export function Plane({ view }: { view: View }) {
  const { book, state, store } = view;
  const [xRange, yRange] = [rangeOf(state.x), rangeOf(state.y)];
  const names = axisNames(book);
  const rest = names.filter((name) => name !== state.x && name !== state.y);
  const key = [state.x, state.y, state.colour, state.k, ...rest.map((name) => coefficient(state.a, name))].join(" ");
  const field = useField(view, key, xRange, yRange);
  const frameOf = (width: number) => framed({ width, height: HEIGHT });
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watcher = new ResizeObserver((entries) => setWidth(Math.round(entries[0].contentRect.width)));
    watcher.observe(box.current!);
    return () => watcher.disconnect();
  }, []);
  const frame = frameOf(width);
  const picture = useMemo(() => (width > 0 ? painted(field, frame, view) : null), [field, width, view.theme, state.colour]);
  const x = scale(xRange, [frame.left, frame.right]);
  const y = scale(yRange, [frame.bottom, frame.top]);
  const clamp = (value: number, [low, high]: readonly [number, number]) => Math.min(Math.max(value, low), high);
  const at = (gate: Gate): [number, number] => [clamp(coefficient(gate, state.x), xRange), clamp(coefficient(gate, state.y), yRange)];
  const marks = useMemo(() => marksOf(view), [state.task]);
  const places = useMemo(() => spots(marks, (mark) => at(mark.gate)), [marks, state.x, state.y]);
  const [active, setActive] = useState<Spot<Mark> | null>(null);
  useEffect(() => setActive(null), [places]);
  const legend = useMemo(() => <Legend view={view} />, [state.colour, view.tints]);
  const inPlane = (gate: Gate) => rest.every((name) => coefficient(gate, name) === coefficient(state.a, name));

  const drag = (event: PointerEvent) => {
    const rect = box.current!.getBoundingClientRect();
    const back = (pixel: number, from: readonly [number, number], to: readonly [number, number]) => Number(clamp(scale(to, from)(pixel), from).toFixed(2));
    const next = withCoefficient(withCoefficient(state.a, state.x, back(event.clientX - rect.left, xRange, [frame.left, frame.right])), state.y,
      back(event.clientY - rect.top, yRange, [frame.bottom, frame.top]));
    store.set({ a: next });
  };
  const axis = (which: "x" | "y", other: "x" | "y") => (
    <Choice
      label={`${which} axis`}
      value={state[which]}
      options={names.map((name) => ({ value: name, text: name }))}
      change={(value) => store.set(value === state[other] ? { x: state.y, y: state.x } : { [which]: value })}
    />
  );
  const [ax, ay] = at(state.a);
  const labels = width > 0 ? placedLabels(places, x, y, frame.right) : new Set<Spot<Mark>>();
  return (
    <section class="card plane" aria-labelledby="plane">
      <div class="head">
        <h2 id="plane">The gate plane</h2>
        <div class="fields">
          {axis("x", "y")}
          {axis("y", "x")}
          <Choice label="colour" value={state.colour} options={COLOURS.map((value) => ({ value, text: value === "mean" ? "E[λ]" : "spread of λ" }))} change={(colour) => store.set({ colour })} />
        </div>
      </div>
      <div
        class="field-box"
        ref={box}
        onPointerDown={(event) => {
          if (event.target instanceof HTMLButtonElement || event.button !== 0) return;
          event.currentTarget.setPointerCapture(event.pointerId);
          drag(event);
        }}
        onPointerMove={(event) => event.currentTarget.hasPointerCapture(event.pointerId) && drag(event)}
      >
        <Canvas
          height={HEIGHT}
          label={`${state.colour === "mean" ? "E[λ]" : "Spread of λ"} over ${state.x} and ${state.y}, the other coefficients as in gate A. Gate A is at ${state.x} = ${brief(ax)}, ${state.y} = ${brief(ay)}.`}
          draw={(context) => {
            if (picture) context.drawImage(picture, frame.left, frame.top, frame.right - frame.left, frame.bottom - frame.top);
            drawAxes(context, frame, { x: xRange, y: yRange, xLabel: state.x, yLabel: state.y });
            context.strokeStyle = colourOf("ink");
            context.lineWidth = 1;
            context.setLineDash([2, 3]);
            line(context, x(ax), frame.top, x(ax), frame.bottom);
            line(context, frame.left, y(ay), frame.right, y(ay));
            context.setLineDash([]);
          }}
        />
        {width > 0 &&
          places.map((spot) => {
            const trained = spot.members.some((mark) => mark.found !== null);
            const here = spot.members.some((mark) => sameGate(mark.gate, state.a));
            const classes = ["mark", trained && "trained", spot.members.some((mark) => inPlane(mark.gate)) || "aside", here && "here"].filter(Boolean).join(" ");
            return (
              <button
                key={`${spot.x} ${spot.y}`}
                type="button"
                class={classes}
                style={{ left: `${x(spot.x)}px`, top: `${y(spot.y)}px` }}
                aria-label={spot.members.length > 1 ? `${spotText(spot)}: ${spot.members.map((mark) => mark.label).join(", ")}` : spotText(spot)}
                aria-pressed={here}
                onPointerEnter={() => setActive(spot)}
                onFocus={() => setActive(spot)}
                onClick={() => {
                  const now = spot.members.findIndex((mark) => sameGate(mark.gate, state.a));
                  choose(view, spot.members[(now + 1) % spot.members.length]);
                }}
              >
                {labels.has(spot) && (
                  <span>
                    {spotText(spot)}
                  </span>
                )}
              </button>
            );
          })}
      </div>
      {legend}
      <div class="here-list" role="status">
        {active ? (
          active.members.map((mark) => (
            <p key={mark.label}>
              <button type="button" onClick={() => choose(view, mark)}>
                {mark.label}
              </button>{" "}
              <small>
                ({gateText(mark.gate)}) {accuracyText(mark.found)}
                {!inPlane(mark.gate) && "; beside this plane"}
              </small>
            </p>
          ))
        ) : (
          <p class="muted">
            Drag to move gate A; a mark chooses its point. Filled marks have runs. Faint marks differ from A in {rest.slice(0, 3).join(" or ")} too, so the colour under them is not theirs.
          </p>
        )}
      </div>
    </section>
  );
}

function Legend({ view }: { view: View }) {
  const mean = view.state.colour === "mean";
  const colours = mean ? view.tints : sequential(view.theme).map(css);
  return (
    <div class="legend">
      <span>{mean ? "0 forward KL" : "0"}</span>
      <Canvas
        height={12}
        label={mean ? "Colours of λ: blue is forward KL, orange is reverse KL." : "Colours of the spread of λ: the greener, the wider."}
        draw={(context, { width, height }) => {
          colours.forEach((colour, i) => {
            context.fillStyle = colour;
            context.fillRect((i * width) / colours.length, 0, width / colours.length + 1, height);
          });
        }}
      />
      <span>{mean ? "reverse KL 1" : SPREAD_TOP}</span>
    </div>
  );
}

/** The colours' numbers: few of them while something moves, all of them piece by piece once it rests. */
function useField(view: View, key: string, xRange: readonly [number, number], yRange: readonly [number, number]): Field {
  const { state, derived } = view;
  const { tokens, columns } = derived;
  const [fine, setFine] = useState<{ key: string; tokens: Int32Array; field: Field } | null>(null);
  const fill = (of: Split, grid: number, values: Float64Array, row: number) => {
    for (let i = 0; i < grid; i++) {
      const [px, py] = [i, row].map((place, axis) => [xRange, yRange][axis][0] + ((([xRange, yRange][axis][1] - [xRange, yRange][axis][0]) * place) / (grid - 1)));
      const { mean, sd } = momentsAt(of, px, py);
      values[row * grid + i] = state.colour === "mean" ? mean : sd / SPREAD_TOP;
    }
  };
  const rough = useMemo(() => {
    const of = split(state.a, columns, sample(tokens, WHILE_MOVING.tokens), state.x, state.y);
    const values = new Float64Array(WHILE_MOVING.grid ** 2);
    for (let row = 0; row < WHILE_MOVING.grid; row++) fill(of, WHILE_MOVING.grid, values, row);
    return { size: WHILE_MOVING.grid, values };
  }, [key, tokens]);
  useEffect(() => {
    let timer = setTimeout(() => {
      const of = split(state.a, columns, sample(tokens, AT_REST.tokens), state.x, state.y);
      const values = new Float64Array(AT_REST.grid ** 2);
      let row = 0;
      const some = () => {
        const end = performance.now() + 6;
        while (row < AT_REST.grid && performance.now() < end) fill(of, AT_REST.grid, values, row++);
        if (row < AT_REST.grid) timer = setTimeout(some, 0);
        else setFine({ key, tokens, field: { size: AT_REST.grid, values } });
      };
      some();
    }, 200);
    return () => clearTimeout(timer);
  }, [key, tokens]);
  return fine?.key === key && fine.tokens === tokens ? fine.field : rough;
}

/** Colours and contour lines of the field, as large as it is shown. */
function painted({ size, values }: Field, frame: { left: number; right: number; top: number; bottom: number }, view: View): OffscreenCanvas {
  const colours = view.state.colour === "mean" ? view.colours : sequential(view.theme);
  const image = new ImageData(size, size);
  for (let row = 0; row < size; row++) {
    for (let column = 0; column < size; column++) {
      const index = colourStep(values[row * size + column]);
      if (index < 0) continue;
      image.data.set([...colours[index], 255], ((size - 1 - row) * size + column) * 4);
    }
  }
  const small = new OffscreenCanvas(size, size);
  small.getContext("2d")!.putImageData(image, 0, 0);
  const ratio = devicePixelRatio || 1;
  const [w, h] = [frame.right - frame.left, frame.bottom - frame.top];
  const large = new OffscreenCanvas(Math.max(1, Math.round(w * ratio)), Math.max(1, Math.round(h * ratio)));
  const context = large.getContext("2d")!;
  context.scale(ratio, ratio);
  // The middle of a pixel is the value at a grid point, so half a pixel on each side is beyond the axes.
  context.drawImage(small, 0.5, 0.5, size - 1, size - 1, 0, 0, w, h);
  context.strokeStyle = colourOf("muted");
  const place = (value: number, length: number) => (value / (size - 1)) * length;
  for (const level of view.state.colour === "mean" ? [0.1, 0.25, 0.5, 0.75, 0.9] : [0.2, 0.4, 0.6, 0.8]) {
    context.globalAlpha = level === 0.5 ? 0.9 : 0.45;
    context.beginPath();
    for (const [x1, y1, x2, y2] of contour(values, size, level)) {
      context.moveTo(place(x1, w), h - place(y1, h));
      context.lineTo(place(x2, w), h - place(y2, h));
    }
    context.stroke();
  }
  return large;
}

/** The label of a spot: the accuracy of its runs, or how many more marks it has. */
function spotText({ members }: Spot<Mark>): string {
  const [{ label, found }] = members;
  if (members.length > 1) return `${label} +${members.length - 1}`;
  return found?.accuracy == null ? label : `${label} ${fixed(100 * found.accuracy, 1)} %`;
}

/** Labels that have room; the first come first. */
function placedLabels(places: Spot<Mark>[], x: Scale, y: Scale, right: number): Set<Spot<Mark>> {
  const boxes: [number, number, number, number][] = places.map((spot) => [x(spot.x) - 9, y(spot.y) - 9, x(spot.x) + 9, y(spot.y) + 9]);
  const found = new Set<Spot<Mark>>();
  places.forEach((spot, own) => {
    const text = spotText(spot).length;
    const box: [number, number, number, number] = [x(spot.x) + 9, y(spot.y) - 8, x(spot.x) + 13 + 7 * text, y(spot.y) + 8];
    const free = boxes.every((other, i) => i === own || box[2] < other[0] || box[0] > other[2] || box[3] < other[1] || box[1] > other[3]);
    if (free && box[2] <= right + 8) {
      found.add(spot);
      boxes.push(box);
    }
  });
  return found;
}

function rangeOf(name: string): readonly [number, number] {
  return name === "c" ? [-6, 6] : [-9, 9];
}
