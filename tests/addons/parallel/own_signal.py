"""A signal of a user's own, which every process of a run imports."""

from gatespace import signals


@signals.register("lead_in_processes", range=(0.0, 1.0))
def lead_in_processes(tokens):
    first, second = tokens.teacher_top(2).log_probs.exp().unbind(-1)
    return first - second
