import assert from "node:assert/strict";
import { test } from "node:test";
import {
  configText, entropyOfTop, entropyOnly, gapOnly, gateLabel, gateOf, gateText, isStatic, lamOf, logit, parseGate, sigmoid, staticGate, summarise,
  withCoefficient,
} from "../src/explorer/gate.ts";

const near = (got: number, want: number, tolerance = 1e-12) => assert.ok(Math.abs(got - want) <= tolerance, `${got} is not ${want}`);
const columns = {
  h: Float64Array.of(0, 0.5, 1, 0.25),
  u: Float64Array.of(0.3, 0.3, 0.6, NaN),
  gap: Float64Array.of(0.9, 0.1, 0.5, 0.5),
  jsd: Float64Array.of(0.1, 0.2, 0.3, 0.4),
};
const all = Int32Array.of(0, 1, 2, 3);
const points = new Map([["G5", gateOf([4, 0, -1, 0])]]);

test("λ is the sigmoid of the linear form, token by token", () => {
  const lam = lamOf(gateOf([4, 4, -1.5, -2], { jsd: 3 }), columns, Int32Array.of(2, 0));
  near(lam[0], 1 / (1 + Math.exp(-(4 * 1 + 4 * 0.6 - 1.5 - 2 * 0.5 + 3 * 0.3))));
  near(lam[1], 1 / (1 + Math.exp(-(4 * 0 + 4 * 0.3 - 1.5 - 2 * 0.9 + 3 * 0.1))));
});

test("a signal that was not recorded spoils λ only where the gate reads it", () => {
  assert.ok(Number.isNaN(lamOf(gateOf([0, 4, 0, 0]), columns, all)[3]));
  near(lamOf(gateOf([4, 0, -1, 0]), columns, all)[3], 0.5);
  assert.ok(Number.isNaN(lamOf(gateOf([0, 0, 0, 0], { unknown: 1 }), columns, all)[0]));
});

test("limits of the sigmoid", () => {
  assert.equal(sigmoid(-1000), 0);
  assert.equal(sigmoid(1000), 1);
  assert.equal(sigmoid(0), 0.5);
  near(sigmoid(logit(0.388)), 0.388);
  assert.deepEqual([...lamOf(staticGate(1), columns, all)], [1, 1, 1, 1]);
  assert.deepEqual([...lamOf(staticGate(0), columns, all)], [0, 0, 0, 0]);
  assert.deepEqual([...lamOf(gateOf([0, 0, 0, 0]), columns, all)], [0.5, 0.5, 0.5, 0.5]);
});

test("summaries by hand", () => {
  const lam = Float64Array.of(0.01, 0.5, 0.99, NaN);
  const found = summarise(lam, all, Float64Array.of(1, 2, 3, 9), Float64Array.of(4, 5, 6, 9), 20, 0.02);
  assert.equal(found.count, 3);
  near(found.mean, 0.5);
  near(found.sd, Math.sqrt((2 * 0.49 ** 2) / 3));
  near(found.saturated, 2 / 3);
  const reverse = 0.01 * 4 + 0.5 * 5 + 0.99 * 6;
  near(found.rklMean, reverse / 15);
  near(found.rklShare, reverse / (reverse + 0.99 * 1 + 0.5 * 2 + 0.01 * 3));
  assert.deepEqual([found.hist[0], found.hist[10], found.hist[19]], [1, 1, 1]);
});

test("λ of exactly 1 is in the last bin, and nothing gives NaN but no error", () => {
  const none = new Float64Array(0);
  assert.equal(summarise(Float64Array.of(1), Int32Array.of(0), Float64Array.of(1), Float64Array.of(1), 20, 0.02).hist[19], 1);
  assert.ok(Number.isNaN(summarise(none, new Int32Array(0), none, none, 20, 0.02).mean));
});

test("h for another K", () => {
  const p = Float64Array.of(0.5, 0.5, 0, 0.9, 0.1, NaN);
  near(entropyOfTop(p, 0, 2), 1);
  near(entropyOfTop(p, 0, 3), Math.log(2) / Math.log(3));
  near(entropyOfTop(p, 3, 2), -(0.9 * Math.log(0.9) + 0.1 * Math.log(0.1)) / Math.log(2));
  assert.ok(Number.isNaN(entropyOfTop(p, 3, 3)));
});

test("text and back", () => {
  for (const gate of [gateOf([4, 0, -1, 0]), gateOf([0.1, -1e-7, 3, 1e21], { jsd: -2.5 }), staticGate(1), staticGate(0)]) {
    assert.deepEqual(parseGate(gateText(gate)), gate);
  }
  assert.equal(gateText(gateOf([-0, 0, 0, 0], { jsd: 0 })), "0,0,0,0");
  for (const text of ["", "1,2,3", "1,2,x,4", "inf,0,0,0", "1,0,inf,0", "1,2,3,4,5", "1,2,3,4,jsd", "1,2,3,4,<b>=1", "1,,3,4"]) {
    assert.equal(parseGate(text), null, text);
  }
});

test("labels are those of Python", () => {
  assert.equal(gateLabel(gateOf([4, 0, -1, 0]), points), "G5");
  assert.equal(gateLabel(staticGate(0.388), points), "static:0.388");
  assert.equal(gateLabel(gateOf([-4, 0, 0, 0]), points), "entropy-only(-4)");
  assert.equal(gateLabel(gateOf([0, 0, 0, 2]), points), "gap-only(+2)");
  assert.equal(gateLabel(gateOf([4, 0, 0, 0]), points), "4,0,0,0");
  assert.equal(gateLabel(gateOf([4, 0, -1, 0], { jsd: 1 }), points), "4,0,-1,0,jsd=1");
});

test("restrictions, and where there are none", () => {
  assert.deepEqual(entropyOnly(gateOf([4, 4, -1, 2])).gate, gateOf([-4, 0, 0, 0]));
  assert.deepEqual(gapOnly(gateOf([4, 4, -1, -2])).gate, gateOf([0, 0, 0, -2]));
  assert.equal(entropyOnly(gateOf([0, 4, -1, 0])).why, "a = 0");
  assert.equal(gapOnly(gateOf([4, 4, -1, 0])).why, "d = 0");
});

test("changing a coefficient keeps a gate legal", () => {
  assert.equal(withCoefficient(staticGate(1), "a", 2).c, 0);
  assert.ok(isStatic(withCoefficient(gateOf([0, 0, 0, 0], { jsd: 1 }), "jsd", 0)));
  assert.deepEqual(withCoefficient(gateOf([1, 2, 3, 4]), "c", -3), gateOf([1, 2, -3, 4]));
});

test("a configuration to paste", () => {
  assert.equal(configText(gateOf([4, 0, -1, 0.5]), 8), 'objective:\n  method: gated\n  gate: "4,0,-1,0.5"\n  top_k: 8\n');
  assert.match(configText(staticGate(1), 8), /gate: "static:1"/);
});
