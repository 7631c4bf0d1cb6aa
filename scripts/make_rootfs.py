"""Writes a root file system for sandboxes, from this machine's Python, as a tar archive.

    python scripts/make_rootfs.py FOLDER [--python /usr/bin/python3]

The archive is named by what goes into it, so a second call finds it there. Prints its path; load it
with `docker import -c 'CMD ["/usr/bin/python3"]' PATH agentrl/sandbox:local`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl_sandboxes.docker import rootfs


def main() -> None:
    """Write the archive where it is missing, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="/usr/bin/python3", help="interpreter to take")
    options = parser.parse_args()
    content = rootfs.collect(options.python)
    path = options.folder / f"agentrl-sandbox-{content.fingerprint[:16]}.tar"
    if not path.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        content.write(path)
    print(path)  # noqa: T201


if __name__ == "__main__":
    main()
