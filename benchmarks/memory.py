"""Peak memory of real runs on this CPU compared with the `--dry-run` estimate.

    python benchmarks/memory.py [--hidden 512] [--layers 8] [--cases fp32,bf16,checkpointing,8bit,lora] [--json FILE]
    python benchmarks/memory.py --growth 64,1024 [--model tiny]    # four bf16 runs of one process, by cache entries

A random Qwen3 student learns from a random teacher of the same size on the synthetic task, for two steps. Each case has
a fresh process, warmed up with a tiny run. The figure is the peak resident memory of the run above that before it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"engine": {"precision": "bf16"}},
    "checkpointing": {"engine": {"activation_checkpointing": True}},
    "8bit": {"optimizer": {"states": "8bit"}},
    "lora": {"pair": {"lora": {"r": 8}}},
    "micro-batches": {"engine": {"micro_tokens": 300}},
}


def work(request: dict[str, Any]) -> dict[str, Any]:
    """In the fresh process: return the estimate and the measured memory."""
    from gatespace.cli.estimate import estimate
    from gatespace.config import TrainConfig, parse_config
    from gatespace.training.train import train

    with tempfile.TemporaryDirectory() as place:
        folder = network(Path(place) / "model", request)

        def config(name: str, model: str, **more: Any) -> TrainConfig:
            usual = {
                "task": {"name": "synthetic", "brief": True},
                "pair": {"student": model, "teacher": model, **more.pop("pair", {})},
                "engine": {"precision": "fp32", "device": "cpu", **more.pop("engine", {})},
                "rollout": {"max_new_tokens": request["new"], "stop": "eos"},
                "teacher": {"cache": None},
                "evaluation": {"every": 0, "final": []},
                "checkpoint": {"every": 0, "model": False},
                "batch_size": request["rows"],
                "steps": 2,
                "output": str(Path(place) / name),
            }
            return parse_config(TrainConfig, {**usual, **more})

        case = {key: dict(value) for key, value in CASES[request["case"]].items()}
        asked = config("run", str(folder), **case)
        said = estimate(asked, lambda _: None)
        train(config("warm", "tiny", **{key: value for key, value in case.items() if key == "optimizer"}))
        measure.give_back_free_memory()
        before = measure.rss()
        _, cost = measure.measured(lambda: train(asked))
    return {"said": said["memory_bytes"], "measured": cost.peak_rss - before, "parameters": said["parameters"]}


def growth(request: dict[str, Any]) -> dict[str, Any]:
    """In the fresh process: resident memory after each of four bf16 runs, CPU seconds, and a hash of the losses."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ[name] = request["limit"]
    from gatespace.config import TrainConfig, parse_config
    from gatespace.training.train import train

    tiny, figures, losses = request["model"] == "tiny", [], []
    with tempfile.TemporaryDirectory() as place:
        for seed in range(4):
            settings = {
                "task": {"name": "synthetic", "brief": True},
                "pair": {"student": request["model"], "teacher": request["model"]},
                "engine": {"precision": "bf16", "device": "cpu"},
                "rollout": {"max_new_tokens": 8},
                "teacher": {"cache": None},
                "evaluation": {"every": 0, "final": ["val"], "limit": 60},
                "checkpoint": {"every": 0, "model": False},
                "batch_size": 24 if tiny else 8,
                "steps": 20 if tiny else 4,
                "seed": seed,
                "output": str(Path(place) / str(seed)),
            }
            begun = time.process_time()
            train(parse_config(TrainConfig, settings))
            gc.collect()
            figures.append((measure.rss(), time.process_time() - begun))
            losses += [json.loads(line)["loss"] for line in (Path(place) / str(seed) / "metrics.jsonl").open()]
    return {"figures": figures, "losses": hashlib.sha256(repr(losses).encode()).hexdigest()[:8]}


def network(folder: Path, request: dict[str, Any]) -> Path:
    """Create a random Qwen3 with the synthetic task's vocabulary."""
    import transformers

    from gatespace.config import TaskConfig, parse_config
    from gatespace.models import build_tiny
    from gatespace.tasks.configured import load_configured_task

    tokens = build_tiny(load_configured_task(parse_config(TaskConfig, {"name": "synthetic"}))).student
    shutil.copytree(tokens, folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    hidden = request["hidden"]
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=request["layers"],
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        vocab_size=request["vocabulary"],
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=32, help="responses of a step")
    parser.add_argument("--new", type=int, default=16, help="response tokens")
    parser.add_argument("--threads", type=int, default=measure.usable_cores())
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--growth", help="entries of oneDNN's caches, e.g. 64,1024: memory from run to run instead")
    parser.add_argument("--model", default="tiny", help="of --growth: tiny or smollm2")
    given = parser.parse_args()
    facts = measure.environment(given.threads)
    for limit in given.growth.split(",") if given.growth else ():
        asked = {"limit": limit, "model": given.model}
        got = measure.in_fresh_process(Path(__file__), asked, threads=given.threads, timeout=given.timeout)
        runs = ", ".join(f"{rss / measure.MIB:.0f} MiB ({cpu:.1f} s)" for rss, cpu in got.get("figures", ()))
        print(f"{limit:>5} entries: {runs or got['unavailable']}; losses {got.get('losses')}", flush=True)
    if given.growth:
        return
    print(f"{facts['cpu']}, {given.threads} threads: hidden {given.hidden}, {given.layers} layers, {given.rows} rows")
    print(f"{'case':<16} {'said MB':>8} {'measured MB':>12} {'ratio':>6}")
    found = {}
    for case in given.cases.split(","):
        asked = {**vars(given), "json": None, "case": case}
        got = measure.in_fresh_process(Path(__file__), asked, threads=given.threads, timeout=given.timeout)
        if "unavailable" in got:
            print(f"{case:<16} {got['unavailable']}")
            continue
        found[case] = got
        said, real = got["said"]["all"] / 1e6, got["measured"] / 1e6
        print(f"{case:<16} {said:>8.0f} {real:>12.0f} {real / said:>6.2f}", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"environment": facts, "figures": found}, indent=2))


if __name__ == "__main__":
    if sys.stdin.isatty() or len(sys.argv) > 1:
        main()
    else:
        text = sys.stdin.read()
        request = json.loads(text) if text else None
        main() if request is None else measure.answer((growth if "limit" in request else work)(request))
