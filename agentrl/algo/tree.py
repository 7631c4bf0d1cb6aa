"""Credit in trees of sessions that share their first turns (Tree-GRPO, arXiv 2509.21240).

A branch holds only the turns after it left its parent; what it earned over its whole path is in its
return. Between two branch points the turns of a session share the leaves below them, and so their
advantage: such a run of turns is an *edge*. ``P`` branch points, ``E = S + P`` edges: the first of
every session, and one behind every branch point of a session.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.credit import Credit, CreditBatch, estimator
from agentrl.algo.group_baselines import group_statistics
from agentrl.algo.ragged import cumulative_sum, position_in_segment, segment_sum, starts_of


@estimator(needs=("tree",), min_group=2, unbiased=({},))
def tree(batch: CreditBatch) -> Credit:
    """Mean return below a turn, less that of the other trees and of the rest of its own.

    ``A = w * (Q - (inter + intra) / 2)``. ``Q`` is the mean return of what was sampled after the
    turn, where at every branch point each continuation counts the same (so does each leaf, in a
    tree that branches evenly). ``inter`` is the mean of the other trees of the group; ``intra`` the
    mean of the leaves of the turn's own tree that do not come after it; each stands for the other
    where that one is missing, and a lone tree without branches gives 0. ``w`` is the share that the
    turn has in its tree: one over the number of continuations, multiplied over the branch points
    on its path. It makes a prefix that was sampled once count once, and deep turns no more for
    being sampled often.

    Unbiased, counted per tree, where a group has two trees or more and whether a state branches
    is decided without looking at what follows it. The mean over leaves, with no regard to where
    they branched off, is not.

    Raises:
        ValueError: a parent is of another group, has fewer turns than its branch left it at, or
            comes after itself.
    """
    edges = _edges(batch)
    returns = _path_returns(batch, edges)
    values, shares = _values_and_shares(edges, returns)
    root = edges.root[edges.session]
    signal = group_statistics(returns, batch.group).has_signal
    trunks = (edges.root == torch.arange(batch.num_sessions)).nonzero().squeeze(1)
    inter = torch.zeros_like(returns)
    trees = group_statistics(values[trunks], batch.group[trunks])
    inter[trunks] = (trees.size * trees.mean - values[trunks]) / (trees.size - 1).clamp(min=1)
    size = torch.zeros_like(returns)
    size[trunks] = trees.size
    has_inter, has_intra = size[root] > 1, shares < 1
    rest = (values[root] - shares * values) / torch.where(has_intra, 1 - shares, 1.0)
    baseline = torch.where(has_inter, inter[root], rest)
    baseline = torch.where(has_inter & has_intra, (baseline + rest) / 2, baseline)
    speaks = (has_inter | has_intra) & signal[edges.session]
    advantages = torch.where(speaks, shares * (values - baseline), 0.0)
    return Credit(batch.spread_turns(advantages[edges.of_turn]))


@dataclass(slots=True, frozen=True, kw_only=True)
class _Edges:
    """A forest of sessions, cut at its branch points.

    Edge ``e < S`` is the first of session ``e``; ``S + p`` is what the parent itself went on with
    behind point ``p``.
    """

    session: Tensor
    """int64 [E]"""
    origin: Tensor
    """int64 [E], the branch point in which it begins; -1 for none."""
    end: Tensor
    """int64 [E], the branch point in which it ends; -1: in a leaf."""
    of_turn: Tensor
    """int64 [K]"""
    root: Tensor
    """int64 [S], the trunk of every session's tree."""
    parent: Tensor
    """int64 [S], the session whose own turns lead to the branch; -1 for a trunk."""
    point_depth: Tensor
    """int64 [P], turns from the start of the episode."""


def _edges(batch: CreditBatch) -> _Edges:
    start, num = batch.require("branch_turn"), batch.num_sessions
    parent = _owners(batch)
    branches = (parent >= 0).nonzero().squeeze(1)
    depths = int((start + batch.turns_per_session).max()) + 1 if num else 1
    keys, point = (parent * depths + start)[branches].unique(return_inverse=True)
    point_parent, point_depth = keys // depths, keys % depths
    following = torch.full_like(keys, -1)
    following[:-1] = torch.where(
        point_parent[1:] == point_parent[:-1], torch.arange(1, max(len(keys), 1)), -1
    )
    first_end = torch.full((num,), -1, dtype=torch.int64)
    if len(keys):
        candidate = torch.searchsorted(keys, torch.arange(num) * depths).clamp(max=len(keys) - 1)
        first_end = torch.where(point_parent[candidate] == torch.arange(num), candidate, -1)
    first_origin = torch.full((num,), -1, dtype=torch.int64)
    first_origin[branches] = point
    session = batch.session_of_turn
    depth = start[session] + position_in_segment(batch.turns_per_session)
    before = torch.searchsorted(keys, session * depths + depth, right=True) - 1
    behind = before >= 0
    behind[behind.clone()] = point_parent[before[behind]] == session[behind]
    return _Edges(
        session=torch.cat([torch.arange(num), point_parent]),
        origin=torch.cat([first_origin, torch.arange(len(keys))]),
        end=torch.cat([first_end, following]),
        of_turn=torch.where(behind, num + before, session),
        root=_roots(parent),
        parent=parent,
        point_depth=point_depth,
    )


def _owners(batch: CreditBatch) -> Tensor:
    """The session that sampled the turn before each branch, int64 [S]; -1 for a trunk.

    A branch that leaves its parent where that one began, or earlier, is a branch of the parent's
    parent. Where that one is not there (it failed), it is a trunk.
    """
    parent, start = batch.require("parent").clone(), batch.require("branch_turn")
    for _ in range(batch.num_sessions + 1):
        above = torch.where(parent >= 0, parent[parent.clamp(min=0)], -1)
        begun = torch.where(parent >= 0, start[parent.clamp(min=0)], -1)
        higher = (parent >= 0) & ((start < begun) | ((start == begun) & (above >= 0)))
        if not bool(higher.any()):
            break
        parent = torch.where(higher, above, parent)
    else:
        raise ValueError("a branch comes after itself: parent and branch_turn form a circle")
    child = (parent >= 0).nonzero().squeeze(1)
    owner = parent[child]
    stray = batch.group[child] != batch.group[owner]
    early = start[child] > (start + batch.turns_per_session)[owner]
    if bool((stray | early).any()):
        at = int((stray | early).nonzero()[0])
        raise ValueError(
            f"session {int(child[at])} branches off session {int(owner[at])} at turn "
            f"{int(start[child[at]])}: that is not a turn of the same group's parent"
        )
    return parent


def _roots(parent: Tensor) -> Tensor:
    root = torch.where(parent >= 0, parent, torch.arange(len(parent)))
    while bool((root[root] != root).any()):
        root = root[root]
    return root


def _path_returns(batch: CreditBatch, edges: _Edges) -> Tensor:
    """Returns with the penalties of the inherited turns, float64 [S]."""
    returns = batch.returns
    if batch.token_penalties is None or not len(edges.point_depth):
        return returns
    of_turn = segment_sum(batch.token_penalties, batch.tokens_per_turn)
    running = cumulative_sum(of_turn, batch.turns_per_session)
    running = torch.cat([running.new_zeros(1), running])
    start = batch.require("branch_turn")
    owner = edges.parent.clamp(min=0)
    taken = torch.where(edges.parent >= 0, start - start[owner], 0)
    position = starts_of(batch.turns_per_session)[owner] + taken
    own = torch.where(taken > 0, running[position], 0.0)
    inherited = own
    above = edges.parent
    while bool((above >= 0).any()):
        inherited = inherited + torch.where(above >= 0, own[above.clamp(min=0)], 0.0)
        above = torch.where(above >= 0, edges.parent[above.clamp(min=0)], -1)
    return returns + inherited


def _values_and_shares(edges: _Edges, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Mean return below every edge, and its share in its tree; float64 [E] both."""
    num_points = len(edges.point_depth)
    starts, ends = edges.origin >= 0, edges.end >= 0
    values = torch.where(ends, 0.0, returns[edges.session])
    shares = torch.ones_like(values)
    incoming = torch.empty(num_points, dtype=torch.int64)
    incoming[edges.end[ends]] = ends.nonzero().squeeze(1)
    continuations = torch.bincount(edges.origin[starts], minlength=num_points).double()
    depth_of_edge = torch.full_like(edges.origin, -1)
    depth_of_edge[starts] = edges.point_depth[edges.origin[starts]]
    levels = edges.point_depth.unique().tolist()
    for level in reversed(levels):
        beginning = (depth_of_edge == level).nonzero().squeeze(1)
        point = edges.origin[beginning]
        values.index_add_(0, incoming[point], values[beginning] / continuations[point])
    for level in levels:
        beginning = (depth_of_edge == level).nonzero().squeeze(1)
        point = edges.origin[beginning]
        shares[beginning] = shares[incoming[point]] / continuations[point]
    return values, shares
