/** Responses as text, each token tinted by λ. */

import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { step as colourStep } from "../shared/colour.ts";
import { visible } from "../shared/format.ts";
import type { View } from "./context.ts";
import { nextHigh, outcome, pageOf } from "./state.ts";

/** Responses with more tokens, and prompts with more characters, can be closed. */
const LONG_RESPONSE = 80;
const LONG_PROMPT = 400;
const VERDICT = { right: "✓ right", wrong: "✗ wrong", unread: "– no legal label" } as const;

export function Rollouts({ view }: { view: View }) {
  const { book, state, derived, store, tints } = view;
  const place = useRef<HTMLDivElement>(null);
  const { responses, pages, tokens } = derived;
  const page = Math.min(state.page, pages.length - 1);
  const [from, to] = [pages[page], pages[page + 1] ?? responses.length];
  const paired = derived.b !== null;

  // The list is made once per page of responses. While a slider moves, only colours change, and they are put straight
  // onto the elements.
  const list = useMemo(
    () => Array.from(responses.subarray(from, to), (response) => <Response key={response} view={view} response={response} paired={paired} />),
    [responses, from, to, paired],
  );
  const elements = useMemo(() => ({ a: [] as HTMLElement[], b: [] as HTMLElement[], shown: { a: [] as string[], b: [] as string[] } }), [list]);
  const inSight = useRef(new Set<Element>());
  const paint = useRef((_everything: boolean) => {});
  paint.current = (everything) => {
    const first = from < responses.length ? firstToken(view, from) : 0;
    for (const side of ["a", "b"] as const) {
      const of = derived[side];
      if (!of) continue;
      const shown = elements.shown[side];
      elements[side].forEach((element, i) => {
        if (!everything && !inSight.current.has(element.parentElement!)) return;
        const index = colourStep(of.lam[first + i]);
        const tint = index < 0 ? "" : tints[index];
        if (shown[i] !== tint) element.style.backgroundColor = shown[i] = tint;
      });
    }
  };
  useLayoutEffect(() => {
    for (const side of ["a", "b"] as const) elements[side] = [...place.current!.querySelectorAll<HTMLElement>(`[data-side="${side}"]`)];
    paint.current(true);
    const watcher = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) isIntersecting ? inSight.current.add(target) : inSight.current.delete(target);
      paint.current(false);
    });
    for (const row of place.current!.querySelectorAll(".tokens")) watcher.observe(row);
    return () => {
      watcher.disconnect();
      inSight.current.clear();
    };
  }, [elements]);
  // What is in sight follows at once, and the rest when the movement pauses.
  useLayoutEffect(() => {
    paint.current(false);
    const timer = setTimeout(() => paint.current(true), 120);
    return () => clearTimeout(timer);
  }, [derived.a, derived.b, tints]);

  // One stop for Tab; the arrows go from token to token.
  const pinned = state.token;
  const stop = tokens.length && responses.subarray(from, to).some((r) => pinned >= book.from(r) && pinned < book.to(r)) ? pinned : tokens[firstToken(view, from)];
  useLayoutEffect(() => {
    for (const element of elements.a) {
      const own = Number(element.dataset.token);
      element.tabIndex = own === stop ? 0 : -1;
      if (own === pinned) element.setAttribute("aria-current", "true");
      else element.removeAttribute("aria-current");
    }
  }, [elements, stop, pinned]);

  const tokenAt = (target: EventTarget | null) => {
    const token = target instanceof Element ? target.closest<HTMLElement>("[data-token]") : null;
    return token ? Number(token.dataset.token) : -1;
  };
  const go = (event: KeyboardEvent) => {
    if (event.key === "Escape") store.set({ token: -1, hover: -1 });
    const at = elements.a.findIndex((element) => element === document.activeElement);
    if (at < 0) return;
    const rowOf = (i: number) => book.responseOf[Number(elements.a[i].dataset.token)];
    const rowStart = (row: number) => elements.a.findIndex((_, i) => rowOf(i) === row);
    const rows = [...new Set(elements.a.map((_, i) => rowOf(i)))];
    const row = rows.indexOf(rowOf(at));
    const column = at - rowStart(rows[row]);
    const beside = (r: number) => {
      if (r < 0 || r >= rows.length) return at;
      const start = rowStart(rows[r]);
      return Math.min(start + column, start + book.to(rows[r]) - book.from(rows[r]) - 1);
    };
    const next = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      ArrowUp: beside(row - 1),
      ArrowDown: beside(row + 1),
      Home: rowStart(rows[row]),
      End: rowStart(rows[row]) + book.to(rows[row]) - book.from(rows[row]) - 1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    elements.a[Math.min(Math.max(next, 0), elements.a.length - 1)].focus();
  };

  const jump = () => {
    const token = nextHigh(tokens, derived.a.lam, pinned);
    if (token < 0) return;
    store.set({ token, hover: -1, page: pageOf(book, responses, pages, token) });
    // When the page is there: open what it is in, and bring it into sight.
    requestAnimationFrame(() => {
      const element = place.current?.querySelector<HTMLElement>(`[data-side="a"][data-token="${token}"]`);
      const closed = element?.closest("details");
      if (closed) closed.open = true;
      element?.scrollIntoView({ block: "nearest" });
      element?.focus({ preventScroll: true });
    });
  };

  return (
    <div>
      {tokens.length > LONG_RESPONSE && (
        <p class="jump">
          <button type="button" onClick={jump}>
            next high λ ›
          </button>{" "}
          <span class="muted">the next token whose λ is among the highest tenth</span>
        </p>
      )}
      <div
        ref={place}
        class="rollouts"
        onPointerOver={(event) => event.pointerType === "mouse" && store.set({ hover: tokenAt(event.target) })}
        onPointerLeave={() => store.set({ hover: -1 })}
        onClick={(event) => {
          const token = tokenAt(event.target);
          if (token >= 0) store.set({ token });
        }}
        onFocusIn={(event) => {
          const token = tokenAt(event.target);
          if (token >= 0) store.set({ token });
        }}
        onKeyDown={go}
      >
        {list}
        {responses.length === 0 && <p>No response is like that. Choose a wider filter.</p>}
      </div>
      {pages.length > 1 && (
        <nav class="pager" aria-label="Pages of responses">
          <button type="button" disabled={page === 0} onClick={() => store.set({ page: page - 1, hover: -1 })}>
            ‹ previous
          </button>
          <span role="status">
            page {page + 1} of {pages.length}
          </span>
          <button type="button" disabled={page + 1 >= pages.length} onClick={() => store.set({ page: page + 1, hover: -1 })}>
            next ›
          </button>
        </nav>
      )}
    </div>
  );
}

/** Where the tokens of a selected response begin among the selected tokens. */
function firstToken(view: View, place: number): number {
  let first = 0;
  for (let i = 0; i < place; i++) first += view.book.to(view.derived.responses[i]) - view.book.from(view.derived.responses[i]);
  return first;
}

function Response({ view, response, paired }: { view: View; response: number; paired: boolean }) {
  const { book } = view;
  const of = book.data.responses;
  const run = book.data.runs[of.run[response]];
  const verdict = outcome(book, response);
  const source = book.string(of.source[response]);
  const tokens = Array.from({ length: book.to(response) - book.from(response) }, (_, i) => book.from(response) + i);
  const prompt = book.string(of.text[response]) ?? "";
  const sides = (
    <>
      <div class="tokens" role="group" aria-label="Tokens">
        {paired && <i class="side">A</i>}
        {tokens.map((token) => (
          <button key={token} type="button" class="token" data-side="a" data-token={token} tabIndex={-1}>
            {visible(book.text(token)) || "∅"}
          </button>
        ))}
      </div>
      {paired && (
        <div class="tokens" aria-hidden="true">
          <i class="side b">B</i>
          {tokens.map((token) => (
            <span key={token} class="token" data-side="b" data-token={token}>
              {visible(book.text(token)) || "∅"}
            </span>
          ))}
        </div>
      )}
    </>
  );
  return (
    <article class="response" aria-label={`Response at step ${of.step[response]}, row ${of.row[response]}, of ${run.label}`}>
      {prompt.length > LONG_PROMPT ? (
        <details>
          <summary>{prompt.slice(0, LONG_PROMPT / 4)}…</summary>
          <p class="prompt">{prompt}</p>
        </details>
      ) : (
        <p class="prompt">{prompt}</p>
      )}
      <p class="muted facts">
        {book.isText(response) ? (
          <>
            reference <b>{book.string(of.gold[response]) ?? "unknown"}</b>
          </>
        ) : (
          <>
            <span class={verdict}>{VERDICT[verdict]}</span> gold <b>{book.string(of.gold[response]) ?? "unknown"}</b>, predicted{" "}
            <b>{book.string(of.label[response]) ?? "unreadable"}</b>
          </>
        )}{" "}
        · step {of.step[response]}
        {book.data.runs.length > 1 && ` · ${run.label}, seed ${run.seed}`}
        {source !== "student" && ` · written by: ${source}`}
        {!of.ended[response] && " · cut off"}
      </p>
      {tokens.length > LONG_RESPONSE ? (
        <details open>
          <summary>{tokens.length} tokens</summary>
          {sides}
        </details>
      ) : (
        sides
      )}
    </article>
  );
}
