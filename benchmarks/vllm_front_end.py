"""What a token costs on its way from vLLM's core to whoever waits for it, without an engine."""

# pyright: reportMissingImports=false
# vLLM need not be installed where types are checked.
from __future__ import annotations

import gc
import time
from typing import Any

from agentrl.rollout.engines.vllm_turns import TurnTable


def front_end() -> dict[str, float]:
    """Microseconds per token from the core's outputs on, 256 requests of 512 tokens."""
    import numpy as np
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VLLMParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    num_requests, num_tokens = 256, 512

    def steps() -> list[EngineCoreOutputs]:
        made = []
        for step in range(num_tokens):
            lists = LogprobsLists(
                np.full((num_requests, 1), step, np.int32),
                np.full((num_requests, 1), -1.5, np.float32),
                np.zeros(num_requests, np.int32),
            )
            finish = FinishReason.LENGTH if step == num_tokens - 1 else None
            outputs = [
                EngineCoreOutput(
                    request_id=str(row),
                    new_token_ids=[step],
                    new_logprobs=lists.slice_request(row, 1),
                    finish_reason=finish,
                )
                for row in range(num_requests)
            ]
            made.append(EngineCoreOutputs(outputs=outputs))
        return made

    def timed(work: Any) -> float:
        gc.collect()
        begin = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - begin) / (num_requests * num_tokens)

    def ours() -> None:
        table = TurnTable()
        for row in range(num_requests):
            table.begin(row)
        ended = [turn for step in fixed for turn in table.take(step.outputs)]
        assert len(ended) == num_requests

    def wire() -> None:
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        for step in fixed:
            decoded.append(decoder.decode(encoder.encode(step)))

    def processor() -> None:
        made = OutputProcessor(None, log_stats=False)
        params = VLLMParams(
            max_tokens=num_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for row in range(num_requests):
            request = EngineCoreRequest(
                request_id=str(row),
                external_req_id=str(row),
                prompt_token_ids=[1] * 128,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            queue = RequestOutputCollector(params.output_kind, str(row))
            made.add_request(request, None, None, 0, queue)
        for step in decoded:
            made.process_outputs(step.outputs)

    decoded: list[Any] = []
    fixed = steps()
    return {
        "ours: collect in the core's process": timed(ours),
        "vLLM: encode and decode": timed(wire),
        "vLLM: output processor, final only, flat": timed(processor),
    }
