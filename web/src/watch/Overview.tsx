/** How the whole stands, what failed, and whether the server is there. */

import type { Link } from "./client.ts";
import { counted, duration, headline, share, type Snapshot } from "./snapshot.ts";

export function Overview({ snapshot }: { snapshot: Snapshot }) {
  const counts = counted(snapshot.rows);
  const total = snapshot.rows.length;
  const done = share(snapshot.rows);
  return (
    <section class="card" aria-labelledby="progress">
      <div class="head">
        <h2 id="progress">Progress</h2>
        <span class={`state ${snapshot.state}`} data-name="state">
          {SAID[snapshot.state]}
        </span>
      </div>
      <div class="bar" role="progressbar" aria-labelledby="progress" aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.floor(100 * done)}>
        {BAR.filter((state) => counts[state] > 0).map((state) => (
          <div key={state} class={state} style={{ width: `${(100 * counts[state]) / total}%` }} />
        ))}
      </div>
      <p role="status" data-name="headline">
        {headline(counts, total)}
      </p>
      <p class="muted" data-name="left">
        {(100 * done).toFixed(0)} % of the work · {left(snapshot)}
        {snapshot.kind === "study" && snapshot.workers > 1 ? ` · ${snapshot.workers} runs at once` : ""}
        {snapshot.behind ? " · still reading the records" : ""}
      </p>
      {snapshot.kind === "study" && !snapshot.alive && snapshot.state !== "done" && (
        <p>
          No process is working on it. Resume it with <code>gatespace run {quoted(snapshot.folder)}{snapshot.state === "failed" ? " --retry" : ""}</code>.
        </p>
      )}
    </section>
  );
}

const BAR = ["done", "running", "stopped", "failed", "blocked"] as const;
const SAID = { running: "running", done: "done", failed: "ended with failures", stopped: "stopped", nothing: "not begun" };

function left(snapshot: Snapshot): string {
  const { seconds_left: seconds, state } = snapshot;
  if (state === "done") return "nothing left";
  if (seconds === null) return state === "running" ? "time left is known when the first run is done" : "time left is not known";
  if (seconds <= 0) return "nothing left";
  const text = `about ${duration(seconds)} left`;
  if (state !== "running") return `${text} once it is resumed`;
  const end = new Date(Date.now() + 1000 * seconds);
  const today = end.toDateString() === new Date().toDateString();
  return `${text}, until ${end.toLocaleString("en-GB", { hour: "2-digit", minute: "2-digit", ...(today ? {} : { weekday: "short", day: "numeric", month: "short" }) })}`;
}

/** As a shell takes it. */
export function quoted(path: string): string {
  return /^[\w./~+-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`;
}

export function Nothing({ snapshot }: { snapshot: Snapshot }) {
  return (
    <section class="card" aria-labelledby="nothing">
      <h2 id="nothing">Nothing has begun</h2>
      <p role="status">
        There is no study and no run in <code>{snapshot.folder}</code> yet. It is shown here as soon as it begins:
      </p>
      <pre>gatespace run STUDY --output {quoted(snapshot.folder)}</pre>
    </section>
  );
}

export function Failures({ snapshot }: { snapshot: Snapshot }) {
  const failed = snapshot.rows.filter((row) => row.state === "failed");
  if (failed.length === 0) return null;
  return (
    <section class="card failures" aria-labelledby="failures">
      <h2 id="failures">Failed</h2>
      <ul>
        {failed.map((row) => (
          <li key={row.id}>
            <b>{row.title}</b>
            {row.steps > 0 && <span class="muted"> · at step {row.step} of {row.steps}</span>}
            {row.when && (
              <span class="muted">
                {" · "}
                <time dateTime={row.when}>{local(row.when)}</time>
              </span>
            )}
            <pre class="error">{row.error || "no reason was recorded"}</pre>
            {row.details && (
              <details>
                <summary>where it happened</summary>
                <pre tabIndex={0}>{row.details}</pre>
              </details>
            )}
          </li>
        ))}
      </ul>
    </section>
  );
}

export function Alarms({ snapshot }: { snapshot: Snapshot }) {
  const rows = snapshot.rows.filter((row) => row.alarms.length > 0);
  if (rows.length === 0) return null;
  return (
    <section class="card alarms" aria-labelledby="alarms">
      <h2 id="alarms">Alarms</h2>
      <ul>
        {rows.map((row) => (
          <li key={row.id}>
            <b>{row.title}</b>
            {row.alarms.map(({ step, alarm, text }) => (
              <p key={`${step} ${alarm}`}>
                <b>{alarm}</b> <span class="muted">· step {step}</span>
                <br />
                {text}
              </p>
            ))}
          </li>
        ))}
      </ul>
    </section>
  );
}

function local(when: string): string {
  const date = new Date(when);
  return Number.isNaN(date.getTime()) ? when : date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

const LINKS: Record<Link, string> = {
  asking: "Asking the server …",
  open: "",
  lost: "The server does not respond. This page keeps asking, and shows what came last.",
  refused: "The server has another token. Open the address that it has printed.",
};

export function Connection({ link, problem }: { link: Link; problem: string }) {
  const text = LINKS[link] || (problem && `What stands in the folder cannot be read now: ${problem}`);
  return (
    <div role="status" class={text ? `banner ${link}` : ""} data-name="link">
      {text}
    </div>
  );
}
