"""Tokens scored per second: a teacher in this process, the same teacher as a service over ZMQ, and a vLLM server.

All score the same responses to the same prompts, batch after batch, in turns within one run; nothing is cached. Client
and service share the machine's cores. See benchmarks/README.md for the method.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import measure
import step

TARGET = 0.9
"""Target speed of the service relative to a teacher in this process."""
BUSY = 0.1
"""Share of the machine taken by other processes above which the run counts as disturbed."""
_READY = 300.0
"""Seconds for a service to become ready."""

Batch = tuple[list[list[int]], list[list[int]]]
"""Prompts after the shared prefix, and responses."""


@dataclass(frozen=True)
class Settings:
    """Settings of one benchmark run."""

    model: str
    task: str
    root: str | None
    batch: int
    batches: int
    repeats: int
    max_new_tokens: int
    k: int
    precision: str
    threads: int
    vllm: str | None
    check: bool
    """Whether the target applies to these sizes."""


@dataclass(frozen=True)
class Work:
    """Batches to score."""

    folder: str
    prefix: list[int]
    batches: list[Batch]
    vocab_size: int
    digest: str

    @property
    def tokens(self) -> int:
        """Response tokens per turn."""
        return sum(len(response) for _, responses in self.batches for response in responses)

    @property
    def read(self) -> int:
        """Prompt and response tokens per turn, without the shared prefix."""
        return self.tokens + sum(len(prompt) for prompts, _ in self.batches for prompt in prompts)


@dataclass(frozen=True)
class Turn:
    """One contender's pass over all batches."""

    contender: str
    wall: float
    cpu: float
    """CPU seconds of this process and the service."""
    others: float
    """Share of the machine taken by other processes."""


def work_of(settings: Settings) -> Work:
    """Real prompts with their gold labels as responses: a teacher's training workload, without a student."""
    from gatespace.addons.service.wire import vocabulary_digest
    from gatespace.models import build_tiny, load_model, packaged_folder
    from gatespace.models.encode import Encoder
    from gatespace.tasks import Prompt, load_task

    task = load_task(settings.task, settings.root)
    folder = settings.model
    if folder == "smollm2":
        folder = str(packaged_folder("smollm2", report=step.tell))
    elif folder == "tiny":
        folder = str(build_tiny(task).teacher)
    model = load_model(folder)
    rows = task.train[: settings.batch * settings.batches]
    encoder = Encoder(Prompt.of(task), model.tokenizer, [row.text for row in rows])
    prompts = [encoder.suffix(row.text) for row in rows]
    responses = [encoder.gold(row.label, model.turn_end)[: settings.max_new_tokens] for row in rows]
    spans = [slice(start, start + settings.batch) for start in range(0, len(rows), settings.batch)]
    batches = [(prompts[span], responses[span]) for span in spans]
    digest = vocabulary_digest(model.tokenizer.get_vocab())
    return Work(folder, encoder.prefix, batches, model.vocab_size, digest)


# ---------------------------------------------------------------------------------------------------- contenders


@contextlib.contextmanager
def service(settings: Settings, work: Work) -> Iterator[tuple[int, str]]:
    """Run `gatespace teacher serve` in its own process; yield its pid and address."""
    command = [sys.executable, "-m", "gatespace", "teacher", "serve", "--model", work.folder]
    command += ["--bind", "tcp://127.0.0.1:0", "--precision", settings.precision, "--device", "cpu"]
    command += ["--cache", "none", "--json", "--quiet"]
    threads = {name: str(settings.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | threads)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                yield process.pid, event["address"]
                break
        else:
            raise SystemExit("the service did not start")
    finally:
        process.terminate()
        process.wait(_READY)


@contextlib.contextmanager
def vllm(settings: Settings, work: Work) -> Iterator[tuple[int | None, str]]:
    """Yield pid and address of a vLLM server with the same model: the given one, or one started for this run."""
    from gatespace.addons.vllm.process import VllmProcess

    assert settings.vllm is not None
    if "://" in settings.vllm:
        yield None, settings.vllm
        return
    longest = max(len(prompt) for prompts, _ in work.batches for prompt in prompts)
    # The same number of threads as the others, unpinned: all contenders share the cores in turns.
    threads = {name: str(settings.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as scratch:
        step.tell("starting vLLM")
        with VllmProcess(
            Path(settings.vllm).expanduser(),
            work.folder,
            log=Path(scratch) / "vllm.log",
            dtype="float32" if settings.precision == "fp32" else "bfloat16",
            max_model_len=len(work.prefix) + longest + settings.max_new_tokens + 1,
            max_logprobs=2 * settings.k + 64,  # padding may be among the top k
            environment=threads | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            patience=_READY,
        ) as process:
            yield process.pid, process.address


def run(settings: Settings) -> tuple[Work, list[Turn], dict[str, Any]]:
    """Run all turns, and check the scores."""
    import torch

    from gatespace.addons.service.client import RemoteTeacher
    from gatespace.models import load_model
    from gatespace.teacher.local import LocalTeacher
    from gatespace.teacher.scores import ScoreSpec

    torch.set_num_threads(settings.threads)
    work = work_of(settings)
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    model = load_model(work.folder, dtype=dtype)

    def spec(payload: str) -> ScoreSpec:
        return ScoreSpec(tuple(work.prefix), settings.max_new_tokens, work.vocab_size, payload, settings.k)

    with service(settings, work) as (pid, address), contextlib.ExitStack() as stack:
        scorers: dict[str, Callable[..., Any]] = {}
        for payload in ("hidden", "top_k"):
            local = LocalTeacher(model, spec(payload))
            remote = RemoteTeacher(address, spec(payload), tokenizer_digest=work.digest)
            stack.callback(remote.close)
            scorers |= {f"local-{payload}": local.score, f"zmq-{payload}": remote.score}
        pids: dict[str, int | None] = {name: pid if name.startswith("zmq") else None for name in scorers}
        if settings.vllm is not None:
            from gatespace.addons.vllm.teacher import VllmTeacher

            pids["vllm"], place = stack.enter_context(vllm(settings, work))
            server = VllmTeacher(place, spec("top_k"), model.tokenizer)
            stack.callback(server.close)
            scorers["vllm"] = server.score
        checks = check(work, scorers)  # also warms them up
        turns: list[Turn] = []
        names = list(scorers)
        for number in range(settings.repeats):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                turns.append(turn(name, scorers[name], work, pids[name]))
                step.tell(f"{number + 1}/{settings.repeats} {name}: {work.tokens / turns[-1].wall:.0f} tokens/s")
    return work, turns, checks


def turn(name: str, score: Callable[..., Any], work: Work, pid: int | None) -> Turn:
    """Score all batches once."""
    before = _cpu(pid)

    def whole() -> None:
        for prompts, responses in work.batches:
            score(prompts, responses)

    _, cost = measure.measured(whole)
    theirs = _cpu(pid) - before
    others = max(0.0, cost.others - theirs) / (cost.wall * (os.cpu_count() or 1))
    return Turn(name, cost.wall, cost.cpu + theirs, others)


def check(work: Work, scorers: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Check that a service returns the teacher's scores bitwise, and how far vLLM's are from them."""
    import torch

    found: dict[str, Any] = {"hidden": True, "top_k": True}
    far = 0.0
    for prompts, responses in work.batches:
        said = {name: score(prompts, responses) for name, score in scorers.items()}
        found["hidden"] &= torch.equal(said["local-hidden"].payload, said["zmq-hidden"].payload)
        ours, theirs = said["local-top_k"].payload, said["zmq-top_k"].payload
        for part in ("ids", "log_probs", "sampled_log_probs"):
            found["top_k"] &= torch.equal(getattr(ours, part), getattr(theirs, part))
        if "vllm" in said:
            distance = said["vllm"].payload.sampled_log_probs - ours.sampled_log_probs
            far = max(far, float(distance.abs().max()))
    return found | ({"vllm_distance": far} if "vllm" in scorers else {})


def _cpu(pid: int | None) -> float:
    """CPU seconds of a process, including its group if it leads one, as vLLM does."""
    if pid is None:
        return 0.0
    ticks = 0
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = place.read_text().rpartition(")")[2].split()
            if int(place.parent.name) == pid or int(fields[2]) == pid:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------------------------------------- results


def results(work: Work, turns: list[Turn]) -> list[dict[str, Any]]:
    """One row per contender: medians over its turns."""
    rows = []
    for name in dict.fromkeys(turn.contender for turn in turns):
        own = [turn for turn in turns if turn.contender == name]
        walls = sorted(turn.wall for turn in own)
        rows.append(
            {
                "contender": name,
                "tokens_per_second": work.tokens / median(walls),
                "read_per_second": work.read / median(walls),
                "wall": median(walls),
                "wall_range": [walls[0], walls[-1]],
                "cpu": median(turn.cpu for turn in own),
                "others": max(turn.others for turn in own),
            }
        )
    return rows


def ratios(turns: list[Turn]) -> dict[str, float]:
    """Speed ratios between contenders: medians of ratios within a repeat."""
    walls: dict[str, list[float]] = {}
    for turn in turns:
        walls.setdefault(turn.contender, []).append(turn.wall)
    pairs = [("zmq-hidden", "local-hidden"), ("zmq-top_k", "local-top_k")]
    pairs += [("zmq-hidden", "vllm"), ("zmq-top_k", "vllm")] if "vllm" in walls else []
    return {
        f"{one} / {other}": median(b / a for a, b in zip(walls[one], walls[other], strict=True)) for one, other in pairs
    }


def met(settings: Settings, found: dict[str, float]) -> dict[str, bool]:
    """Check the targets: ZMQ at 0.9 of the teacher in this process, and faster than vLLM over HTTP."""
    if not settings.check:
        return {}
    return {name: value >= (TARGET if "local" in name else 1.0) for name, value in found.items()}


def show(settings: Settings, facts: dict[str, Any], work: Work, turns: list[Turn], checks: dict[str, Any]) -> None:
    print(f"{facts['cpu']}, {settings.threads} threads; {settings.model}, {settings.precision}, {settings.task}")
    print(
        f"{settings.batches} batches of {settings.batch}: {work.tokens} response tokens, {work.read} tokens read, "
        f"prefix {len(work.prefix)}; {settings.repeats} repeats in turns\n"
    )
    print(f"{'contender':<14}{'tokens/s':>10}{'read/s':>10}{'wall s':>9}{'range':>16}{'CPU s':>9}{'others':>8}")
    for row in results(work, turns):
        low, high = row["wall_range"]
        print(
            f"{row['contender']:<14}{row['tokens_per_second']:>10.1f}{row['read_per_second']:>10.0f}{row['wall']:>9.3f}"
            f"{f'{low:.3f}–{high:.3f}':>16}{row['cpu']:>9.2f}{row['others']:>8.0%}"
        )
    print()
    found = ratios(turns)
    judged = met(settings, found)
    for name, value in found.items():
        verdict = "" if name not in judged else "  met" if judged[name] else "  MISSED"
        print(f"{name}: {value:.3f}{verdict}")
    for payload in ("hidden", "top_k"):
        print(f"{payload} over ZMQ: {'the same bits' if checks[payload] else 'OTHER BITS'} as in this process")
    if "vllm_distance" in checks:
        print(f"vLLM: log-probabilities within {checks['vllm_distance']:.2g} of the teacher's")
    if max(turn.others for turn in turns) > BUSY:
        print("other processes took more than a tenth of the machine: not to be quoted")


def parse(arguments: Sequence[str] | None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the teacher: smollm2, tiny or a folder (smollm2; quick: tiny)")
    parser.add_argument("--root", type=Path, help="a TweetEval folder ($GATESPACE_TWEETEVAL)")
    parser.add_argument("--batch", type=step.positive, help="rows of a batch (24; quick: 4)")
    parser.add_argument("--batches", type=step.positive, help="batches of a turn (6; quick: 2)")
    parser.add_argument("--repeats", type=step.positive, help="turns of each contender (7; quick: 2)")
    parser.add_argument("--max-new-tokens", type=step.positive, default=8, metavar="N", help="longest response (8)")
    parser.add_argument("-k", type=step.positive, default=64, metavar="K", help="tokens of top_k (64)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="of the teacher (bf16; quick: fp32)")
    cores = measure.usable_cores()
    parser.add_argument("--threads", type=step.positive, default=cores, help="of each process (all cores: %(default)s)")
    parser.add_argument(
        "--vllm",
        metavar="PYTHON|URL",
        help="the Python of an environment with vLLM, which is started here; or vllm://host:port of a server with the"
        " same model and --max-logprobs K",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and generated texts: does it run?")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args(arguments)
    quick = options.quick
    beside = Path(__file__).resolve().parents[2] / "shared" / "tweeteval"
    given = options.root or os.environ.get("GATESPACE_TWEETEVAL") or (beside if beside.is_dir() else None)
    task, root = ("synthetic", None) if quick else step.task_of(given and Path(given), step.tell)
    settings = Settings(
        model=options.model or ("tiny" if quick else "smollm2"),
        task=task,
        root=root,
        batch=options.batch or (4 if quick else 24),
        batches=options.batches or (2 if quick else 6),
        repeats=options.repeats or (2 if quick else 7),
        max_new_tokens=options.max_new_tokens,
        k=options.k,
        precision=options.precision or ("fp32" if quick else "bf16"),
        threads=options.threads,
        vllm=place_of(parser, options.vllm),
        check=not quick,
    )
    return settings, options


def place_of(parser: argparse.ArgumentParser, given: str | None) -> str | None:
    """Resolve where vLLM is; mistakes are reported before anything is measured."""
    if given is None:
        return None
    from gatespace.addons.vllm import check_place
    from gatespace.errors import UsageError

    given = given.replace("http://", "vllm://")
    try:
        check_place(given)
    except UsageError as error:
        parser.error(str(error))
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    settings, options = parse(arguments)
    facts = measure.environment(settings.threads)
    work, turns, checks = run(settings)
    found = ratios(turns)
    judged = met(settings, found)
    if options.json:
        whole = {
            "settings": asdict(settings),
            "environment": facts,
            "tokens": work.tokens,
            "read": work.read,
            "results": results(work, turns),
            "turns": [asdict(turn) for turn in turns],
            "ratios": found,
            "met": judged,
            "same_bits": {name: checks[name] for name in ("hidden", "top_k")},
            "vllm_distance": checks.get("vllm_distance"),
        }
        print(json.dumps(whole, indent=2))
    else:
        show(settings, facts, work, turns, checks)
    wrong = not (checks["hidden"] and checks["top_k"])
    return int(wrong or (options.check and not all(judged.values())))


if __name__ == "__main__":
    sys.exit(main())
