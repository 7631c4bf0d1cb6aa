"""Real chat templates (those that ship with trl): the parser is found, and an episode is played."""

from __future__ import annotations

import asyncio
import random
import re
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from agentrl.agent.call_format import choose_parser, opens_thought
from agentrl.agent.loop import AgentLoop, EpisodeRequest, LoopLimits
from agentrl.agent.renderer import Renderer
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.errors import ConfigError
from agentrl.testing import EchoEnv, FakeSandboxes, make_tokenizer
from agentrl.testing.call_forms import CALL_FORMS, TOOLS, random_call
from agentrl.tool.binding import Toolbox
from agentrl.tool.parsers import TurnContext, make_parser
from agentrl.types import (
    GenerateRequest,
    Generation,
    Message,
    StopReason,
    Task,
    ToolCall,
    ToolStatus,
    Trajectory,
)

TEMPLATES = Path(str(distribution("trl").locate_file("trl/chat_templates")))
CONTROL = re.compile(r"<\|[a-z_]+\|>|<｜[^｜<]{1,40}｜>|\[gMASK\]|<sop>|</?think>|</?tool_call>")
CASES = {
    # template: the form that its family writes, what ends its calls, what ends its answers
    "qwen2_5": ("hermes", "<|im_end|>", "<|im_end|>"),
    "qwen3": ("hermes", "<|im_end|>", "<|im_end|>"),
    "qwen3_instruct_2507": ("hermes", "<|im_end|>", "<|im_end|>"),
    "qwen3_vl": ("hermes", "<|im_end|>", "<|im_end|>"),
    "qwen3_5_think": ("qwen3_coder", "<|im_end|>", "<|im_end|>"),
    "qwen3_5_nothink": ("qwen3_coder", "<|im_end|>", "<|im_end|>"),
    "qwen3_6": ("qwen3_coder", "<|im_end|>", "<|im_end|>"),
    "llama3_1": ("llama3_json", "<|eom_id|>", "<|eot_id|>"),
    "llama3_2": ("llama3_json", "<|eot_id|>", "<|eot_id|>"),
    "glm4moe": ("glm45", "<|observation|>", "<|user|>"),
    "gptoss": ("harmony", "<|call|>", "<|return|>"),
}
CALCULATE = ToolCall(name="calculator", arguments={"expression": "6*7"})


def tokenizer_with(name: str, eos: str) -> Any:
    """The small byte-level tokenizer with a real template and its control tokens."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer = make_tokenizer(chat_template=template)
    controls = {*CONTROL.findall(template), eos, "<|eom_id|>"}
    special = sorted(c for c in controls if "think" not in c and "tool_call>" not in c)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    added = [AddedToken(c, special=False, normalized=False) for c in controls - set(special)]
    tokenizer.add_tokens(sorted(added, key=str))
    tokenizer.eos_token = eos
    return tokenizer


@pytest.mark.parametrize("name", CASES)
def test_the_parser_that_reads_a_templates_calls_is_found(name: str):
    form, _, eos = CASES[name]
    renderer = Renderer(tokenizer_with(name, eos))
    parser = choose_parser(renderer, TOOLS)
    assert type(parser) is type(make_parser(CALL_FORMS[form].parser))
    others = {f.parser for f in CALL_FORMS.values()} - {CALL_FORMS[form].parser}
    with pytest.raises(ConfigError, match="leave model.tool_parser unset"):
        choose_parser(renderer, TOOLS, sorted(others)[0])


@pytest.mark.parametrize("name", [*CASES, "deepseekv3"])
def test_what_a_template_writes_of_a_call_is_read_back(name: str):
    form, _, eos = CASES.get(name, ("deepseek_v3", "", "<｜end▁of▁sentence｜>"))
    renderer = Renderer(tokenizer_with(name, eos))
    parser, rng = make_parser(CALL_FORMS[form].parser), random.Random(name)
    prompt = renderer.begin([{"role": "user", "content": "u"}], []).record.spans[-1].text
    # DeepSeek's template opens a thought for the model, and closes none in history.
    in_thought = opens_thought(prompt) and name != "deepseekv3"
    context = TurnContext.of(TOOLS, in_thought=in_thought)
    for _ in range(20):
        call = random_call(rng)
        function = {"name": call.name, "arguments": call.arguments}
        message: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }
        _, text = renderer.encode_answer(message, TOOLS)
        assert parser.parse(text, context).tool_calls == (call,), text


@pytest.mark.parametrize("name", CASES)
def test_an_episode_is_played_in_the_words_of_the_family(name: str):
    form, end_call, end_answer = CASES[name]
    said = CALL_FORMS[form].write([CALCULATE])
    think = "So 6*7.\n</think>\n\n" if name in ("qwen3_5_think", "qwen3_6") else ""
    final = "<|channel|>final<|message|>42" if form == "harmony" else f"{think}42"
    trajectory = play(name, [think + said + end_call, final + end_answer])
    assert trajectory.stop_reason is StopReason.TERMINATED, trajectory.error
    (result,) = trajectory.turns[0].tool_results
    assert (result.status, result.content) == (ToolStatus.OK, "42")
    assert trajectory.turns[1].tool_calls == []
    assert "42" in trajectory.messages[-1]["content"] or len(trajectory.messages) > 4


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6"])
def test_a_call_in_a_thought_that_the_prompt_opened_is_not_run(name: str):
    said = CALL_FORMS["qwen3_coder"].write([CALCULATE])
    trajectory = play(name, [f"I could {said}\n</think>\n\nNo.<|im_end|>", f"{said}<|im_end|>"])
    assert [turn.tool_calls for turn in trajectory.turns] == [[], []]


def play(name: str, script: list[str]) -> Trajectory:
    """Play an episode of two turns, said as a model would: control tokens are single ids."""
    renderer = Renderer(tokenizer_with(name, CASES[name][2]))
    left = iter(script)

    async def generate(request: GenerateRequest) -> Generation:
        ids: list[int] = []
        for piece in renderer.codec.split_controls(next(left)):
            ids += [piece] if isinstance(piece, int) else renderer.codec.encode_plain(piece)
        assert ids[-1] in request.sampling.stop_token_ids
        return Generation(
            ids=ids,
            logprobs=[0.0] * len(ids),
            policy_version=[0] * len(ids),
            stop_reason=StopReason.STOP,
        )

    async def main() -> Trajectory:
        loop = AgentLoop(
            generate=generate,
            renderer=renderer,
            toolbox=Toolbox(["calculator"]),
            sandboxes=FakeSandboxes(),
            limits=LoopLimits(max_turns=4, max_context_tokens=8192),
        )
        config = EnvConfig(id="echo", kwargs={"num_turns": 2, "tools": ["calculator"]})
        hosts = EnvHosts(config, reward_timeout_s=5.0, cls=EchoEnv)
        try:
            request = EpisodeRequest(
                env_id="echo", task=Task(id="t", data={"prompt": "6*7?"}), seed=1
            )
            return await loop.run(await hosts.open(), request)
        finally:
            await hosts.close()

    return asyncio.run(asyncio.wait_for(main(), 60))
