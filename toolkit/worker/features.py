"""Features of running requests: the table that an encoder fills, and the tokens that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBatch, FeatureRows
from toolkit.hardware.memory import lazy_zeros, to_device
from toolkit.models.towers.parts import Grid
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.scheduler.output import Encode
from toolkit.sequence import Feature
from toolkit.worker.axes import axis_positions
from toolkit.worker.step_sizes import MOST_PICTURE_ROWS

Ints = npt.NDArray[np.int64]


class FeatureEncoder(Protocol):
    """Computes features with a tower."""

    device: torch.device
    dtype: torch.dtype
    row_size: int

    def encode(self, data: Sequence[bytes], grids: Sequence[Grid], /) -> torch.Tensor:
        """Return the rows [num_rows, row size] of features, one after the other."""

    def num_rows(self, grid: Grid) -> int:
        """Return the number of a feature's rows."""

    def rehearse(self, num_rows: int) -> None:
        """Compute a feature of about this many rows, kernel by kernel."""

    def capture(self) -> None:
        """Capture the tower's graphs, if it has some, on the current stream."""


class FeaturePlan(Protocol):
    """Facts about features: how their tokens are computed, and the memory of their rows."""

    @property
    def has_axes(self) -> bool:
        """True if they have positions on several axes."""

    @property
    def both_ways(self) -> bool:
        """True if they may see each other."""

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of rows."""


class FeatureTable:
    """Rows that a tower has computed, in pages: [num_pages · rows_per_page, row size]."""

    def __init__(
        self, encoder: FeatureEncoder, num_pages: int, rows_per_page: int, most_rows: int
    ) -> None:
        """most_rows: of a feature."""
        self.encoder, self.most_rows = encoder, most_rows
        self._rows_per_page, self._device = rows_per_page, encoder.device
        shape, dtype = (num_pages * rows_per_page, encoder.row_size), encoder.dtype
        self.rows = lazy_zeros(shape, dtype, self._device)
        self._pages: dict[bytes, Ints] = {}

    def load(self, loads: Sequence[Encode]) -> None:
        """Compute features into their pages."""
        for group in self._groups(loads):
            data = [load.data for load in group]
            rows = self.encoder.encode(data, [load.grid for load in group])
            places = np.concatenate([self._place(load) for load in group])
            self.rows[to_device(torch.from_numpy(places), self._device)] = rows

    def _groups(self, loads: Sequence[Encode]) -> list[list[Encode]]:
        """Split features into those that are computed together, in no more memory than one."""
        groups: list[list[Encode]] = []
        most, left = max(self.most_rows, MOST_PICTURE_ROWS), 0
        for load in loads:
            num_rows = self.encoder.num_rows(load.grid)
            if num_rows > left:
                groups.append([])
                left = most
            groups[-1].append(load)
            left -= num_rows
        return groups

    def _place(self, load: Encode) -> Ints:
        """Note where a feature is. Return the table's rows for its own."""
        taken = set(load.pages)
        for digest in [one for one, own in self._pages.items() if taken & set(own.tolist())]:
            del self._pages[digest]
        self._pages[load.digest] = np.array(load.pages)
        return self.places(load.digest, np.arange(self.encoder.num_rows(load.grid)))

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def places(self, digest: bytes, rows: Ints) -> Ints:
        """Return the table's rows with these rows of a feature."""
        pages = self._pages[digest]
        return pages[rows // self._rows_per_page] * self._rows_per_page + rows % self._rows_per_page


class FeatureRequests:
    """The features of the requests that have rows, and a step's inputs of them.

    Each pipeline stage has one; the first has the table, too. Inputs have fixed addresses, so that
    CUDA graphs can read them: of all steps but those of next tokens and their drafts."""

    def __init__(
        self,
        num_rows: int,
        max_tokens: int,
        device: torch.device,
        *,
        has_axes: bool,
        both_ways: bool,
        table: FeatureTable | None,
        looks_ahead: bool = False,
    ) -> None:
        """has_axes: tokens of features have positions on several axes; both_ways: they may see each
        other; looks_ahead: a drafter reads the embedding after each token."""
        self.table, self._has_axes, self._both_ways = table, has_axes, both_ways
        self._device = device
        self._features: dict[int, tuple[Feature, ...]] = {}  # by row
        self._axes: dict[int, Ints] = {}  # positions of the tokens up to the last feature's end
        self._ends = np.zeros(num_rows, np.int64)
        """Positions after the last feature's last token, by row."""
        self._last = 1 + 3 * has_axes
        self._next = self._last + both_ways if looks_ahead else 0
        shape = self._last + both_ways + looks_ahead, max_tokens
        self._inputs = torch.full(shape, -1, dtype=torch.int32, device=device)
        """Rows of the table, positions on three axes, that of a run's last token (`_last`), and the
        table's rows of the tokens after (`_next`); -1: the token has none of its own."""
        self._is_empty = True

    def capture(self) -> None:
        """Capture the graphs of the tower, if this stage has it."""
        if self.table is not None:
            self.table.encoder.capture()

    def rehearse(self) -> None:
        """Compute the largest feature, kernel by kernel."""
        if self.table is not None:
            self.table.encoder.rehearse(self.table.most_rows)

    @property
    def has_tokens(self) -> bool:
        """True if the step that was sent last has a token before a feature's end."""
        return not self._is_empty

    def apply(self, step: SchedulerOutput) -> None:
        """Compute the features that a step loads, and note its new rows."""
        if self.table is not None:
            self.table.load([load for load in step.loads if isinstance(load, Encode)])
        for new in step.new_rows:
            self._place(new)

    def _place(self, new: NewRow) -> None:
        features = new.spec.features
        self._ends[new.row] = max((one.end for one in features), default=0)
        self._features[new.row] = features
        if features and self._has_axes:
            self._axes[new.row] = axis_positions(features)

    def send(self, step: SchedulerOutput) -> bool:
        """Send a step's inputs to the device. Return True if a token is before a feature's end."""
        before = np.flatnonzero(step.num_computed < self._ends[step.rows])
        if not len(before):
            if not self._is_empty:
                self._inputs.fill_(-1)
                self._is_empty = True
            return False
        inputs = np.full(self._inputs.shape, -1, np.int32)
        ends = np.cumsum(step.num_tokens)
        for index in before.tolist():
            row, first = int(step.rows[index]), int(step.num_computed[index])
            last = first + int(step.num_tokens[index])
            offset = int(ends[index]) - last
            if self.table is not None:
                self._add_places(inputs[0], self.table, row, (first, last), offset)
                if self._next:
                    after = (first + 1, last + 1)
                    self._add_places(inputs[self._next], self.table, row, after, offset - 1)
            if self._has_axes:
                found = self._axes[row][:, first:last]
                inputs[1:4, offset + first : offset + first + found.shape[1]] = found
            if self._both_ways:
                self._add_last(inputs[self._last], row, (first, last), offset)
        self._inputs.copy_(to_device(torch.from_numpy(inputs), self._device), non_blocking=True)
        self._is_empty = False
        return True

    def _add_places(
        self, inputs: Ints, table: FeatureTable, row: int, span: tuple[int, int], offset: int
    ) -> None:
        """Set the table's rows of a request's tokens of these positions.

        A feature may begin after the step, and not be in the table yet."""
        for feature in self._features[row]:
            done = 0
            for begin, count in feature.runs if feature.digest in table else ():
                found = np.arange(max(begin, span[0]), min(begin + count, span[1]))
                if len(found):
                    inputs[found + offset] = table.places(feature.digest, found - begin + done)
                done += count

    def _add_last(self, inputs: Ints, row: int, span: tuple[int, int], offset: int) -> None:
        """Set the positions of the last tokens that a request's tokens of these positions see."""
        for feature in self._features[row]:
            for begin, count in feature.runs if feature.both_ways else ():
                first, end = max(begin, span[0]), min(begin + count, span[1])
                if first < end:
                    assert end == begin + count, "a step computes all of a run"
                    inputs[first + offset : end + offset] = end - 1

    def place(self, batch: AttentionBatch, *, ahead: bool = False) -> None:
        """Add the inputs to a step's other ones. `ahead`: with embeddings of the tokens after."""
        num_tokens = len(batch.positions)
        inputs = self._inputs[:, :num_tokens]
        if self.table is not None:
            batch.features = FeatureRows(inputs[self._next if ahead else 0], self.table.rows)
        if self._has_axes:
            assert batch.rope_positions is not None, "the model has positions on several axes"
            own = inputs[1:4]
            batch.rope_positions = torch.where(own < 0, batch.rope_positions, own)
        if self._both_ways:
            batch.last_key = torch.maximum(batch.positions, inputs[self._last])
