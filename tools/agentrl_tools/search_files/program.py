"""Runs in the sandbox, as a program of its own, with ``PAYLOAD`` and ``reply`` given to it.

It shares the box with what it searches: every name and file may be hostile, links are not
followed, and whatever it says is bounded by the host again.
"""

import sys

sys.path[:] = [folder for folder in sys.path if folder]  # no module of the workspace is imported

import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import stat  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    PAYLOAD = b""

    def reply(data: bytes) -> None:
        """Given by the sandbox: hands bytes to the host."""


_MAX_ANSWER_CHARS = 30_000


class _Refused(Exception):
    """The search cannot be made; the message is for the model."""


def _time_is_up(*_):
    raise _Refused("the search took too long; use a simpler pattern, or a glob for fewer files")


def _glob_to_regex(glob):
    """Translate a glob: ``*`` and ``?`` stay inside a folder, ``**/`` is any folders."""
    parts, position = [], 0
    while position < len(glob):
        if glob.startswith("**/", position):
            parts.append("(?:.*/)?")
            position += 3
        elif glob.startswith("**", position):
            parts.append(".*")
            position += 2
        else:
            char = glob[position]
            parts.append({"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)))
            position += 1
    prefix = "" if "/" in glob else "(?:.*/)?"
    return re.compile(prefix + "".join(parts), re.DOTALL)


def _files(glob, left_out, max_files):
    """Yield regular files below the work directory, sorted, as (path, size)."""
    wanted = _glob_to_regex(glob) if glob else None
    seen = 0
    for folder, folders, names in os.walk("."):
        folders.sort()
        for name in sorted(names):
            path = os.path.relpath(os.path.join(folder, name), ".")
            if wanted is not None and not wanted.fullmatch(path):
                continue
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            seen += 1
            if seen > max_files:
                left_out[f"files beyond the first {max_files}"] = 1
                return
            yield path, status.st_size


def _lines(path, limit):
    """Return the lines of a text file, or None for another kind."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        data = file.read(limit)
    return None if b"\0" in data else data.decode("utf-8", "replace").split("\n")


def _compile(pattern, literal):
    try:
        return re.compile(re.escape(pattern) if literal else pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _Refused(
            f"pattern is no regular expression ({error}); set literal to true for plain text"
        ) from None


def _search(request):
    left_out = {}
    found, most = [], request["max_results"]
    files = sorted(_files(request["glob"], left_out, request["max_files"]))
    pattern = request["pattern"]
    if pattern is None:
        found = [f"{path} ({size} bytes)" for path, size in files]
    else:
        compiled = _compile(pattern, request["literal"])
        for path, size in files:
            if size > request["max_file_bytes"]:
                left_out["large files"] = left_out.get("large files", 0) + 1
                continue
            for number, line in enumerate(_lines(path, request["max_file_bytes"]) or (), 1):
                if compiled.search(line):
                    shown = line[: request["max_line_chars"]]
                    more = len(line) - len(shown)
                    found.append(f"{path}:{number}: {shown}" + (f"[{more} more]" if more else ""))
            if len(found) > most:
                break
    return _answer(found, most, left_out, len(files))


def _answer(found, most, left_out, num_files):
    text = "\n".join(found[:most])[:_MAX_ANSWER_CHARS]
    notes = [f"[left out: {name}]" for name in left_out]
    if len(found) > most:
        notes.insert(0, f"[more than {most} results; use a narrower pattern or glob]")
    if not found:
        text = f"nothing found in {num_files} files"
    return "\n".join([text, *notes])


def _main():
    request = json.loads(PAYLOAD)
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
    try:
        answer = "+" + _search(request)
    except _Refused as refused:
        answer = f"-{refused}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    reply(answer.encode("utf-8", "replace"))


_main()
