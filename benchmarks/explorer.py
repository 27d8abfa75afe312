"""Frame rate of the explorer while a slider is dragged, in a real Chromium.

    python benchmarks/explorer.py [--tokens 20000] [--length 64] [--seconds 4] [--compare] [--json]

The page has one run with --tokens recorded tokens, all selected, and two gates with --compare. The slider of `a` moves
back and forth with one `input` event per frame; frames and their durations are recorded. Needs Playwright (extra dev)
and a Chromium; GATESPACE_CHROMIUM names one that is not found automatically.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from gatespace.addons.pages.explore import build_explorer
from gatespace.gating.coefficients import Gate
from gatespace.seeding import generator

DRAG = """(seconds) => new Promise((done) => {
  const slider = document.querySelector(".gate-a input[type=range]");
  const frames = [], began = performance.now();
  const next = (now) => {
    frames.push(now);
    if (now - began > 1000 * seconds) return done({ frames, value: Number(slider.value) });
    slider.value = String(8 * Math.sin(frames.length / 9));
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})"""
"""Moves the slider in every frame, so that no idle frame is counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=64, help="tokens of a response")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--compare", action="store_true", help="two gates side by side")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        write_run(folder, tokens=args.tokens, length=args.length)
        gates = [Gate.named("G2"), Gate.named("H3")][: 1 + args.compare]
        made = build_explorer([folder], gates=gates, most_tokens=args.tokens)
        found = measure(made.write(), args.seconds)
    found |= {"tokens": made.counts["tokens"], "responses": made.counts["responses"], "gates": len(gates)}
    found["page_bytes"] = len(made.html)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{found['tokens']} tokens, {found['gates']} gate(s): {found['fps']:.1f} frames per second, median frame "
        f"{found['median_ms']:.1f} ms, 95 % under {found['p95_ms']:.1f} ms, longest {found['longest_ms']:.1f} ms, "
        f"{found['cpu_ms']:.1f} ms of CPU per frame; "
        f"ready after {found['ready_ms']:.0f} ms; {found['page_bytes'] / 1e6:.1f} MB"
    )


def write_run(folder: Path, *, tokens: int, length: int) -> None:
    """Write a run folder with plausible numbers; nothing is trained."""
    draw = generator(0, "benchmarks", "explorer")
    folder.mkdir(parents=True)
    objective = {"method": "gated", "gate": "4,0,-1,0", "top_k": 8, "entropy": "top_k"}
    config = {"task": {"name": "made up"}, "objective": objective, "steps": 100, "seed": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "identity.json").write_text(json.dumps({"content": {"gate": "4,0,-1,0"}, "identity": "0"}))
    words = [f" word{i}" for i in range(2000)]
    with (folder / "tokens.jsonl").open("w") as file:
        for row in range(math.ceil(tokens / length)):
            count = min(length, tokens - row * length)
            file.write(json.dumps(_response(draw, words, row, count)) + "\n")


def _response(draw: random.Random, words: list[str], row: int, count: int) -> dict[str, Any]:
    def share(power: float) -> float:
        return round(draw.random() ** power, 6)

    def choices() -> list[list[Any]]:
        weights = sorted((draw.random() ** 4 for _ in range(5)), reverse=True)
        return [[draw.choice(words), round(0.95 * weight / sum(weights), 6)] for weight in weights]

    h = [share(2) for _ in range(count)]
    values = {
        "h": h,
        "u": [h[0]] * count,
        "gap": [share(1) for _ in range(count)],
        "lam": [round(Gate.named("G5").lam(h=one), 6) for one in h],
        "forward_kl": [share(3) for _ in range(count)],
        "reverse_kl": [share(3) for _ in range(count)],
    }
    return {
        "step": row // 8 + 1,
        "row": row % 8,
        "text": f"text number {row}",
        "gold": "yes",
        "label": draw.choice(["yes", "no", None]),
        "source": "student",
        "ended": True,
        "ids": [0] * count,
        "tokens": [draw.choice(words) for _ in range(count)],
        "values": values,
        "teacher_top": [choices() for _ in h],
        "student_top": [choices() for _ in h],
    }


def measure(page_file: Path, seconds: float) -> dict[str, float]:
    """Open the page, drag a slider for `seconds`, and count frames."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("GATESPACE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        began = time.perf_counter()
        page.goto(page_file.as_uri())
        page.wait_for_selector(".token")
        ready = 1000 * (time.perf_counter() - began)
        page.wait_for_timeout(1000)
        inside = page.context.new_cdp_session(page)
        inside.send("Performance.enable", {"timeDomain": "threadTicks"})
        before = _busy(inside)
        drawn = page.evaluate(DRAG, seconds)
        busy = _busy(inside) - before
        frames = drawn["frames"]
        assert page.evaluate("explorer.state().a.a") == drawn["value"], "the page did not follow the slider"
        browser.close()
    gaps = [later - sooner for sooner, later in itertools.pairwise(frames)]
    return {
        "cpu_ms": 1000 * busy / len(gaps),
        "fps": 1000 * len(gaps) / (frames[-1] - frames[0]),
        "median_ms": statistics.median(gaps),
        "p95_ms": statistics.quantiles(gaps, n=20)[-1],
        "longest_ms": max(gaps),
        "ready_ms": ready,
    }


def _busy(session: Any) -> float:
    """CPU seconds of the page's main thread: the cost of a frame, independent of other load."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


if __name__ == "__main__":
    main()
