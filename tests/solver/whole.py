"""Sharding and recompute as one integer program: every choice, every state, and the bytes of two times of the step.

What the docstring of `solver/joint.py` relaxes, posed as it stands and solved by HiGHS. It knows the space and its
pieces, no table, price or flow of the search; windows are none here, all communication is in line. Its least seconds
are under those of any schedule within the budget, and no bound of the search may be over them.
"""

from __future__ import annotations

import numpy as np
import pulp

from autopar.space.passage import OWN


class WholeProgram:
    """The program of a space at one time, for one budget."""

    def __init__(self, space, time: int, step: int, budget: float) -> None:
        assert not space.windows and space.setting.accumulation == 1
        self.space, self.time, self.step, self.budget = space, time, step, budget
        self.program = pulp.LpProblem("whole", pulp.LpMinimize)
        self.passages = space.memory.passages
        self.last = 2 * len(self.passages.ops) - 1
        self.seconds, self.bytes, self.at_step = [], [], []
        self.names = 0
        self.picked = [self._one_of(site.seconds) for site in space.sites]
        self.flows = [self._flows(e) for e in space.edges]
        self._pieces()
        self._states()

    def least(self, seconds: float = 300.0) -> float:
        """The least seconds, proven."""
        self.program += pulp.lpSum(self.seconds)
        for held in (self.bytes, self.at_step):
            self.program += pulp.lpSum(held) <= self.budget * 1e-6
        self.program.solve(pulp.HiGHS(msg=False, gapRel=1e-6, timeLimit=seconds))
        assert pulp.LpStatus[self.program.status] == "Optimal"
        return pulp.value(self.program.objective) / 1e6

    def _var(self, is_whole=False):
        self.names += 1
        return pulp.LpVariable(f"v{self.names}", 0, 1, pulp.LpBinary if is_whole else pulp.LpContinuous)

    def _one_of(self, seconds):
        """Whether each choice is taken; in microseconds and megabytes throughout."""
        found = [self._var(is_whole=True) if np.isfinite(s) else None for s in seconds]
        self.program += pulp.lpSum(v for v in found if v is not None) == 1
        self.seconds += [float(s) * 1e6 * v for s, v in zip(seconds, found, strict=True) if v is not None and s]
        return found

    def _flows(self, e):
        """Whether a value leaves as f and arrives as g, for each pair that leads anywhere."""
        found = {(f, g): self._var() for f, g in zip(*np.nonzero(np.isfinite(e.seconds)), strict=True)}
        for side, by, picked in ((0, e.given_by, self.picked[e.source]), (1, e.taken_by, self.picked[e.target])):
            for flow in range(e.seconds.shape[side]):
                taken = [picked[c] for c in np.flatnonzero(by == flow) if picked[c] is not None]
                moved = [v for pair, v in found.items() if pair[side] == flow]
                self.program += pulp.lpSum(moved) == pulp.lpSum(taken)
        self.seconds += [float(e.seconds[pair]) * 1e6 * v for pair, v in found.items() if e.seconds[pair]]
        return found

    def _pieces(self):
        """Bytes that are held at the times whatever is recomputed."""
        for piece in self.space.memory.pieces:
            held = self._held(piece)
            if piece.first <= self.time <= piece.last and not self._has_state(piece):
                self.bytes += held
            if piece.first <= self.step <= piece.last:
                self.at_step += held

    def _has_state(self, piece):
        """Whether a piece is of a value that backward may make again."""
        of_op = not piece.is_edge or self.space.sites[self.space.edges[piece.place].target].kind == "op"
        return piece.kind == "saved activations" and of_op

    def _held(self, piece):
        """The bytes of a piece, under the choices taken."""
        if piece.is_edge:
            return [float(piece.bytes[pair]) * 1e-6 * v for pair, v in self.flows[piece.place].items()]
        choices = zip(piece.bytes, self.picked[piece.place], strict=True)
        return [float(n) * 1e-6 * v for n, v in choices if v is not None]

    def _costs(self, state, parts, table, where):
        """A state that costs what the table says where it is taken under a choice."""
        shares = {}
        for key, taken in parts:
            shares[key] = self._var()
            self.program += shares[key] <= taken
        self.program += pulp.lpSum(shares.values()) == state
        where += [float(table[key]) * v for key, v in shares.items() if table[key]]

    def _states(self):
        """What is saved, what runs again, and that whatever backward wants is there."""
        there, ran = {}, []
        for time, op in enumerate(self.passages.ops):
            wants = self.last - time >= self.time
            site = self.space.sites[op.site]
            choices = [(c, v) for c, v in enumerate(self.picked[op.site]) if v is not None]
            again = self._var()
            ran.append(again)
            if site.compute:
                self._costs(again, choices, site.compute[0] * 1e6, self.seconds)
            for i, made in enumerate(op.made):
                is_there = there[time, i] = 1 if made.is_kept and wants else self._var()
                saved = 0
                if made.shows == OWN:
                    saved = self._var()
                    self._costs(saved, choices, made.bytes * 1e-6, self.bytes)
                self.program += is_there <= saved + again
            if op.besides is not None and wants:
                saved = self._var()
                self.program += saved >= 1 - again
                self._costs(saved, choices, op.besides * 1e-6, self.bytes)
        for time, op in enumerate(self.passages.ops):
            for k, kept, first in zip(op.edges, op.kept, op.first, strict=True):
                source, port = self.passages.sources[k]
                if source < 0 or k in self.passages.gathered:
                    continue
                is_kept = kept and self.last - time - first >= self.time
                self._arrives(k, there[source, port], 1 if is_kept else self._var(), ran[time])

    def _arrives(self, k, given, arrived, reader):
        """What arrives over an edge: the value itself, or its conversion, saved or made again."""
        e, made = self.space.edges[k], self.passages.converted[k]
        whole = [(pair, v) for pair, v in self.flows[k].items() if made[pair] > 0]
        same = [v for pair, v in self.flows[k].items() if not made[pair] > 0]
        saved, again, shown = self._var(), self._var(), self._var()
        self._costs(saved, whole, made * 1e-6, self.bytes)
        self._costs(again, whole, e.forward * 1e6, self.seconds)
        self.program += arrived <= saved + again + shown
        self.program += shown <= pulp.lpSum(same)
        self.program += shown <= given
        self.program += again <= given
        self.program += reader <= arrived
