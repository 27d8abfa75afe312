"""Whole configurations as a file would hold them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gatespace.plugins import provided

Data = dict[str, Any]

text = st.text(max_size=12)
name = st.one_of(
    st.text(min_size=1, max_size=12), st.sampled_from(["yes", "no", "1e-6", "null", "1:30", "~", "<<", "=", "0x1"])
)
path = st.text(st.characters(codec="utf-8", exclude_characters="\0~"), min_size=1, max_size=12)
count = st.integers(1, 10**6)
positive = st.floats(0, 1e6, exclude_min=True, allow_nan=False)
share = st.floats(0, 1, allow_nan=False)
number = st.floats(allow_nan=False, allow_infinity=False)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Data]:
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def shares(draw: st.DrawFn, *names: str) -> Data:
    first = draw(share)
    return dict(zip(draw(st.permutations(names)), (first, 1 - first), strict=False))


labels = st.lists(name, min_size=2, max_size=4, unique=True)
tables = st.fixed_dictionaries(
    {"source": name | st.fixed_dictionaries({"train": name}, optional={"test": name}), "labels": labels},
    optional={"definitions": st.dictionaries(name, text, max_size=2), "name": st.none() | name, "question": name},
)
texts = st.one_of(
    st.fixed_dictionaries({"source": name, "prompt": st.just("{a}: {b}"), "answer": name}, optional={"metric": name}),
    st.fixed_dictionaries(
        {"source": name, "messages": name},
        optional={"stop": st.lists(name, max_size=2), "system": text, "thinking": st.booleans(), "also": st.just([])},
    ),
)
tasks = st.one_of(
    st.fixed_dictionaries({"text": texts}, optional={"prefill": text}),
    some(
        name=name,
        root=st.none() | path,
        prefill=text,
        brief=st.booleans(),
        split=st.none() | shares("teacher", "distill"),
    ),
    st.fixed_dictionaries({"table": tables}, optional={"prefill": text, "split_seed": st.integers(0, 2**63 - 1)}),
)
gates = st.one_of(
    st.sampled_from(["G5", "static:0.388", " 4,0,-1,0 "]),
    st.lists(number, min_size=4, max_size=4),
    st.dictionaries(name, number, min_size=1, max_size=3),
)
values = st.one_of(st.booleans(), st.integers(-(10**20), 10**20), number, text)
objectives = st.one_of(
    some(
        gate=gates,
        top_k=count,
        temperature=positive,
        stop_gradient=st.booleans(),
        shuffle=st.booleans(),
        entropy=st.sampled_from(["full", "bucket"]),
    ),
    st.fixed_dictionaries(
        {"support": st.sampled_from(["bucket", "renorm"])}, optional={"support_k": st.none() | count}
    ),
    st.fixed_dictionaries(
        {"method": st.sampled_from(["static", "todi", "eopd"])},
        optional={"params": st.dictionaries(name, values, max_size=2)},
    ),
)
loras = st.none() | some(
    r=count, alpha=positive, targets=st.just("all-linear") | st.lists(name, min_size=1, max_size=3, unique=True)
)
trains = st.fixed_dictionaries(
    {"pair": st.fixed_dictionaries({"teacher": name}, optional={"student": name, "lora": loras})},
    optional={
        "task": tasks,
        "objective": objectives,
        "rollout": some(
            **{"from": shares("student", "teacher", "gold")}, top_p=st.floats(0.01, 1), stop=st.just("eos")
        ),
        "teacher": some(cache=st.none() | name, k=count),
        "optimizer": some(
            lr=positive, betas=st.lists(st.floats(0, 0.999), min_size=2, max_size=2), clip=st.none() | positive
        ),
        "engine": some(
            threads=st.none() | count, device=st.sampled_from(["cpu", "cuda:1"]), deterministic=st.booleans()
        ),
        "evaluation": some(final=st.lists(st.sampled_from(["val", "test"]), unique=True), every=st.integers(0, 9)),
        "trace": some(
            trackers=st.lists(st.sampled_from([*provided("trackers")]), unique=True)
            if provided("trackers")
            else st.just([])
        ),
        "seed": st.integers(0, 2**63 - 1),
        "output": path,
    },
)
