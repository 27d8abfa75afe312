/** Drawing: a canvas that is as sharp as the screen, and axes. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { brief } from "./format.ts";
import { colourOf } from "./theme.ts";

export interface Size {
  width: number;
  height: number;
}

export interface Frame extends Size {
  left: number;
  right: number;
  top: number;
  bottom: number;
}

/** A drawing that is made anew whenever its parent is drawn. `label` says to those who cannot see it what it shows. */
export function Canvas(props: { height: number; label: string; draw: (context: CanvasRenderingContext2D, size: Size) => void }) {
  const place = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watcher = new ResizeObserver((entries) => setWidth(Math.round(entries[0].contentRect.width)));
    watcher.observe(place.current!);
    return () => watcher.disconnect();
  }, []);
  useLayoutEffect(() => {
    const canvas = place.current!;
    if (width === 0) return;
    const ratio = devicePixelRatio || 1;
    const [w, h] = [Math.round(width * ratio), Math.round(props.height * ratio)];
    const context = canvas.getContext("2d")!;
    if (canvas.width !== w || canvas.height !== h) {
      [canvas.width, canvas.height] = [w, h];
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.font = "12px system-ui, sans-serif"; // kept until the size changes; to set it makes the browser restyle
    }
    context.clearRect(0, 0, width, props.height);
    props.draw(context, { width, height: props.height });
  });
  return <canvas ref={place} class="drawing" style={{ height: `${props.height}px` }} role="img" aria-label={props.label} />;
}

export function framed(size: Size, left = 40, bottom = 34, top = 10, right = 12): Frame {
  return { ...size, left, right: size.width - right, top, bottom: size.height - bottom };
}

export type Scale = (value: number) => number;

export function scale(from: readonly [number, number], to: readonly [number, number]): Scale {
  const ratio = (to[1] - to[0]) / (from[1] - from[0] || 1);
  return (value) => to[0] + (value - from[0]) * ratio;
}

/** Round numbers within a range. */
export function ticks([low, high]: readonly [number, number], wanted = 5): number[] {
  const raw = (high - low) / wanted;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const width = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999)!;
  const first = Math.ceil(low / width - 1e-9);
  const last = Math.floor(high / width + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * width).toPrecision(12)));
}

export interface Axes {
  x: readonly [number, number];
  y: readonly [number, number];
  xLabel: string;
  yLabel: string;
  grid?: boolean;
}

/** Draw both axes, and return where numbers are. */
export function drawAxes(context: CanvasRenderingContext2D, frame: Frame, axes: Axes): { x: Scale; y: Scale } {
  const x = scale(axes.x, [frame.left, frame.right]);
  const y = scale(axes.y, [frame.bottom, frame.top]);
  context.save();
  context.fillStyle = colourOf("muted");
  context.strokeStyle = colourOf("grid");
  context.lineWidth = 1;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const value of ticks(axes.x, Math.max(2, Math.min(6, (frame.right - frame.left) / 60)))) {
    if (axes.grid) line(context, x(value), frame.top, x(value), frame.bottom);
    context.fillText(brief(value), x(value), frame.bottom + 5);
  }
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of ticks(axes.y, Math.max(2, Math.min(5, (frame.bottom - frame.top) / 30)))) {
    if (axes.grid) line(context, frame.left, y(value), frame.right, y(value));
    context.fillText(brief(value), frame.left - 5, y(value));
  }
  context.strokeStyle = colourOf("muted");
  line(context, frame.left, frame.bottom, frame.right, frame.bottom);
  context.textAlign = "center";
  context.textBaseline = "bottom";
  context.fillText(axes.xLabel, (frame.left + frame.right) / 2, frame.height - 1);
  context.translate(11, (frame.top + frame.bottom) / 2);
  context.rotate(-Math.PI / 2);
  context.textBaseline = "middle";
  context.fillText(axes.yLabel, 0, 0);
  context.restore();
  return { x, y };
}

export function line(context: CanvasRenderingContext2D, x1: number, y1: number, x2: number, y2: number): void {
  context.beginPath();
  context.moveTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
  context.lineTo(Math.round(x2) + 0.5, Math.round(y2) + 0.5);
  context.stroke();
}

/** A line through points; it is broken where a number is missing. */
export function polyline(context: CanvasRenderingContext2D, xs: ArrayLike<number>, ys: ArrayLike<number | null>, x: Scale, y: Scale): void {
  context.beginPath();
  let open = false;
  for (let i = 0; i < xs.length; i++) {
    const value = ys[i];
    if (value === null || value === undefined || Number.isNaN(value)) {
      open = false;
      continue;
    }
    if (open) context.lineTo(x(xs[i]), y(value));
    else context.moveTo(x(xs[i]), y(value));
    open = true;
  }
  context.stroke();
}
