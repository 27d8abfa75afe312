/** One token: its signals, how they make λ, its divergences, and what both models would have said. */

import { brief, fixed, percent, visible } from "../shared/format.ts";
import type { View } from "./context.ts";
import type { Choice } from "./data.ts";
import { type Gate, sigmoid, weights } from "./gate.ts";

export function Inspector({ view }: { view: View }) {
  const { book, state, derived, store } = view;
  const token = state.hover >= 0 ? state.hover : state.token;
  if (token < 0) {
    return (
      <aside class="card inspector empty" aria-label="Token">
        <h2>Token</h2>
        <p class="muted">Point at a token, or go to one with Tab and the arrow keys, to see its signals and what both models would have said.</p>
      </aside>
    );
  }
  const response = book.responseOf[token];
  const of = book.data.responses;
  const run = book.data.runs[of.run[response]];
  const values = Object.fromEntries(book.data.signals.map((name) => [name, derived.columns[name][token]]));
  const [forward, reverse] = [book.forward[token], book.reverse[token]];
  const sides = [["A", state.a] as const, ...(state.b ? [["B", state.b] as const] : [])];
  return (
    <aside class="card inspector" aria-label="Token">
      <header>
        <h2>
          <code>{visible(book.text(token)) || "∅"}</code>
        </h2>
        <button type="button" class="close" aria-label="Close" onClick={() => store.set({ token: -1, hover: -1 })}>
          ✕
        </button>
      </header>
      <p class="muted">
        token {token - book.from(response) + 1} of {book.to(response) - book.from(response)} · step {of.step[response]} · {run.label}, seed {run.seed}
      </p>
      {sides.map(([name, gate]) => (
        <Sum key={name} name={name} gate={gate} values={values} forward={forward} reverse={reverse} />
      ))}
      <p class="muted">λ in training: {fixed(book.trained[token], 4)}</p>
      <dl class="readout">
        <div>
          <dt>forward KL</dt>
          <dd>{fixed(forward)}</dd>
        </div>
        <div>
          <dt>reverse KL</dt>
          <dd>{fixed(reverse)}</dd>
        </div>
      </dl>
      <div class="choices">
        <Choices title="teacher" list={book.top("teacher", token)} sampled={book.text(token)} />
        <Choices title="student" list={book.top("student", token)} sampled={book.text(token)} />
      </div>
    </aside>
  );
}

/** The sum under the sigmoid, term by term. */
function Sum({ name, gate, values, forward, reverse }: { name: string; gate: Gate; values: Record<string, number>; forward: number; reverse: number }) {
  const terms = weights(gate).map(([signal, weight]) => ({ signal, weight, value: values[signal] ?? NaN, part: weight === 0 ? 0 : weight * (values[signal] ?? NaN) }));
  const total = gate.c + terms.reduce((sum, term) => sum + term.part, 0);
  const lam = sigmoid(total);
  return (
    <div class={`sum side-${name.toLowerCase()}`}>
      <h3>
        {name}: λ = <span data-name={`token-${name.toLowerCase()}`} data-value={lam}>{fixed(lam, 4)}</span>
      </h3>
      <table>
        <tbody>
          {terms.map((term) => (
            <tr key={term.signal}>
              <th scope="row">{term.signal}</th>
              <td class="n">{fixed(term.value)}</td>
              <td class="n">× {brief(term.weight)}</td>
              <td class="n">{fixed(term.part)}</td>
            </tr>
          ))}
          <tr>
            <th scope="row">c</th>
            <td />
            <td />
            <td class="n">{fixed(gate.c)}</td>
          </tr>
          <tr>
            <th scope="row">loss</th>
            <td class="n" colSpan={3}>
              λ·RKL {fixed(lam * reverse)} + (1−λ)·FKL {fixed((1 - lam) * forward)} = {fixed(lam * reverse + (1 - lam) * forward)}
            </td>
          </tr>
        </tbody>
      </table>
    </div>
  );
}

function Choices({ title, list, sampled }: { title: string; list: Choice[]; sampled: string }) {
  return (
    <table>
      <caption>{title}</caption>
      <tbody>
        {list.map((choice, i) => (
          <tr key={i}>
            <td>
              <code>{visible(choice.text).replace(/^ /, "␣") || "∅"}</code>
              {choice.text === sampled && <span title="the token that was written"> ◂</span>}
            </td>
            <td class="n">{percent(choice.p)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
