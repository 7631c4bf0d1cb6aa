"""Models and tokenizers from a hub id, a directory or a ``.gguf`` file.

Whatever would silently make another model than the one named is refused: weights that the files
lack, a tokenizer larger than the embedding, a missing chat template or end token.
"""

from __future__ import annotations

import logging
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import jinja2
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from agentrl.errors import ConfigError, ModelError
from agentrl.model.gguf import converted

HUB_TIMEOUT_S = 2.0
_BUILDING = threading.RLock()


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A policy that can be sampled and trained."""

    model: Any
    """An ``AutoModelForCausalLM`` in evaluation mode."""
    tokenizer: Any
    """With a chat template and an end-of-sequence token."""
    source: str
    """What was asked for."""


def load_model(
    path: str,
    *,
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    chat_template: str | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        path: a hub id, a directory, or a ``.gguf`` file (converted once, then cached).
        device: where the model goes; ``auto`` is CUDA where there is one.
        dtype: of its weights.
        chat_template: a jinja file that replaces the tokenizer's template.

    Raises:
        ModelError: nothing there that can be loaded, or something that cannot be used as it is.
    """
    template = None if chat_template is None else _read_template(Path(chat_template))
    with quiet_transformers():
        source = _resolve(path)
        model = _load_weights(source, path, dtype)
        tokenizer = _load_tokenizer(source, path)
    if template is not None:
        tokenizer.chat_template = template
    loaded = LoadedModel(
        model=model.to(resolve_device(device)).eval(), tokenizer=tokenizer, source=path
    )
    _check(loaded)
    return loaded


def load_tokenizer(path: str) -> Any:
    """Load what :func:`load_model` would load, without the weights.

    Raises:
        ModelError: nothing there that can be loaded.
    """
    with quiet_transformers():
        return _load_tokenizer(_resolve(path), path)


def load_with_weights(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    device: str = "auto",
    chat_template: str | None = None,
) -> LoadedModel:
    """Build a model from configuration and tokenizer in ``folder``, with ``weights``.

    Args:
        device, chat_template: as of :func:`load_model`.

    Raises:
        ModelError: the weights are those of another model, or the template cannot be used.
    """
    template = None if chat_template is None else _read_template(Path(chat_template))
    model, tokenizer = _build(folder)
    if template is not None:
        tokenizer.chat_template = template
    try:
        missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    except RuntimeError as error:  # a shape differs
        raise ModelError(
            f"the weights do not fit the configuration in {str(folder)!r}: {error}"
        ) from error
    model.tie_weights()
    tied = {name for name in missing if name.endswith("lm_head.weight")}
    if not model.config.tie_word_embeddings:
        tied = set()
    if unexpected or set(missing) - tied:
        raise ModelError(
            f"the weights do not fit the configuration in {str(folder)!r}: "
            f"missing {sorted(set(missing) - tied)[:3]}, unknown {sorted(unexpected)[:3]}"
        )
    return LoadedModel(
        model=model.to(resolve_device(device)).eval(), tokenizer=tokenizer, source=str(folder)
    )


def load_untrained(folder: Path, *, device: str, source: str) -> LoadedModel:
    """Build a model from configuration and tokenizer in ``folder``, with random weights.

    Raises:
        ModelError: there is no usable configuration or tokenizer.
    """
    device = resolve_device(device)
    # Built there: a model that is moved to torch's meta device loses what ties its weights.
    with torch.device("meta") if device == "meta" else nullcontext():
        model, tokenizer = _build(folder)
    return LoadedModel(model=model.to(device).eval(), tokenizer=tokenizer, source=source)


def _build(folder: Path) -> tuple[Any, Any]:
    """Return the module, with random weights, and the tokenizer that ``folder`` describes."""
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ModelError(f"no usable configuration in {str(folder)!r}: {error}") from error
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model, _load_tokenizer(_Source(str(folder)), str(folder))


def resolve_device(device: str) -> str:
    """Return ``device``, with ``auto`` as CUDA where there is one.

    Raises:
        ConfigError: this process sees no such GPU.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    found = torch.cuda.device_count() if kind == "cuda" else 1
    if kind == "cuda" and int(index or 0) >= found:
        raise ConfigError(
            f"model.device={device!r}: this process sees {found} GPUs of CUDA; write "
            + (f"cuda:0 to cuda:{found - 1}" if found else "cpu, or auto")
        )
    return device


def positions_of(model: Any) -> int | None:
    """Return how many positions a model was made for; None where its configuration has no say."""
    return positions_in(model.config)


def positions_in(config: Any) -> int | None:
    """Return how many positions a model of this transformers configuration has, if it says."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


@dataclass(slots=True, frozen=True)
class _Source:
    location: str
    """A local directory, or a hub id."""
    cached_only: bool = False
    """The hub cannot be reached: look into its local cache only."""


def _resolve(path: str) -> _Source:
    """Find what a path means."""
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ModelError(f"no such file: {path!r}; model.path names a .gguf file to read")
        return _Source(str(converted(local.resolve())))
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(
                f"{path!r} holds no config.json; give the directory that save_pretrained wrote"
            )
        return _Source(str(local))
    if local.exists():
        raise ModelError(f"{path!r} is a file; model.path takes a directory or a .gguf file")
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelError(f"no such directory: {path!r}; a hub id looks like 'owner/name'")
    return _Source(path, cached_only=not hub_answers())


def hub_answers() -> bool:
    """Ask once, with a deadline; the hub's own client would retry for half a minute."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True  # a direct connection would say nothing about the way through the proxy
    hub = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=HUB_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _load_weights(source: _Source, path: str, dtype: torch.dtype) -> Any:
    """Load the module; refuse one that would be completed with random numbers."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=source.cached_only,
            # Or the hub is asked for an adapter all the same, again and again.
            adapter_kwargs={"local_files_only": source.cached_only},
        )
    except Exception as error:
        raise _not_loaded("model", source, path, error) from error
    model, info = loaded
    lacking = sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])})
    if lacking:
        raise ModelError(
            f"the files of {path!r} lack {len(lacking)} weights of a "
            f"{type(model).__name__} or hold them in another shape, first {lacking[0]!r}; they "
            "would be random: is it a causal language model, and is the download whole?"
        )
    return model


def _load_tokenizer(source: _Source, path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source.location, local_files_only=source.cached_only)
    except Exception as error:
        raise _not_loaded("tokenizer", source, path, error) from error


def _not_loaded(what: str, source: _Source, path: str, error: Exception) -> ModelError:
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if Path(source.location).is_dir():
        return ModelError(f"cannot load the {what} in {path!r} ({reason}); are its files whole?")
    how = "the hub cannot be reached and its local cache lacks it" if source.cached_only else reason
    return ModelError(
        f"cannot load the {what} {path!r}: no directory of that name, and as a hub id: {how}. "
        "Check the name and the network, or download it elsewhere and give its directory; "
        "model.path=tiny needs no download"
    )


def _read_template(path: Path) -> str:
    """Read a chat template; refuse one that is no jinja."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read the chat template {str(path)!r}: {error}") from error
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template {str(path)!r} is no valid jinja, line {error.lineno}: {error}"
        ) from error
    if not text.strip():
        raise ModelError(f"the chat template {str(path)!r} is empty")
    return text


def _check(loaded: LoadedModel) -> None:
    """Refuse what would have to be invented."""
    tokenizer, path = loaded.tokenizer, loaded.source
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {path!r} has no chat template (a base model?); give one with "
            "model.chat_template=FILE.jinja"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {path!r} has no end-of-sequence token, so turns could not end; set "
            "eos_token in its tokenizer_config.json"
        )
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer of {path!r} has {len(tokenizer)} tokens but the model only {rows} "
            "embeddings; they belong to different models, or the embedding must be resized first"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Build or read a model: one thread at a time, without advice and progress bars.

    While transformers builds a model it replaces functions of its own and of torch for the whole
    process, such as the one that ties embeddings. Two threads that overlapped would put each
    other's replacement back, for good.
    """
    with _BUILDING, _quiet():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.ERROR)
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        hub.setLevel(hub_level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
