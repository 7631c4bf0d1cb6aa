"""Lets the tests here import the helper modules beside them, under any import mode of pytest."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
