"""Cost of the score cache: entries per second, and a teacher's scores from it, compared with LMDB.

    python benchmarks/cache.py [--model tiny|smollm2|FOLDER] [--beside MODULE:CLASS] [--quick] [--json]

A batch is what a training step requests: 24 responses of about 8 tokens, each token one entry of 1152 to 4096 bytes
(SmolLM2's 576 numbers in bf16 and fp32, and 1024 in fp32). All contenders process the same batches in turns. Figures
are medians of CPU time, which other processes disturb less than wall time. `lmdb` is bare LMDB: no checksum, no size
bound, and a damaged file crashes the process; it is skipped if the package is not installed. `--beside` adds another
implementation of `ScoreCache`, such as that of an earlier commit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import measure

from gatespace.seeding import generator
from gatespace.teacher.cache import ScoreCache

ROWS, LENGTH = 24, 8
Batch = list[tuple[bytes, bytes]]


class Cache(Protocol):
    """The measured interface of a cache."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...
    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None: ...
    def close(self) -> None: ...


class Lmdb:
    """Bare LMDB."""

    def __init__(self, folder: Path) -> None:
        import lmdb

        self._environment = lmdb.open(str(folder), map_size=4 << 30, sync=False)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._environment.begin() as transaction:
            return [transaction.get(key) for key in keys]

    def put_many(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, value in items:
                transaction.put(key, value, overwrite=False)

    def close(self) -> None:
        self._environment.close()


def contenders(beside: str | None) -> dict[str, Callable[[Path], Cache]]:
    """Importable contenders by name."""
    found: dict[str, Callable[[Path], Cache]] = {"gatespace": ScoreCache}
    if beside is not None:
        module, _, name = beside.partition(":")
        found["beside"] = getattr(importlib.import_module(module), name)
    try:
        importlib.import_module("lmdb")
        found["lmdb"] = Lmdb
    except ImportError:
        pass
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return CPU seconds and the result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


# ---------------------------------------------------------------------- entries


def entries(folder: Path, kinds: dict[str, Callable[[Path], Cache]], size: int, batches: int) -> list[dict[str, Any]]:
    """Measure microseconds per entry of every contender, for payloads of `size` bytes."""
    draw = generator(0, "benchmarks", "cache", size)
    caches = {name: kind(folder / f"{name}-{size}") for name, kind in kinds.items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {"put": [], "get": [], "miss": []} for name in caches}
    rows: list[Batch] = []
    for _ in range(batches):
        new = [_row(draw.randbytes, draw.randrange(LENGTH // 2, 3 * LENGTH // 2 + 1), size) for _ in range(ROWS)]
        rows += new
        items = [item for row in new for item in row]
        for name, cache in caches.items():
            took, _ = timed(lambda cache=cache, items=items: cache.put_many(items))  # type: ignore[misc]
            seconds[name]["put"].append(took / len(items))
    for _ in range(2 * batches):
        items = [item for row in draw.sample(rows, ROWS) for item in row]
        keys, absent = [key for key, _ in items], [draw.randbytes(32) for _ in items]
        for name, cache in caches.items():
            took, found = timed(lambda cache=cache, keys=keys: cache.get_many(keys))  # type: ignore[misc]
            assert found == [value for _, value in items], f"{name} served something else"
            seconds[name]["get"].append(took / len(items))
            took, _ = timed(lambda cache=cache, keys=absent: cache.get_many(keys))  # type: ignore[misc]
            seconds[name]["miss"].append(took / len(items))
    stored = sum(len(value) for row in rows for _, value in row)
    result = []
    for name, cache in caches.items():
        cache.close()
        disk = sum(file.stat().st_size for file in (folder / f"{name}-{size}").iterdir())
        medians = {f"{what}_us": 1e6 * statistics.median(some) for what, some in seconds[name].items()}
        result.append({"contender": name, "bytes": size, **medians, "disk_per_byte": disk / stored})
    return result


def _row(random_bytes: Callable[[int], bytes], length: int, size: int) -> Batch:
    return [(random_bytes(32), random_bytes(size)) for _ in range(length)]


# ---------------------------------------------------------------------- scores


def scores(folder: Path, kinds: dict[str, Callable[[Path], Cache]], model_name: str, turns: int) -> dict[str, Any]:
    """Measure milliseconds for a teacher to score a cached batch, by contender."""
    from gatespace.models import build_tiny, load_model, packaged_folder
    from gatespace.tasks import synthetic_task
    from gatespace.teacher.local import LocalTeacher
    from gatespace.teacher.scores import ScoreSpec

    if model_name == "tiny":
        model_name = str(build_tiny(synthetic_task(size=600), folder / "tiny").teacher)
    model = load_model(str(packaged_folder(model_name)) if model_name == "smollm2" else model_name)
    draw = generator(0, "benchmarks", "cache", "scores")
    ids = range(3, model.vocab_size)
    prefix = tuple(draw.choices(ids, k=40))
    prompts = [draw.choices(ids, k=draw.randrange(20, 60)) for _ in range(ROWS)]
    responses = [draw.choices(ids, k=LENGTH) for _ in range(ROWS)]
    spec = ScoreSpec(prefix, 2 * LENGTH, model.vocab_size)
    teachers = {}
    for name, kind in kinds.items():
        teachers[name] = LocalTeacher(model, spec, cache=kind(folder / f"{name}-scores"))  # type: ignore[arg-type]
        teachers[name].score(prompts, responses)
    computed = {name: teacher.stats.computed_tokens for name, teacher in teachers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in teachers}
    for _ in range(turns):
        for name, teacher in teachers.items():
            seconds[name].append(timed(lambda teacher=teacher: teacher.score(prompts, responses))[0])  # type: ignore[misc]
    assert all(teacher.stats.computed_tokens == computed[name] for name, teacher in teachers.items()), "a miss"
    width = int(model.head.weight.shape[1])
    medians = {name: 1e3 * statistics.median(some) for name, some in seconds.items()}
    return {"model": model.name, "width": width, "tokens": ROWS * LENGTH, "score_ms": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="the teacher: tiny, smollm2 or a folder")
    parser.add_argument("--beside", help="MODULE:CLASS of another score cache")
    parser.add_argument("--batches", type=int, default=150, help="batches of 24 responses that are stored")
    parser.add_argument("--quick", action="store_true", help="does it run? numbers mean nothing")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    batches = 3 if args.quick else args.batches
    kinds = contenders(args.beside)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [row for size in (1152, 2304, 4096) for row in entries(folder, kinds, size, batches)]
        warm = scores(folder, kinds, args.model, 2 * batches)
    ours = warm["score_ms"]["gatespace"]
    ratios = {name: other / ours for name, other in warm["score_ms"].items() if name != "gatespace"}
    found = {"environment": measure.environment(1), "results": rows, "warm": warm, "ratios": ratios}
    if args.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['environment']['cpu']}, load {found['environment']['load_average']:.1f}")
    for row in rows:
        costs = ", ".join(f"{what} {row[f'{what}_us']:.1f}" for what in ("put", "get", "miss"))
        disk = f"{row['disk_per_byte']:.2f} bytes on disk for one of payload"
        print(f"{row['bytes']} bytes, {row['contender']:9}: {costs} µs an entry; {disk}")
    for name, milliseconds in warm["score_ms"].items():
        print(f"{ROWS}x{LENGTH} warm scores of {warm['width']} numbers, {name:9}: {milliseconds:.2f} ms")
    for name, ratio in ratios.items():
        print(f"speed of scoring, gatespace / {name}: {ratio:.2f}")


if __name__ == "__main__":
    main()
