"""Settings of the layer between the episodes and the replicas of an engine. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ServingConfig:
    """How requests are spread over the replicas of an engine, and what happens to lost ones."""

    max_requests: int = 256
    """Requests that one replica works at; more wait, first come, first served."""
    affinity_slack: int = 4
    """Requests by which the replica that a session was served by last may be ahead of the idlest
    one before the session moves, whatever is left of it in the prefix cache."""
    affinity_tokens: int = 1024
    """Tokens of prompt that are worth one further request of being ahead: a session with a long
    prompt in the cache of a replica waits longer before it moves."""
    request_timeout_s: float = 1800.0
    """For one turn, waiting and weight updates included."""
    max_replays: int = 3
    """Replicas that may be lost under one request before the request is given up."""
    start_timeout_s: float = 600.0
    """For a replica to start, at first and again."""
    drain_timeout_s: float = 600.0
    """How long a weight update waits until no replica has an unfinished request."""
    update_timeout_s: float = 600.0
    """For the replicas to load weights, once nothing is unfinished."""
    interrupt_updates: bool | None = None
    """Whether a weight update interrupts what is being generated. Interrupted turns go on under
    the new weights, each token with the version it was sampled from; otherwise the update waits
    until every turn has ended. None: where sampling runs ahead of training
    (``rollout.max_staleness``, ``rollout.oversubscribe``)."""
    health_interval_s: float = 5.0
    """Between two looks at whether the replicas live."""
    health_timeout_s: float = 60.0
    """For a replica to say so; one that does not is taken for lost."""
    max_restarts: int = 8
    """Lost replicas that are started again in the whole run; further ones stay away."""
    restart_pause_s: float = 1.0
    """Before a lost replica is started again; doubled, up to a minute, each time it is lost again
    before it has served anything."""
    metrics_port: int = 0
    """TCP port on which the metrics are offered to Prometheus, on 127.0.0.1; 0 opens none. On a
    cluster rollout worker ``i`` has this port plus ``i``, on its own machine."""


def serving_problems(config: ServingConfig, *, key: str = "rollout.serving") -> Iterable[str]:
    """Say what is wrong with settings, one line each."""
    for name in ("max_requests", "affinity_tokens"):
        if getattr(config, name) < 1:
            yield f"{key}.{name}={getattr(config, name)}: must be at least 1"
    for name in ("affinity_slack", "max_replays", "max_restarts", "metrics_port"):
        if getattr(config, name) < 0:
            yield f"{key}.{name}={getattr(config, name)}: must be at least 0"
    if config.metrics_port > 65535:
        yield f"{key}.metrics_port={config.metrics_port}: must be at most 65535"
    timeouts = [name for name in ServingConfig.__slots__ if name.endswith("_timeout_s")]
    for name in (*timeouts, "health_interval_s"):
        if not (getattr(config, name) > 0 and math.isfinite(getattr(config, name))):
            yield f"{key}.{name}={getattr(config, name)}: must be a finite number above 0"
    if not (config.restart_pause_s >= 0 and math.isfinite(config.restart_pause_s)):
        yield f"{key}.restart_pause_s={config.restart_pause_s}: must be finite, 0 or more"
