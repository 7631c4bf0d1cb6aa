"""Supervised fine-tuning of any model: what `agentrl sft` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.agent.renderer import Renderer
from agentrl.cli.options import check_out_dir
from agentrl.config.load import unknown_key_message
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.env.config import EnvConfig
from agentrl.errors import ConfigError
from agentrl.model.load import LoadedModel, load_model
from agentrl.model.tiny import DEFAULT_VOCAB_SIZE
from agentrl.playground import open_sandboxes
from agentrl.sandbox.config import SandboxConfig
from agentrl.train.config import TINY
from agentrl.train.environments import make_environments
from agentrl.train.open_model import warm_start_progress
from agentrl.train.sft import SFTStep, run_sft
from agentrl.train.sft_config import SFTConfig
from agentrl.train.sft_data import ChatExample, encode_examples, load_conversations
from agentrl.train.warm_start import Report, collect_splits, train_tiny

_NUM_VALIDATION = 256


def sft_settings(overrides: Sequence[str]) -> SFTConfig:
    """Read ``key=value`` settings of supervised training.

    Raises:
        ConfigError: an unknown key, or a wrong type.
    """
    defaults = OmegaConf.structured(SFTConfig)
    known = list(defaults)
    for item in overrides:
        key = item.split("=", 1)[0].lstrip("+")
        if "=" not in item or key not in known:
            raise ConfigError(unknown_key_message(key, [str(name) for name in known]))
    try:
        merged = OmegaConf.merge(defaults, OmegaConf.from_dotlist(list(overrides)))
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    assert isinstance(settings, SFTConfig)
    if settings.steps < 1 or settings.episodes_per_step < 1 or not settings.lr >= 0:
        raise ConfigError(
            f"steps={settings.steps} episodes_per_step={settings.episodes_per_step} "
            f"lr={settings.lr}: at least 1, 1 and 0"
        )
    return settings


async def fine_tune(
    settings: SFTConfig, *, env_id: str | None, data: Path | None, model: str, out: Path
) -> dict[str, Any]:
    """Train ``model`` on demonstrations of ``env_id`` or on the conversations of ``data``.

    Writes a directory that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.

    Returns:
        Losses, sizes and seconds.

    Raises:
        ConfigError: neither or both sources, or ``out`` is a file or not empty.
        DataError, EnvError, ModelError: the source or the model cannot be used.
    """
    if (env_id is None) == (data is None):
        raise ConfigError("give either --env (its demonstrations) or --data (a JSONL file)")
    check_out_dir(out)
    with warm_start_progress(quiet=False) as show:
        examples = (
            await _demonstrations(settings, env_id, show.report)
            if env_id is not None
            else _from_file(data)  # pyright: ignore[reportArgumentType]
        )
        if model == TINY:
            out.mkdir(parents=True, exist_ok=True)
            return train_tiny(
                settings, examples, out, vocab_size=DEFAULT_VOCAB_SIZE, report=show.report
            )
        return _tune(settings, load_model(model), examples, out, show.report)


def _tune(
    settings: SFTConfig,
    loaded: LoadedModel,
    examples: dict[str, list[ChatExample]],
    out: Path,
    report: Report,
) -> dict[str, Any]:
    renderer = Renderer(loaded.tokenizer)
    train = encode_examples(renderer, examples["train"], max_tokens=settings.max_tokens)
    held_out = encode_examples(renderer, examples["val"], max_tokens=settings.max_tokens)
    engine = FSDPEngine(
        loaded.model,
        loaded.tokenizer,
        settings.engine_config(),
        ranks=Ranks.single(loaded.model.device),
        total_updates=settings.steps,
    )

    def on_step(step: SFTStep) -> None:
        report("sft", step.step, step.total_steps, step.loss)

    result = run_sft(
        settings, engine, train.examples, validation=held_out.examples, on_step=on_step
    )
    out.mkdir(parents=True, exist_ok=True)
    engine.export_pretrained(out)
    return {
        "first_loss": result.losses[0],
        "last_loss": result.losses[-1],
        "validation_loss": result.validation_loss,
        "num_tokens": result.num_tokens,
        "num_too_long": train.num_too_long + held_out.num_too_long,
        "sft_s": result.seconds,
    }


def _from_file(path: Path) -> dict[str, list[ChatExample]]:
    """Keep every tenth conversation (at most 256) for validation; a lone one serves both."""
    conversations = load_conversations(path)
    held_out = conversations[::10][:_NUM_VALIDATION]
    train = [item for index, item in enumerate(conversations) if index % 10] or conversations
    return {"train": train, "val": held_out}


async def _demonstrations(
    settings: SFTConfig, env_id: str, report: Report
) -> dict[str, list[ChatExample]]:
    environments = make_environments(EnvConfig(id=env_id))
    async with open_sandboxes(SandboxConfig()) as sandboxes:
        return await collect_splits(settings, environments, sandboxes=sandboxes, report=report)
