/** One gate: its coefficients, where they may come from, and what it does to the selected tokens. */

import { brief, fixed, percent } from "../shared/format.ts";
import { CopyButton, NumberSlider } from "../shared/widgets.tsx";
import type { View } from "./context.ts";
import type { Side } from "./derived.ts";
import { coefficient, configText, entropyOnly, gapOnly, type Gate, gateLabel, gateText, isStatic, parseGate, sameGate, staticGate, withCoefficient } from "./gate.ts";

const ABOUT: Record<string, string> = {
  a: "× h, teacher’s entropy",
  b: "× u, at the first token",
  c: "bias",
  d: "× gap, student’s miss",
};
const REACH: Record<string, number> = { c: 6 };

export function GateCard({ view, side, name }: { view: View; side: Side; name: "a" | "b" }) {
  const { book, store, state } = view;
  const { gate, summary } = side;
  const change = (next: Gate) => store.set({ [name]: next });
  const further = book.data.signals.filter((signal) => !["h", "u", "gap"].includes(signal));
  const k = state.k || book.data.runs[Math.max(state.run, 0)].top_k;
  const title = name.toUpperCase();
  return (
    <section class={`card gate gate-${name}`} aria-labelledby={`gate-${name}`}>
      <header>
        <h2 id={`gate-${name}`}>
          Gate {title} <span class="gate-name">{gateLabel(gate, book.points)}</span>
        </h2>
        {name === "b" && (
          <button type="button" onClick={() => store.set({ b: null })} aria-label="Remove gate B">
            remove
          </button>
        )}
      </header>
      <Presets view={view} side={side} change={change} label={`Preset of gate ${title}`} />
      {[..."abcd", ...further].map((one) => (
        <NumberSlider
          key={one}
          label={one}
          about={ABOUT[one] ?? "× a further recorded signal"}
          value={coefficient(gate, one)}
          reach={REACH[one] ?? 9}
          step={0.05}
          allowInfinite={one === "c" && isStatic(gate)}
          change={(value) => change(withCoefficient(gate, one, value))}
        />
      ))}
      <dl class="readout">
        <Number name={`${name}-mean`} term="E[λ]" value={summary.mean} text={fixed(summary.mean)} />
        <Number name={`${name}-sd`} term="spread (SD)" value={summary.sd} text={fixed(summary.sd)} />
        <Number name={`${name}-saturated`} term="saturated" value={summary.saturated} text={percent(summary.saturated)} />
        <Number name={`${name}-rkl`} term="loss from RKL" value={summary.rklShare} text={percent(summary.rklShare)} />
        <Number name={`${name}-fkl`} term="loss from FKL" value={1 - summary.rklShare} text={percent(1 - summary.rklShare)} />
        <Number name={`${name}-tokens`} term="tokens" value={summary.count} text={String(summary.count)} />
      </dl>
      <div class="take">
        <CopyButton text={() => configText(gate, k)}>Copy as config</CopyButton>
        <details>
          <summary>show it</summary>
          <pre tabIndex={0}>{configText(gate, k)}</pre>
        </details>
      </div>
    </section>
  );
}

function Number({ name, term, value, text }: { name: string; term: string; value: number; text: string }) {
  return (
    <div>
      <dt>{term}</dt>
      <dd data-name={name} data-value={value}>
        {text}
      </dd>
    </div>
  );
}

function Presets({ view, side, change, label }: { view: View; side: Side; change: (gate: Gate) => void; label: string }) {
  const { book } = view;
  const { gate, summary } = side;
  const text = gateText(gate);
  const restrictions = [
    { text: "entropy-only", ...entropyOnly(gate) },
    { text: "gap-only", ...gapOnly(gate) },
  ];
  const constants: [string, number][] = [["static λ = 0 (forward KL)", 0], ["static λ = 0.5", 0.5], ["static λ = 1 (reverse KL)", 1]];
  const twins: [string, number][] = [
    [`its mean-matched twin, λ = ${fixed(summary.mean)}`, summary.mean],
    [`its RKL-matched twin, λ = ${fixed(summary.rklMean)}`, summary.rklMean],
  ];
  const runs = new Map<string, string>();
  book.data.marks.forEach((mark) => {
    const of = book.gates[mark.runs.find((run) => book.gates[run] !== null) ?? -1];
    if (of) runs.set(`run ${gateText(of)}`, [mark.label, book.tasks.length > 1 ? mark.task : ""].filter(Boolean).join(", "));
  });
  const known = [...book.points].find(([, point]) => sameGate(point, gate));
  return (
    <select
      class="presets"
      aria-label={label}
      value={known ? `point ${text}` : ""}
      onChange={(event) => {
        const next = parseGate(event.currentTarget.value.replace(/^\w+ /, ""));
        if (next) change(next);
        event.currentTarget.value = known ? `point ${text}` : "";
      }}
    >
      <option value="">preset …</option>
      <optgroup label="Points of the paper">
        {[...book.points].map(([name, point]) => (
          <option key={name} value={`point ${gateText(point)}`} selected={known?.[0] === name}>
            {name} ({[point.a, point.b, point.c, point.d].map((value) => brief(value)).join(", ")})
          </option>
        ))}
      </optgroup>
      <optgroup label="Restrictions of this gate">
        {restrictions.map((one) => (
          <option key={one.text} value={one.gate ? `restriction ${gateText(one.gate)}` : ""} disabled={one.gate === null}>
            {one.gate ? `${one.text} (${gateText(one.gate)})` : `${one.text}: N/A, ${one.why}`}
          </option>
        ))}
      </optgroup>
      <optgroup label="Constant λ">
        {[...constants, ...(globalThis.Number.isFinite(summary.mean) ? twins : [])].map(([name, lam]) => (
          <option key={name} value={`static ${gateText(staticGate(lam))}`}>
            {name}
          </option>
        ))}
      </optgroup>
      {runs.size > 0 && (
        <optgroup label="Gates of these runs">
          {[...runs].map(([value, name]) => (
            <option key={value} value={value}>
              {name}
            </option>
          ))}
        </optgroup>
      )}
    </select>
  );
}
