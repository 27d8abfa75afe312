"""The objective of a run in a card: its formula, and what the letters mean."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gatespace.addons.publish.card_use import inline
from gatespace.config import ObjectiveConfig, TeacherConfig
from gatespace.gating.coefficients import Gate

__all__ = ["PUBLISHED", "lam_formula", "objective"]

PUBLISHED: Mapping[str, tuple[str, str, str]] = {
    "todi": (
        "ToDi",
        "Σ_v [α_v·t(log t − log s) + (1−α_v)·s(log s − log t)], α_v = sg σ(β·log(t_v/s_v))",
        "arXiv:2505.16297",
    ),
    "eopd": ("EOPD", "PG + α·1[H > τ]·FKL, H the teacher's entropy in nats", "arXiv:2603.07079"),
    "akl": ("AKL", "λ·RKL + (1−λ)·FKL, λ = sg[g_tail / (g_head + g_tail)], g = Σ|t − s|", "arXiv:2404.02657"),
    "jsd": ("generalised JSD", "β·KL(t‖m) + (1−β)·KL(s‖m), m = β·t + (1−β)·s", "arXiv:2306.13649"),
    "skl": ("skew forward KL", "KL(t‖α·t + (1−α)·s)", "arXiv:2402.03898"),
    "srkl": ("skew reverse KL", "KL(s‖(1−α)·t + α·s)", "arXiv:2402.03898"),
    "abkd": ("ABKD", "−1/(αβ) Σ [t^α s^β − α/(α+β)·t^(α+β) − β/(α+β)·s^(α+β)]", "arXiv:2505.04560"),
    "sampled_reverse_kl": ("sampled reverse KL", "ρ·sg[log s(y) − log t(y)] on the sampled token y", ""),
}
"""Method → its name, its loss at a token (s student, t teacher, sg without gradient), and where it is published."""

_SIGNALS = {
    "h": "h is the teacher's entropy at the token, {entropy}",
    "u": "u is the same at the first token of the response",
    "gap": "gap is one minus the student's probability of the teacher's first choice",
}
_ENTROPIES = {
    "top_k": "over its {k} likeliest tokens renormalised, divided by log {k}",
    "full": "over the full vocabulary, divided by its logarithm",
    "bucket": "over its {k} likeliest tokens and the rest as one outcome, divided by the logarithm of their number",
}
_SUPPORTS = {
    "full": "Both KLs are over the full vocabulary.",
    "bucket": "Both KLs are over the teacher's {k} likeliest tokens and the rest as one outcome.",
    "hybrid": "Both KLs are over the teacher's {k} likeliest tokens (support `hybrid`).",
    "renorm": "Both KLs are over the teacher's {k} likeliest tokens, renormalised.",
    "recipe": "Both KLs are over the teacher's {k} likeliest tokens (support `recipe`).",
}


def objective(goal: ObjectiveConfig, gate: Gate | None, teacher: TeacherConfig) -> list[str]:
    """Paragraphs about what was minimised; `gate` is None for a published method."""
    parts = ["### The objective"]
    if gate is None:
        name, formula, where = PUBLISHED[goal.method]
        given = ", ".join(f"{key} = {value}" for key, value in goal.params.items())
        rest = f"with {given}, the rest" if given else "all parameters"
        parts += [
            f"{name}{f' ({where})' if where else ''}, {inline(rest)} at the published defaults. At a token, with the "
            "student's distribution s and the teacher's t:",
            f"```text\n{formula}\n```",
        ]
    else:
        parts += [
            "At every response token λ weighs reverse KL, and 1 − λ weighs forward KL; the loss is the mean over "
            "tokens.",
            f"```text\n{lam_formula(gate)}\nloss = λ · KL(student‖teacher) + (1 − λ) · KL(teacher‖student)\n```",
            _gate_words(goal, gate, teacher),
        ]
    if goal.temperature != 1:
        parts.append(f"Logits of both sides are divided by {goal.temperature:g} in the divergences.")
    return parts


def lam_formula(gate: Gate) -> str:
    """λ as it is computed, without the signals that have no weight."""
    if gate.is_static:
        return f"λ = {gate.lam():.6g}"
    terms = [(gate.a, "h"), (gate.b, "u"), (gate.d, "gap"), *((w, name) for name, w in gate.extra.items())]
    written = [(weight, f"{abs(weight):g}·{name}") for weight, name in terms if weight]
    written += [(gate.c, f"{abs(gate.c):g}")] if gate.c else []
    first = "−" if written[0][0] < 0 else ""
    rest = "".join(f" {'−' if weight < 0 else '+'} {text}" for weight, text in written[1:])
    return f"λ = σ({first}{written[0][1]}{rest})"


def _gate_words(goal: ObjectiveConfig, gate: Gate, teacher: TeacherConfig) -> str:
    k = goal.top_k
    support_k = goal.support_k or (teacher.k if teacher.payload == "top_k" else k)
    sentences = []
    if not gate.is_static:
        entropy = _ENTROPIES[goal.entropy].format(k=k)
        used = [name for name, weight in (("h", gate.a), ("u", gate.b), ("gap", gate.d)) if weight]
        if used == ["u"]:
            sentences.append(f"u is the teacher's entropy at the first token of the response, {entropy}.")
        elif used:
            sentences.append("; ".join(_SIGNALS[name].format(entropy=entropy) for name in used) + ".")
        if goal.shuffle:
            sentences.append("The values of λ in a step were dealt out to its tokens at random, as constants.")
        elif goal.stop_gradient:
            sentences.append("λ is a constant in the gradient.")
        else:
            sentences.append("Gradient flows through λ.")
    sentences.append(_SUPPORTS[goal.support].format(k=support_k))
    return " ".join(_capital(sentence) for sentence in sentences)


def _capital(text: str) -> str:
    """With a capital letter, unless the sentence begins with a symbol."""
    return text if re.match(r"(h|u|gap|λ)\b", text) or not text else text[0].upper() + text[1:]
