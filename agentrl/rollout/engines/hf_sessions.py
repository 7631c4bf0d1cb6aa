"""Which session's keys and values lie where.

A session keeps its row between turns as long as nobody needs it. When somebody does, the row's
contents are *saved*: copied out bit for bit and copied back when the session returns. Only when
the memory for saved rows is used up is the one that was used least recently forgotten, and
prefilled again at its next turn. Ended sessions stay readable until their row is taken, so that a
new session can copy the prompt prefix that it shares with them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.rollout.engines.hf_runner import Runner

PREFIX_BLOCK = 16
"""Prefixes are looked up by multiples of this many tokens, then extended token by token."""

_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """Keys and values of one session."""

    id: str
    tokens: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    """int64, the tokens whose keys and values are held (or being written while not ``ready``)."""
    row: int = -1
    saved: Any = None
    busy: bool = False
    """A request of it is running: the row must stay."""
    ready: bool = True
    prefix_keys: list[bytes] = field(default_factory=list)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


class SessionTable:
    """Rows and saved copies of all sessions.

    Args:
        runner: the model.
        cache_bytes: memory for saved rows.
        share_prefixes: copy the beginning of a prompt from a session that has it.
        may_forget: drop saved rows beyond ``cache_bytes``; else they are kept while they live.
    """

    def __init__(
        self, runner: Runner, *, cache_bytes: int, share_prefixes: bool, may_forget: bool
    ) -> None:
        self._runner = runner
        self._cache_bytes = cache_bytes
        self._share_prefixes = share_prefixes
        self._may_forget = may_forget
        self.sessions: dict[str, Session] = {}
        self._clear()

    def _clear(self) -> None:
        self._rows: list[Session | None] = [None] * self._runner.num_rows
        self._idle: OrderedDict[str, Session] = OrderedDict()  # holds a row, least recent first
        self._saved: OrderedDict[str, int] = OrderedDict()  # bytes, least recent first
        self._saved_bytes = 0
        self._prefixes: dict[bytes, Session] = {}

    def clear(self) -> None:
        """Forget everything; nothing may be busy."""
        self.sessions.clear()
        self._clear()

    def get(self, session_id: str) -> Session:
        """Return the session, new if unknown."""
        session = self.sessions.get(session_id)
        if session is None:
            session = self.sessions[session_id] = Session(id=session_id)
        return session

    # ------------------------------------------------------------------ rows

    def claim(self, session: Session, prompt: np.ndarray) -> tuple[int, Session | None] | None:
        """Give a session a row that begins with as much of ``prompt`` as is held anywhere.

        Returns:
            The number of tokens that need no prefill (at most ``len(prompt) - 1``), and the
            session to copy more from once it is ready, or None; None where no row is free.
        """
        donor, shared = None, 0
        wanted = prompt[:-1]
        held = common_prefix(session.tokens, wanted)
        if held < PREFIX_BLOCK and self._share_prefixes:
            donor, shared = self._find_donor(session, wanted)
        if session.row < 0:
            row = self._free_row()
            if row is None:
                return None
            in_place = donor is not None and self._rows[row] is donor
            self._take(session, row, keep=held)
            if in_place:
                session.tokens, held, donor = wanted[:shared], shared, None
        self._idle.pop(session.id, None)
        held = self._runner.keep_prefix(session.row, held) if held else 0
        if donor is not None and donor.ready:
            self.copy(donor, session, shared)
            held, donor = shared, None
        session.busy = True
        self._publish(session, wanted)
        session.tokens, session.ready = wanted, held == len(wanted)
        return held, donor

    def copy(self, donor: Session, session: Session, length: int) -> None:
        """Copy the first ``length`` positions of a donor into the session's row."""
        if donor.row >= 0:
            self._runner.copy_prefix(donor.row, session.row, length)
        else:
            self._runner.load_row(session.row, donor.saved, length)

    def _free_row(self) -> int | None:
        """Pick a row: unused or ended first (the lowest), else the least recently used."""
        for row, holder in enumerate(self._rows):
            if holder is None or not (holder.busy or self._idle.get(holder.id) is holder):
                return row
        for session in self._idle.values():
            return session.row
        return None

    def _take(self, session: Session, row: int, *, keep: int) -> None:
        """Move a session into ``row``, saving whom it displaces."""
        holder = self._rows[row]
        if holder is not None:
            self._vacate(holder)
        self._rows[row], session.row = session, row
        if session.saved is not None:
            if keep:
                self._runner.load_row(row, session.saved, keep)
            self._drop_saved(session)

    def _vacate(self, holder: Session) -> None:
        """Take a row from an idle session (saved) or an ended one (forgotten)."""
        row, holder.row = holder.row, -1
        self._rows[row] = None
        if self._idle.get(holder.id) is not holder:
            self._unpublish(holder)
            holder.tokens = _NO_TOKENS
            return
        del self._idle[holder.id]
        holder.saved = self._runner.save_row(row, len(holder.tokens))
        self._saved[holder.id] = self._runner.num_bytes(holder.saved)
        self._saved_bytes += self._saved[holder.id]
        while self._may_forget and self._saved_bytes > self._cache_bytes:
            oldest = self.sessions[next(iter(self._saved))]
            self._drop_saved(oldest)
            self._unpublish(oldest)
            oldest.tokens = _NO_TOKENS

    def _drop_saved(self, session: Session) -> None:
        session.saved = None
        self._saved_bytes -= self._saved.pop(session.id, 0)

    def release(self, session: Session, tokens: np.ndarray) -> None:
        """A request ended; the row holds ``tokens`` and stays until it is needed."""
        session.busy, session.ready, session.tokens = False, True, tokens
        if self.sessions.get(session.id) is session:
            self._idle[session.id] = session

    def end(self, session_id: str) -> None:
        """Forget a session that is not busy; its row stays readable until it is taken."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        self._idle.pop(session_id, None)
        if session.saved is not None:
            self._drop_saved(session)
            self._unpublish(session)

    def relocate(self, session: Session, row: int) -> None:
        """Move a busy session to ``row``, whose holder must not be busy."""
        holder = self._rows[row]
        if holder is not None:
            self._vacate(holder)
        self._runner.move_row(session.row, row, len(session.tokens))
        self._rows[session.row] = None
        self._rows[row], session.row = session, row

    # ------------------------------------------------------------------ shared prefixes

    def _find_donor(self, session: Session, wanted: np.ndarray) -> tuple[Session | None, int]:
        """Find a session that holds, or is about to hold, a prefix of ``wanted``."""
        for end in range(len(wanted) // PREFIX_BLOCK * PREFIX_BLOCK, 0, -PREFIX_BLOCK):
            donor = self._prefixes.get(wanted[:end].tobytes())
            if donor is not None and donor is not session:
                shared = common_prefix(donor.tokens, wanted)
                if shared >= PREFIX_BLOCK:
                    return donor, shared
        return None, 0

    def _publish(self, session: Session, wanted: np.ndarray) -> None:
        """Make a session's first prompt findable."""
        if not self._share_prefixes or session.prefix_keys:
            return
        for end in range(PREFIX_BLOCK, len(wanted) + 1, PREFIX_BLOCK):
            key = wanted[:end].tobytes()
            self._prefixes[key] = session
            session.prefix_keys.append(key)

    def _unpublish(self, session: Session) -> None:
        for key in session.prefix_keys:
            if self._prefixes.get(key) is session:
                del self._prefixes[key]
        session.prefix_keys = []
