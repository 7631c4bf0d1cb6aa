"""What the trunk of a critic starts from."""

from __future__ import annotations

import copy
from pathlib import Path

from agentrl.dist.config import CriticConfig
from agentrl.errors import ConfigError
from agentrl.model.load import LoadedModel, load_model
from agentrl.train.open_model import is_run, open_run_model


def open_trunk(config: CriticConfig, policy: LoadedModel) -> LoadedModel:
    """Return the model that becomes a critic: of ``critic.path``, or a copy of the policy's.

    It lies on the policy's device. A resumed run replaces its weights by those of the checkpoint.

    Raises:
        ModelError: nothing that can be loaded stands at ``critic.path``.
        ConfigError: it reads other tokens than the policy.
    """
    path, device = config.path, str(policy.model.device)
    if path is None:
        return LoadedModel(
            model=copy.deepcopy(policy.model), tokenizer=policy.tokenizer, source=policy.source
        )
    if is_run(path):
        trunk = open_run_model(Path(path), device=device)
    else:
        trunk = load_model(path, device=device)
    if trunk.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            f"critic.path={path!r} has another vocabulary than the policy, {policy.source!r}: it "
            "would read other words than were said; give a model of the same family, or leave it "
            "out (critic.path=null), which starts from the policy's own weights"
        )
    return trunk
