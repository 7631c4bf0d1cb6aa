"""What holds for every test: workers and the processes that they start share few cores."""

from __future__ import annotations

import os

# Read when torch loads, which no test does before this. Threads that spin while they wait take
# the cores from the other worker, and from the engines and sandboxes of their own test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
