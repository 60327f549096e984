"""Memory that a device needs next to weights and KV cache.

Computed: what rows and drafters keep, and the number of CUDA graphs. Estimated: activations,
sampling, each graph's own memory, and the process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.config import EngineConfig
from toolkit.hardware.figures import SAMPLING_BYTES
from toolkit.models.describe import Parameter
from toolkit.models.memory import Memory
from toolkit.weights.formats import Packings
from toolkit.worker.graph_policy import GraphPolicy, new_drafter_graphs
from toolkit.worker.startup.cache_problem import table_bytes
from toolkit.worker.step_sizes import TOKEN_BUDGETS

CPU_RUNTIME = 400 * 2**20
"""Memory of a CPU server's processes without weights and cache: 223 MiB idle (2026-11-21)."""
CUDA_RUNTIME = 700 * 2**20  # memory of a process's CUDA context, kernels and workspaces
GRAPH_LAYER_BYTES = 240 * 2**10
"""Memory of one layer in a CUDA graph, without activations. The 56 graphs of a model of 8 layers
take 264 MiB on an H100, of which 160 MiB are activations (docs/notes/where-the-time-goes.md)."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The model of a drafter."""

    most: int  # drafts of a request
    memory: Sequence[Memory]  # of its layers
    parameters: Sequence[Parameter]
    hidden_size: int
    num_states: int = 0  # hidden states of the model that it reads at a position
    packings: Packings | None = None
    is_tied: bool = False


def step_tokens(engine: EngineConfig, *, on_gpu: bool) -> int:
    """Return the most tokens of one step."""
    return engine.scheduler.max_num_batched_tokens or TOKEN_BUDGETS["cuda" if on_gpu else "cpu"]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that steps of an engine take on one device."""

    config: Any  # of the model
    engine: EngineConfig
    type_bytes: int  # of an activation
    on_gpu: bool
    max_model_len: int
    num_layers: int  # with a KV cache
    num_groups: int = 1  # of these layers, which have a block table each
    inputs: int = 0  # numbers of a token for layers, next to its embedding
    drafting: Drafting | None = None

    @property
    def total(self) -> int:
        """Bytes of the largest step, of what is kept between steps, and of the process."""
        process = CUDA_RUNTIME if self.on_gpu else CPU_RUNTIME
        most = self.engine.scheduler.max_num_seqs * self.max_model_len
        largest = self._activations(min(self.num_tokens, most)) + self._logits
        return largest + self.rows + self.hidden_states + self._graphs + process

    @property
    def rows(self) -> int:
        """Bytes of the rows' tokens, block tables and predictions."""
        if not self.num_layers:
            return 0
        num_rows = self.engine.scheduler.max_num_seqs + 1  # one for padding
        block_size = self.engine.cache.block_size
        return table_bytes(
            num_rows, self.max_model_len, block_size, self._num_token_tables, self.num_groups
        )

    @property
    def bytes_per_position(self) -> float:
        """Bytes of `rows` for each token of --max-model-len."""
        return self.rows / self.max_model_len

    @property
    def _num_token_tables(self) -> int:
        """Tables with a token for each position. Predictions take a GPU's from the start."""
        wanted = self.engine.speculation.drafter
        return 1 + (self.on_gpu and wanted is not None and wanted.method == "ngram")

    @property
    def num_tokens(self) -> int:
        return step_tokens(self.engine, on_gpu=self.on_gpu)

    @property
    def _policy(self) -> GraphPolicy:
        return GraphPolicy(
            self.engine.scheduler.max_num_seqs,
            self.num_tokens,
            self.max_model_len,
            captures=self.on_gpu and bool(self.num_layers) and not self.engine.device.enforce_eager,
            adapts=self.engine.lora.is_enabled,
            most_drafts=self.engine.speculation.most_drafts,
        )

    @property
    def _logits(self) -> int:
        """Bytes of logits and of sampling from them."""
        policy = self._policy
        num_points = policy.most_requests + policy.most_step_drafts
        vocab_size = int(self.config.vocab_size)
        return num_points * vocab_size * (self.type_bytes + SAMPLING_BYTES)

    def _activations(self, num_tokens: int) -> int:
        hidden = int(self.config.hidden_size)
        inner: int = (
            getattr(self.config, "intermediate_size", None)
            or getattr(self.config, "n_inner", None)
            or 4 * hidden
        )
        return num_tokens * (4 * hidden + max(2 * inner, 3 * self.inputs)) * self.type_bytes

    @property
    def hidden_states(self) -> int:
        """Bytes of the hidden states that a drafter keeps: the model's and its own."""
        drafting = self.drafting
        if drafting is None:
            return 0
        read = self.num_tokens * drafting.num_states * int(self.config.hidden_size)
        own = drafting.hidden_size * (2 if drafting.num_states else 1)
        return self.type_bytes * (read + self.engine.scheduler.max_num_seqs * own)

    @property
    def _graphs(self) -> int:
        """Bytes of CUDA graphs. They share the activations of the largest."""
        shapes = self._policy.shapes
        if not shapes:
            return 0
        num_layers = len(shapes) * self.num_layers
        if self.drafting is not None:
            for follows, drafts in new_drafter_graphs(shapes):
                runs = follows + drafts * self.drafting.most
                num_layers += runs * len(self.drafting.memory)
        return self._activations(shapes[0].num_tokens) + num_layers * GRAPH_LAYER_BYTES
