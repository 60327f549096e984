"""Features of running requests: the table that an encoder fills, and the tokens that read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from toolkit.attention import AttentionBatch, FeatureRows
from toolkit.hardware.memory import to_device
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.scheduler.output import Encode
from toolkit.sequence import Feature
from toolkit.worker.axes import axis_positions
from toolkit.worker.picture_encoder import PictureEncoder

Ints = npt.NDArray[np.int64]


class FeatureTable:
    """Rows that a tower has computed, in pages: [num_pages · rows_per_page, row size]."""

    def __init__(
        self, encoder: PictureEncoder, num_pages: int, rows_per_page: int, most_rows: int
    ) -> None:
        """most_rows: of a feature."""
        self.encoder, self.most_rows = encoder, most_rows
        self._rows_per_page, self._device = rows_per_page, encoder.device
        shape, dtype = (num_pages * rows_per_page, encoder.row_size), encoder.tower.dtype
        self._rows = torch.zeros(shape, dtype=dtype, device=self._device)
        self._pages: dict[bytes, Ints] = {}

    def load(self, loads: Sequence[Encode]) -> None:
        """Compute features into their pages."""
        if loads:
            data = [load.data for load in loads]
            rows = self.encoder.encode(data, [load.grid for load in loads])
            places = np.concatenate([self._place(load) for load in loads])
            self._rows[to_device(torch.from_numpy(places), self._device)] = rows

    def _place(self, load: Encode) -> Ints:
        """Note where a feature is. Return the table's rows for its own."""
        taken = set(load.pages)
        for digest in [one for one, own in self._pages.items() if taken & set(own.tolist())]:
            del self._pages[digest]
        self._pages[load.digest] = np.array(load.pages)
        return self.places(load.digest, np.arange(load.grid[0] * load.grid[1]))

    def places(self, digest: bytes, rows: Ints) -> Ints:
        """Return the table's rows with these rows of a feature."""
        pages = self._pages[digest]
        return pages[rows // self._rows_per_page] * self._rows_per_page + rows % self._rows_per_page

    def take(self, places: Ints) -> torch.Tensor:
        return self._rows[to_device(torch.from_numpy(places), self._device)]


class FeatureRequests:
    """The features of the requests that have rows.

    Each pipeline stage has one; the first has the table, too."""

    def __init__(self, num_rows: int, *, has_axes: bool, table: FeatureTable | None) -> None:
        """has_axes: tokens of features have positions on several axes."""
        self.table, self._has_axes = table, has_axes
        self._features: dict[int, tuple[Feature, ...]] = {}  # by row
        self._axes: dict[int, Ints] = {}  # positions of the tokens up to the last feature's end
        self._ends = np.zeros(num_rows, np.int64)
        """Positions after the last feature's last token, by row."""

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

    def of(self, step: SchedulerOutput) -> StepFeatures | None:
        """Return how a step reads features; None if no token is before the end of one."""
        before = np.flatnonzero(step.num_computed < self._ends[step.rows])
        if not len(before):
            return None
        starts = np.concatenate(([0], np.cumsum(step.num_tokens)))
        tokens: list[Ints] = []
        places: list[Ints] = []
        moved: list[Ints] = []
        axes: list[Ints] = []
        for index in before.tolist():
            row, first = int(step.rows[index]), int(step.num_computed[index])
            last = first + int(step.num_tokens[index])
            offset = int(starts[index]) - first
            table = self.table
            for feature in self._features[row] if table is not None else ():
                assert table is not None
                done = 0
                for begin, count in feature.runs:
                    found = np.arange(max(begin, first), min(begin + count, last))
                    if len(found):
                        tokens.append(found + offset)
                        places.append(table.places(feature.digest, found - begin + done))
                    done += count
            if self._has_axes:
                found = np.arange(first, min(last, int(self._ends[row])))
                moved.append(found + offset)
                axes.append(self._axes[row][:, found])
        return StepFeatures(
            self.table,
            _joined(tokens),
            _joined(places),
            _joined(moved),
            np.concatenate(axes, axis=1) if axes else np.empty((3, 0), np.int64),
        )


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """Tokens of a step that stand for rows of features, or have positions on several axes."""

    table: FeatureTable | None
    tokens: Ints  # of the step
    places: Ints  # of each, in the table
    moved: Ints  # tokens of the step
    axes: Ints  # [3, len(moved)]

    def place(self, batch: AttentionBatch, device: torch.device) -> None:
        """Add them to a step's inputs on the device."""
        if self.table is not None and len(self.tokens):
            tokens = to_device(torch.from_numpy(self.tokens), device)
            batch.features = FeatureRows(tokens, self.table.take(self.places))
        if len(self.moved):
            assert batch.rope_positions is not None, "the model has positions on several axes"
            index = to_device(torch.from_numpy(self.moved), device)
            values = to_device(torch.from_numpy(self.axes).to(torch.int32), device)
            positions = batch.rope_positions.expand(3, -1).contiguous()
            batch.rope_positions = positions.index_copy_(1, index, values)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
