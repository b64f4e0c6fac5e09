"""What drafting costs, from which acceptance on it pays, and how deep to draft. Plain arithmetic: no MLX, no clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROWS = 8
"""Most rows that a verification is priced for: a token and seven drafts."""


@dataclass(frozen=True)
class Costs:
    """What drafting costs, in passes of one row; measured from outside, because the engine has no clock.

    rows: a pass of 1, 2, … 8 rows (the first is 1). draft: one drafted token; or, by depth, all that a step with 1, 2,
    … 7 drafts takes beside the pass of its rows, which is below 0 where that was measured slower alone. replay, states:
    taking rows back by a replay, and keeping the state of one more row.
    """

    rows: tuple[float, ...]
    draft: float | tuple[float, ...] = 0.0
    replay: float = 0.05
    states: float = 0.05

    def __post_init__(self) -> None:
        if len(self.rows) != ROWS or min(self.rows) <= 0 or abs(self.rows[0] - 1) > 1e-9:
            raise ValueError(f"costs.rows must give the cost of 1 to {ROWS} rows over that of one, got {self.rows}")
        if isinstance(self.draft, tuple) and len(self.draft) != ROWS - 1:
            raise ValueError(f"costs.draft must be one number or one for each of 1 to {ROWS - 1} drafts: {self.draft}")
        one = 0.0 if isinstance(self.draft, tuple) else self.draft
        if min(one, self.replay, self.states) < 0 or min(self.rows[d] + self.drafting(d) for d in range(1, ROWS)) <= 0:
            raise ValueError("costs must not be negative")

    def drafting(self, depth: int) -> float:
        """What `depth` drafts add to the pass of their rows."""
        return self.draft[depth - 1] if isinstance(self.draft, tuple) else depth * self.draft

    def step(self, depth: int, right: float = 1.0) -> float:
        """A step with `depth` drafts, all of them right with probability `right`."""
        if depth == 0:
            return 1.0
        return self.rows[depth] + self.drafting(depth) + (depth + 1) * self.states + (1 - right) * self.replay

    def taking_back_by(self, rollback: str) -> Costs:
        """The same with only one of the two ways of taking rows back."""
        return dataclasses.replace(self, **({"replay": 0.0} if rollback == "states" else {"states": 0.0}))


GUESSED = {
    "metal": Costs((1, 1.25, 1.45, 1.65, 1.9, 2.1, 2.35, 2.6), draft=0.15),
    "cuda": Costs((1, 2.9, 3.5, 4.0, 4.7, 5.1, 5.5, 5.9), draft=0.7, replay=0.85),
    "cpu": Costs((1, 1.55, 2.25, 2.9, 3.5, 4.1, 4.75, 5.35), draft=0.38, replay=0.2, states=0.2),
}
"""Guesses by kind of device, to be replaced by what was measured on the chip: rows that go to different experts read
different weights, so a row more is far from free. That of a CPU was measured once, on the embedded model, that of
CUDA on an H200 where MLX launched verifications beside replayed steps: recorded ones should cost less, and until they
are measured an engine drafts too seldom there rather than at a loss."""

DRAFT_COST = {"mtp": 1.0, "ngram": 0.0, "model": 2.0}
"""The guessed cost of a draft by drafter, as a multiple of `Costs.draft`."""


Cost = float | tuple[float, ...]
"""What drafts cost, as `Costs.draft` has it: one number, or one by depth."""


def draft_cost(
    measured: Mapping[str, float | Sequence[float]], name: str, draft_vocab: int, vocabulary: int
) -> Cost | None:
    """What drafts of drafter `name` were measured to cost, in passes of one row; None if they were not.

    A trimmed vocabulary that was not measured itself lies on the line through the two that were (``mtp`` and
    ``mtp/N``): what is trimmed is one product.
    """
    costs = {key: tuple(cost) if isinstance(cost, Sequence) else float(cost) for key, cost in measured.items()}
    whole = costs.get(name)
    kept = [(int(key.partition("/")[2]), cost) for key, cost in costs.items() if key.startswith(f"{name}/")]
    if whole is None or not kept or not 0 < draft_vocab < vocabulary:
        return whole
    size, cost = min(kept, key=lambda point: abs(point[0] - draft_vocab))
    share = (vocabulary - draft_vocab) / (vocabulary - size) if vocabulary > size else 0.0
    if not isinstance(whole, tuple) and not isinstance(cost, tuple):
        return max(0.0, whole - (whole - cost) * share)
    return tuple(one - (one - other) * share for one, other in zip(_by_depth(whole), _by_depth(cost), strict=True))


def _by_depth(cost: Cost) -> tuple[float, ...]:
    return cost if isinstance(cost, tuple) else tuple(depth * cost for depth in range(1, ROWS))


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """Tokens that a step with `depth` drafts yields on average; `acceptance` by position in the draft."""
    total = reach = 1.0
    for rate in acceptance[:depth]:
        reach *= rate
        total += reach
    return total


def break_even(costs: Costs, depth: int) -> float | None:
    """The acceptance (equal at every position) from which `depth` drafts are no loss; None if not even all right is."""
    if costs.step(depth) > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        pays = expected_tokens([middle] * depth, depth) >= costs.step(depth, middle**depth)
        low, high = (low, middle) if pays else (middle, high)
    return high


class DepthController:
    """How many tokens to draft, from acceptance so far and the costs.

    Acceptance is a running estimate for each position in the draft, given that the positions before it were right;
    old trials fade. Where no depth gains `MARGIN` it steps aside for a growing number of tokens, then probes. A probe
    that comes out right starts the estimate anew and is followed by more of them, up to `MOST_PROBES`, until a depth
    gains or one comes out wrong.

    What drafts cost beyond the tokens that they yielded is a debt, which what they saved before pays up to `CREDIT`
    steps of. Each rest is long enough to make the debt `SHARE` of its tokens: whenever drafting begins again, all steps
    so far took at most ``1 + SHARE`` plain steps a token.
    """

    PRIOR, WEIGHT, FADE = 0.75, 2.0, 0.82
    MARGIN = 1.05
    """Costs are measured to a few percent; a gain within that may be a loss."""
    SHARE, CREDIT = 0.015, 2.0
    FIRST_REST, LONGEST_REST = 16, 256
    MOST_PROBES = 12

    def __init__(self, costs: Costs, most: int):
        self.costs, self.most = costs, most
        self.resting = 0
        self._rest = self.FIRST_REST
        self._probing = False
        self._right_probes = 0
        self._debt = 0.0
        self._forget()

    def _forget(self) -> None:
        self._right, self._tried = [0.0] * self.most, [0.0] * self.most
        self._weight = [self.WEIGHT] * self.most

    def acceptance(self) -> list[float]:
        """The estimate by position; a position never tried is taken to be like the one before."""
        rates, prior = [], self.PRIOR
        for right, tried, weight in zip(self._right, self._tried, self._weight, strict=True):
            prior = (right + prior * weight) / (tried + weight)
            rates.append(prior)
        return rates

    def best(self) -> int:
        """The depth with the most tokens for its cost; 0 where none gains the margin."""
        rates = self.acceptance()
        depths = range(self.most + 1)
        gain = [expected_tokens(rates, d) / self.costs.step(d, math.prod(rates[:d])) for d in depths]
        depth = max(depths, key=gain.__getitem__)
        return depth if gain[depth] >= self.MARGIN else 0

    def can_pay(self) -> bool:
        """Whether any depth would gain the margin if every draft were right."""
        return any((d + 1) / self.costs.step(d) >= self.MARGIN for d in range(1, self.most + 1))

    def next_depth(self) -> int:
        """The depth of the next step; 0 while it steps aside (see `rest`)."""
        if self.resting > 0 or not self.can_pay():
            return 0
        depth = self.best()
        if depth == 0:
            if not self._probing:
                self._probing = True
                self.resting = max(self._rest, math.ceil(self._debt / self.SHARE))
                self._debt = min(0.0, self._debt)
                return 0
            return 1
        if self._right_probes:
            self._probing, self._right_probes, self._rest = False, 0, self.FIRST_REST
        return depth

    def rest(self, tokens: int) -> None:
        """Count tokens made without drafts."""
        self.resting = max(0, self.resting - tokens)

    def saw(self, drafted: int, accepted: int) -> None:
        """Learn from one verification."""
        self._debt += self.costs.step(drafted, float(accepted == drafted)) - (accepted + 1)
        self._debt = max(-self.CREDIT, self._debt)
        if self._probing and accepted and not self._right_probes:
            self._forget()
        for i in range(min(drafted, accepted + 1, self.most)):
            self._right[i] = self._right[i] * self.FADE + (1.0 if i < accepted else 0.0)
            self._tried[i] = self._tried[i] * self.FADE + 1.0
            self._weight[i] *= self.FADE
        if self._probing:
            self._right_probes += 1
            if not accepted or self._right_probes > self.MOST_PROBES:
                # Wrong, or right and yet not enough.
                self._probing, self._right_probes = False, 0
                self._rest = min(2 * self._rest, self.LONGEST_REST)
