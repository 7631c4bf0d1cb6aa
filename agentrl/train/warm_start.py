"""The embedded model, warmed up on an environment's demonstrations and kept for the next run.

Demonstrations -> tokenizer -> model with random weights -> supervised training -> a directory that
``AutoModelForCausalLM`` and ``AutoTokenizer`` load. The directory lies in the user's cache under a
hash of everything that shapes it, complete or absent.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import agentrl.model.tiny
import agentrl.train.sft
from agentrl.agent.renderer import Renderer
from agentrl.agent.template import ChatTemplate
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.env.config import EnvConfig
from agentrl.env.registry import env_class
from agentrl.errors import ModelError
from agentrl.model.cache import cache_root, make_once
from agentrl.model.tiny import MAX_CONTEXT_TOKENS, build_tiny, train_tokenizer
from agentrl.sandbox.base import SandboxProvider
from agentrl.tool.binding import Toolbox
from agentrl.train.config import WarmStartConfig
from agentrl.train.demonstrations import collect_demonstrations, open_player
from agentrl.train.sft import SFTResult, SFTStep, run_sft
from agentrl.train.sft_config import SFTConfig
from agentrl.train.sft_data import ChatExample, encode_examples

FACTS_NAME = "warm_start.json"
MAX_DEMONSTRATIONS = 16_384
"""Distinct demonstrations of one warm start; a longer one passes over them again."""
_NUM_VALIDATION = 256
_NUM_TOKENIZER_TEXTS = 3000
_PACKAGES = ("agentrl", "torch", "transformers", "tokenizers")
# Pure byte-level: renders conversations before there is a trained tokenizer.
_BYTES_ONLY = 259


class Report(Protocol):
    """Shows progress."""

    def __call__(self, stage: str, done: int, total: int, loss: float | None = None) -> None:
        """Stages are ``demonstrations``, ``tokenizer`` and ``sft``, one after the other."""
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class WarmStart:
    """A model that is ready to be trained further."""

    path: Path
    """Holds weights, configuration and tokenizer."""
    cached: bool
    """True where it was there already."""
    facts: dict[str, Any]
    """Losses, sizes and seconds, as they stand in ``warm_start.json``."""


async def warm_start(
    config: WarmStartConfig,
    env_config: EnvConfig,
    env: Any,
    *,
    toolbox: Toolbox,
    sandboxes: SandboxProvider,
    report: Report | None = None,
    cache: Path | None = None,
) -> WarmStart:
    """Return the warmed-up embedded model for an environment, from the cache or made now.

    Args:
        config: the recipe.
        env_config: names the environment; its id and arguments are part of the cache key.
        env: an instance of it.
        toolbox: the tools that the model is told of.
        sandboxes: for demonstrations that have to be played.
        report: told about progress.
        cache: default: ``$AGENTRL_CACHE``, else ``~/.cache/agentrl``.

    Raises:
        EnvError: the environment has no demonstrations; says what to do.
        ModelError: the cache cannot be written, or is damaged.
    """
    key = cache_key(config, env_config, toolbox)
    target = (cache or cache_root()) / "warm_start" / f"{_readable(env_config.id)}-{key}"
    if target.is_dir():
        return WarmStart(path=target, cached=True, facts=_read_facts(target))
    report = report or _silent
    demonstrations = await collect_splits(
        sft_config(config), env_config, env, toolbox=toolbox, sandboxes=sandboxes, report=report
    )
    make_once(
        target,
        lambda directory: train_tiny(
            sft_config(config),
            demonstrations,
            directory,
            vocab_size=config.vocab_size,
            report=report,
        ),
    )
    return WarmStart(path=target, cached=False, facts=_read_facts(target))


def cache_key(config: WarmStartConfig, env_config: EnvConfig, toolbox: Toolbox) -> str:
    """Hash everything that shapes the model: recipe, environment and its source, tools, versions.

    (The last bits of the weights also depend on the processor and the number of threads.)
    """
    digest = hashlib.blake2b(digest_size=8)
    plain = {
        "recipe": asdict(config),
        "env": {"id": env_config.id, "kwargs": env_config.kwargs},
        "tools": toolbox.schemas,
        "versions": {name: version(name) for name in _PACKAGES},
    }
    digest.update(json.dumps(plain, sort_keys=True, default=repr).encode())
    for path in _sources(env_class(env_config.id)):
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def sft_config(config: WarmStartConfig) -> SFTConfig:
    """Return the supervised training of a warm start."""
    return SFTConfig(
        lr=config.lr,
        steps=config.steps,
        episodes_per_step=config.episodes_per_step,
        max_tokens=MAX_CONTEXT_TOKENS,
        seed=config.seed,
    )


async def collect_splits(
    sft: SFTConfig,
    env_config: EnvConfig,
    env: Any,
    *,
    toolbox: Toolbox,
    sandboxes: SandboxProvider,
    report: Report,
) -> dict[str, list[ChatExample]]:
    """Return demonstrations of the splits ``train`` (as many as ``sft`` sees) and ``val``.

    Raises:
        EnvError: the environment has no demonstrations; says what to do.
    """
    wanted = {
        "train": min(sft.steps * sft.episodes_per_step, MAX_DEMONSTRATIONS),
        "val": _NUM_VALIDATION,
    }
    found: dict[str, list[ChatExample]] = {}
    async with open_player(
        env_config,
        toolbox=toolbox,
        sandboxes=sandboxes,
        renderer=Renderer(train_tokenizer([""], _BYTES_ONLY)),
        seed=sft.seed,
    ) as play:
        for split, count in wanted.items():
            before = sum(map(len, found.values()))

            def on_progress(num_found: int, before: int = before) -> None:
                report("demonstrations", before + num_found, sum(wanted.values()))

            found[split] = await collect_demonstrations(
                env,
                split,
                seed=sft.seed,
                count=count,
                tools=toolbox.schemas,
                play=play,
                on_progress=on_progress,
            )
    return found


def train_tiny(
    sft: SFTConfig,
    demonstrations: Mapping[str, Sequence[ChatExample]],
    directory: Path,
    *,
    vocab_size: int,
    report: Report,
) -> dict[str, Any]:
    """Make the embedded model from conversations and write it to ``directory``.

    Args:
        sft: the supervised training; its seed also decides the initial weights.
        demonstrations: conversations under ``train`` and, held out, ``val``.
        vocab_size: of the byte-level tokenizer that is trained on them.

    Returns:
        Losses, sizes and seconds, which are also written to ``warm_start.json``.
    """
    report("tokenizer", 0, 1)
    tokenizer = _fit_tokenizer(vocab_size, demonstrations["train"])
    renderer = Renderer(tokenizer)
    examples, validation = (
        encode_examples(renderer, demonstrations[split], max_tokens=sft.max_tokens)
        for split in ("train", "val")
    )
    report("tokenizer", 1, 1)
    model = build_tiny(tokenizer, sft.seed)
    engine = FSDPEngine(model, tokenizer, sft, total_updates=sft.steps)

    def on_step(step: SFTStep) -> None:
        report("sft", step.step, step.total_steps, step.loss)

    result = run_sft(
        sft, engine, examples.examples, validation=validation.examples, on_step=on_step
    )
    engine.export_pretrained(directory)
    facts = _facts(result, num_params=sum(p.numel() for p in model.parameters()))
    facts |= {"vocab_size": len(tokenizer), "num_too_long": examples.num_too_long}
    (directory / FACTS_NAME).write_text(json.dumps(facts, indent=1))
    return facts


def _fit_tokenizer(vocab_size: int, examples: Sequence[ChatExample]) -> Any:
    template = ChatTemplate(train_tokenizer([""], _BYTES_ONLY))
    texts = (
        template.render(example.messages, example.tools, generation=False)
        for example in examples[:_NUM_TOKENIZER_TEXTS]
    )
    return train_tokenizer(texts, vocab_size)


def _facts(result: SFTResult, *, num_params: int) -> dict[str, Any]:
    tail = result.losses[-20:]
    return {
        "num_params": num_params,
        "steps": len(result.losses),
        "first_loss": result.losses[0],
        "last_loss": sum(tail) / len(tail),
        "validation_loss": result.validation_loss,
        "num_tokens": result.num_tokens,
        "sft_s": result.seconds,
    }


def _read_facts(target: Path) -> dict[str, Any]:
    try:
        return json.loads((target / FACTS_NAME).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the cached model {str(target)!r} is damaged ({error}); delete the directory"
        ) from error


def _sources(env: type) -> list[Path]:
    """Return the files whose content decides the demonstrations and the training."""
    modules: list[ModuleType] = [agentrl.model.tiny, agentrl.train.sft]
    files = {Path(inspect.getfile(module)) for module in modules}
    for base in env.__mro__:
        module = inspect.getmodule(base)
        name = base.__module__.split(".")[0]
        if module is None or name in ("builtins", "gymnasium", "agentrl", "typing"):
            continue
        file = Path(inspect.getfile(module))
        files.add(file)
        if module.__package__:  # a pack: demonstrations come from all of its modules
            files.update(file.parent.glob("*.py"))
    return sorted(files)


def _readable(env_id: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in env_id.rpartition("/")[2])[:40] or "env"


def _silent(stage: str, done: int, total: int, loss: float | None = None) -> None:
    pass
