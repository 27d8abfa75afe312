"""A causal language model with its tokenizer: by folder, by name, or from the Hugging Face Hub.

What is specific to an architecture stays here: other modules see a body that returns hidden states and a head that
turns them into logits. Loading checks that the two together equal the network.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gatespace.errors import UsageError, missing_extra, unknown_name
from gatespace.gating.projection import Head, Projection, logits_buffer
from gatespace.models.cache_root import new_folder, read_record, write_record
from gatespace.models.hub import first_line, hub_reachable, without_progress_bars
from gatespace.models.packaged import PACKAGED, packaged_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "smollm2"
TINY = ("tiny", "tiny-student", "tiny-teacher")

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PROBE = "Probe7"
# Entries of a configuration that cannot change what a network computes from given weights.
_WITHOUT_EFFECT = re.compile(
    r"_.*|transformers_version|architectures|(torch_)?dtype|use_cache|\w+_token_id|id2label|label2id|initializer_range"
    r"|output_attentions|output_hidden_states|return_dict"
)
_ALIGNMENT = 64
"""Bytes, as in torch's allocations."""


@dataclass(eq=False)
class Model:
    """A network and its tokenizer.

    Args:
        network: A causal LM, in evaluation mode.
        tokenizer: Its tokenizer.
        name: The user's name for it.
        source: Where it came from: a folder, or a Hub id and its revision.
    """

    network: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    name: str
    source: str
    unpackable: str | None = field(default=None, init=False, repr=False)
    """Why packed passes differ from the network's own forward, "" if they do not; None: not probed (`body_of`)."""
    _fingerprint: tuple[object, str] = field(default=(None, ""), init=False, repr=False)
    """State of the weights when their fingerprint was taken, and the fingerprint."""

    @cached_property
    def vocab_size(self) -> int:
        """The number of ids the tokenizer has. The head may have more rows; they are padding."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def window(self) -> int | None:
        """Context window: the most tokens of prompt and response; None if not in its configuration."""
        found = getattr(self.network.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a response, in ascending order."""
        declared = getattr(getattr(self.network, "generation_config", None), "eos_token_id", None)
        found = {*(declared if isinstance(declared, (list, tuple)) else [declared])}
        found |= {self.tokenizer.eos_token_id, _end_of_turn(self.tokenizer)}
        return tuple(sorted(id for id in found if isinstance(id, int) and 0 <= id < self.vocab_size))

    @cached_property
    def turn_end(self) -> int | None:
        """The id that closes a complete response: the chat template's, or else the tokenizer's end."""
        for id in (_end_of_turn(self.tokenizer), self.tokenizer.eos_token_id, *self.end_ids):
            if isinstance(id, int) and id in self.end_ids:
                return id
        return None

    @property
    def pad_id(self) -> int:
        """The id at masked positions; any would do."""
        pad = self.tokenizer.pad_token_id
        if isinstance(pad, int) and 0 <= pad < self.vocab_size:
            return pad
        return self.end_ids[0] if self.end_ids else 0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute precision."""
        return self.head.weight.dtype

    @property
    def body(self) -> nn.Module:
        """The network without its head: `input_ids` to `last_hidden_state`, after the final norm."""
        decoder: nn.Module = _unwrapped(self.network).get_decoder()
        return decoder

    @property
    def head(self) -> Head:
        """The head, with the network's own weight, so that gradients and updates reach it."""
        return network_head(self.network)

    def whole(self) -> AbstractContextManager[None]:
        """Gather all weights of a sharded model for passes without gradient."""
        return nullcontext()

    def learning(self) -> AbstractContextManager[None]:
        """The same for passes with gradient, which reaches the sharded weights on exit."""
        return nullcontext()

    def gathered(self, *, here: bool = True) -> Model | None:
        """The whole model; None if it is sharded and not wanted `here`."""
        return self

    def fingerprint(self) -> str:
        """A hash of the weights and of all configuration that affects the output.

        It does not depend on where the files are or how they are split, and changes if any weight or the precision of
        the weights changes.
        """
        state = _weight_versions(self.network)
        if self._fingerprint[0] != state:
            self._fingerprint = state, _fingerprint(self.network)
        return self._fingerprint[1]

    def tokenizer_digest(self) -> str:
        """A hash of all tokens with their ids, and of the chat template."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        content = json.dumps([vocabulary, self.tokenizer.chat_template], sort_keys=True)
        return hashlib.sha256(b"gatespace tokenizer 1\n" + content.encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write a normal model folder atomically. Adapters are merged into the saved weights.

        If the weights are quantised, the folder has the adapters alone and names their base (PEFT's format).
        A folder that gatespace has written is replaced; any other that is not empty is refused.
        """
        whole = self
        if _unwrapped(self.network) is not self.network and not getattr(self.network, "is_quantized", False):
            from gatespace.models.lora import merged

            whole = merged(self)
        with new_folder(Path(folder)) as fresh, without_progress_bars():
            whole.network.save_pretrained(fresh)
            whole.tokenizer.save_pretrained(fresh)
            write_record(fresh, {"name": self.name, "source": self.source})


def load_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Model:
    """Load a causal LM and its tokenizer. Weights saved quantised (GPTQ, AWQ, bitsandbytes) stay so.

    Args:
        name: A folder; ``smollm2``; or a Hub id, ``org/name`` or ``hub:org/name``. A folder takes precedence over a Hub
            id of the same name, and the short name over a folder (write ``./smollm2`` for the folder).
        dtype: Precision of the weights.
        device: Where the weights go; ``auto``: over all GPUs, layer by layer; ``meta``: nowhere, only shapes and
            tokenizer are loaded.
        revision: Branch, tag or commit of a Hub id.
        trust_remote_code: Whether code that comes with the model may run.
        quantization: ``int8`` or ``nf4``: quantise linear layers except the head with bitsandbytes; None: do not.
        report: Called with a message if something has to be fetched or converted first.
    """
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("loading a model", module="transformers", extra="train") from error
    where, options, source = located(name, revision, report)
    options |= {"trust_remote_code": trust_remote_code}
    with _loading(name, "configuration", options):
        config = transformers.AutoConfig.from_pretrained(where, **options)
    if source is None:
        # The rest is loaded from the same commit, even if the branch moves meanwhile.
        options["revision"] = _commit(where, options["revision"])
        source = f"{where}@{options['revision']}"
    if config.is_encoder_decoder:
        raise UsageError("not a causal language model", got=f"{name}, an encoder-decoder ({config.model_type})")
    with _loading(name, "tokenizer", options):
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.added_tokens_decoder):
        # For some architectures transformers creates an empty tokenizer if its files are missing.
        raise UsageError(
            f"the tokenizer of {name} has no tokens", why="its files are missing, tokenizer.json above all"
        )
    quantised = quantization is not None or getattr(config, "quantization_config", None) is not None
    by_map = quantised or device in ("auto", "meta")  # quantised layers cannot be moved later
    if by_map:
        options |= {"device_map": device if device == "auto" else {"": device}}
    with _loading(name, "weights", options), without_progress_bars():
        if quantization is not None:
            options |= {"quantization_config": _bitsandbytes(quantization, config, dtype, name)}
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    network, loading = loaded
    missing = sorted(loading["missing_keys"]) + sorted(map(str, loading["mismatched_keys"]))
    if missing:
        raise UsageError(
            f"{name} does not have all the weights of a {type(network).__name__}",
            got=f"{len(missing)} missing, the first is {missing[0]}",
            why="they would be random numbers",
        )
    model = Model(network.eval(), tokenizer, name, source)
    if device == "auto" and any(parameter.is_meta for parameter in network.parameters()):
        raise UsageError(
            f"{name} does not fit on the GPUs of this machine together",
            instead="quantised weights (int8, nf4), cpu, or a service on another machine",
        )
    if device != "meta":
        _align(network)
        if not by_map:
            network.to(device)
        check_network(model)
    return model


def _bitsandbytes(quantization: str, config: Any, dtype: torch.dtype, name: str) -> Any:
    from transformers import BitsAndBytesConfig

    if quantization not in ("int8", "nf4"):
        raise unknown_name("quantization", quantization, ("int8", "nf4"))
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            "weights that were saved quantised cannot be quantised again", got=f"{quantization} for {name}"
        )
    if quantization == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    # No outlier threshold: outliers are detected over a whole batch, and a row must not depend on the others.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def _align(network: nn.Module) -> None:
    """Copy unaligned weights to memory allocated by torch.

    On a CPU the last bits of a matmul depend on the alignment of its operands; memory-mapped weights have any
    alignment, which no fingerprint covers.
    """
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.data_ptr() % _ALIGNMENT:
            tensor.data = tensor.data.clone()


def check_network(model: Model) -> None:
    """Raise unless the network is causal and its logits are those of `head` on the output of `body`."""
    head, network = model.head, model.network
    if model.vocab_size > len(head.weight):
        raise UsageError(
            f"the tokenizer of {model.name} has ids that its head has no row for",
            got=f"{model.vocab_size} ids, {len(head.weight)} rows",
        )
    last = model.vocab_size - 1
    # Two rows that differ only in the last token: in a causal network, earlier hidden states are equal.
    ids = torch.tensor([[last // 5, last // 2, 0], [last // 5, last // 2, last]], device=model.device)
    with torch.no_grad():
        hidden = model.body(input_ids=ids, use_cache=False).last_hidden_state.to(model.device)
        logits = network(input_ids=ids, use_cache=False).logits.float()
        flat, rows = hidden.flatten(0, 1), len(head.weight)
        projection = Projection(flat, head, rows)
        rebuilt = projection.into(logits_buffer(flat, len(flat), rows, projection.dtype), slice(None), 0, rows)
    tolerance = torch.finfo(hidden.dtype).eps ** 0.5
    for what, values in (("hidden states", hidden), ("logits", logits)):
        if bool((values.isnan() | (values.abs() == torch.inf)).any()):
            raise UsageError(
                f"{model.name} computes numbers that are not finite",
                got=f"its {what}: {_not_finite(network)}",
                why="no loss or response can be computed from them",
                instead="weights of a training that did not diverge, loaded whole; fp32 or bf16 in place of float16",
            )
    if not _close(hidden[0, :2], hidden[1, :2], tolerance):
        raise UsageError(
            "not a causal language model",
            got=f"{model.name}, a {type(network).__name__} whose states depend on later tokens",
        )
    if not _close(rebuilt, logits.flatten(0, 1), tolerance):
        raise UsageError(
            f"the logits of {model.name} are not those of its head on its hidden states",
            got=f"{type(network).__name__}, scale {head.scale:g}, softcap {head.softcap}",
            why="gatespace makes logits where the loss needs them, and only there",
            instead="a model of another architecture",
        )


def located(
    name: str, revision: str | None, report: Callable[[str], None] | None, *, weights: bool = True
) -> tuple[str, dict[str, Any], str | None]:
    """Where transformers finds the model, with which options, and the source if known before loading.

    `weights`: whether a folder must have weights; not if only shapes are needed.
    """
    if name in TINY:
        raise UsageError(
            f"{name!r} is built for a task",
            why="its tokenizer is trained on the task's texts",
            instead="build_tiny(task) gives the folders of the pair",
        )
    folder = Path(name).expanduser()
    if name in PACKAGED:
        folder = packaged_folder(name, report=report or (lambda line: None))
        return str(folder), {"local_files_only": True}, str(read_record(folder).get("source", folder))
    if folder.is_dir():
        if revision is not None:
            raise UsageError("a folder has no revisions", got=f"{name} and revision {revision!r}")
        _check_folder(folder, weights=weights)
        origin = read_record(folder).get("source")
        return str(folder), {"local_files_only": True}, f"{folder} (from {origin})" if origin else str(folder)
    if folder.suffix.lower() == ".gguf" and folder.is_file():
        raise _gguf(folder)
    return hub_name(name), {"local_files_only": not hub_reachable(), "revision": revision or "main"}, None


def hub_name(name: str) -> str:
    """The Hub id that `name` stands for; raises if it cannot be one. Does not check that the model exists."""
    hub_id = name.removeprefix("hub:")
    folder = Path(name).expanduser().parent
    in_folder = hub_id == name and "/" in name and folder.is_dir()  # a name without `hub:` next to existing folders
    if _HUB_NAME.fullmatch(hub_id) and not hub_id.startswith(".") and not in_folder:
        return hub_id
    there = [path.name for path in folder.iterdir() if path.is_dir()] if in_folder else []
    near = difflib.get_close_matches(Path(name).name, there, n=1)
    raise UsageError(
        "no such model folder" if "/" in name and hub_id == name else "no such model",
        got=repr(name),
        why="it is neither an existing folder nor a Hub id",
        instead=(f"did you mean {folder / near[0]}? " if near else "") + "A folder, smollm2, or hub:org/name",
    )


def _commit(name: str, revision: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, "config.json", revision=revision)  # …/snapshots/<commit>/config.json
    return Path(file).parent.name if isinstance(file, str) else revision


def _check_folder(folder: Path, *, weights: bool) -> None:
    if not (folder / "config.json").is_file():
        for file in sorted(folder.glob("*.gguf")):
            raise _gguf(file)
        adapters = (folder / "adapter_config.json").is_file()
        raise UsageError(
            "not a model folder",
            got=str(folder),
            why="it has adapters alone, of a student that was quantised" if adapters else "it has no config.json",
            instead="its base with them: PeftModel.from_pretrained(base, folder)" if adapters else "",
        )
    if weights and not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        raise UsageError(
            "a model folder has its weights in .safetensors files",
            got=f"{folder} with {', '.join(pickled) or 'no weights'}",
            why="loading a pickle runs whatever code is in it" if pickled else "",
            instead="model.save_pretrained(folder) where it comes from: it writes safetensors" if pickled else "",
        )


def _gguf(file: Path) -> UsageError:
    return UsageError(
        "a GGUF file is not a model folder",
        got=str(file),
        why="its weights are quantised for inference, and there is no gradient through them",
        instead="the model that it was made from; or convert it: from_pretrained(folder, gguf_file=…, "
        "quantization_config=GgufConfig(dequantize=True)) and save_pretrained of transformers",
    )


@contextmanager
def _loading(name: str, part: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Say in our words what transformers, tokenizers and safetensors raise, which is of many kinds."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        why = instead = ""
        what = f"the {part} of {name} could not be loaded"
        if "Unrecognized configuration class" in str(error):
            what = "not a causal language model"
        elif isinstance(error, ImportError) and part == "weights":
            what = f"the quantised weights of {name} need a package that is not here"
            instead = "that package, e.g. pip install bitsandbytes accelerate; or weights that are not quantised"
        elif "revision" in options:  # from the Hub
            if part == "configuration":
                what = f"no such model folder: {name}; nor could a model of that name be loaded from the Hub"
            why = "no such id or revision, one that needs a login (hf auth login), or one without safetensors files"
            if options["local_files_only"]:
                why = "the Hugging Face Hub is out of reach, or HF_HUB_OFFLINE is set, and no copy is in its cache"
                instead = "the folder of a copy that was downloaded elsewhere; or smollm2, which needs no Hub"
        raise UsageError(what, got=first_line(error), why=why, instead=instead) from error


def _unwrapped(network: Any) -> Any:
    # PEFT wraps the network whose layers it changed in place.
    inner = getattr(network, "get_base_model", None)
    return network if inner is None else inner()


def network_head(network: Any) -> Head:
    """The output head of a causal LM: its own parameters, and what the architecture does to the logits."""
    network = _unwrapped(network)
    layer = network.get_output_embeddings()
    if not isinstance(getattr(layer, "weight", None), Tensor):
        raise UsageError(
            "gatespace needs a model whose head is one linear layer",
            got=f"{type(network).__name__} with {type(layer).__name__}",
        )
    config = network.config.get_text_config()
    scale = 1.0
    for factor in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere, Falcon-H1, Muse
        scale *= getattr(config, factor, None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    # One name, two meanings: Granite divides by it, HyperCLOVA X multiplies.
    scale = scale * divisor if config.model_type.startswith("hyperclovax") else scale / divisor
    softcap = getattr(config, "final_logit_softcapping", None) or None  # e.g. Gemma 2
    return Head(layer.weight, getattr(layer, "bias", None), scale, softcap)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the chat template puts after the assistant's text, if it is a special one."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template is code and may reject any chat
        return None
    tail = str(text).rpartition(_PROBE)[2]
    ids: list[int] = tokenizer.encode(tail, add_special_tokens=False) if tail else []
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return ids[0] if ids and ids[0] in special else None


def _not_finite(network: nn.Module) -> str:
    """Where non-finite numbers come from."""
    for name, tensor in network.state_dict().items():
        if count := int(tensor.isfinite().logical_not().sum()):
            return f"{count} of {tensor.numel()} values of {name} are not finite"
    return f"all weights are finite, so the computation overflows in {next(network.parameters()).dtype}"


def _close(left: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool((left - right).abs().max() <= tolerance * right.abs().max())


# ---------------------------------------------------------------------------------------------------- fingerprint


def _fingerprint(network: Any) -> str:
    """SHA-256 of the names, types, shapes and bytes of all weights, and of the configuration that has an effect."""
    config = json.dumps(_with_effect(network.config.to_dict()), sort_keys=True, default=str)
    digest = hashlib.sha256(b"gatespace model 1\n" + config.encode() + b"\n")
    weights = sorted(network.state_dict().items())
    with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as pool:
        for line in pool.map(_line, weights):
            digest.update(line)
    return digest.hexdigest()


def _weight_versions(network: Any) -> list[tuple[str, int, int]]:
    """A list that changes when a weight is replaced or updated in place, e.g. by an optimizer; cheap to make."""
    return [
        (name, weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for name, weight in network.state_dict().items()
    ]


def _with_effect(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _with_effect(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (isinstance(key, str) and _WITHOUT_EFFECT.fullmatch(key))
    }


def _line(item: tuple[str, Tensor]) -> bytes:
    name, weight = item
    raw: Any = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{name} {weight.dtype} {list(weight.shape)} {hashlib.sha256(raw).hexdigest()}\n".encode()
