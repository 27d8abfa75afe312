"""Rollout sampler on a vLLM server that gets the student's weights after every update.

vLLM generates faster than a training network, but its samples are on-policy only if it has all of the student's
weights. So weights are written with an untied head, and after every sync the server's log-probabilities of a probe
text must agree with the student's, or nothing is sampled. That check cannot see updates smaller than the server's
rounding, so it is rehearsed once with weights that differ everywhere, which exposes a server that keeps old ones.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gatespace.addons.vllm.server import Choice, RefusedError, VllmServer, is_log_prob, read_position
from gatespace.errors import RunError, UsageError
from gatespace.files import Closing
from gatespace.models.cache_root import new_folder, write_record
from gatespace.models.hub import without_progress_bars
from gatespace.models.load import Model
from gatespace.models.lora import merged
from gatespace.rollout.native import Rollout, Sampling

_TEXT = 'The price rose by 12.5 %, "really"?!\n\t@user #tag naïve {"label": "x"}'
_PROBE = 32
"""Tokens of the probe text on which server and student must agree."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.12, torch.float16: 0.03}
"""Mean difference allowed in the probe's log-probabilities (nats), by the less precise side. SmolLM2 differs by less
than 1e-4 in float32 and by .05 in bfloat16 (single tokens by up to .24)."""
_HOT = 2.0
"""vLLM's highest temperature: log-probabilities of sampled tokens then clearly differ from those at temperature 1."""
_ALTERED = 0.03
"""Fraction of its neighbour added to each weight in the rehearsal."""
_NEVER = -100.0
"""Logit bias of padding ids; the lowest the protocol allows."""
_CONCURRENCY = 32
_ATTEMPTS = 4
_SEED = (1 << 63) - 1
_PLAIN: dict[str, Any] = {
    # A server may take defaults from the model's generation_config.json.
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class VllmSampler(Closing):
    """Samples with a vLLM server that has, or is sent, a model's weights; verifies them on a probe text.

    A server that is sent weights must run with ``VLLM_SERVER_DEV_MODE=1``, preferably from a folder written by
    `save_untied`, and see `folder` under the same path as this process: on this machine, or on a shared disk.

    Args:
        address: ``vllm://HOST:PORT[/MODEL]``.
        model: The student.
        folder: Parent of new weights; None: the server already has the model's weights, which do not change.
        rehearse: Check once, with weights that differ everywhere, that the server loads all of them. Briefly needs the
            memory of a second student.
        dtype: Precision of the server, and of the written weights.
        tolerance: Mean difference allowed in log-probabilities (nats); None: by precision.
        timeout: Seconds after which a request is retried.
        patience: Seconds without a reply after which `ServerAwayError` is raised.
        wait: As in `VllmServer`.
        report: Called with a message when a reply is late.
    """

    def __init__(
        self,
        address: str,
        model: Model,
        folder: Path | None = None,
        *,
        rehearse: bool = True,
        dtype: torch.dtype = torch.float32,
        tolerance: float | None = None,
        timeout: float = 60.0,
        patience: float = 600.0,
        wait: bool = True,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._model, self._dtype = model, dtype
        self._folder = None if folder is None else folder.expanduser().absolute()
        self._syncs = 0
        coarser = max(dtype, model.head.weight.dtype, key=lambda dtype: _TOLERANCE.get(dtype, math.inf))
        self._tolerance = _TOLERANCE[coarser] if tolerance is None else tolerance
        self._probe: list[int] = model.tokenizer.encode(_TEXT, add_special_tokens=False)[:_PROBE]
        self._seen = 0
        """The server's interruptions when its weights were last checked."""
        self._processed: bool | None = None
        self._server = VllmServer(
            address, timeout=timeout, patience=patience, wait=wait, report=report, concurrency=_CONCURRENCY
        )
        try:
            self._name = self._server.card().id
            if self._folder is not None and rehearse:
                altered = _altered(model)
                self._load(altered, self._folder)
                self._compare(altered, 2 * self._tolerance)
            self.sync()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort running requests, and delete the written weights."""
        self._server.close()
        if self._folder is not None:
            for number in (0, 1):
                shutil.rmtree(self._folder / f"weights-{number}", ignore_errors=True)

    # ------------------------------------------------------------------ weights

    def sync(self) -> float:
        """Send the current weights to the server; return the mean difference of log-probabilities in nats.

        Raises `RunError` if it exceeds rounding.
        """
        if self._folder is not None:
            self._load(self._model, self._folder)
        apart = self._compare(self._model, self._tolerance)
        self._seen = self._server.interruptions
        return apart

    def _load(self, model: Model, folder: Path) -> None:
        """Make the server load the weights of `model`."""
        new, old = (folder / f"weights-{(self._syncs + i) % 2}" for i in (0, 1))  # the server may have `old` open
        self._syncs += 1
        save_untied(model, new, dtype=self._dtype)
        try:
            self._server.command("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(new)}})
            self._server.command("/reset_prefix_cache")
        except RefusedError as error:
            if error.status == 404:
                raise UsageError(
                    f"{self._server} does not accept new weights",
                    got=error.got,
                    instead="start it with VLLM_SERVER_DEV_MODE=1 in its environment",
                ) from None
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _compare(self, model: Model, tolerance: float) -> float:
        """Return the mean log-probability difference between server and `model`; raise beyond `tolerance`."""
        apart = float((_log_probs(model, self._probe) - torch.tensor(self._server_log_probs(self._probe))).abs().mean())
        if not apart <= tolerance:
            why, instead = "it has another model, or computes in another precision", "start it with this model"
            if self._folder is not None:
                why = "it has old weights somewhere, or computes in another precision; a tied head may stay the old one"
                instead = "start it from a folder that gatespace.addons.vllm.sampler.save_untied wrote"
            raise RunError(
                f"{self._server} does not have the weights of {model.name}",
                got=f"the log-probabilities of a text differ by {apart:.3g} on average, more than {tolerance:g}",
                why=why,
                instead=f"{instead}, in the same precision",
            )
        return apart

    def _server_log_probs(self, ids: list[int]) -> list[float]:
        """Return the log-probability of every token but the first."""
        body = {"model": self._name, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
        (choice,) = self._server.complete([ids], body)
        positions = (choice.prompt_logprobs or [])[1:]
        return [read_position(raw, id)[id] for id, raw in zip(ids[1:], positions, strict=True)]

    # ------------------------------------------------------------------ responses

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        stop: Callable[[list[int]], bool],
        seeds: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> Rollout:
        """Sample a response to every prompt, like `gatespace.rollout.sample` but with vLLM's random numbers.

        Args:
            prompts: Whole prompts, with the shared prefix.
            sampling: Sampling parameters.
            stop: Whether a response is complete with its last token. vLLM generates up to an end token or the maximum
                length, and everything after the stop is cut off.
            seeds: One per row, from its own named stream; not needed at temperature 0.
            vocab_size: Ids from here on are padding. None: from the model's tokenizer.
        """
        if sampling.temperature > 0 and len(seeds) != len(prompts):
            raise UsageError("sampling needs a seed per row", got=f"{len(seeds)} for {len(prompts)} rows")
        self._check_logprobs_mode(sampling)
        size = vocab_size or self._model.vocab_size
        rollout = Rollout()
        for choice in self._choices(prompts, sampling, seeds, size):
            ids, log_probs = self._generated(choice, sampling, size)
            end = next((i for i in range(1, len(ids) + 1) if stop(ids[:i])), None)
            rollout.responses.append(ids[:end])
            rollout.log_probs.append(log_probs[:end])
            rollout.ended.append(end is not None)
        return rollout

    def _choices(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], vocab_size: int
    ) -> list[Choice]:
        """Return the replies to all prompts, from a server that had the weights throughout."""
        body = {
            "model": self._name,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.temperature > 0 else 1.0,
            "logprobs": 1,
            **_PLAIN,
            "ignore_eos": True,  # ignores the server's own end tokens; ours follow
            "stop_token_ids": list(self._model.end_ids),
        }
        if padding := range(vocab_size, len(self._model.head.weight)):
            body["logit_bias"] = dict.fromkeys(map(str, padding), _NEVER)
        if sampling.temperature == 0:
            requests = [(list(prompts), body)] if prompts else []
        else:  # one seed per request
            requests = [([prompt], {**body, "seed": seed & _SEED}) for prompt, seed in zip(prompts, seeds, strict=True)]
        for _ in range(_ATTEMPTS):
            running = [self._server.submit(partial(self._server.complete, rows, body)) for rows, body in requests]
            choices = [choice for request in running for choice in request.result()]
            if self._server.interruptions == self._seen:
                return choices
            self.sync()  # a restarted server may have other weights
        raise RunError(f"{self._server} does not stay long enough to sample", got=f"{_ATTEMPTS} interruptions")

    def _generated(self, choice: Choice, sampling: Sampling, vocab_size: int) -> tuple[list[int], list[float]]:
        ids = choice.token_ids or []
        values = [] if choice.logprobs is None else choice.logprobs.token_logprobs
        if not 0 < len(ids) <= sampling.max_new_tokens or len(values) != len(ids):
            raise RunError(
                f"{self._server} has generated something other than requested",
                got=f"{len(ids)} tokens and {len(values)} log-probabilities ({choice.finish_reason})",
            )
        log_probs = [value for value in values if value is not None and is_log_prob(value)]
        if len(log_probs) < len(values):
            raise RunError(f"{self._server} has sent an invalid log-probability", got=values)
        if max(ids) >= vocab_size or min(ids) < 0:
            raise RunError(f"{self._server} has generated an id that is not a token", got=max(ids))
        if len(ids) < sampling.max_new_tokens and ids[-1] not in self._model.end_ids:
            raise RunError(f"{self._server} has ended a response early", got=choice.finish_reason)
        return ids, log_probs

    def _check_logprobs_mode(self, sampling: Sampling) -> None:
        """Raise unless log-probabilities are those of the sampling distribution, not of the raw model."""
        if sampling.temperature == 0 or (sampling.temperature, sampling.top_p) == (1, 1):
            return
        if self._processed is None:
            body = {"model": self._name, "max_tokens": 1, "temperature": _HOT, "top_p": 1.0, "logprobs": 1, "seed": 1}
            (choice,) = self._server.complete([self._probe], body | _PLAIN)
            (token,), (drawn,) = self._generated(choice, Sampling(max_new_tokens=1), 1 << 62)
            own = self._server_log_probs([*self._probe, token])[-1]
            self._processed = abs(drawn - own) > self._tolerance
        if not self._processed:
            raise UsageError(
                f"{self._server} gives log-probabilities before temperature and top_p",
                got=f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}",
                instead="start it with --logprobs-mode processed_logprobs, or sample at temperature 1 and top_p 1",
            )


# ---------------------------------------------------------------------------------------------------- weights


def save_untied(model: Model, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a model folder with an untied head, atomically. `model` is not modified.

    Many small models tie embedding and head, and their folders store the matrix once. An engine that reloads weights
    from such a folder may update the embedding and silently keep its old head, as vLLM's CPU build does. A folder that
    has both avoids this.

    Args:
        model: Any model; adapters are merged into the copy.
        folder: Replaced if gatespace wrote it before.
        dtype: Precision of the written weights; None: the network's.
    """
    whole = merged(model) if hasattr(model.network, "merge_and_unload") else model
    network: Any = whole.network
    config = copy.deepcopy(network.config)
    config.tie_word_embeddings = False
    config.get_text_config().tie_word_embeddings = False
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    if dtype is not None:
        state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    head = network.get_output_embeddings()
    name = next(name for name, module in network.named_modules() if module is head) + ".weight"
    state[name] = state[name].clone()  # no longer shares storage with the embedding
    with torch.device("meta"):  # allocates no weights: they are assigned from `state`
        untied: Any = type(network)(config)
    missing, unexpected = untied.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        raise UsageError(
            "this architecture cannot be written with an untied head", got=f"{type(network).__name__}: {missing[:3]}"
        )
    untied.generation_config = network.generation_config
    with new_folder(folder) as fresh, without_progress_bars():
        untied.save_pretrained(fresh)
        whole.tokenizer.save_pretrained(fresh)
        write_record(fresh, {"name": model.name, "source": model.source})


@torch.no_grad()
def _log_probs(model: Model, ids: list[int]) -> Tensor:
    """Return the log-probability of every token but the first, over all rows of the head, as in vLLM."""
    network: Any = model.network
    logits = network(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, :-1]
    log_probs = torch.log_softmax(logits.float(), -1)
    return log_probs.gather(1, torch.tensor(ids[1:], device=logits.device)[:, None])[:, 0].cpu()


@torch.no_grad()
def _altered(model: Model) -> Model:
    """Return a copy with all weights changed: the body's slightly, so that rounding stays the same; the head's rows
    rotated by one, so that an old head, or one that merely copies the embedding, is far off."""
    whole = merged(model) if hasattr(model.network, "merge_and_unload") else model
    network: Any = copy.deepcopy(whole.network) if whole is model else whole.network
    layer = network.get_output_embeddings()
    rotated = layer.weight.roll(1, 0)
    for parameter in network.parameters():
        parameter.add_(parameter.roll(1, 0), alpha=_ALTERED)
    layer.weight = torch.nn.Parameter(rotated, requires_grad=False)
    return Model(network.eval(), model.tokenizer, model.name, model.source)
