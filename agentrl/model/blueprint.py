"""A model without its weights: configuration and tokenizer, as the files that hold them.

They travel to processes that get the weights from elsewhere, so that no node but the driver's has
to see the model's own files.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentrl.model.load import LoadedModel, load_untrained


@dataclass(slots=True, frozen=True, kw_only=True)
class Blueprint:
    """What a process needs to build the architecture and the tokenizer."""

    files: dict[str, bytes]
    """By name, as ``save_pretrained`` writes them."""
    source: str
    """What the model was called where it was loaded."""

    @classmethod
    def of(cls, model: LoadedModel) -> Blueprint:
        """Describe a loaded model."""
        with tempfile.TemporaryDirectory(prefix="agentrl-model-") as folder:
            model.model.config.save_pretrained(folder)
            model.tokenizer.save_pretrained(folder)
            found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            files = {str(path.relative_to(folder)): path.read_bytes() for path in found}
        return cls(files=files, source=model.source)

    def build(self, *, device: str) -> LoadedModel:
        """Build the model with random weights, which are to be replaced before it is used.

        Raises:
            ModelError: it cannot be built in this process.
        """
        with tempfile.TemporaryDirectory(prefix="agentrl-model-") as folder:
            for name, content in self.files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return load_untrained(Path(folder), device=device, source=self.source)
