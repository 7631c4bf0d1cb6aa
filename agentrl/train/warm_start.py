"""The embedded model, warmed up on the environments' demonstrations and kept for the next run.

Demonstrations -> tokenizer -> model with random weights -> supervised training -> a directory that
``AutoModelForCausalLM`` and ``AutoTokenizer`` load. The directory lies in the user's cache under a
hash of everything that shapes it, complete or absent.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import agentrl.model.tiny
import agentrl.train.sft
from agentrl.agent.renderer import Renderer
from agentrl.agent.template import ChatTemplate
from agentrl.env.registry import env_class
from agentrl.errors import ModelError
from agentrl.model.cache import cache_root, make_once
from agentrl.model.load import LoadedModel
from agentrl.model.tiny import MAX_CONTEXT_TOKENS, build_tiny, train_tokenizer
from agentrl.rollout.mix import MixSchedule
from agentrl.sandbox.base import SandboxProvider
from agentrl.train.config import TINY, WarmStartConfig
from agentrl.train.demonstrations import collect_demonstrations, open_player
from agentrl.train.environments import Environment
from agentrl.train.interruption import interruptible
from agentrl.train.sft import SFTResult, SFTStep, run_sft
from agentrl.train.sft_config import SFTConfig
from agentrl.train.sft_data import ChatExample, encode_examples
from agentrl.train.sft_engine import local_engine

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
    environments: Sequence[Environment],
    *,
    sandboxes: SandboxProvider,
    report: Report | None = None,
    cache: Path | None = None,
) -> WarmStart:
    """Return the warmed-up embedded model for these environments, from the cache or made now.

    Args:
        config: the recipe.
        environments: whose demonstrations it learns from, in the proportions of their weights.
        sandboxes: for demonstrations that have to be played.
        report: told about progress.
        cache: default: ``$AGENTRL_CACHE``, else ``~/.cache/agentrl``.

    Raises:
        EnvError: an environment has no demonstrations; says what to do.
        ModelError: the cache cannot be written, or is damaged.
    """
    key = cache_key(config, environments)
    readable = "-".join(_readable(item.entry.config.id) for item in environments)[:80]
    target = (cache or cache_root()) / "warm_start" / f"{readable}-{key}"
    if target.is_dir():
        return WarmStart(path=target, cached=True, facts=_read_facts(target))
    report = report or _silent
    demonstrations = await collect_splits(
        sft_config(config), environments, sandboxes=sandboxes, report=report
    )

    def make(directory: Path) -> None:
        train_tiny(
            sft_config(config),
            demonstrations,
            directory,
            vocab_size=config.vocab_size,
            report=report,
        )

    await interruptible(partial(make_once, target, make))
    return WarmStart(path=target, cached=False, facts=_read_facts(target))


def cache_key(config: WarmStartConfig, environments: Sequence[Environment]) -> str:
    """Hash what shapes the model: recipe, environments, their sources, tools and shares, versions.

    (The last bits of the weights also depend on the processor and the number of threads.)
    """
    digest = hashlib.blake2b(digest_size=8)
    for item in environments:
        env = item.entry.config
        plain = {
            "recipe": asdict(config),
            "env": {"id": env.id, "kwargs": env.kwargs},
            "tools": item.toolbox.schemas,
            "versions": {name: version(name) for name in _PACKAGES},
        }
        digest.update(json.dumps(plain, sort_keys=True, default=repr).encode())
        for path in _sources(env_class(env.id)):
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    total = sum(item.entry.weight for item in environments)
    for item in environments[1:]:  # the first one's share follows from the others'
        digest.update(repr(item.entry.weight / total).encode())
    return digest.hexdigest()


def sft_config(config: WarmStartConfig) -> SFTConfig:
    """Return the supervised training of a warm start."""
    return SFTConfig(
        lr=config.lr,
        steps=config.steps,
        episodes_per_step=config.episodes_per_step,
        max_tokens=MAX_CONTEXT_TOKENS,
        eval_every=0,
        seed=config.seed,
    )


async def collect_splits(
    sft: SFTConfig,
    environments: Sequence[Environment],
    *,
    sandboxes: SandboxProvider,
    report: Report,
) -> dict[str, list[ChatExample]]:
    """Return demonstrations of the splits ``train`` (as many as ``sft`` sees) and ``val``.

    Those of several environments are interleaved as their prompts will be.

    Raises:
        EnvError: an environment has no demonstrations; says what to do.
    """
    wanted = {
        "train": min(sft.steps * sft.episodes_per_step, MAX_DEMONSTRATIONS),
        "val": _NUM_VALIDATION,
    }
    schedule = MixSchedule([item.entry.weight for item in environments])
    order = {
        split: [schedule.at(index)[0] for index in range(count)] for split, count in wanted.items()
    }
    renderer = Renderer(train_tokenizer([""], _BYTES_ONLY))
    num_found = 0

    def on_progress(num_new: int) -> None:
        report("demonstrations", num_found + num_new, sum(wanted.values()))

    found: dict[str, list[Iterator[ChatExample]]] = {split: [] for split in wanted}
    for party, item in enumerate(environments):
        async with open_player(
            item.entry.config,
            toolbox=item.toolbox,
            sandboxes=sandboxes,
            renderer=renderer,
            seed=sft.seed,
        ) as play:
            for split, parties in order.items():
                examples = await collect_demonstrations(
                    item.env,
                    split,
                    seed=sft.seed,
                    count=parties.count(party),
                    tools=item.toolbox.schemas,
                    play=play,
                    on_progress=on_progress,
                )
                num_found += len(examples)
                found[split].append(iter(examples))
    return {
        split: [next(found[split][party]) for party in parties] for split, parties in order.items()
    }


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
    start = fresh_tiny(demonstrations["train"], vocab_size=vocab_size, seed=sft.seed)
    renderer = Renderer(start.tokenizer)
    examples, validation = (
        encode_examples(renderer, demonstrations[split], max_tokens=sft.max_tokens)
        for split in ("train", "val")
    )
    report("tokenizer", 1, 1)

    def on_step(step: SFTStep) -> None:
        report("sft", step.step, step.total_steps, step.loss)

    with local_engine(sft, start, total_steps=sft.steps) as engine:
        result = run_sft(
            sft, engine, examples.examples, validation=validation.examples, on_step=on_step
        )
        engine.export_pretrained(directory)
    facts = _facts(result, num_params=sum(p.numel() for p in start.model.parameters()))
    facts |= {"vocab_size": len(start.tokenizer), "num_too_long": examples.num_too_long}
    (directory / FACTS_NAME).write_text(json.dumps(facts, indent=1))
    return facts


def fresh_tiny(examples: Sequence[ChatExample], *, vocab_size: int, seed: int) -> LoadedModel:
    """Return the embedded model with random weights, and a tokenizer trained on ``examples``."""
    tokenizer = _fit_tokenizer(vocab_size, examples)
    return LoadedModel(model=build_tiny(tokenizer, seed), tokenizer=tokenizer, source=TINY)


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
