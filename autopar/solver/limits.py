"""`LIMITS`: the tuned numbers of the solver, each with its unit and how it was found.

They are in one place so that a search can be tuned, or tried otherwise, without reading it. Limits count work and never
seconds, so that plans are reproducible (docs/design/009). A number is here if another value would be right too and only
change how long a search takes or what it finds; units, versions and infinities stay where they are used. "Chosen" is
said of a number that was never measured against others. A class has the numbers of one search.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundingLimits:
    """Differences that are rounding of double precision. Chosen."""

    same: float = 1e-12  # relative difference of seconds
    over: float = 1e-9  # relative excess over a budget
    closed: float = 1e-9  # gap, as a share of a step: backends of integer programs have such tolerances


@dataclass(frozen=True, slots=True)
class EliminationLimits:
    """Tables of an elimination, and the agreement of variables that it had to split."""

    widest: int = 1 << 19  # entries of a table; above that, a variable is split. Chosen: it was 1 << 22.
    cheap: int = 1 << 16  # entries of a table; smaller ones are as good, and the least combined go first. Chosen.
    # With these, kinds of a variable that others beat are left out: on GPT-3's shape three in five (design 009).
    rivals: int = 12  # kinds that the others are compared with
    large: int = 1 << 22  # sums; above that, those that cannot be least are ruled out first
    room: int = 1 << 24  # sums; above that, ruling them out would take too much memory. Chosen.
    # Granite on (2, 2, 2): a gap of 11 % without the descent, of .06 % with it (design 009). Its size was chosen.
    worth: float = 1e-3  # relative gap that is worth a descent, and share of it that is worth a change
    sweeps: int = 4  # passes of a descent over the split variables
    choices: int = 3  # choices that are tried for a variable, of those that its copies chose
    # ResNet-50 on (2, 4): 41.4 ms with one agreement, 39.1 ms with eight (design 009).
    agreements: int = 8  # ways in which the copies of split variables are made to agree


@dataclass(frozen=True, slots=True)
class PriceLimits:
    """The search for prices under a budget (`budget.py`)."""

    rounds: int = 16  # rounds of prices, at least. Chosen.
    most_rounds: int = 64  # rounds of prices where tables are small. Chosen.
    work: int = 1 << 21  # table entries in all rounds together, where these are more than `rounds`. Chosen.
    # Single precision takes two thirds of the time for GPT-3 on three axes (design 041).
    large: int = 1 << 20  # table entries; above that, prices are searched in single precision
    pivots: int = 10_000  # pivots of a linear program of prices, which has a row for each plan. Chosen.
    # A budget that nothing fits was searched for a hundred eliminations before proofs were tried (design 009). Chosen.
    absurd: float = 2  # bound, in seconds of the slowest plan, above which it is tried to prove that no plan fits
    proofs: int = 3  # times that this is tried
    worth: float = 1e-6  # relative gain of the bound; a round that can gain less is not run. Chosen.
    little: float = 0.03  # share of the open gap; a round that can close less is not run. Chosen.
    # A LLaMA on (2, 2): plans 2.4 % faster with the two of these (design 009).
    dearer: tuple[float, ...] = (2.0, 10.0)  # factors on seconds of conversions, to find plans with fewer of them
    # The smallest plan is searched for between its bound and the smallest that is known. All four were chosen.
    near: float = 1e-3  # relative difference of the two that ends the search
    seconds_weight: float = 1e-3  # weight of seconds beside bytes, which decides what no memory row mentions
    between: tuple[float, ...] = (0.3, 0.5, 0.7)  # budgets that are tried, as shares of the way from one to the other
    rough_gap: float = 0.02  # gap at which each of these searches ends


@dataclass(frozen=True, slots=True)
class IntegerLimits:
    """Integer programs of a whole space, as a backend solves them."""

    # CBC walked for ever in one feasibility pump: its search ends after work that is counted (design 009). Both chosen.
    nodes: int = 2_000  # nodes of the tree of one call
    pivots: int = 50_000  # pivots of each linear program in that tree
    whole: float = 0.9  # least value of a variable that counts as 1; tolerances of backends are far from it. Chosen.


@dataclass(frozen=True, slots=True)
class PolishLimits:
    """Plans between those that prices lead to: an integer program of alike layers, and splices (`polish.py`)."""

    gap: float = 4e-3  # gap at which the program ends. Chosen: it was 1e-3.
    nodes: int = 50  # nodes of its search tree. Chosen: it was 200.
    pivots: int = 5_000  # pivots of each of its linear programs. Chosen.
    # Plans under a budget took half the time, by this and other changes, when only plans near the bound were combined.
    close: float = 0.01  # relative excess over the bound up to which plans are combined
    few: int = 4  # plans that are combined, at least
    steps: int = 3  # steps of the search for a price of memory. Chosen: it was 6.
    enough: float = 1e-3  # gap, where tables are large, that is not worth combining plans. Chosen.


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Which searches follow the search for prices, and in which spaces (`searches.py`)."""

    nearly: float = 1e-3  # gap that is worth plans with fewer conversions, or a larger integer program. Chosen.
    # ResNets on two axes were 8 % from their bound (design 009).
    wide: float = 0.01  # gap that is worth more agreements of split variables
    far: float = 0.05  # gap that is worth plans of smaller budgets. Chosen.
    less: tuple[float, ...] = (0.94, 0.88, 0.8)  # these budgets, as shares of the given one. Chosen.
    # 200,000 before; CBC hung on a program of 120,000 pairs (design 009).
    pairs: int = 20_000  # flow pairs of the largest integer program
    pairs_with_rows: int = 4_000  # the same with memory rows, which make a program hard. Chosen.
    # LLaMA-8B's shape on (8, 8) is refused 3 GiB after 13 CPU seconds, 67 to 113 before (design 009).
    long: int = 1_000  # sites; in longer models a budget that nothing fits is refused after a shorter search


@dataclass(frozen=True, slots=True)
class RecomputeLimits:
    """The search for a sharding with states of its values, under one budget (`recompute.py`)."""

    known: int = 3  # shardings from earlier budgets that are tried first. Chosen.
    rounds: int = 12  # rounds of prices. Chosen: 8 in large spaces was given up.
    in_vain: int = 5  # rounds in a row without progress that end the search. Chosen: 2, 3 and 4 were given up.
    little: float = 0.05  # share of the open gap; a round that can close less is not run. Chosen: it was .03.
    # A space with other windows is left early where it cannot beat the first one's plan (design 019). All three chosen.
    rounds_at_first: int = 2  # rounds of prices before it is compared with that plan
    worth: float = 0.01  # relative gain on that plan that is not worth more rounds
    rounds_for_bound: int = 4  # rounds for the bound alone, where no plan comes near that plan
    # No search ever came to fit where the smallest plan that it met first held more; none of 110 budgets of five models
    # was lost by it (design 045).
    far: float = 1.25  # bytes of that plan, in budgets, above which the search is given up
    # It is also how far plans may be from that of another space for the search to go on. Chosen.
    open: float = 0.05  # gap, in addition to the free plan's, that is worth a search without recompute
    # BERT at .9 of its memory: a gap of .16 % with the search from here on, of 3.7 % without (design 009).
    small_open: float = 0.02  # the same in a small space, where that search is cheap
    smallest: int = 3  # shardings of the fewest bytes under a policy before the budget is given up. Chosen.
    mixed: int = 8  # shardings, the fastest of those that were met, whose choices are mixed. Chosen.
    mixtures: int = 6  # times that choices are mixed. Chosen.
    # LLaMA-8B at a quarter of its bytes: 1.63 s without, 1.22 with 6 as with 12 (design 063).
    moved_back: int = 6  # numbers of optimizer states that move back from the host, which are tried
    segments: tuple[int, ...] = (1, 2, 3, 4, 6, 8)  # blocks in a segment of which only the ends are saved. Chosen.


@dataclass(frozen=True, slots=True)
class JointLimits:
    """Prices of the search for shardings with states, whatever the budget (`joint.py`, `joint_search.py`)."""

    rough: float = 0.08  # share of the open gap without a budget; a round that can close less is not run. Chosen.
    # DeepSeek-V3 under 72 GiB, whose gap without a budget does not matter to it: 3 rounds for 16.
    free_gap: float = 1e-3  # gap at which the search without a budget ends in a long model
    # Rounds in a row without progress that end the search in a long model whose gap is under this one. Both chosen.
    in_vain_long: int = 3
    little_open: float = 0.01
    dearer: float = 8.0  # factor by which the price of a byte rises while all known plans are over the budget. Chosen.
    # GPT-3 at 80 GiB: a gap of 1.9 % before prices moved in such steps, of 1.0 % after. LLaMA-8B at .4: 10.4 and 6.7 %.
    step: float = 3.0  # largest factor between a price of a byte alone and that of the best bound
    same_share: float = 0.01  # difference of two exposed shares that counts as none. Chosen.
    same_price: float = 0.02  # relative difference of two prices of a byte that counts as none. Chosen.
    lowest_price: float = 1e-24  # price of a byte, in seconds, from which the range of prices is halved. Chosen.
    halvings: int = 48  # times that it is halved. Chosen.
    handed_on: int = 8  # plans of the Pareto front that are handed on. Chosen.
    # Shardings that fit with the bytes that no states change are looked for by themselves (design 041). Both chosen.
    bare_gap: float = 0.02  # gap at which the fastest of them is good enough
    bare_smallest: int = 2  # number of the smallest that are tried where none fits
    # Before small plans were searched for, 8 of 34 budgets that letters named were refused (design 045). Both chosen.
    dear: tuple[float, ...] = (30.0,)  # prices of a byte for small shardings, in usual prices; it was 1, 30 and 1,000
    lower: float = 0.95  # next budget of the search for a smaller plan, as a share of the smallest plan's bytes


@dataclass(frozen=True, slots=True)
class StateProgramLimits:
    """The integer program over saved values of policy "ilp" (`state_program.py`). All chosen."""

    programs: int = 5  # programs, each with less room than the last
    nodes: int = 4_000  # nodes of the search tree
    gap: float = 1e-4  # gap at which a program ends
    half: float = 0.5  # value of a variable above which it counts as 1


@dataclass(frozen=True, slots=True)
class StateLimits:
    """Prices of a byte at which the states of one sharding are chosen by cuts (`states.py`). All chosen."""

    step: float = 2.0  # factor by which a price is raised
    near: float = 1.1  # the first such factor from a price that may be near; each is the square of the one before
    raised: int = 12  # times that it is raised
    in_vain: int = 2  # steps in a row that raised the peak, after which it is raised no further
    between: int = 8  # prices that are tried between two
    pairs: int = 2  # pairs of states that are spliced
    program: StateProgramLimits = StateProgramLimits()
    looser: int = 6  # budgets above the given one under which states are searched that the host makes fit. Chosen.
    halved: int = 3  # times that the way from such a budget to the next is halved. Chosen.
    packed: int = 24  # known states, the slowest that would still be faster, that are tried with the host. Chosen.
    more: int = 6  # runs that are repeated one after the other where no known states fit beside the host. Chosen.
    largest: int = 12  # runs that are tried for each of them. Chosen.
    exchanged: int = 4  # runs among them that are tried in the place of a repeated one. Chosen.
    # Levels of recompute of stages: prices at which they are made, in usual prices, and the blocks of which some have
    # the next level. Both chosen.
    of_stages: tuple[float, ...] = (0.02, 0.1, 0.5, 0.8, 1.2)
    of_few: int = 4


@dataclass(frozen=True, slots=True)
class RefineLimits:
    """A closer look at states of a budget (`refine.py`).

    Together they reach the best of all sets for 337 of 345 budgets of small drawn lines, and no other way is better at
    any of 50 budgets on one device (design 041). Each alone was chosen.
    """

    step: float = 2.0  # factor between prices
    beyond: int = 2  # prices beyond the first that leads under the budget
    apart: int = 2  # prices between the first base of mixtures and the last price over the budget
    mixed: int = 6  # mixtures that are tried
    slots: int = 8192  # slots of their knapsack
    left_out: int = 256  # repeated runs that are tried to be left out, the longest first
    exchanges: int = 16  # exchanges of two runs
    pairs: int = 32  # pairs that are tried for each exchange
    lowered: int = 24  # steps to a lower peak
    next: int = 16  # runs that are tried for each step
    work: int = 1 << 16  # runs of the timeline that exchanges, and steps to a lower peak, may go through
    much: float = 0.4  # repeated share of the seconds of forward, above which repeating runs twice is tried; it was .5
    # There an integer program finds up to a tenth less than prices do (design 041).
    few: int = 600  # runs that could be repeated, up to which that program is tried


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Nested checkpoints by dynamic programming over stages (`groups.py`).

    With them no other way is better at any of 50 budgets on one device, five of which were left to others before
    (design 041). Each alone was chosen.
    """

    slots: int = 512  # slots into which room is rounded
    spare: float = 1.25  # room that is asked for, in budgets, at most
    rooms: int = 12  # rooms that are tried: estimates are off by a few per cent of what the line says
    joined: tuple[int, ...] = (1, 2)  # stages in one way of going back
    subsets: int = 6  # values of a stage, the largest, of which every subset is tried
    prices: tuple[float, ...] = tuple(4.0**k for k in range(-4, 6))  # prices of a byte for the others, in usual prices
    longest: int = 24  # stages in a group
    near: int = 3  # ops on either side among which a stage begins, where the fewest bytes are live
    wide: float = 2.0  # live bytes, in those at both neighbours, above which no stage begins
    finer: int = 256  # further values that are made in passing
    beside: int = 6  # values that are tried for each of these, where the step is fullest
    work: int = 1 << 16  # runs of the timeline that the search for these goes through


@dataclass(frozen=True, slots=True)
class CurveLimits:
    """One search for many budgets (`curve.py`)."""

    every: int = 3  # budgets from one search of prices to the next. Chosen.
    # A curve took a third less time, by this and other changes, with so few.
    rounds: int = 2  # rounds of such a search


@dataclass(frozen=True, slots=True)
class TieLimits:
    """Changes of a plan that cost nothing (`ties.py`). All chosen."""

    none: float = 1e-9  # communication that counts as none, as a share of the step time
    changes: int = 8  # changes of one kind of site
    tries: int = 3  # attempts, each with more room for bytes that changes do not count


@dataclass(frozen=True, slots=True)
class MeshLimits:
    """Meshes of a number of devices (`meshes.py`)."""

    # LLaMA's shape on 64 devices took 25 s a mesh with three, and none of seven was faster than the best of two.
    axes: int = 2  # axes of the meshes that are searched
    # A small ResNet was predicted .3 % faster on (2, 2) than on (4,), and measured 7 % slower (design 025).
    alike: float = 0.02  # relative difference of step times up to which the mesh of fewest axes is taken
    # Storage along both axes nests in their order, so that an exchange may cost: far less than forecasts are off.
    named: float = 0.005  # share of a step that an exchange of axes may add. Chosen.


@dataclass(frozen=True, slots=True)
class WordLimits:
    """Shares and numbers in texts about a plan (`summary.py`, `text.py`). All chosen."""

    all: float = 0.9  # share of the seconds of products that counts as all of them (design 045)
    some: float = 0.1  # share under which nothing is said
    large: float = 0.02  # share of the peak under which kinds of memory are summed up as "others"
    names: int = 6  # modules or values that are named
    slowest: int = 5  # places that are named as the slowest
    times: int = 128  # times of a step whose memory a file keeps: a chart is as wide as that in steps of 7 pixels
    pause: float = 1e-3  # share of a step that a file's events leave out between those of a block: a pixel of a chart
    open: float = 1e-3  # gap above which better plans may be unknown
    as_fast: float = 1e-9  # seconds by which a rival is no slower
    stages: int = 12  # stages whose numbers of blocks are named
    shown: int = 10  # actions at either end of an order that are named
    actions: int = 24_000  # actions of all coordinates that a page draws: some 700 KB of it


@dataclass(frozen=True, slots=True)
class Limits:
    """The tuned numbers of the solver, by search."""

    rounding: RoundingLimits = RoundingLimits()
    elimination: EliminationLimits = EliminationLimits()
    prices: PriceLimits = PriceLimits()
    integer: IntegerLimits = IntegerLimits()
    polish: PolishLimits = PolishLimits()
    searches: SearchLimits = SearchLimits()
    recompute: RecomputeLimits = RecomputeLimits()
    joint: JointLimits = JointLimits()
    states: StateLimits = StateLimits()
    refine: RefineLimits = RefineLimits()
    groups: GroupLimits = GroupLimits()
    curve: CurveLimits = CurveLimits()
    ties: TieLimits = TieLimits()
    meshes: MeshLimits = MeshLimits()
    words: WordLimits = WordLimits()


LIMITS = Limits()
