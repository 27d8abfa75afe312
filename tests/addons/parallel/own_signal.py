"""A signal of a user's own, which every process of a run imports."""

from gatespace import signals


@signals.register("teacher_lead", range=(0.0, 1.0))
def teacher_lead(tokens):
    first, second = tokens.teacher_top(2).log_probs.exp().unbind(-1)
    return first - second
