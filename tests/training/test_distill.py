"""A step of distillation against the plain computation: whole sequences, the network's own forward, float64 sums."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gatespace.config import ObjectiveConfig, RolloutConfig, parse_config
from gatespace.errors import RunError
from gatespace.gating import LossInputs, distillation_loss
from gatespace.gating.configured import build_objective
from gatespace.models import Model, load_model
from gatespace.models.packed import PackedDecoding
from gatespace.seeding import permutation
from gatespace.tasks import Task, synthetic_task
from tests.conftest import rounding

from .conftest import Lab, Stepped

Loss = Callable[[list[Tensor], list[Tensor], list[list[int]]], Tensor]
G5 = (4.0, 0.0, -1.0, 0.0)
WITH_GAP = (1.5, -1.0, 0.3, 2.5)


# ---------------------------------------------------------------------------------------------------- by hand


def logits_of(model: Model, prompts: list[list[int]], responses: list[list[int]], vocab_size: int) -> list[Tensor]:
    """Per row (T, V): what the whole network says at the places before each token of the response."""
    whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(map(len, whole))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in whole])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in whole])
    logits = model.network(input_ids=ids, attention_mask=mask).logits[..., :vocab_size].double()
    return [
        logits[i, len(prompt) - 1 : len(prompt) + len(response) - 1]  # position t-1 predicts token t
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]


def gated(
    coefficients: tuple[float, ...],
    *,
    top_k: int = 8,
    temperature: float = 1.0,
    stop: bool = False,
    order: list[int] | None = None,
) -> Loss:
    """Σ λR + (1-λ)F with λ = σ(a·h + b·u + c + d·gap), token by token; with an order, token i has λ of order[i]."""
    a, b, c, d = coefficients

    def entropy(logits: Tensor) -> Tensor:
        top = logits.softmax(-1).topk(top_k, -1).values
        top = top / top.sum(-1, keepdim=True)
        return -(top * top.log()).sum(-1) / math.log(top_k)

    def loss(student: list[Tensor], teacher: list[Tensor], responses: list[list[int]]) -> Tensor:
        lams, terms = [], []
        for z, w in zip(student, teacher, strict=True):
            u = entropy(w[:1])
            for position in range(len(z)):
                row, other = z[position], w[position]
                gap = 1 - row.softmax(-1)[other.argmax()]
                lams.append(torch.sigmoid(a * entropy(other[None]) + b * u + c + d * gap)[0])
                s, t = (row / temperature).log_softmax(-1), (other / temperature).log_softmax(-1)
                terms.append(((s.exp() * (s - t)).sum(), (t.exp() * (t - s)).sum()))
        lam = torch.stack(lams)
        lam = lam.detach() if stop or order is not None else lam
        lam = lam if order is None else lam[order]
        reverse, forward = (torch.stack(side) for side in zip(*terms, strict=True))
        return (lam * reverse + (1 - lam) * forward).sum()

    return loss


def expected(lab: Lab, stepped: Stepped, loss: Loss, *, double: bool = True) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and its gradient for the responses that the step has learned from."""
    student = lab.student
    if double:
        student = Model(copy.deepcopy(student.network).double(), student.tokenizer, "double", "")
    for p in student.network.parameters():
        p.grad = None
    prompts = [lab.prompt.render(student.tokenizer, row.example.text) for row in stepped.rows]
    with torch.no_grad():
        teacher = logits_of(lab.teacher, prompts, stepped.responses, lab.vocab_size)
    own = logits_of(student, prompts, stepped.responses, lab.vocab_size)
    value = loss(own, teacher, stepped.responses) / sum(map(len, stepped.responses))
    value.backward()
    gradients = {name: p.grad for name, p in student.network.named_parameters() if p.grad is not None}
    return float(value.detach()), gradients


def assert_same_gradient(found: dict[str, Tensor], wanted: dict[str, Tensor], rel: float = 1e-5) -> None:
    assert set(found) == set(wanted)
    whole = distance(found, wanted)
    assert whole < rel
    enough = 1e-4 * norm(wanted)
    for name, gradient in wanted.items():  # and no small tensor hides behind a large one
        if float(gradient.norm()) > enough:
            part = distance({name: found[name]}, {name: gradient})
            assert part < 10 * rel, name


def norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return norm({name: found[name].double() - wanted[name].double() for name in wanted}) / norm(wanted)


@pytest.fixture
def skilled(taught: Path, teacher: Model, synthetic: Task) -> Lab:
    """A student that answers in the right form, so that responses end and differ in length."""
    student = load_model(str(taught / "model"))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in student.network.parameters():
            p += 0.7 * p.std() * torch.randn(p.shape, generator=draw)
    return Lab(student, teacher, synthetic, synthetic.train[:40], brief=True)


# ---------------------------------------------------------------------------------------------------- the gradient


def assert_is(lab: Lab, stepped: Stepped, loss: Loss, *others: Loss) -> None:
    """Loss and gradient are those of the plain computation of `loss`, and not those of `others`."""
    value, gradients = expected(lab, stepped, loss)
    assert stepped.loss == pytest.approx(value, rel=1e-5)
    assert_same_gradient(stepped.gradients, gradients)
    assert stepped.update.grad_norm == pytest.approx(norm(gradients), rel=1e-5)
    for other in others:
        assert distance(stepped.gradients, expected(lab, stepped, other)[1]) > 1e-3  # the comparison can fail


@pytest.mark.parametrize("gate, other", [(G5, WITH_GAP), (WITH_GAP, G5)])
def test_gradient_is_that_of_the_plain_computation(lab: Lab, gate: tuple[float, ...], other: tuple[float, ...]) -> None:
    assert_is(lab, lab.step(objective={"gate": list(gate)}), gated(gate), gated(other))


def test_gradient_with_responses_of_many_lengths(skilled: Lab) -> None:
    stepped = skilled.step(objective={"gate": list(WITH_GAP)}, rows=10, micro_tokens=130)
    assert len({len(ids) for ids in stepped.responses}) > 1
    assert len(stepped.scored) > 2
    assert_is(skilled, stepped, gated(WITH_GAP))


def test_gradient_with_a_temperature_and_without_gradient_through_the_gate(lab: Lab) -> None:
    settings = {"gate": list(WITH_GAP), "temperature": 2.0, "stop_gradient": True, "top_k": 5}
    loss, through = (gated(WITH_GAP, top_k=5, temperature=2.0, stop=stop) for stop in (True, False))
    assert_is(lab, lab.step(objective=settings), loss, through)


@pytest.mark.parametrize("reuse, micro_tokens", [(True, 10**9), (False, 10**9), (True, 60)])
def test_gradient_of_single_tokens(lab: Lab, reuse: bool, micro_tokens: int) -> None:
    rollout = {"max_new_tokens": 1}
    stepped = lab.step(objective={"gate": "G5"}, rollout=rollout, reuse=reuse, micro_tokens=micro_tokens)
    assert_is(lab, stepped, gated(G5))


@pytest.mark.parametrize("micro_tokens", [10**9, 120])
@pytest.mark.parametrize("way", [{"reuse"}, {"fused"}, {"share"}, {"packed"}, {"reuse", "fused", "share", "packed"}])
def test_every_way_of_computing_gives_one_gradient(lab: Lab, way: set[str], micro_tokens: int) -> None:
    settings: dict[str, Any] = {
        "objective": {"gate": list(WITH_GAP)},
        "rollout": {"from": {"student": 0.5, "gold": 0.5}},  # gold ones are short
    }
    usual = lab.step(packed=True, **settings)
    other = lab.step(**{"packed": True, **dict.fromkeys(way, False)}, micro_tokens=micro_tokens, **settings)
    assert len(usual.scored) == 1
    assert (len(other.scored) > 1) == (micro_tokens == 120)
    assert other.responses == usual.responses
    assert other.sources == usual.sources
    assert len({len(ids) for ids in usual.responses}) > 1
    assert other.loss == pytest.approx(usual.loss, rel=1e-5)
    assert_same_gradient(other.gradients, usual.gradients)


def test_parts_are_weighted_by_their_tokens(skilled: Lab) -> None:
    settings: dict[str, Any] = {"objective": {"gate": "G5"}, "rows": 9}
    one, many = skilled.step(**settings), skilled.step(micro_tokens=1, **settings)
    assert (len(one.scored), len(many.scored)) == (1, 9)
    assert many.responses == one.responses
    means = [float(scored.output.loss.detach()) / scored.output.tokens for scored in many.scored]
    assert sum(means) / len(means) != pytest.approx(many.loss, rel=1e-3)  # a mean of means would be another number
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert_same_gradient(many.gradients, one.gradients)


def test_a_step_is_sampled_as_a_whole_however_it_is_divided(skilled: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = Counter[int](), PackedDecoding.step

    def counted(self: PackedDecoding, ids: Tensor) -> Tensor:
        steps[len(found)] += 1
        return step(self, ids)

    monkeypatch.setattr(PackedDecoding, "step", counted)
    found: list[tuple[int, list[list[int]]]] = []
    for options in ({}, {"micro_tokens": 1}, {"micro_tokens": 1, "rollout_tokens": 150}):
        stepped = skilled.step(objective={"gate": "G5"}, rows=9, **options)
        found.append((len(stepped.scored), stepped.responses))
    whole, divided, bounded = found
    assert divided == bounded == (9, whole[1])
    assert steps[0] == steps[1] < steps[2]


# ---------------------------------------------------------------------------------------------------- λ dealt out


SHUFFLED = {"gate": list(WITH_GAP), "shuffle": True}


def orders(stepped: Stepped, seed: int, number: int) -> list[int]:
    """Whose λ each token has: of a token of its micro-batch, by the run's seed, the step and the part's first row."""
    order: list[int] = []
    for scored in stepped.scored:
        count = sum(map(len, scored.part.rollout.responses))
        dealt = permutation(count, seed, "shuffle", number, scored.part.places[0])
        order += [len(order) + place for place in dealt]
    return order


def lams(stepped: Stepped) -> list[list[float]]:
    return [scored.output.lam[0].tolist() for scored in stepped.scored if scored.output.lam is not None]


@pytest.mark.parametrize("micro_tokens", [10**9, 120])
@pytest.mark.parametrize("way", [set(), {"fused"}, {"reuse", "share", "packed"}])
def test_shuffled_gradient_is_that_of_the_dealt_constants(skilled: Lab, way: set[str], micro_tokens: int) -> None:
    stepped = skilled.step(objective=SHUFFLED, micro_tokens=micro_tokens, number=3, **dict.fromkeys(way, False))
    assert (len(stepped.scored) > 1) == (micro_tokens == 120)
    order = orders(stepped, 5, 3)
    others = gated(WITH_GAP), gated(WITH_GAP, stop=True), gated(WITH_GAP, order=order[::-1])
    assert_is(skilled, stepped, gated(WITH_GAP, order=order), *others)


def test_shuffling_depends_on_seed_and_step(skilled: Lab) -> None:
    def dealt(**options: Any) -> list[list[float]]:
        # Right answers to one text, so that seed and step choose nothing else.
        lab = Lab(skilled.student, skilled.teacher, synthetic_task(), skilled.examples[:1], brief=True)
        return lams(lab.step(rows=1, objective=SHUFFLED, rollout={"from": {"gold": 1.0}, "per_prompt": 4}, **options))

    first = dealt()
    assert dealt() == first
    for other in (dealt(seed=6), dealt(number=1), dealt(number=2)):
        assert other != first
        assert [sorted(part) for part in other] == [sorted(part) for part in first]


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["short_smollm2", pytest.param("smollm2", marks=pytest.mark.long)])
def test_gradient_on_the_real_architecture(folder: str, request: pytest.FixtureRequest) -> None:
    place = str(request.getfixturevalue(folder))
    student, teacher = load_model(place), load_model(place)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in teacher.network.parameters():
            # Far enough away: between like distributions the gradient is a small difference, and rounding shows.
            p += 0.25 * p.std() * torch.randn(p.shape, generator=draw)
    task = synthetic_task(size=60)
    lab = Lab(student, teacher, task, task.train[:3], brief=True)
    settings: dict[str, Any] = {"objective": {"gate": list(WITH_GAP)}, "rollout": {"max_new_tokens": 4}, "rows": 3}
    stepped = lab.step(**settings)
    parts = lab.step(micro_tokens=75, **settings)
    assert len(parts.scored) > 1
    assert parts.responses == stepped.responses
    value, gradients = expected(lab, stepped, gated(WITH_GAP), double=False)
    rel = rounding(student)
    assert stepped.loss == pytest.approx(value, rel=rel)
    assert_same_gradient(stepped.gradients, gradients, rel)
    assert_same_gradient(parts.gradients, gradients, rel)
    assert distance(stepped.gradients, expected(lab, stepped, gated(G5), double=False)[1]) > 100 * rel


# ---------------------------------------------------------------------------------------------------- the shift


@pytest.mark.parametrize("source", ["student", "teacher"])
@pytest.mark.parametrize("reuse", [True, False])
def test_states_are_those_that_the_tokens_were_drawn_from(skilled: Lab, source: str, reuse: bool) -> None:
    """The sampler wrote down each token's log-probability; states one place off could not give the same."""
    stepped = skilled.step(rollout={"from": {source: 1.0}}, rows=8, reuse=reuse, micro_tokens=200)
    assert len(stepped.scored) > 1
    for scored in stepped.scored:
        states, model = scored.hidden, skilled.student
        if source == "teacher":
            assert isinstance(scored.scores.payload, Tensor)
            states, model = scored.scores.payload[0], skilled.teacher
        tokens = torch.tensor([token for ids in scored.part.rollout.responses for token in ids])
        drawn = torch.tensor([value for row in scored.part.rollout.log_probs for value in row])
        logits = (states @ model.head.weight.T)[:, : skilled.vocab_size]
        found = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(found, drawn, rtol=1e-4, atol=1e-4)
        elsewhere = logits.roll(1, 0).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert float((elsewhere.detach() - drawn).abs().max()) > 1


# ---------------------------------------------------------------------------------------------------- responses


def test_sources_come_in_their_shares(lab: Lab) -> None:
    rollout = {"from": {"student": 0.5, "teacher": 0.2, "gold": 0.3}, "max_new_tokens": 1}
    found = Counter[str]()
    for number in range(2):
        found.update(lab.step(rollout=rollout, rows=150, number=number).sources)
    total = 300
    for name, share in (("student", 0.5), ("teacher", 0.2), ("gold", 0.3)):
        assert abs(found[name] / total - share) < 4 * math.sqrt(share * (1 - share) / total), name


@pytest.mark.parametrize("stop", ["json", "eos"])
def test_gold_responses_are_the_right_answers(lab: Lab, stop: str) -> None:
    stepped = lab.step(rollout={"from": {"gold": 1.0}, "stop": stop, "max_new_tokens": 12})
    tokenizer = lab.student.tokenizer
    for row, ids in zip(stepped.rows, stepped.responses, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        end = "<|im_end|>" if stop == "eos" else ""
        assert text == f'{row.example.label}"}}{end}'
    assert len({row.example.label for row in stepped.rows}) > 1
    assert_is(lab, stepped, gated(G5))


@pytest.mark.parametrize("source", ["student", "teacher"])
def test_greedy_responses_are_the_writer_s_first_choices(skilled: Lab, source: str) -> None:
    rollout = {"from": {source: 1.0}, "temperature": 0.0, "stop": "eos"}
    stepped = skilled.step(rollout=rollout, rows=8)
    prompts = [skilled.prompt.render(skilled.student.tokenizer, row.example.text) for row in stepped.rows]
    other = {"student": "teacher", "teacher": "student"}[source]
    with torch.no_grad():
        own, foreign = (
            [
                logits.argmax(-1).tolist()
                for logits in logits_of(getattr(skilled, who), prompts, stepped.responses, skilled.vocab_size)
            ]
            for who in (source, other)
        )
    assert own == stepped.responses
    assert foreign != stepped.responses
    ends = set(skilled.student.end_ids)
    for ids, ended in zip(stepped.responses, stepped.scored[0].part.rollout.ended, strict=True):
        assert ended == (ids[-1] in ends)
        assert ended or len(ids) == 7
        assert not ends & set(ids[:-1])


def test_responses_depend_on_seed_step_and_place_alone(lab: Lab) -> None:
    rollout = {"from": {"student": 0.4, "teacher": 0.4, "gold": 0.2}}
    whole = lab.step(rollout=rollout, rows=10)
    assert set(whole.sources) == {"student", "teacher", "gold"}
    again = lab.step(rollout=rollout, rows=10, micro_tokens=100)
    fewer = lab.step(rollout=rollout, rows=7)
    assert (again.responses, again.sources) == (whole.responses, whole.sources)
    assert (fewer.responses, fewer.sources) == (whole.responses[:7], whole.sources[:7])
    later = lab.step(rollout=rollout, rows=10, number=4)  # four batches of ten: the second epoch begins
    assert later.sources != whole.sources
    other = lab.step(rollout=rollout, rows=10, seed=6)
    assert other.sources != whole.sources
    pure = lab.step(rows=10)
    assert len({tuple(ids) for ids in pure.responses}) == 10


# ---------------------------------------------------------------------------------------------------- off-policy


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "rollout", [{"temperature": 0.6}, {"top_p": 0.5}, {"from": {"teacher": 1.0}, "temperature": 3.0}]
)
def test_tokens_from_another_distribution_are_weighted(lab: Lab, rollout: dict[str, Any], fused: bool) -> None:
    settings = parse_config(ObjectiveConfig, {"gate": "G5", "support": "hybrid", "support_k": 3})
    objective = build_objective(settings)
    sampling = parse_config(RolloutConfig, rollout)

    def weighted(corrected: bool) -> Loss:
        def loss(student: list[Tensor], teacher: list[Tensor], responses: list[list[int]]) -> Tensor:
            segments = torch.tensor([i for i, ids in enumerate(responses) for _ in ids])
            tokens = torch.tensor([token for ids in responses for token in ids])
            z, w = torch.cat(student), torch.cat(teacher)
            writer = w if sampling.source.teacher else z.detach()
            mass = (writer / sampling.temperature).softmax(-1)
            ranked, order = mass.sort(-1, descending=True)
            nucleus = ranked.cumsum(-1) - ranked < sampling.top_p
            mass = torch.zeros_like(mass).scatter(1, order, ranked * nucleus)
            drawn = (mass / mass.sum(-1, keepdim=True)).log().gather(1, tokens[:, None])
            return distillation_loss(
                z[None],
                w[None],
                objective=objective,
                inputs=LossInputs(
                    sampled=tokens[None],
                    sampled_log_probs=drawn.T if corrected else None,
                    segment_ids=segments[None],
                    total_tokens=1.0,
                ),
            ).loss

        return loss

    given = settings.model_dump(mode="json")
    stepped = lab.step(objective=given, rollout=rollout, rows=6, fused=fused)
    assert_is(lab, stepped, weighted(True), weighted(False))


# ---------------------------------------------------------------------------------------------------- failure


def test_states_that_are_not_finite_stop_the_step(lab: Lab) -> None:
    with torch.no_grad():
        lab.student.network.model.layers[1].mlp.down_proj.weight[3, 4] = math.nan
    before = {name: p.detach().clone() for name, p in lab.student.network.named_parameters()}
    with pytest.raises(RunError, match="hidden states are not finite"):
        lab.step()
    for name, p in lab.student.network.named_parameters():
        assert torch.equal(p.nan_to_num(), before[name].nan_to_num()), name
