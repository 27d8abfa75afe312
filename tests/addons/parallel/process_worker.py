"""One of several processes: does the runs of a plan one after the other, as `gatespace train` would.

Run as `python -m torch.distributed.run --nproc_per_node=2 process_worker.py PLAN.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from gatespace.addons.parallel.processes import join
from gatespace.config import TeachConfig, TrainConfig, parse_config
from gatespace.errors import RunError
from gatespace.models import load_model
from gatespace.training import train as run


def main(plan: Path) -> None:
    torch.set_num_threads(1)
    work = json.loads(plan.read_text())
    shards(work["student"], plan.with_name("shards"))
    for settings in work["runs"]:
        if "pair" in settings:
            run.train(parse_config(TrainConfig, settings))
        else:
            run.teach(parse_config(TeachConfig, settings))


def shards(student: str, output: Path) -> None:
    """Write down what a sharded model is made of."""
    from gatespace.addons.parallel import sharded

    settings = {"pair": {"teacher": "unused"}, "engine": {"device": "cpu", "parallel": "fsdp"}}
    ranks = join(parse_config(TrainConfig, settings))
    model = load_model(student, device=ranks.loads_on("cpu"))
    size, loaded = sum(p.numel() for p in model.network.parameters()), model.device.type
    before = model.fingerprint() if ranks.first else None
    whole = 0  # numbers of layers that are whole on a device when they are divided

    def divided(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        nonlocal whole
        whole += sum(p.numel() for p in module.parameters() if not p.is_meta and not hasattr(p, "to_local"))
        return fully_shard(module, **options)

    fully_shard, sharded.fully_shard = sharded.fully_shard, divided  # type: ignore[assignment]
    model = sharded.shard(model, dtype=torch.float32)
    sharded.fully_shard = fully_shard  # type: ignore[assignment]
    own = sum(p.to_local().numel() for p in model.network.parameters())  # type: ignore[attr-defined]
    gathered = model.gathered(here=ranks.first)
    after = None if gathered is None else gathered.fingerprint()
    found = {"loaded": loaded, "whole": whole, "size": size, "own": own, "before": before, "after": after}
    output.with_suffix(f".{ranks.rank}").write_text(json.dumps(found))
    told = ranks.gather([ranks.rank, "λ" * (1 + 3 * ranks.rank), None, float("inf")])
    assert told == [[0, "λ", None, float("inf")], [1, "λλλλ", None, float("inf")]], told
    try:
        with ranks.together():
            if not ranks.first:
                raise torch.OutOfMemoryError("out of memory\nand more")
    except (RunError, torch.OutOfMemoryError) as error:
        output.with_suffix(f".error.{ranks.rank}").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
