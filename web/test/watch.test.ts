import assert from "node:assert/strict";
import { test } from "node:test";
import { extent, lastOf, look } from "../src/watch/Charts.tsx";
import { waiting } from "../src/watch/client.ts";
import { quoted } from "../src/watch/Overview.tsx";
import { counted, type Curves, duration, headline, merged, metricOf, type Row, share, type Snapshot } from "../src/watch/snapshot.ts";
import { drawn, FOLLOWED, fromLink, listed, Looks, START, toLink } from "../src/watch/state.ts";

const row = (id: string, change: Partial<Row> = {}): Row => ({
  id, title: `x ${id}`, task: "x", point: id, kind: "point", seed: 1, state: "waiting", step: 0, steps: 10, loss: null, lam: null, accuracy: null, metric: "", seconds: null,
  error: "", details: "", when: "", alarms: [], ...change,
});
const curves = (last: number): Curves => ({ step: [1, last], loss: [1, null], lam: [null, null], evaluated: [0], accuracy: [0.5] });
const snapshot = (change: Partial<Snapshot> = {}): Snapshot => ({
  schema: 1, version: "e.1", whole: true, kind: "study", title: "t", folder: "/f", alive: true, state: "running", workers: 1, seconds_left: null, behind: false,
  problem: "", rows: [row("a"), row("b")], curves: {}, ...change,
});

test("curves that have not changed are kept, those of runs that are gone are not", () => {
  const first = merged(null, snapshot({ curves: { a: curves(2), b: curves(2) } }));
  const second = merged(first, snapshot({ whole: false, curves: { a: curves(3) } }));
  assert.deepEqual([second.curves.a.step, second.curves.b.step], [[1, 3], [1, 2]]);
  assert.deepEqual(Object.keys(merged(second, snapshot({ whole: false, rows: [row("b")] })).curves), ["b"]);
  assert.deepEqual(merged(second, snapshot({ whole: true, curves: {} })).curves, {});
  assert.throws(() => merged(null, snapshot({ schema: 2 })), /schema 2/);
});

test("progress counts the steps of what is under way", () => {
  const rows = [row("a", { state: "done", step: 10 }), row("b", { state: "running", step: 5 }), row("c", { state: "failed", step: 9 }), row("d", { state: "running", steps: 0 })];
  assert.equal(share(rows), 1.5 / 4);
  assert.equal(share([]), 0);
  assert.equal(headline(counted(rows), 4), "1 of 4 done · 2 running · 1 failed");
});

test("durations", () => {
  assert.deepEqual([0, 59.4, 59.6, 125, 1200, 3600, 7290, null].map(duration), ["0 s", "59 s", "1 min 0 s", "2 min 5 s", "20 min", "1 h 0 min", "2 h 2 min", "–"]);
});

test("filters and orders; what has no value comes last", () => {
  const rows = [row("G10", { loss: 2 }), row("G9", { loss: null, state: "failed" }), row("G1", { loss: 1, task: "y" })];
  const ids = (change: object) => listed(rows, { ...START, ...change }).map((one) => one.id);
  assert.deepEqual(ids({}), ["G10", "G9", "G1"]);
  assert.deepEqual(ids({ sort: "point" }), ["G1", "G9", "G10"]);
  assert.deepEqual(ids({ sort: "loss" }), ["G1", "G10", "G9"]);
  assert.deepEqual(ids({ sort: "loss", down: true }), ["G10", "G1", "G9"]);
  assert.deepEqual(ids({ sort: "state" }), ["G9", "G10", "G1"]);
  assert.deepEqual(ids({ task: "y" }), ["G1"]);
  assert.deepEqual(ids({ state: "failed" }), ["G9"]);
  assert.deepEqual(ids({ text: " g1 " }), ["G10", "G1"]);
});

test("what runs is drawn, then what ended last, unless runs are chosen", () => {
  const ended = Array.from({ length: 8 }, (_, i) => row(`d${i}`, { state: "done" }));
  const rows = [row("p", { state: "done", kind: "preparation" }), ...ended, row("r", { state: "running" }), row("w")];
  const held = Object.fromEntries(rows.filter((one) => one.id !== "w").map((one) => [one.id, curves(2)]));
  assert.deepEqual(drawn(rows, held, null).map((one) => one.id), ["d3", "d4", "d5", "d6", "d7", "r"]);
  assert.equal(drawn(rows, held, null).length, FOLLOWED);
  assert.deepEqual(drawn(rows, held, ["w", "p", "d0", "gone"]).map((one) => one.id), ["p", "d0"]);
  assert.deepEqual(drawn(rows, held, []), []);
});

test("a run keeps its look while others come and go", () => {
  const looks = new Looks();
  assert.deepEqual([...looks.of(["a", "b"])], [["a", 0], ["b", 1]]);
  assert.deepEqual([...looks.of(["b", "c"])].sort(), [["b", 1], ["c", 0]]);
  const all = Array.from({ length: 18 }, (_, i) => JSON.stringify(look(i)));
  assert.equal(new Set(all).size, 18);
});

test("a link brings the choices back, and nonsense changes nothing", () => {
  assert.equal(toLink(START), "");
  const state = { chosen: ["x-G5-s1", "y"], task: "a&b", state: "failed", text: "ä#", sort: "loss", down: true, theme: "dark" } as const;
  assert.deepEqual(fromLink(`#${toLink(state)}`), state);
  assert.deepEqual(fromLink(toLink({ ...START, chosen: [] })).chosen, []);
  assert.deepEqual(fromLink("#sort=x&state=gone&theme=pink&down=yes"), START);
});

test("a server that is gone is asked ever more rarely, up to a bound", () => {
  assert.deepEqual([0, 1, 2, 3, 50].map(waiting), [500, 1000, 2000, 4000, 4000]);
});

test("what the scores of runs are called", () => {
  assert.equal(metricOf([]), "score");
  assert.equal(metricOf([row("a", { metric: "rouge_l" }), row("b", {})]), "rouge_l");
  assert.equal(metricOf([row("a", { metric: "rouge_l" }), row("b", { metric: "accuracy" })]), "score");
});

test("ranges of charts", () => {
  assert.deepEqual(extent([], false), [0, 1]);
  assert.deepEqual(extent([[null, 0.5], [0.5]], true), [0.48, 0.52]);
  assert.deepEqual(extent([[0, 1]], true), [0, 1]);
  const [low, high] = extent([[2, 4]], false);
  assert.ok(low < 2 && low > 1.8 && high > 4 && high < 4.2);
  assert.ok(extent([[-1, 1]], false)[0] < -1);
  assert.equal(lastOf([1, 2, null]), 2);
  assert.equal(lastOf([]), null);
});

test("paths for a shell", () => {
  assert.equal(quoted("/a/b-c_1.d"), "/a/b-c_1.d");
  assert.equal(quoted("/a b'c"), "'/a b'\\''c'");
});
