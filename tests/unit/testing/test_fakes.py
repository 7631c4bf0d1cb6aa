"""The shipped fakes do what their users rely on."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.agent.renderer import Renderer
from agentrl.errors import EngineError, SandboxError
from agentrl.testing import (
    EchoEnv,
    FakeEngine,
    FakeSandboxes,
    ScriptedEngine,
    call_text,
    make_tokenizer,
)
from agentrl.tool.parsers import make_parser
from agentrl.types import Action, GenerateRequest, SamplingParams, StopReason

RENDERER = Renderer(make_tokenizer())


def request(*, seed: int = 0, max_tokens: int = 50, session: str = "s") -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=RENDERER.stop_token_ids, seed=seed
    )
    return GenerateRequest(prompt_ids=[5, 6], sampling=sampling, session_id=session)


def test_the_tokenizer_knows_every_byte_and_is_the_same_every_time():
    tokenizer = make_tokenizer()
    text = "".join(map(chr, range(32, 700))) + "\n\t\u4f60\u597d\U0001f600"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert make_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_the_tokenizer_merges_across_words():
    tokenizer = make_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("higher\nlower\ncorrect\n"))
    assert any("\u010a" in token.strip("\u010a") for token in tokens) or len(tokens) < 6


def test_random_turns_depend_on_the_request_and_nothing_else():
    engine = FakeEngine(vocab_size=300)

    async def sample(seed: int) -> list[int]:
        return (await engine.generate(request(seed=seed))).ids

    async def main() -> tuple[list[list[int]], list[list[int]]]:
        forward = [await sample(seed) for seed in range(5)]
        backward = await asyncio.gather(*(sample(seed) for seed in reversed(range(5))))
        return forward, list(reversed(backward))

    forward, backward = asyncio.run(main())
    assert forward == backward
    assert len(set(map(tuple, forward))) > 1


def test_a_random_turn_honours_its_limit_its_stop_token_and_the_version():
    engine = FakeEngine(vocab_size=300, mean_tokens=5, exclude=RENDERER.stop_token_ids)
    engine.policy_version = 4
    seen = set()
    for seed in range(40):
        turn = asyncio.run(engine.generate(request(seed=seed, max_tokens=6)))
        seen.add(turn.stop_reason)
        assert 1 <= len(turn.ids) == len(turn.logprobs) <= 6
        assert set(turn.policy_version) == {4}
        stopped = turn.ids[-1] in RENDERER.stop_token_ids
        assert stopped == (turn.stop_reason is StopReason.STOP)
    assert seen == {StopReason.STOP, StopReason.LENGTH}


def test_a_script_begins_anew_in_every_session():
    engine = ScriptedEngine(RENDERER, ["one", "two"])

    async def say(session: str) -> str:
        turn = await engine.generate(request(session=session))
        return RENDERER.decode_turn(turn.ids)

    async def main() -> list[str]:
        said = [await say("a"), await say("b"), await say("a")]
        await engine.end_session("a")
        return [*said, await say("a")]

    assert asyncio.run(main()) == ["one", "one", "two", "one"]


def test_a_script_that_ran_out_says_so():
    engine = ScriptedEngine(RENDERER, [])
    with pytest.raises(EngineError, match="0 turns"):
        asyncio.run(engine.generate(request()))


def test_a_script_may_look_at_the_prompt():
    engine = ScriptedEngine(RENDERER, lambda prompt, turn: f"{len(prompt)} {turn}")
    turn = asyncio.run(engine.generate(request()))
    assert RENDERER.decode_turn(turn.ids) == f"{len(RENDERER.decode([5, 6]))} 0"


def test_a_call_text_is_what_the_parser_reads():
    (call,) = make_parser("hermes").parse(call_text("f", x="a\n\"b'")).tool_calls
    assert (call.name, call.arguments, call.error) == ("f", {"x": "a\n\"b'"}, None)


def test_the_echo_environment_pays_for_its_word_in_the_last_turn_only():
    env = EchoEnv(num_turns=2, word="yes")
    env.reset(options={"task": env.tasks("train")[0]})
    say = Action(text="yes", content="yes")
    assert env.step(say)[1:3] == (0.0, False)
    assert env.step(say)[1:3] == (1.0, True)


def test_fake_sandboxes_fail_where_real_ones_would():
    async def main() -> None:
        sandbox = await FakeSandboxes().acquire()
        await sandbox.close()
        with pytest.raises(SandboxError):
            await sandbox.run_code("1")

    asyncio.run(main())
