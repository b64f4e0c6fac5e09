"""Decode steps recorded once and replayed: on CUDA the launches of a folded step become one graph.

What a step costs the host is then one call instead of some hundreds of nodes that MLX makes, schedules and hands over
one by one. Kernels are the folded model's own; what differs is who launches them and where they write:

- A step is run once in Python while `loader.recorded` takes its launches down instead of passing them to MLX. Outputs
  become arrays of their own that are used again in every replay.
- Keys and values are written where they lie, the recurrent state over itself. The convolution reads the last three
  rows, which are outputs of the last three steps: `PHASES` = 4 steps are recorded, each with buffers of its own, so
  that every row is found where the step of that phase left it and none is ever moved.
- Position and token stay on the device; the host reads tokens from memory that the last kernel writes (`RING`).

Drafts are verified by recorded passes of several rows (`RowsReplay`). There all passes, of one row too, share one place
for the state and one for the convolutions' rows, so that one may follow any other. A pass leaves the state after each
of its rows; one launch makes that after fewer rows the state, another moves the convolutions' rows back, and keys and
values that are taken back are written over.

MLX does not see any of this. While steps run, the cache's state is away; `ReplayedCache` calls `Replay.settle` before
anything looks at it, which waits and makes the state MLX's again, in fresh arrays, as a snapshot may hold them.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from engine.cache import Cache, CacheError, Inputs, Rows, Snapshot
from engine.config import ModelConfig
from engine.folded import FoldedModel
from engine.kernels import loader, step
from engine.kernels.loader import KernelError, Launch
from engine.ops.registry import Recorder

PHASES = 4
"""Steps with buffers of their own: the convolution's kernel, of 4 rows."""
LEAST_ROOM = 512
"""Positions of the shortest recorded step; longer ones double, so that a long decode records few."""

Placed = tuple[Launch, Sequence[int], Sequence[tuple[int, ...]]]
"""A launch, the addresses of its inputs and outputs, and the strides of its inputs."""


def room_for(positions: int) -> int:
    """Positions that a recorded step attends over, where the cache holds as many: `LEAST_ROOM`, doubled until it holds
    `positions`."""
    room = LEAST_ROOM
    while room < positions:
        room *= 2
    return room


class Backend(Protocol):
    """What replaying takes of a device; `engine.kernels.cuda.Device` has it."""

    def enter(self) -> None:
        """Called first in a thread that will make other calls."""
        ...

    def addresses(self, arrays: Sequence[mx.array]) -> list[tuple[int, tuple[int, ...]]]:
        """Address and strides of evaluated arrays."""
        ...

    def graph(self, calls: Sequence[Placed]) -> Any:
        """Launches, one after another, as something to `run`."""
        ...

    def drop(self, graph: Any) -> None:
        """Free a graph."""
        ...

    def start(self, graph: Any) -> None:
        """Start a graph behind what runs already."""
        ...

    def run(self, graph: Any) -> Any:
        """The same; an event for `wait`."""
        ...

    def wait(self, event: Any) -> None:
        """Until what was started has ended."""
        ...

    def synchronize(self) -> None:
        """Until everything has ended."""
        ...

    def copy(self, to: int, from_: int, size: int) -> None:
        """Bytes between addresses."""
        ...

    def fill(self, to: int, word: int, count: int) -> None:
        """32-bit words at an address."""
        ...

    def host_words(self, count: int) -> tuple[int, Any]:
        """Words of the host's memory that kernels read and write: their address, and they."""
        ...


class ReplayedCache(Cache):
    """A `Cache` whose state may be away with a `Replay`; whoever asks for it waits until it is back."""

    away: Callable[[], None] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """All arrays by name, as in every cache; back first if they are away."""
        if self.away is not None:
            self.away()
        return self._state

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        """Set once, when the cache is made."""
        self._state = value

    @property
    def capacity(self) -> int:
        keys = self._state["keys"]
        return keys[0].shape[2] if keys else 1 << 62

    forgotten: Callable[[], None] | None = None
    sequence = 0
    """Grows whenever what is cached becomes another sequence."""

    def settle(self) -> None:
        if self.away is not None:
            self.away()

    def reset(self) -> None:
        if self.forgotten is not None:
            self.forgotten()
        self.sequence += 1
        super().reset()

    def restore(self, snapshot: Snapshot) -> None:
        # What is away will not be looked at again: it need not come back.
        if self.forgotten is not None and snapshot.position <= min(self.position, self.capacity):
            self.forgotten()
        self.sequence += 1
        super().restore(snapshot)

    def seek(self, position: int) -> None:
        self.settle()
        super().seek(position)


class Pending:
    """A token in flight."""

    def __init__(self, replay: Replay, event: Any, slot: int):
        self._replay, self._event, self._slot = replay, event, slot
        replay.unread[slot] = self
        self._token: int | None = None

    def item(self) -> int:
        """The token, once it is there."""
        if self._token is None:
            self._replay.backend.wait(self._event)
            self._token = int(self._replay.ring[self._slot])
            self._replay.unread.pop(self._slot, None)
        return self._token

    @property
    def finite(self) -> Finite:
        """Whether every logit chosen so far was finite."""
        return Finite(self)


def as_array(token: Pending | mx.array) -> mx.array:
    """A token in flight as uint32 ``[1]``; waits for one of a replay."""
    return mx.array([token.item()], dtype=mx.uint32) if isinstance(token, Pending) else token


@dataclass(frozen=True)
class Finite:
    """A flag in flight, read as MLX's are."""

    token: Pending

    def item(self) -> bool:
        """The flag, once its token is there."""
        self.token.item()
        return self.token._replay.finite


@dataclass
class _Program:
    """A recorded step: a graph for each phase, or a recorded pass of rows: one graph, and one to take rows back.

    Attributes:
        conv: addresses of each layer's rows before phase 0, oldest first, and the rows themselves.
        logits: of each phase, if they were asked for.
        tally: what one step counts as executed.
        held: what must stay alive.
        hidden: rows before the final norm, of a pass of rows.
    """

    graphs: list[Any]
    conv: list[list[tuple[int, mx.array]]]
    logits: list[mx.array]
    tally: dict
    held: list[Any] = field(default_factory=list)
    hidden: mx.array | None = None


class Replay:
    """Greedy steps of a `FoldedModel` over a `ReplayedCache`, recorded and replayed.

    Args:
        model: with everything folded, and weights packed. recorder: counts what runs.
    """

    MOST_GRAPHS = 8 * PHASES
    """Graphs kept at once."""

    def __init__(
        self, config: ModelConfig, model: FoldedModel, cache: ReplayedCache, recorder: Recorder, backend: Backend
    ):
        self.config, self.model, self.cache, self.recorder, self.backend = config, model, cache, recorder, backend
        self.states = self._states()
        self.position = mx.zeros((4,), mx.int32)
        self.token = mx.zeros((4,), mx.uint32)
        mx.eval(self.states, self.position, self.token)
        backend.enter()
        # One word more than the ring: the flag that all logits were finite.
        self._ring_at, self.ring = backend.host_words(step.RING + 1)
        self._at = self._addresses([self.position, self.token, *self.states])
        self._programs: dict[tuple, _Program] = {}
        # Steps in flight write into arrays that go with this object, and graphs are no memory of MLX's.
        weakref.finalize(self, _release, backend, self._programs).atexit = False
        # What was taken over last, and where it lies: a restore point is often taken again.
        self._taken: list[mx.array] = []
        self._taken_at: list[int] = []
        self._running: tuple[tuple, _Program] | None = None
        self._phase = 0
        self._fed: int | None = None
        self._where: tuple[int, ...] = ()
        self.unread: dict[int, Pending] = {}

    def _states(self) -> list[mx.array]:
        """Each Gated DeltaNet layer's state."""
        return [mx.zeros(self._state_shape, mx.float32) for _ in self.config.linear_layers]

    @property
    def _state_shape(self) -> tuple[int, ...]:
        c = self.config
        return 1, c.linear_num_value_heads, c.linear_value_head_dim, c.linear_key_head_dim

    def _addresses(self, arrays: Sequence[mx.array]) -> list[int]:
        return [address for address, _ in self.backend.addresses(arrays)]

    # -- steps -----------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the cache's state is here."""
        return self._running is not None

    def feed(self, token: int) -> None:
        """Make `token` the next to be fed, instead of what the last step chose."""
        self._fed = token

    def step(self, scores: bool = False) -> Pending | mx.array:
        """Submit one step from the cache's token; with `scores` wait and return its logits ``[1, vocabulary]``."""
        program, phase = self._ready(scores), self._phase
        if self._fed is not None:
            self.backend.fill(self._at[1], self._fed, 4)
        slot = self.cache.position % step.RING
        self._overtaken(slot)
        event = self.backend.run(program.graphs[phase])
        self._fed = None
        self.recorder.replay(program.tally)
        self.cache.position += 1
        pending = Pending(self, event, slot)
        self._phase = (phase + 1) % PHASES
        if not scores:
            return pending
        pending.item()
        return self._copy(program.logits[phase]).squeeze(0)

    def _ready(self, scores: bool) -> _Program:
        """The recorded step that may run now, after taking over the cache's state if it is not here."""
        room = self._room(1)
        if self._running is not None and self._running[0][:2] != (room, scores):
            self.settle()
        if self._running is None:
            self._look()
            key, program = self._found((room, scores), lambda: self._record(room, scores))
            self._take_over([at for placed in program.conv for at, _ in placed[: PHASES - 1]])
            self._phase, self._running = 0, (key, program)
        return self._running[1]

    def _room(self, rows: int) -> int:
        """Positions of the shortest recorded step that `rows` more rows fit."""
        return min(room_for(self.cache.position + rows), self.cache.capacity)

    def _overtaken(self, slot: int) -> None:
        """Read what is written over next, where the host is a whole ring behind."""
        if slot in self.unread:
            self.unread[slot].item()

    def _copy(self, array: mx.array) -> mx.array:
        """An array of MLX's own, of one that steps write."""
        made = array * 1
        mx.eval(made)
        return made

    def _look(self) -> None:
        """Drain MLX and see where keys and values lie."""
        s = self.cache.state
        self.backend.enter()
        mx.eval(self.cache.arrays())
        mx.synchronize()
        self._where = tuple(self._addresses([*s["keys"], *s["values"]]))

    def _found(self, wanted: tuple, record: Callable[[], _Program]) -> tuple[tuple, _Program]:
        """A program and its key; recorded if there is none for where keys and values lie now."""
        key = (*wanted, self.cache.capacity, self._where)
        if key not in self._programs:
            while sum(len(program.graphs) for program in self._programs.values()) >= self.MOST_GRAPHS:
                # The oldest may run still.
                self.backend.synchronize()
                for graph in self._programs.pop(next(iter(self._programs))).graphs:
                    self.backend.drop(graph)
            self._programs[key] = record()
        return key, self._programs[key]

    def _take_over(self, conv: Sequence[int]) -> None:
        """Copy the cache's state to where programs find it; `conv` are places of the convolutions' rows."""
        s, cache = self.cache.state, self.cache
        taken = [*s["recurrent"], *sum(s["conv"], [])]
        if list(map(id, taken)) != list(map(id, self._taken)):
            places = self.backend.addresses(taken)
            for array, (_, steps) in zip(taken, places):
                if steps and any(n > 1 and a != b for n, a, b in zip(array.shape, steps, _dense(array.shape))):
                    raise KernelError(f"replay copies states as they lie; one of shape {list(array.shape)} has gaps")
            self._taken, self._taken_at = taken, [address for address, _ in places]
        for address, from_, array in zip([*self._at[2:], *conv], self._taken_at, taken):
            self.backend.copy(address, from_, array.nbytes)
        self.backend.fill(self._at[0], cache.position, 4)
        self.backend.fill(self._at[1], int(s["token"].item()), 4)
        self.ring[step.RING] = int(s["finite"].item())  # type: ignore[index]
        # The copies read arrays that the cache may let go.
        self.backend.synchronize()
        self._fed = None
        cache.away, cache.forgotten = self.settle, self.forget

    @property
    def finite(self) -> bool:
        """Whether every logit chosen so far was finite; of steps that have ended."""
        return self.ring[step.RING] != 0

    def _end(self) -> _Program | None:
        """Wait for all steps; the program that ran, if any."""
        if self._running is None:
            return None
        self.backend.enter()
        self.backend.synchronize()
        for pending in list(self.unread.values()):
            pending.item()
        (_, program), self._running = self._running, None
        self.cache.away = self.cache.forgotten = None
        return program

    def forget(self) -> None:
        """Wait for all steps; the state they left is not wanted. The cache is as it was, but for its length."""
        if self._end() is not None:
            # A fault that nobody has asked about is not forgotten with the rest.
            self.cache.state["finite"] = mx.array([self.finite])
            self.cache.seek(self.cache.position)

    def settle(self) -> None:
        """Wait for all steps and give the state back to the cache."""
        program = self._end()
        if program is None:
            return
        s, last = self.cache.state, (self.cache.position - 1) % step.RING
        rows = self._conv_rows(program)
        s["recurrent"] = [state * 1 for state in self.states]
        s["conv"] = [[row * 1 for row in three] for three in rows]
        s["token"] = mx.array([self.ring[last] if self._fed is None else self._fed], dtype=mx.uint32)
        s["finite"] = mx.array([self.finite])
        self.cache.seek(self.cache.position)
        mx.eval(s["recurrent"], s["conv"])

    def _conv_rows(self, program: _Program) -> list[list[mx.array]]:
        """Each layer's last three rows, oldest first."""
        # Rows before phase 0 are, in order, those that the phases 1 to 3 left; a later phase finds them further on.
        return [self._rows(placed, program) for placed in program.conv]

    def _rows(self, placed: list[tuple[int, mx.array]], program: _Program) -> list[mx.array]:
        """A layer's last three rows, oldest first: those of the three phases before the one that comes next."""
        by_phase = {1: placed[0][1], 2: placed[1][1], 3: placed[2][1], 0: placed[3][1]}
        return [by_phase[(self._phase + before) % PHASES] for before in (-3, -2, -1)]

    # -- recording -------------------------------------------------------------------------

    def _record(self, room: int, scores: bool) -> _Program:
        """A step of `room` positions for every phase."""
        c = self.config
        taken = _Taken()
        full = mx.array([self.cache.capacity] * 4, dtype=mx.int32)
        # Stand-ins, never evaluated: what they stand for is told below.
        ring = mx.zeros((step.RING,), mx.uint32)
        flag = mx.zeros((4,), mx.uint32)
        conv = [[mx.zeros((1, 1, c.conv_dim), self.cache.dtype) for _ in range(PHASES - 1)] for _ in c.linear_layers]
        before, left, logits = [list(rows) for rows in conv], [], []
        with loader.recorded(taken.launch):
            for _ in range(PHASES):
                tally = self.recorder.capture()
                try:
                    view = _View(self, taken, conv, room, full)
                    h = self.model(self.token[:1], view)  # pyright: ignore[reportArgumentType]
                    tokens, best, *all_logits = self.model.scored(h, scores)
                    step.settle_metal(tokens.squeeze(0), best.squeeze(0), (self.token, self.position, flag, ring))
                finally:
                    self.recorder.release()
                taken.cut()
                logits += all_logits
                left.append([rows[-1] for rows in conv])
        # Row j before phase 0 is what phase j + 1 of the last round left; phase 0's own follows them.
        stands = dict(taken.stands)
        for layer, three in enumerate(before):
            for j, row in enumerate(three):
                stands[id(row)] = left[j + 1][layer]
        places = self._places(stands, ring, flag)
        self._allow(places, [full, *self.states, *taken.outputs])
        graphs = [self.backend.graph(places.of(calls)) for calls in taken.phases]
        rows = [[left[phase][layer] for phase in (1, 2, 3, 0)] for layer in range(len(before))]
        flat = places.addresses([row for four in rows for row in four])
        placed = [[(flat[4 * i + j], row) for j, row in enumerate(four)] for i, four in enumerate(rows)]
        # Not the views of the cache: MLX writes in place only where nothing else holds an array.
        return _Program(graphs, placed, logits, dict(tally), [taken.outputs, full, conv])

    def _places(self, stands: dict[int, mx.array], ring: mx.array, flag: mx.array) -> _Places:
        """Where arrays lie, with what is known without asking."""
        # Past the property: while steps run, keys and values lie where they lay.
        s, places = self.cache._state, _Places(self.backend, stands)
        places.known[id(ring)] = self._ring_at, (1,)
        places.known[id(flag)] = self._ring_at + 4 * step.RING, (1,)
        for array, address in zip([*s["keys"], *s["values"]], self._where):
            places.known[id(array)] = address, ()
        return places

    def _allow(self, places: _Places, more: Sequence[mx.array]) -> None:
        """Let launches read the state, the weights and `more`."""
        s = self.cache._state
        recorded = [self.position, self.token, *s["keys"], *s["values"]]
        places.allow([*recorded, *more, *_arrays_of(self.model.weights)])


class RowsReplay(Replay):
    """The same with passes of up to `rows` rows beside the steps, whose last rows can be taken back.

    A pass over several tokens is fed by the host, which waits for it: `verify`. It and the steps find the state, the
    convolutions' rows and the position in the same places, so that nothing is moved between them; for that a step's
    launches end with those that move the convolutions' rows on.

    Args:
        rows: most of a pass; as many states of each layer are held.
    """

    MOST_GRAPHS = 64
    """Passes of 1 to 8 rows, with logits and without, for two lengths; all but the first have one to take rows back."""

    def __init__(
        self,
        config: ModelConfig,
        model: FoldedModel,
        cache: ReplayedCache,
        recorder: Recorder,
        backend: Backend,
        rows: int,
    ):
        self.rows, layers = rows, len(config.linear_layers)
        # What convolutions read next, and what they read in the last pass.
        self._conv = mx.zeros((2, layers, PHASES - 1, config.conv_dim), cache.dtype)
        self._kept = mx.zeros((4,), mx.uint32)
        mx.eval(self._conv, self._kept)
        super().__init__(config, model, cache, recorder, backend)
        self._next = [[self._conv[0, i : i + 1, j : j + 1] for j in range(PHASES - 1)] for i in range(layers)]
        flat = self._addresses([self._kept, *sum(self._next, [])])
        self._kept_at, self._next_at = flat[0], flat[1:]
        self._fed_at, self._tokens = backend.host_words(rows)
        self._last: _Program | None = None
        # Which sequence the last pass or `keep` left, where that pass began, and at which position.
        self._left = -1, -1, -1

    def _states(self) -> list[mx.array]:
        layers, (_, *shape) = len(self.config.linear_layers), self._state_shape
        # Of each layer the state, then those after 1, 2, … rows of a pass that are not all of it.
        self._every = mx.zeros((layers, self.rows, *shape), mx.float32)
        mx.eval(self._every)
        return [self._every[i, :1] for i in range(layers)]

    def _ready(self, scores: bool) -> _Program:
        self._last = None
        return self._pass(1, scores)

    def verify(self, tokens: Sequence[int], scores: bool = False) -> tuple[list[int], mx.array | None]:
        """Feed `tokens`, 2 to `rows`, from the cache's position on; all of them stay until `keep` takes some back.

        Returns:
            The greedy token after each, and with `scores` the logits ``[T, vocabulary]``.
        """
        count, start = len(tokens), self.cache.position
        # Recording may free graphs of earlier passes.
        self._last = None
        program = self._pass(count, scores)
        slots = [(start + row) % step.RING for row in range(count)]
        for slot in slots:
            self._overtaken(slot)
        # Nothing that read the last ones runs any more: that pass was waited for.
        self._tokens[:count] = list(tokens)
        event = self.backend.run(program.graphs[0])
        self.recorder.replay(program.tally)
        self.cache.position += count
        self._fed, self._last, self._left = None, program, (self.cache.sequence, start, self.cache.position)
        self.backend.wait(event)
        return [int(self.ring[slot]) for slot in slots], self._copy(program.logits[0]).squeeze(0) if scores else None

    def keep(self, start: int, rows: int) -> None:
        """Leave only the first `rows`, at least one, of the last `verify`, which began at `start`; again with fewer.

        Raises:
            CacheError: other rows have entered the cache since, or another sequence.
        """
        program, now = self._last, (self.cache.sequence, start, self.cache.position)
        if program is None or now != self._left or not start < start + rows < self.cache.position:
            raise CacheError(f"rows from position {start} on are not the last of {self.cache.position}")
        if self._running is None:
            # Something has looked at the state since; what was left beside it still stands.
            self._look()
            self._take_over(self._next_at)
            self._running = (), program
        self.backend.fill(self._kept_at, rows, 1)
        self.backend.start(program.graphs[1])
        self.backend.fill(self._at[0], start + rows, 4)
        self.cache.position = start + rows
        self._left = self.cache.sequence, start, self.cache.position
        self._fed = int(self.ring[(start + rows - 1) % step.RING])

    def forget(self) -> None:
        super().forget()
        self._last = None

    def hidden(self) -> mx.array:
        """Rows ``[1, T, hidden]`` before the final norm of what ran last, which must have ended."""
        assert self._running is not None and self._running[1].hidden is not None
        return self._copy(self._running[1].hidden)

    def _pass(self, rows: int, scores: bool) -> _Program:
        """The recorded pass of `rows` rows that may run now."""
        room = self._room(rows)
        if self._running is None:
            self._look()
        # Recording may fail: the state is taken over after it.
        found = self._found((rows, room, scores), lambda: self._record_rows(rows, room, scores))
        if self._running is None:
            self._take_over(self._next_at)
        self._running, self._phase = found, 0
        return found[1]

    def _conv_rows(self, program: _Program) -> list[list[mx.array]]:
        return self._next

    def _record_rows(self, rows: int, room: int, scores: bool) -> _Program:
        """A pass of `rows` rows in `room` positions, and taking some of them back."""
        # What runs may write what is evaluated here.
        self.backend.synchronize()
        taken, full = _Taken(), mx.array([self.cache.capacity] * 4, dtype=mx.int32)
        # Stand-ins, never evaluated: what they stand for is told below.
        ring, flag = mx.zeros((step.RING,), mx.uint32), mx.zeros((4,), mx.uint32)
        fed = self.token[:1] if rows == 1 else mx.zeros((rows,), mx.uint32)
        with loader.recorded(taken.launch):
            tally = self.recorder.capture()
            try:
                view = _RowsView(self, taken, self._next, room, full)
                view.states = [self._every[i, :rows] for i in range(len(self._next))]
                h = self.model(fed, view)  # pyright: ignore[reportArgumentType]
                tokens, best, *logits = self.model.scored(h, scores)
                step.settle_metal(tokens.squeeze(0), best.squeeze(0), (self.token, self.position, flag, ring))
            finally:
                self.recorder.release()
            self._slide(view.new, back=False)
            taken.cut()
            if rows > 1:
                step.back_metal(self._kept, self._every)
                self._slide(view.new, back=True)
                taken.cut()
        places = self._places(taken.stands, ring, flag)
        if rows > 1:
            places.known[id(fed)] = self._fed_at, (1,)
        self._allow(places, [fed, full, self._every, self._conv, self._kept, *taken.outputs])
        graphs = [self.backend.graph(places.of(calls)) for calls in taken.phases]
        # MLX is drained again before anything runs.
        mx.synchronize()
        return _Program(graphs, [], logits, dict(tally), [taken.outputs, full, fed], h)

    def _slide(self, new: Sequence[mx.array], back: bool) -> None:
        for i in range(0, len(new), step.MOST_LAYERS):
            some = slice(i, i + step.MOST_LAYERS)
            step.slide_metal(new[some], self._kept, self._conv[0, some], self._conv[1, some], back=back)


def _release(backend: Backend, programs: dict[tuple, _Program]) -> None:
    """Wait for all steps and free the graphs."""
    backend.enter()
    backend.synchronize()
    for program in programs.values():
        for graph in program.graphs:
            backend.drop(graph)


def _room(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An array to be written, in device memory however small."""
    size = math.prod(shape)
    if size * dtype.size > 8:
        return mx.zeros(shape, dtype)
    return mx.zeros((16 // dtype.size,), dtype)[:size].reshape(shape)


def _arrays_of(value: Any) -> Iterator[mx.array]:
    """Every array in dataclasses, sequences and dicts."""
    if isinstance(value, mx.array):
        yield value
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from _arrays_of(getattr(value, f.name))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _arrays_of(part)


class _Taken:
    """Launches taken down, with the arrays they leave."""

    def __init__(self) -> None:
        self.phases: list[list[tuple[Launch, list[mx.array]]]] = []
        self.outputs: list[mx.array] = []
        self.stands: dict[int, mx.array] = {}
        self._now: list[tuple[Launch, list[mx.array]]] = []

    def launch(self, call: Launch) -> list[mx.array]:
        """Take a launch down; what it leaves are arrays to be, or those it writes into."""
        if call.into is not None:
            made = list(call.into)
        else:
            made = [_room(shape, dtype) for shape, dtype in zip(call.shapes, call.dtypes)]
            self.outputs += made
        self._now.append((call, made))
        return made

    def stand(self, made: mx.array, for_: mx.array) -> None:
        """A launch's output `made` is written to `for_` instead."""
        self.stands[id(made)] = for_
        self.outputs = [array for array in self.outputs if array is not made]

    def cut(self) -> None:
        """End a phase."""
        self.phases.append(self._now)
        self._now = []


class _Places:
    """Where the arrays of recorded launches lie."""

    def __init__(self, backend: Backend, stands: dict[int, mx.array]):
        self._backend, self._stands = backend, stands
        self.known: dict[int, tuple[int, tuple[int, ...]]] = {}
        # An array that dies may leave its id to another.
        self._alive: list[mx.array] = []
        self._ranges: list[tuple[int, int]] = []

    def allow(self, arrays: Sequence[mx.array]) -> None:
        """What launches may read: what else they are given was computed by MLX, once, and would never change."""
        starts = self.addresses(arrays)
        self._ranges = sorted((start, start + array.nbytes) for start, array in zip(starts, arrays))

    def _check(self, call: Launch, addresses: Sequence[int]) -> None:
        for name, address in zip(call.kernel.inputs, addresses):
            at = bisect.bisect_right(self._ranges, (address, 1 << 64)) - 1
            # Ranges may overlap: a longer one may begin further back.
            if not any(start <= address < end for start, end in self._ranges[max(at - 8, 0) : at + 1]):
                raise KernelError(f"{call.kernel.name}: {name} comes from an operation that is no recorded launch")

    def of(self, calls: Sequence[tuple[Launch, list[mx.array]]]) -> list[Placed]:
        """Launches with addresses."""
        every = [array for call, made in calls for array in (*call.inputs, *made)]
        self._look(every)
        placed = []
        for call, made in calls:
            inputs = [self._known(array) for array in call.inputs]
            outputs = [self._known(array)[0] for array in made]
            self._check(call, [address for address, _ in inputs])
            strides = [steps or _dense(array.shape) for (_, steps), array in zip(inputs, call.inputs)]
            placed.append((call, [*(address for address, _ in inputs), *outputs], strides))
        return placed

    def addresses(self, arrays: Sequence[mx.array]) -> list[int]:
        """Where arrays lie."""
        self._look(arrays)
        return [self._known(array)[0] for array in arrays]

    def _known(self, array: mx.array) -> tuple[int, tuple[int, ...]]:
        return self.known[id(self._stands.get(id(array), array))]

    def _look(self, arrays: Sequence[mx.array]) -> None:
        resolved = {id(a): a for a in (self._stands.get(id(array), array) for array in arrays)}
        new = [array for key, array in resolved.items() if key not in self.known]
        mx.eval(new)
        for array, place in zip(new, self._backend.addresses(new)):
            self.known[id(array)] = place
        self._alive += new


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    steps, size = [], 1
    for extent in reversed(shape):
        steps.append(size)
        size *= extent
    return tuple(reversed(steps))


class _View:
    """How a recorded step reads and writes the cache: as `engine.cache.TracedView`, in place."""

    def __init__(self, replay: Replay, taken: _Taken, conv: list[list[mx.array]], room: int, capacity: mx.array):
        self._replay, self._taken, self._conv, self._room, self._capacity = replay, taken, conv, room, capacity
        self._position = replay.position
        self.offset = self.position = replay.position[:1]

    def append(self, layer: int, k: mx.array, v: mx.array) -> tuple[Rows, Rows]:
        """Put new rows into the cache; keys and values to attend over."""
        s, i = self._replay.cache._state, self._replay.cache.attention_index[layer]
        keys, values = s["keys"][i], s["values"][i]
        step.keep_metal(k, v, self._position, self._capacity, keys, values)
        return keys[..., : self._room, :], values[..., : self._room, :]

    def recur(self, layer: int, inputs: Inputs, core: Callable[..., Any]) -> mx.array:
        """Run a layer's recurrence over its state, in place."""
        i = self._replay.cache.linear_index[layer]
        out, self._conv[i], new = core(inputs, self._conv[i], self._replay.states[i])
        self._taken.stand(new, self._replay.states[i])
        return out


class _RowsView(_View):
    """The same for several rows: the state after each, and their inputs of the convolutions."""

    states: list[mx.array]
    new: list[mx.array]

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.new = []

    def recur(self, layer: int, inputs: Inputs, core: Callable[..., Any]) -> mx.array:
        i = self._replay.cache.linear_index[layer]
        out, _, new = core(inputs, self._conv[i], self.states[i])
        self._taken.stand(new, self.states[i])
        self.new.append(inputs[0])
        return out


def unsupported(config: ModelConfig, model: Any, cache_layout: str) -> str | None:
    """Why steps of a model cannot be recorded, or None.

    Raises nothing; what only recording finds out is a `KernelError` there.
    """
    if not isinstance(model, FoldedModel) or not model.whole:
        return "only launches of our own kernels are recorded; take decode.fusion=full"
    if not model.ops.decode_attention.always("metal"):
        return "only launches of our own kernels are recorded; take decode_attention=metal"
    if model.weights.embed.scales is None:
        return "a recorded step reads a packed embedding"
    if cache_layout != "contiguous":
        return "a recorded step reads a contiguous cache"
    if config.linear_conv_kernel_dim != PHASES:
        return f"it is made for a convolution of {PHASES} rows"
    return None
