"""The reward of a run, from its settings to trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl import Env, Episode, Score, register_env
from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig
from agentrl.env.entries import environments
from agentrl.errors import ConfigError, RegistryError
from agentrl.reward.config import OverlongConfig, RewardConfig, RewardPartConfig
from agentrl.reward.registry import register_reward
from agentrl.reward.run import open_reward
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.groups import Sample
from agentrl.rollout.stage import open_stage
from agentrl.testing import EchoEnv, FakeSandboxes, ScriptedEngine, make_tokenizer
from agentrl.tool.binding import Toolbox
from agentrl.types import StopReason, Task, Trajectory

RENDERER = Renderer(make_tokenizer())
TASK = Task(
    id="t",
    data={"word": "yes", "data_source": "echo", "reward_model": {"ground_truth": "yes"}},
)
SOURCE = """
import asyncio

def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    if solution_str == "crash":
        raise ValueError("cannot read this")
    return {"score": scale * (solution_str == ground_truth), "length": len(solution_str)}

async def of_episode(episode):
    await asyncio.sleep(0)
    return -1.0 if len(episode.turns) > 1 else 0.5
"""


class LastWord:
    """The rubric of an environment."""

    def score(self, episode: Episode) -> Score:
        said = [m["content"] for m in episode.messages if m["role"] == "assistant"]
        return Score(
            reward=2.0, success=said[-1] == "yes", parts={"loud": 0.25}, turn_rewards=(0.5,)
        )


@register_env("reward_test_echo")
class RubricEcho(EchoEnv):
    rubric = LastWord()


@register_env("reward_test_plain")
class PlainEcho(EchoEnv):
    pass


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "r.py").write_text(SOURCE)
    return f"{tmp_path}/r.py"


def play(
    reward: RewardConfig,
    said: Sequence[str] = ("yes",),
    *,
    env: str = "reward_test_echo",
    reward_timeout_s: float = 30.0,
) -> Trajectory:
    """Play one episode with the reward of a run."""

    async def main() -> Trajectory:
        engine: Any = ScriptedEngine(RENDERER, said)
        rollout = RolloutConfig(reward_timeout_s=reward_timeout_s, max_response_tokens=100)
        async with (
            open_reward(
                reward,
                reward_timeout_s=rollout.reward_timeout_s,
                given={"max_response_tokens": rollout.max_response_tokens, "seed": 0},
                examples=[TASK],
            ) as opened,
            open_stage(
                entry=environments(EnvConfig(id=env, kwargs={"num_turns": len(said)}))[0],
                toolbox=Toolbox(),
                rollout=rollout,
                renderer=RENDERER,
                engine=engine,
                sandboxes=FakeSandboxes(),
                tool_parser="hermes",
                reward=opened,
            ) as stage,
        ):
            sample = Sample(
                task=TASK, seed=1, group_id="g", sample_index=0, attempt=0, temperature=1.0
            )
            return await stage.play(sample)

    return asyncio.run(asyncio.wait_for(main(), 120))


def graded(trajectory: Trajectory) -> Score:
    assert trajectory.score is not None, trajectory.error
    return trajectory.score


def test_without_settings_the_environment_grades():
    score = graded(play(RewardConfig()))
    assert (score.reward, score.success, dict(score.parts)) == (2.0, True, {"loud": 0.25})


@pytest.mark.parametrize("process", [None, False])
def test_a_function_of_a_file_replaces_the_environments_rubric(file: str, process: bool | None):
    reward = RewardConfig(path=f"{file}:compute_score", kwargs={"scale": 3.0}, process=process)
    right = play(reward)
    assert graded(right).reward == 3.0
    assert graded(right).success
    assert dict(graded(right).parts) == {"score": 3.0, "score/length": 3.0}
    assert [turn.reward for turn in right.turns] == [1.0]  # what `step` pays stays
    wrong = graded(play(reward, ["yes", "no"]))
    assert (wrong.reward, wrong.success) == (0.0, False)


@pytest.mark.parametrize("process", [None, False])
def test_a_function_that_raises_fails_the_trajectory_and_never_pays_it_0(
    file: str, process: bool | None
):
    trajectory = play(RewardConfig(path=f"{file}:compute_score", process=process), ["crash"])
    assert trajectory.stop_reason is StopReason.REWARD_ERROR
    assert trajectory.score is None
    assert "reward part 'score'" in str(trajectory.error)
    assert "ValueError: cannot read this" in str(trajectory.error)


@pytest.mark.parametrize("process", [None, False])
def test_a_coroutine_function_of_the_episode(file: str, process: bool | None):
    reward = RewardConfig(path=f"{file}:of_episode", process=process)
    assert graded(play(reward)).reward == 0.5
    assert graded(play(reward, ["a", "b"])).reward == -1.0


def test_the_environments_rubric_is_one_part_among_others(file: str):
    parts = [
        RewardPartConfig(id="env", weight=0.5),
        RewardPartConfig(id="format", name="tag", weight=10.0, kwargs={"pattern": "yes"}),
        RewardPartConfig(
            id="function", name="own", kwargs={"path": f"{file}:of_episode"}, weight=0.0
        ),
    ]
    trajectory = play(RewardConfig(parts=parts))
    assert graded(trajectory).reward == 11.0
    assert dict(graded(trajectory).parts) == {"env": 2.0, "tag": 1.0, "own": 0.5, "loud": 0.25}
    assert [turn.reward for turn in trajectory.turns] == [1.0 + 0.5 * 0.5]
    assert graded(trajectory).success
    assert not graded(play(RewardConfig(parts=parts), ["no"])).success  # the rubric's verdict
    chosen = RewardConfig(parts=parts, success_part="tag", success_threshold=1.5)
    assert not graded(play(chosen)).success


def test_an_environment_without_a_rubric_keeps_its_success_beside_a_punishment():
    reward = RewardConfig(overlong=OverlongConfig(buffer_tokens=90, penalty=9.0))
    trajectory = play(reward, ["long " * 6, "yes"], env="reward_test_plain")
    excess = trajectory.num_sampled_tokens - 10
    assert excess > 0
    assert dict(graded(trajectory).parts) == {
        "env": 0.0, "overlong": pytest.approx(-excess / 90 * 9.0),
    }  # fmt: skip
    assert graded(trajectory).success  # the last step paid
    assert not graded(play(reward, ["no"], env="reward_test_plain")).success


def test_the_deadline_of_a_part_is_rollout_reward_timeout_s_unless_it_has_its_own(tmp_path: Path):
    (tmp_path / "slow.py").write_text(
        "import asyncio\nasync def hangs(episode):\n    await asyncio.sleep(60)\n"
    )
    kwargs = {"path": f"{tmp_path}/slow.py:hangs"}
    for timeout_s, expected in ((None, "timeout_s=0.3"), (0.2, "timeout_s=0.2")):
        part = RewardPartConfig(id="function", kwargs=kwargs, timeout_s=timeout_s)
        trajectory = play(RewardConfig(parts=[part]), reward_timeout_s=0.3)
        assert trajectory.stop_reason is StopReason.REWARD_ERROR
        assert expected in str(trajectory.error)


def test_a_registered_part_is_opened_given_the_runs_facts_and_closed():
    log: list[str] = []

    @register_reward("reward_test_logged")
    class Logged:
        def __init__(self, *, max_response_tokens: int, part_name: str, factor: float) -> None:
            self.value = max_response_tokens * factor
            self.part_name = part_name

        async def open(self) -> None:
            log.append("open")

        async def close(self) -> None:
            log.append("close")

        async def __call__(self, episode: Episode) -> float:
            log.append(self.part_name)
            return self.value

    part = RewardPartConfig(id="reward_test_logged", name="x", kwargs={"factor": 0.5})
    assert graded(play(RewardConfig(parts=[part]))).reward == 50.0
    assert log == ["open", "x", "close"]


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ({"id": "function"}, ConfigError, r"reward.parts\[0\].kwargs: function needs path"),
        ({"id": "judge", "kwargs": {"base_url": "http://x", "modle": "m"}}, ConfigError,
         r"reward.parts\[0\].kwargs.modle.*did you mean 'model'"),
        ({"id": "function", "kwargs": {"path": "json:dumps"}}, ConfigError,
         r"reward.parts\[0\].kwargs.path=json:dumps: the function must be fn"),
        ({"id": "json:nothing"}, RegistryError, "nothing"),
        ({"id": "builtins:exit"}, ConfigError, r"parts\[0\]: making.*raised SystemExit"),
        ({"id": "builtins:dict"}, ConfigError, r"parts\[0\].id='builtins:dict' is.*signature"),
        ({"id": "builtins:__name__"}, ConfigError, r"parts\[0\].id=.*makes a grader"),
        ({"id": "format", "kwargs": {"pattern": "("}}, ConfigError, r"reward.parts\[0\]: format"),
    ],
)  # fmt: skip
def test_a_part_that_cannot_be_made_is_refused_with_its_key(
    part: dict[str, Any], kind: type, message: str
):
    with pytest.raises(kind, match=message):
        play(RewardConfig(parts=[RewardPartConfig(**part)]))


def test_data_without_an_answer_are_refused_before_the_first_episode(file: str):
    async def main() -> None:
        async with open_reward(
            RewardConfig(path=f"{file}:compute_score"),
            reward_timeout_s=1.0,
            given={},
            examples=[Task(id="t9", data={"question": "?"})],
        ):
            raise AssertionError("must be refused")

    with pytest.raises(ConfigError, match="reward: .*task 't9'.*'question'"):
        asyncio.run(main())


def test_the_rubric_of_an_environment_may_be_composed():
    from agentrl import ComposedRubric, Part

    @register_env("reward_test_composed")
    class Composed(EchoEnv):
        rubric = ComposedRubric(
            Part("said", lambda episode: float("yes" in episode.messages[-2]["content"])),
            Part("brief", lambda episode: 1.0, weight=0.1),
        )

    assert issubclass(Composed, Env)
    score = graded(play(RewardConfig(), env="reward_test_composed"))
    assert score.reward == pytest.approx(1.1)
    assert dict(score.parts) == {"said": 1.0, "brief": 1.0}
