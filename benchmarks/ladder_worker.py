"""Worker process of ladder.py: the steps of a rung, responses, a profile, or the machine's rates.

A rung is assembled from the public parts of the engine, so that every speed-up can be disabled separately; the rows
`engine-…` are the engine's unmodified step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from step_worker import GATE, Engine, Meter, Work, padded_left, whole_prompts
from torch import Tensor, nn

from gatespace.config import OptimizerConfig
from gatespace.gating.coefficients import Gate
from gatespace.gating.fused import fused_distillation_loss
from gatespace.gating.loss import LossInputs, distillation_loss
from gatespace.gating.objectives import Gated
from gatespace.models import Model, check_pair, load_model
from gatespace.models.body import Forward, body_of
from gatespace.rollout import Sampling, sample
from gatespace.seeding import generator, stream
from gatespace.teacher.cache import ScoreCache
from gatespace.teacher.local import LocalTeacher
from gatespace.teacher.scores import ScoreSpec
from gatespace.training.batches import Row
from gatespace.training.optimizer import Optimizer

NOISE = 0.05
"""Relative noise on the teacher's weights if student and teacher are the same model, as the loss would be zero."""
Responses = list[list[list[int]]]
"""Token ids per step and row."""


def pair(work: Work) -> tuple[Model, Model]:
    """Load the student in float32, and a teacher with different weights in the precision of the work."""
    student, teacher = load_model(work.student), load_model(work.teacher)
    if work.student == work.teacher:
        draw = torch.Generator().manual_seed(stream(work.seed, "teacher") % 2**63)
        with torch.no_grad():
            for parameter in teacher.network.parameters():
                if parameter.dim() > 1:
                    parameter += torch.randn(parameter.shape, generator=draw) * (NOISE * parameter.std())
    teacher.network.to(work.dtype)
    return student, teacher


def write_responses(work: Work, file: Path) -> None:
    """Sample the student's responses to every row, always at the maximum length, to share among all rungs."""
    student, _ = pair(work)
    encoder = work.encoder(student.tokenizer)
    body, found = body_of(student), []
    with torch.no_grad():
        for number, rows in enumerate(work.rows(encoder)):
            forward = body.forward([row.prompt for row in rows], prefix=encoder.prefix)
            found.append(_sample(work, number, body, forward, student.vocab_size))
    file.write_text(json.dumps(found))


def _sample(work: Work, number: int, body: Any, forward: Forward, vocab_size: int) -> list[list[int]]:
    count = len(forward.cache.lengths)
    return sample(
        body,
        forward,
        vocab_size=vocab_size,
        sampling=Sampling(max_new_tokens=work.max_new_tokens),
        stop=lambda ids: False,
        draws=[generator(work.seed, "rollout", number, i).random for i in range(count)],
    ).responses


# ---------------------------------------------------------------------- a rung


class Rung:
    """A step with some of the speed-ups; `rung` is a row of ladder.RUNGS."""

    def __init__(self, work: Work, rung: dict[str, Any], responses: Responses, folder: Path, micro_rows: int) -> None:
        self.work, self.rung, self.folder, self.micro_rows = work, rung, folder, micro_rows
        self.student, self.teacher = pair(work)
        self.size = check_pair(self.student, self.teacher).vocab_size
        self.optimizer = Optimizer(
            self.student.network, OptimizerConfig(lr=work.lr), steps=work.all_steps, dtype=work.dtype
        )
        self.encoder = work.encoder(self.student.tokenizer)
        self.rows, self.responses = work.rows(self.encoder), responses
        self.objective = Gated(Gate.parse(GATE))
        self.seen: dict[str, Any] = {"same_responses": 0}
        if rung["packed"]:
            self.body, self.teacher_body = body_of(self.student, packed=True), body_of(self.teacher, packed=True)
        self.scorer, self.store = None, None
        if "score" in rung["share"]:
            self.store = ScoreCache(folder / "scores") if rung["warm"] else None
            spec = ScoreSpec(tuple(self.encoder.prefix), work.max_new_tokens, self.size)
            self.scorer = LocalTeacher(self.teacher, spec, cache=self.store, packed=True)
            if rung["warm"]:
                for rows, written in zip(self.rows, responses, strict=True):
                    self.scorer.score([row.prompt for row in rows], written)

    def step(self, number: int, meter: Meter) -> None:
        rows, responses = self.rows[number], self.responses[number]
        tokens = sum(map(len, responses))
        meter.begin()
        with meter.clock("rollout"):
            forward = self._rollout(number, rows)
        with meter.clock("score"):
            scores = self._score(rows, responses)
        with meter.clock("update"):
            loss = self._update(rows, responses, forward, scores)
        if number == 0:
            self.seen |= {"loss": loss / tokens, **self._gradient(tokens)}
        with meter.clock("optimizer"):
            self.optimizer.step(number, tokens)
        meter.end(responses)

    def _prompts(self, rows: Sequence[Row], phase: str) -> tuple[list[list[int]], list[int] | None]:
        """Prompts of a phase, and the prefix if it is shared."""
        if phase in self.rung["share"]:
            return [row.prompt for row in rows], self.encoder.prefix
        return whole_prompts(self.encoder, rows), None

    def _rollout(self, number: int, rows: Sequence[Row]) -> Forward | None:
        if not self.rung["packed"]:
            self._generate(rows)
            return None
        prompts, prefix = self._prompts(rows, "rollout")
        with torch.set_grad_enabled(self.rung["reuse"]):
            forward = self.body.forward(prompts, prefix=prefix)
        written = _sample(self.work, number, self.body, forward, self.size)
        pairs = zip(written, self.responses[number], strict=True)
        self.seen["same_responses"] += sum(found == fixed for found, fixed in pairs)
        return forward

    @torch.no_grad()
    def _generate(self, rows: Sequence[Row]) -> None:
        from transformers import GenerationConfig

        ids, mask = padded_left(whole_prompts(self.encoder, rows), self.student.pad_id)
        count = self.work.max_new_tokens
        settings = GenerationConfig(
            do_sample=True, top_k=0, top_p=1.0, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
        )
        self.student.network.generate(input_ids=ids, attention_mask=mask, generation_config=settings)

    @torch.no_grad()
    def _score(self, rows: Sequence[Row], responses: Sequence[Sequence[int]]) -> Tensor:
        """(N, H) hidden states, or (N, V) logits on rungs that compute all logits."""
        if self.scorer is not None:
            payload = self.scorer.score([row.prompt for row in rows], responses).payload
            assert isinstance(payload, Tensor)
            return payload[0]
        return torch.cat([self._pass(self.teacher, part, said) for part, said in self._parts(rows, responses)])

    def _update(
        self, rows: Sequence[Row], responses: Sequence[Sequence[int]], forward: Forward | None, scores: Tensor
    ) -> float:
        if self.rung["reuse"] and forward is not None:
            return self._learn(self._after(forward, responses), responses, scores)
        if "update" in self.rung["share"]:
            return self._learn(self._pass(self.student, rows, responses), responses, scores)
        total, start = 0.0, 0
        for part, said in self._parts(rows, responses):
            stop = start + sum(map(len, said))
            total += self._learn(self._pass(self.student, part, said), said, scores[start:stop])
            start = stop
        return total

    def _parts(self, rows: Sequence[Row], responses: Sequence[Sequence[int]]) -> Any:
        """Split rows with whole prompts into micro-batches."""
        for start in range(0, len(rows), self.micro_rows):
            chosen = slice(start, start + self.micro_rows)
            yield rows[chosen], responses[chosen]

    def _pass(self, model: Model, rows: Sequence[Row], responses: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states or logits at the positions that predict the response tokens, (N, H) or (N, V)."""
        prompts, prefix = self._prompts(rows, "update" if model is self.student else "score")
        whole = [[*prompt, *ids[:-1]] for prompt, ids in zip(prompts, responses, strict=True)]
        places = [slice(len(prompt) - 1, len(row)) for prompt, row in zip(prompts, whole, strict=True)]
        if self.rung["packed"]:
            body = self.body if model is self.student else self.teacher_body
            states = body.forward(whole, prefix=prefix).hidden.split([len(row) for row in whole])
            return torch.cat([row[place] for row, place in zip(states, places, strict=True)])
        longest = max(map(len, whole))
        ids = torch.tensor([row + [model.pad_id] * (longest - len(row)) for row in whole])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in whole])
        network = model.network if self.rung["all_logits"] else model.body
        output = network(input_ids=ids, attention_mask=mask, use_cache=False)
        found = output.logits if self.rung["all_logits"] else output.last_hidden_state
        return torch.cat([row[place] for row, place in zip(found, places, strict=True)])

    def _after(self, forward: Forward, responses: Sequence[Sequence[int]]) -> Tensor:
        """(N, H) hidden states from the rollout's prefill: only responses are computed."""
        if self.work.max_new_tokens == 1:
            return forward.last()
        fed = [list(ids[:-1]) for ids in responses]
        rest = self.body.forward(fed, prefix=forward.prefix, past=forward.cache).hidden.split([len(ids) for ids in fed])
        return torch.cat([torch.cat(pieces) for pieces in zip(forward.last().split(1), rest, strict=True)])

    def _learn(self, found: Tensor, responses: Sequence[Sequence[int]], scores: Tensor) -> float:
        """Backpropagate the sum of the losses of all tokens."""
        lengths = torch.tensor([len(ids) for ids in responses])
        inputs = LossInputs(
            sampled=torch.tensor([[token for ids in responses for token in ids]]),
            segment_ids=torch.arange(len(responses)).repeat_interleave(lengths)[None],
            total_tokens=1.0,
            vocab_size=self.size,
        )
        student, teacher = self.student.head, self.teacher.head
        own, other = found[None], scores[None]
        if self.rung["fused"]:
            output = fused_distillation_loss(own, student, other, teacher, objective=self.objective, inputs=inputs)
        else:
            if not self.rung["all_logits"]:
                own, other = student.logits(own), teacher.logits(other)
            output = distillation_loss(own, other, objective=self.objective, inputs=inputs)
        output.loss.backward()
        return float(output.loss)

    def _gradient(self, tokens: int) -> dict[str, float]:
        """Norm of the gradient, and its relative difference from the first rung's."""
        found = {n: p.grad / tokens for n, p in self.optimizer.masters.items() if p.grad is not None}
        norm = sum(float(g.double().norm()) ** 2 for g in found.values()) ** 0.5
        file, error = self.folder / "reference.safetensors", 0.0
        if not file.exists():
            save_file({name: g.contiguous() for name, g in found.items()}, file)
        with safe_open(str(file), "pt") as known:
            gaps = [float((g.double() - known.get_tensor(name).double()).norm()) ** 2 for name, g in found.items()]
            size = sum(float(known.get_tensor(name).double().norm()) ** 2 for name in found)
            error = (sum(gaps) / max(size, 1e-300)) ** 0.5
        return {"gradient_norm": norm, "gradient_error": error}


def measured_rung(asked: dict[str, Any], work: Work) -> dict[str, Any]:
    folder, meter = Path(asked["folder"]), Meter()
    if asked["rung"]["engine"]:
        step, store, encoder, prompts = _engine(asked, work, meter)
        seen: dict[str, Any] = {}
    else:
        responses = json.loads((folder / "responses.json").read_text())
        rung = Rung(work, asked["rung"], responses, folder, asked["micro_rows"])
        step, store, encoder, prompts = lambda n: rung.step(n, meter), rung.store, rung.encoder, rung.rows
        seen = rung.seen
    for number in range(work.warm_up):
        step(number)
    measure.give_back_free_memory()
    before = 0 if store is None else store.stats.misses
    _, cost = measure.measured(lambda: [step(number) for number in range(work.warm_up, work.all_steps)])
    steps = meter.steps[work.warm_up :]
    lengths = [len(row.prompt) for rows in prompts[work.warm_up :] for row in rows]
    shape = {"prefix": len(encoder.prefix), "rows": work.batch, "suffix": sum(lengths) / work.steps}
    misses = 0 if store is None else store.stats.misses - before
    return {"steps": steps, "peak_mib": cost.peak_rss / measure.MIB, "shape": shape, "misses": misses, **seen}


def _engine(asked: dict[str, Any], work: Work, meter: Meter) -> tuple[Callable[[int], None], ScoreCache, Any, Any]:
    store = ScoreCache(Path(asked["scores"]))
    engine = Engine(work, store, pair)

    def step(number: int) -> None:
        meter.begin()
        meter.end(engine.step(number, meter.clock))

    return step, store, engine.encoder, engine.rows


def profiled(asked: dict[str, Any], work: Work) -> dict[str, Any]:
    """Torch operation → self CPU time in microseconds, over the measured steps of the engine."""
    step, *_ = _engine(asked, work, Meter())
    for number in range(work.warm_up):
        step(number)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for number in range(work.warm_up, work.all_steps):
            step(number)
    events = [event for event in seen.key_averages() if event.key.startswith("aten::")]
    return {"operations": {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in events}}


# ---------------------------------------------------------------------- machine rates


def rates(asked: dict[str, Any], work: Work) -> dict[str, Any]:
    """Seconds per FLOP of the step's products at the model's own shapes, seconds per byte of a copy, and sizes.

    Every product runs over the weights of all layers in turn, so that small ones wait for memory as in a step; results
    go into preallocated memory.
    """
    student, teacher = pair(work)
    student.network.to(work.dtype)
    tokens, taught, positions = (max(1, round(asked[key])) for key in ("tokens", "taught", "positions"))
    own, other = _weights(student), _weights(teacher)
    heads = [student.head.weight.detach()], [teacher.head.weight.detach()]
    result: dict[str, Any] = {
        "forward": _rate(own, tokens, _forward),
        "input_gradient": _rate(own, tokens, _input_gradient),
        "weight_gradient": _rate(own, tokens, _weight_gradient),
        "teacher": _rate(other, taught, _forward),
        "decode": _rate(own, work.batch, _forward),
        "draw": _rate(heads[0], work.batch, _forward),
        "head_forward": _rate(heads[0], positions, _forward),
        "head_input_gradient": _rate(heads[0], positions, _input_gradient),
        "head_weight_gradient": _rate(heads[0], positions, _weight_gradient),
        "teacher_head": _rate(heads[1], positions, _forward),
        "copy": _copy_rate(),
    }
    result["sizes"] = {
        "body": sum(w.numel() for w in own),
        "teacher_body": sum(w.numel() for w in other),
        "head": heads[0][0].numel(),
        "teacher_head": heads[1][0].numel(),
        "parameters": sum(p.numel() for p in student.network.parameters()),
        "attention": _attention_width(student),
        "teacher_attention": _attention_width(teacher),
    }
    return result


def _weights(model: Model) -> list[Tensor]:
    return [module.weight.detach() for module in model.body.modules() if isinstance(module, nn.Linear)]


def _attention_width(model: Model) -> int:
    """Layers × heads × head dimension."""
    config: Any = model.network.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * config.num_attention_heads * width)


def _forward(weight: Tensor, inputs: Tensor, outputs: Tensor, gradient: Tensor) -> None:
    torch.mm(inputs, weight.t(), out=outputs)


def _input_gradient(weight: Tensor, inputs: Tensor, outputs: Tensor, gradient: Tensor) -> None:
    torch.mm(outputs, weight, out=inputs)


def _weight_gradient(weight: Tensor, inputs: Tensor, outputs: Tensor, gradient: Tensor) -> None:
    torch.mm(outputs.t(), inputs, out=gradient)


Product = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def _rate(weights: Sequence[Tensor], tokens: int, product: Product) -> dict[str, float]:
    """Wall and CPU seconds per FLOP, best of a few passes."""
    dtype = weights[0].dtype
    inputs = {k: torch.randn(tokens, k).to(dtype) for k in {w.shape[1] for w in weights}}
    outputs = {n: torch.randn(tokens, n).to(dtype) for n in {w.shape[0] for w in weights}}
    gradients = {w.shape: torch.zeros_like(w) for w in weights}

    def every() -> None:
        for weight in weights:
            product(weight, inputs[weight.shape[1]], outputs[weight.shape[0]], gradients[weight.shape])

    return _best(every, 2 * tokens * sum(w.numel() for w in weights))


def _copy_rate() -> dict[str, float]:
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    return _best(lambda: target.copy_(source), 2 * source.numel() * source.element_size())


def _best(act: Callable[[], Any], amount: int) -> dict[str, float]:
    act()
    found = []
    for _ in range(4):
        wall, cpu = time.perf_counter(), time.process_time()
        act()
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return {"wall": min(wall for wall, _ in found) / amount, "cpu": min(cpu for _, cpu in found) / amount}


def main() -> None:
    asked = measure.request()
    torch.set_num_threads(asked["threads"])
    work = Work(**asked["work"])
    if asked["do"] == "responses":
        write_responses(work, Path(asked["folder"], "responses.json"))
        measure.answer({"ok": True})
    elif asked["do"] == "rung":
        measure.answer(measured_rung(asked, work))
    elif asked["do"] == "profile":
        measure.answer(profiled(asked, work))
    else:
        found, cost = measure.measured(lambda: rates(asked, work))
        # A disturbed machine measures slow rates, which inflates the limit and our share of it.
        measure.answer(found | {"others_share": cost.others / (cost.wall * measure.usable_cores())})


if __name__ == "__main__":
    main()
