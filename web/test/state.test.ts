import assert from "node:assert/strict";
import { test } from "node:test";
import { Book, type Payload, type RunRecord } from "../src/explorer/data.ts";
import { gateOf } from "../src/explorer/gate.ts";
import { fromLink, initial, nextHigh, opening, pageOf, outcome, pages, selected, tokensOf, toLink } from "../src/explorer/state.ts";

const run = (id: string, task: string, abcd: number[] | null): RunRecord => ({
  id, label: id, task, metric: "accuracy", kind: "point", seed: 1, gate: abcd === null ? null : { abcd, extra: {} }, top_k: 8, entropy: "top_k", steps: 3, done: true,
  shown: 2, recorded: 2, lam: null, scores: {}, course: { step: [1] },
});
const payload: Payload = {
  schema: 1, version: "", title: "t", kind: "runs", saturation: 0.02, bins: 20, points: {}, start: [],
  runs: [run("one.two", "x", null), run("b&c", "y", [1, 2, 3, 4])], marks: [], signals: ["h", "u", "gap", "jsd"], strings: ["good", "bad", "text"],
  responses: {
    run: [0, 0, 1, 1], step: [1, 2, 1, 3], row: [0, 0, 0, 1], text: [2, 2, 2, 2], gold: [0, 0, 1, 1], label: [0, 1, -1, 1], source: [2, 2, 2, 2],
    ended: [1, 1, 1, 1], start: [0, 2, 3, 3],
  },
  tokens: {
    text: [0, 1, 0, 1, 0], h: [0, 1, 0, 1, null], u: [0, 0, 0, 1, 1], gap: [0, 0, 0, 0, 0], jsd: [0, 0, 0, 0, 0], lam: [0, 0, 0, 0, 0],
    forward_kl: [1, 1, 1, 1, 1], reverse_kl: [1, 1, 1, 1, 1],
  },
  top: {
    count: 2, teacher: [0, 1, 0, 1, 0, 1, 0, 1, 0, 1], teacher_p: [0.5, 0.5, 1, 0, 0.9, 0.1, 0.5, 0.5, 0.8, 0.2], student: [0, 1, 0, 1, 0, 1, 0, 1, 0, -1],
    student_p: [0.5, 0.5, 1, 0, 0.9, 0.1, 0.5, 0.5, 0.8, null],
  },
};
const book = new Book(payload);
const start = initial(book);
const everything = { task: "", run: -1, outcome: "all", gold: "", label: "", from: -1, to: -1 } as const;

test("a response without tokens has none, and the next has its own", () => {
  assert.deepEqual([0, 1, 2, 3].map((r) => book.to(r) - book.from(r)), [2, 1, 0, 2]);
  assert.deepEqual([...book.responseOf], [0, 0, 1, 3, 3]);
  assert.deepEqual(book.top("student", 4), [{ text: "good", p: 0.8 }]);
});

test("the page starts at the first run that has a gate", () => {
  assert.deepEqual(start.a, gateOf([1, 2, 3, 4]));
  assert.equal(start.run, 1);
});

test("filters", () => {
  const by = (change: object) => [...selected(book, { ...everything, ...change })];
  assert.deepEqual(by({}), [0, 1, 2, 3]);
  assert.deepEqual(by({ task: "x" }), [0, 1]);
  assert.deepEqual(by({ task: "x", run: 1 }), [2, 3]);
  assert.deepEqual(by({ outcome: "right" }), [0, 3]);
  assert.deepEqual(by({ outcome: "unread" }), [2]);
  assert.deepEqual(by({ gold: "bad" }), [2, 3]);
  assert.deepEqual(by({ label: "bad" }), [1, 3]);
  assert.deepEqual(by({ from: 2 }), [1, 3]);
  assert.deepEqual(by({ from: 2, to: 2 }), [1]);
  assert.equal(outcome(book, 1), "wrong");
  assert.deepEqual([...tokensOf(book, Int32Array.of(3, 0))], [3, 4, 0, 1]);
});

test("pages have whole responses", () => {
  const all = Int32Array.of(0, 1, 2, 3);
  assert.deepEqual(pages(book, all, 2), [0, 1, 3]);
  assert.deepEqual(pages(book, all, 100), [0]);
  assert.deepEqual(pages(book, all, 100, 3), [0, 3]);
  assert.deepEqual(pages(book, new Int32Array(0), 2), [0]);
});

test("a link has what was changed, and brings it back", () => {
  assert.equal(toLink(start, start, book), "");
  const changed = {
    ...start, a: gateOf([0.1, 0, -1, 0], { jsd: 2 }), b: gateOf([0, 0, -Infinity, 0]), k: 2, run: 0, task: "x", outcome: "wrong" as const, gold: "bad",
    label: "good", from: 1, to: 3, page: 2, token: 2, signal: "gap", x: "c", y: "jsd", colour: "sd" as const, metric: "loss", theme: "dark" as const,
  };
  assert.deepEqual(fromLink(`#${toLink(changed, start, book)}`, start, book), changed);
  assert.deepEqual(fromLink(toLink({ ...changed, run: -1, b: null }, start, book), start, book), { ...changed, run: -1, b: null });
});

test("a page opens on the token of its first response where the models differ most", () => {
  const apart = new Book({ ...payload, tokens: { ...payload.tokens, forward_kl: [1, 9, 2, 1, 3], reverse_kl: [1, 1, 1, 1, null] } });
  assert.equal(opening(apart, { ...start, run: -1, task: "" }), 1);
  assert.equal(opening(apart, { ...start, run: 1 }), 3);
  assert.equal(opening(apart, { ...start, run: -1, task: "", gold: "none" }), -1);
});

test("the next token of high λ, on whatever page it is", () => {
  const all = Int32Array.of(0, 1, 2, 3);
  const tokens = tokensOf(book, all);
  const lam = Float64Array.of(0.2, 0.9, 0.1, NaN, 0.9);
  assert.equal(nextHigh(tokens, lam, -1), 1);
  assert.equal(nextHigh(tokens, lam, 1), 4);
  assert.equal(nextHigh(tokens, lam, 4), 1);
  assert.equal(nextHigh(tokens, new Float64Array(5).fill(NaN), 1), -1);
  const starts = pages(book, all, 2);
  assert.deepEqual([0, 2, 4].map((token) => pageOf(book, all, starts, token)), [0, 1, 2]);
  assert.equal(pageOf(book, Int32Array.of(1), [0], 4), -1);
});

test("a link that this page cannot follow changes nothing", () => {
  const wrong = "a=1,2,3&b=1,2,3,4,other=1&k=7&task=z&run=none&outcome=maybe&from=x&page=-4&signal=q&x=q&y=b&colour=red&theme=pink&token=9.9.9.none";
  assert.deepEqual(fromLink(wrong, start, book), { ...start, y: "b" });
  assert.deepEqual(fromLink("x=b&y=b", start, book), start);
  assert.equal(fromLink("token=5.0.1.one.two", start, book).token, -1);
  assert.equal(fromLink("token=1.0.1.one.two", start, book).token, 1);
});

test("h and u of another K come from the teacher's recorded choices", () => {
  assert.deepEqual(book.possibleK, [2]);
  const { h, u, gap } = book.signals(2);
  assert.deepEqual([h[0], h[1], u[0], u[1], gap[0]], [1, 0, 1, 1, 0]);
  assert.equal(book.signals(0).h[0], 0);
  assert.ok(Number.isNaN(book.signals(0).h[4]));
});
