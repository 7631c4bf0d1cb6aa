"""The root of the configuration: composes the settings that stand beside each component."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.algo.config import AlgoConfig
from agentrl.data.config import DataConfig
from agentrl.dist.cluster_config import ClusterConfig
from agentrl.dist.config import ActorConfig, CriticConfig, LoraConfig, PlacementConfig
from agentrl.dist.weight_sync.config import WeightSyncConfig
from agentrl.env.config import EnvConfig
from agentrl.reward.config import RewardConfig
from agentrl.rollout.config import FailureConfig, RolloutConfig
from agentrl.sandbox.config import SandboxConfig
from agentrl.tool.config import ToolsConfig
from agentrl.train.config import (
    EvalConfig,
    ModelConfig,
    TelemetryConfig,
    TrainerConfig,
)


@dataclass(slots=True, kw_only=True)
class Config:
    """Everything a run is made of."""

    env: EnvConfig = field(default_factory=EnvConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
