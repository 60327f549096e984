"""Running requests on the device, one stable row each, and the inputs of steps.

The host sends a few numbers for each request, without waiting, and kernels expand them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBatch, GroupTable, StateRows
from toolkit.cache_group import ONE_GROUP, CacheGroup
from toolkit.kernels.drafts import LATER, SAMPLES, DraftInputs, Points
from toolkit.kernels.table import Kernels
from toolkit.lora.weight import StepActive, StepAdapters
from toolkit.sampling.processor_rows import NO_PROCESSORS, Loaded
from toolkit.sampling.sampling_state import SamplingState
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.scheduler.output import IntArray
from toolkit.worker.axes import shift_after
from toolkit.worker.graph_policy import StepShape
from toolkit.worker.staging import Staging
from toolkit.worker.table_columns import TableColumns


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device.

    `sample_rows`, `sample_positions` int32 [num_reqs], or [num_points] with drafts: rows of the
    logits, and positions of the tokens to sample; -1: none."""

    token_ids: torch.Tensor
    batch: AttentionBatch
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    adapters: StepAdapters | None  # in a step with LoRA adapters
    points: Points | None  # if steps verify drafts

    @property
    def wanted(self) -> torch.Tensor:
        """The tokens that are sampled after, as indices, int64."""
        if self.points is not None:
            return self.points.tokens
        return (self.batch.query_start_loc[1:] - 1).clamp(min=0).long()


class BatchState:
    """Row r belongs to one request from its admission to its end or preemption.

    `token_ids` [num_rows + 1, max_model_len + 1] int32: prompt and output. The device writes
    sampled tokens, so that the next step can read them before the host has seen them. `tables`: by
    group of layers, block numbers [num_rows + 1, max_blocks] int32. The last row belongs to the
    padding: requests without tokens, and tokens without a slot. Inputs have fixed addresses, so
    that CUDA graphs can read them."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        max_tokens: int,
        kernels: Kernels,
        processors: Loaded = NO_PROCESSORS,
        active: StepActive | None = None,
        most_step_drafts: int = 0,
        *,
        most_drafts: int = 0,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        num_state_slots: int = 0,
        has_axes: bool = False,
    ) -> None:
        """active: LoRA adapters, if there are any. num_state_slots: without that of the padding,
        which is the last; 0: no layer has memory of rows.
        has_axes: features' tokens have positions on several axes.

        most_step_drafts: that a step verifies. 0 before the last pipeline stage, which gets all
        lengths, tokens and drafts with the step. most_drafts: of a request, on any stage."""
        self.device, self.block_size = device, block_size
        size = num_rows + 1
        self.token_ids = torch.zeros(size, max_model_len + 1, dtype=torch.int32, device=device)
        self._columns = TableColumns(groups, block_size, max_model_len)
        self._table = torch.zeros(size, self._columns.width, dtype=torch.int32, device=device)
        self.tables = self._columns.split(self._table)
        self.sampling = SamplingState(size, device, processors)
        self.adapters = np.zeros(size, np.int32)
        """Slot of each row's LoRA adapter."""
        self._spare_blocks: torch.Tensor | None = None
        self._copy_runs, self._expand = kernels.copy_runs, kernels.expand_inputs
        self._staging = Staging(device)
        self._num_reqs, self.max_tokens = num_rows, max_tokens
        self.active = active
        sizes = [num_rows, num_rows + 1, num_rows, num_rows, num_rows, num_rows + most_step_drafts]
        self.verifies = most_step_drafts > 0
        if self.verifies:
            sizes += [num_rows + 1, num_rows]
        self._num_state_slots = num_state_slots
        self.num_slots = num_state_slots + 1  # of states, with that of the padding
        self._most_drafts = most_drafts
        has_states, has_pending = num_state_slots > 0, num_state_slots > 0 and most_drafts > 0
        sizes += [num_rows] * (4 * has_states + has_pending)
        if active is not None:
            # Kernels are compiled for adapters' buffers that begin at 16 bytes.
            sizes += [-sum(sizes) % 4, -(-num_rows // 4) * 4, 2 + active.num_slots]
        ends = np.cumsum(sizes).tolist()
        self._parts = [slice(end - count, end) for count, end in zip(sizes, ends, strict=True)]
        """Slices of the numbers that a step sends."""
        self._padding = self._without_requests(ends[-1])
        self._packed = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        split = torch.split(self._packed, sizes)
        self._rows, self._query_start_loc, self._seq_lens, self._sample_positions = split[:4]
        self._order, self.later = split[4:6]
        """`later`: rows of logits of the requests that sample later, padded with -1."""
        self._states: tuple[torch.Tensor, ...] = ()
        """State slots that requests read, write, and keep; and tokens of the snapshots.

        With drafts, how many of each request's tokens are none, too."""
        self.state_tokens: torch.Tensor | None = None
        """[num_slots], number of tokens in each state, if steps verify drafts: on the device only.

        A slot also has the inputs of the drafts after them."""
        if has_states:
            self._states = tuple(split[6 + 2 * self.verifies :][: 4 + has_pending])
        if has_pending:
            self.state_tokens = torch.zeros(self.num_slots, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._slots = torch.full((len(groups), max_tokens), -1, dtype=torch.int64, device=device)
        self._written = [nth for nth, group in enumerate(groups) if not group.feature]
        """Groups whose slots tokens write. Pages of features may be fewer than their own."""
        self._shifts: tuple[torch.Tensor, torch.Tensor] | None = None
        """Added to the positions of rows after their features, and positions of tokens with it."""
        if has_axes:
            self._shifts = (
                torch.zeros(size, dtype=torch.int32, device=device),
                torch.zeros(max_tokens, dtype=torch.int32, device=device),
            )
        self.counts = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """Tokens that each request got in the step that was sent last, if steps verify drafts."""
        self._points: Points | None = None
        if self.verifies:
            self.lengths = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
            """The rows' numbers of tokens. The host does not know them before a step has ended."""
            self._locate = kernels.locate_points
            num_points = num_rows + most_step_drafts
            places, numbers = torch.zeros(2, num_points, dtype=torch.int32, device=device)
            self._points = Points(
                starts=split[6],
                ends=split[7],
                seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
                tokens=torch.zeros(num_points, dtype=torch.int64, device=device),
                rows=places,
                positions=numbers,
            )
            self._draft_inputs = kernels.draft_inputs
            no_token = torch.zeros(num_rows, dtype=torch.int32, device=device)
            self._drafting = DraftInputs(
                token_ids=no_token,
                positions=no_token.clone(),
                slots=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
                seq_lens=torch.ones_like(no_token),
                sample_positions=torch.full_like(no_token, -1),
            )
            self._nth = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._adapters: StepAdapters | None = None
        if active is not None:
            tokens = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
            self._adapters = StepAdapters(used=split[-1], tokens=tokens, requests=split[-2])
            self._point_adapters = torch.full_like(tokens[: num_rows + most_step_drafts], -1)

    def set_spare_blocks(self, first: int, per_row: int) -> None:
        """Give each row `per_row` blocks, from `first` on, for positions past its own blocks.

        A drafter, whose layers are in the first group, writes there: the scheduler adds blocks for
        the tokens of the next step only."""
        num_rows, max_blocks = self.tables[0].shape
        nth = torch.arange(max_blocks) % per_row
        blocks = first + torch.arange(num_rows)[:, None] * per_row + nth
        self._spare_blocks = blocks.to(self.device, torch.int32)

    def apply(self, step: SchedulerOutput) -> None:
        """Apply a step's new rows, new blocks, and tokens sampled elsewhere."""
        if step.new_rows:
            self._place_all(step.new_rows)
        if len(step.new_blocks):
            self._put(self._table, *self._columns.of_pages(*step.new_blocks.T))
        if len(step.known_tokens):
            row, position, token = step.known_tokens.T
            self._put(self.token_ids, row, position, token)

    def _put(
        self, table: torch.Tensor, rows: IntArray, columns: IntArray, values: IntArray
    ) -> None:
        """Set single numbers of a table."""
        order = np.arange(len(rows), dtype=np.int32)
        runs = np.stack((rows, columns, order, np.ones_like(order)), axis=1)
        runs_there, values_there = self._staging.send([runs, values])
        self._copy_runs(table, runs_there.view(-1, 4), values_there, 1)

    def _place_all(self, new: list[NewRow]) -> None:
        sampling = self.sampling
        for one in new:
            sampling.set(one.row, one.spec, one.seed)
            self.adapters[one.row] = one.adapter
        rows = np.array([one.row for one in new], np.int32)
        token_runs, tokens = _runs(rows, [[(0, one.token_ids)] for one in new])
        block_runs, blocks = _runs(rows, [self._columns.of_tables(one.blocks) for one in new])
        shifts = np.array([shift_after(one.spec.features) for one in new], np.int32)
        sent = self._staging.send(
            [
                rows,
                np.array([len(one.token_ids) for one in new], np.int32),
                sampling.host_ints[rows].view(np.int32),
                sampling.host_floats[rows].view(np.int32),
                sampling.host_windows[rows],
                token_runs,
                tokens,
                block_runs,
                blocks,
                shifts,
            ]
        )
        which, lengths, ints, floats, windows, runs, tokens_there, *sent = sent
        block_runs_there, blocks_there, moved = sent
        which = which.to(torch.int64)
        if self.verifies:
            self.lengths.index_copy_(0, which, lengths)
        if self._shifts is not None:
            self._shifts[0].index_copy_(0, which, moved)
        if self._spare_blocks is not None:
            self.tables[0].index_copy_(0, which, self._spare_blocks[which])
        sampling.ints.index_copy_(0, which, ints.view(torch.int64).view(-1, 3))
        sampling.windows.index_copy_(0, which, windows)
        sampling.floats.index_copy_(0, which, floats.view(torch.float32).view(-1, 6))
        self._copy_runs(self.token_ids, runs.view(-1, 4), tokens_there, int(token_runs[:, 3].max()))
        self._copy_runs(
            self._table,
            block_runs_there.view(-1, 4),
            blocks_there,
            int(block_runs[:, 3].max()),
        )

    def _without_requests(self, num_numbers: int) -> IntArray:
        """Return the numbers of a step without requests."""
        packed = np.zeros(num_numbers, np.int32)
        rows, _, _, samples, order, again, *others = [packed[part] for part in self._parts]
        rows[:], samples[:], again[:] = self._num_reqs, -1, -1
        order[:] = np.arange(self._num_reqs)
        if self._num_state_slots:
            reads, writes, keeps, *_ = others[2 * self.verifies :]
            reads[:], writes[:], keeps[:] = self._num_state_slots, self._num_state_slots, -1
        return packed

    def send(self, step: SchedulerOutput, later: npt.NDArray[np.bool_] | None = None) -> None:
        """Send a step's numbers to the device, padded to all requests.

        later: which requests sample after the step's graph; None: none does."""
        n, packed = len(step.rows), self._padding.copy()
        rows, starts, lens, samples, order, again, *others = [packed[one] for one in self._parts]
        rows[:n] = step.rows
        step.num_tokens.cumsum(out=starts[1 : n + 1])
        starts[n + 1 :] = starts[n]
        np.add(step.num_computed, step.num_tokens, out=lens[:n])
        samples[:n] = np.where(step.samples, lens[:n], -1)
        order[:n] = (-lens[:n]).argsort()
        if later is not None:
            _, points = step.points_of(later)
            again[: len(points)] = points
        if self.verifies:
            firsts, ends = others[:2]
            ends[:n] = np.where(step.samples, SAMPLES, lens[:n])
            if later is not None:
                ends[:n][later] = LATER
            firsts[: n + 1] = step.first_points
            firsts[n + 1 :] = firsts[n]
        if self._num_state_slots:
            reads, writes, keeps, kept, *own = others[2 * self.verifies :][: len(self._states)]
            reads[:n], writes[:n] = step.state_reads, step.state_writes
            keeps[:n], kept[:n] = step.state_keeps.T
            for counts in own:
                counts[:n] = step.num_own_tokens
        if self.active is not None:
            index, used = others[-2:]
            self.active.pack(self.adapters[step.rows], index, used)
        self._staging.send_into(self._packed, [packed])

    def samples_later(self, step: SchedulerOutput) -> npt.NDArray[np.bool_] | None:
        """Return which requests sample after the step's graph, from changed logits. None: none."""
        later: npt.NDArray[np.bool_] = step.samples & self.sampling.is_special(step.rows)
        later[step.constrained] = True
        return later if np.count_nonzero(later) else None

    @property
    def sample_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and positions of all rows of logits, of the step that was sent last."""
        if self._points is not None:
            return self._points.rows, self._points.positions
        return self._rows, self._sample_positions

    def points(self, shape: StepShape | None = None) -> Points:
        """Return the points of the step that was sent last; without a shape, as many as fit."""
        assert self._points is not None, "the steps verify no drafts"
        if shape is None:
            return self._points
        starts, ends, seq_lens, *of_points = self._points
        n, p = shape.num_reqs, shape.num_points
        return Points(starts[: n + 1], ends[:n], seq_lens[:n], *(one[:p] for one in of_points))

    @property
    def rows_sent(self) -> torch.Tensor:
        """The rows of the requests of the step that was sent last, padded."""
        return self._rows

    def expand(self, shape: StepShape) -> StepInputs:
        """Return the inputs of the step that was sent last."""
        n, tokens = shape.num_reqs, shape.num_tokens
        rows, starts, lens = self._rows[:n], self._query_start_loc[: n + 1], self._seq_lens[:n]
        adapters = points = None
        if shape.is_adapted:
            assert self._adapters is not None
            adapters = StepAdapters(
                self._adapters.used, self._adapters.tokens[:tokens], self._adapters.requests[:n]
            )
        sample_rows, sample_positions = rows, self._sample_positions[:n]
        of_requests = None if adapters is None else adapters.requests
        if self._points is not None:
            points = self.points(shape)
            sample_rows, sample_positions, lens = points.rows, points.positions, points.seq_lens
            of_points = None
            if adapters is not None and of_requests is not None:
                of_points = of_requests, self._point_adapters[: shape.num_points]
                adapters = adapters._replace(requests=of_points[1])
            self._locate(points, rows, starts, self.lengths, of_points)
        of_tokens = None
        if adapters is not None and of_requests is not None:
            of_tokens = of_requests, adapters.tokens
        token_ids, batch = self._packed_tokens(shape, lens, of_tokens)
        if self._states:
            batch.states = self._state_rows(starts, lens)
        return StepInputs(token_ids, batch, sample_rows, sample_positions, adapters, points)

    def _packed_tokens(
        self,
        shape: StepShape,
        lens: torch.Tensor,
        adapters: tuple[torch.Tensor, torch.Tensor] | None = None,
        ahead: int = 0,
    ) -> tuple[torch.Tensor, AttentionBatch]:
        """Return token ids and attention batch of the step that was sent last.

        lens, adapters, ahead: see `reference.expand_inputs`."""
        n, tokens = shape.num_reqs, shape.num_tokens
        rows, starts = self._rows[:n], self._query_start_loc[: n + 1]
        slots = [one[:tokens] for one in self._slots]
        rope_positions, shifts = None, self._shifts
        if shifts is not None:
            rope_positions = shifts[1][:tokens]
            shifts = shifts[0], rope_positions
        for nth in reversed(self._written):  # the first group's last, with all the rest
            out = self._token_ids[:tokens], self._positions[:tokens], slots[nth]
            others = (adapters, ahead, shifts) if nth == 0 else ()
            tables = self.token_ids, self.tables[nth], self.block_size
            self._expand(rows, starts, lens, *tables, out, *others)
        batch = AttentionBatch(
            positions=self._positions[:tokens],
            tables=tuple(map(GroupTable, self.tables, slots)),
            query_start_loc=starts,
            seq_lens=lens,
            rows=rows,
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
            rope_positions=rope_positions,
            live=slots[0],
            is_adapted=shape.is_adapted,
            verifies=shape.verifies,
            order=self._order[:n],
        )
        return self._token_ids[:tokens], batch

    def _state_rows(self, starts: torch.Tensor, lens: torch.Tensor) -> StateRows:
        """Return the states of the step that was sent last. Called once for a step."""
        reads, writes, keeps, kept, *own = (one[: len(lens)] for one in self._states)
        spare, tokens = self._num_state_slots, self.state_tokens
        if tokens is None:
            return StateRows(reads, writes, keeps, kept, spare)
        before = lens - (starts[1:] - starts[:-1])
        begins = torch.where(before > 0, tokens[reads], 0)
        written = before + own[0]
        tokens[writes] = written
        tokens[torch.where(keeps < 0, spare, keeps)] = kept
        most = 1 + self._most_drafts
        return StateRows(reads, writes, keeps, kept, spare, begins, written, most)

    # ---- for a drafter, after the step

    def shifted(self, batch: AttentionBatch) -> torch.Tensor | None:
        """Return positions for the rotation, of a token of each row after its features.

        None: they are those of the tokens."""
        if self._shifts is None:
            return None
        return (batch.positions + self._shifts[0][batch.rows]).clamp_(min=0)

    def observed(self, shape: StepShape, ahead: int) -> tuple[torch.Tensor, AttentionBatch]:
        """Return the inputs of the step that was sent last, once its tokens are accepted.

        The ids are those of the tokens `ahead` positions later. The batch wants the token before
        each request's newest one."""
        points = self.points(shape)
        token_ids, batch = self._packed_tokens(shape, points.seq_lens, None, ahead)
        if shape.max_query_len > 1:
            last = points.starts[:-1] + self.counts[: shape.num_reqs] - 1
            batch.wanted = points.tokens.index_select(0, last.clamp_(min=0))
        return token_ids, batch

    def before_step(
        self, which: npt.NDArray[np.int64], counts: IntArray
    ) -> tuple[torch.Tensor, AttentionBatch]:
        """Return the inputs of tokens before those of the step that was sent last.

        which: some of its requests, counts: numbers of their tokens. The batch wants the last of
        each."""
        starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
        index, starts_there = self._staging.send([which.astype(np.int32), starts])
        sent, rows = self._query_start_loc, self._rows[index]
        lens = self.points().seq_lens[index] - (sent[index + 1] - sent[index])
        ids, positions = torch.empty(2, starts[-1], dtype=torch.int32, device=self.device)
        slots = torch.empty(int(starts[-1]), dtype=torch.int64, device=self.device)
        tables = self.token_ids, self.tables[0], self.block_size
        self._expand(rows, starts_there, lens, *tables, (ids, positions, slots))
        batch = AttentionBatch(
            positions=positions,
            tables=(GroupTable(self.tables[0], slots),),
            query_start_loc=starts_there,
            seq_lens=lens,
            rows=rows,
            max_query_len=max(2, int(counts.max())),  # no decode step, whose kernel wants an order
            max_seq_len=self.token_ids.shape[1] - 1,
            live=slots,
            wanted=starts_there[1:].long() - 1,
        )
        return ids, batch

    def before_draft(
        self, nth: int, num_reqs: int, ahead: int, limit: int, max_seq_len: int
    ) -> tuple[DraftInputs, AttentionBatch]:
        """Return the inputs from which draft `nth` of each request follows.

        See `kernels.drafts.draft_inputs`."""
        rows, points = self._rows[:num_reqs], self.points()
        inputs = DraftInputs(*(one[:num_reqs] for one in self._drafting))
        tables = self.token_ids, self.tables[0], self.block_size
        ends = points.ends[:num_reqs]
        self._draft_inputs(ends, rows, self.lengths, *tables, nth, ahead, limit, inputs)
        batch = AttentionBatch(
            positions=inputs.positions,
            tables=(GroupTable(self.tables[0], inputs.slots),),
            query_start_loc=self._nth[: num_reqs + 1],
            seq_lens=inputs.seq_lens,
            rows=rows,
            max_query_len=1,
            max_seq_len=max_seq_len,
            live=inputs.slots,
            order=self._order[:num_reqs],
        )
        return inputs, batch


def _runs(
    rows: IntArray, parts: Sequence[Sequence[tuple[int, list[int] | IntArray]]]
) -> tuple[IntArray, IntArray]:
    """Return (runs [n, 4], values) that copy (first column, values) of each row to it."""
    runs, values, begin = [], [], 0
    for row, own in zip(rows.tolist(), parts, strict=True):
        for column, one in own:
            values.append(np.asarray(one, np.int32))
            runs.append((row, column, begin, len(values[-1])))
            begin += len(values[-1])
    return np.array(runs, np.int32), np.concatenate(values)
