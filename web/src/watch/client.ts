/** Asks the server again and again. Whoever is gone is asked until he is back: a study and a server may be restarted. */

import type { Snapshot } from "./snapshot.ts";

/** ``open``: all is well; ``lost``: no reply; ``refused``: the token is not that of the server. */
export type Link = "asking" | "open" | "lost" | "refused";

const BUSY = 1000;
const QUIET = 2000;
const HIDDEN = 15000;
const SOONEST = 500;
const LATEST = 4000;
const PATIENCE = 20000;

export class Client {
  private timer = 0;
  private failures = 0;
  private asking = false;

  constructor(
    private readonly address: (since: string) => string,
    private readonly version: () => string,
    private readonly take: (snapshot: Snapshot) => void,
    private readonly told: (link: Link) => void,
  ) {
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
    addEventListener("online", () => this.ask());
  }

  async ask(): Promise<void> {
    if (this.asking) return;
    this.asking = true;
    clearTimeout(this.timer);
    let next: number;
    try {
      const reply = await fetch(this.address(this.version()), { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
      if (reply.status === 403) {
        this.told("refused");
        next = LATEST;
      } else {
        if (!reply.ok) throw new Error(await reply.text());
        const snapshot = (await reply.json()) as Snapshot;
        this.failures = 0;
        this.take(snapshot);
        this.told("open");
        next = document.hidden ? HIDDEN : snapshot.alive || snapshot.behind ? BUSY : QUIET;
      }
    } catch {
      this.told("lost");
      next = waiting(this.failures++);
    }
    this.asking = false;
    this.timer = window.setTimeout(() => void this.ask(), next);
  }
}

/** Milliseconds until the next attempt, after so many that failed. */
export function waiting(failures: number): number {
  return Math.min(SOONEST * 2 ** Math.min(failures, 10), LATEST);
}
