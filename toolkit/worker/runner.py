"""Runs steps: inputs, model, sampler, state update. On a GPU, common ones are CUDA graphs."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from toolkit.attention import AttentionBatch, Backends
from toolkit.config.sources import checks_memory
from toolkit.hardware.graph_capture import capture, empty_cache
from toolkit.lora.adapters import Adapters
from toolkit.models.model import CausalLM
from toolkit.pooling.accumulator import PromptPooling
from toolkit.sampling.grammar import Masks
from toolkit.scheduler import ModelOutput, PromptLogprobs, SchedulerOutput
from toolkit.scheduler.output import Encode, PlaceAdapter
from toolkit.scheduler.request import HOLE
from toolkit.worker.alignment import ClipAlignment
from toolkit.worker.batch_state import BatchState, StepInputs
from toolkit.worker.clips import Clips
from toolkit.worker.drafter import Drafter
from toolkit.worker.features import FeatureRequests
from toolkit.worker.graph_policy import GraphPolicy, StepShape
from toolkit.worker.kv_cache import KVCache, RowStates
from toolkit.worker.pending import (
    PendingOutput,
    Sampled,
    UnsampledOutput,
    copy_barrier,
    empty_output,
    to_host,
)
from toolkit.worker.step_sampler import StepSampler


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step and its output."""

    shape: StepShape
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    """Logits [num_points, vocab]; before the last stage, hidden states [num_tokens, hidden]."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Results of a step next to its tokens, on the device."""

    prompt_logprobs: dict[int, tuple[int, torch.Tensor]]
    """(First position, records from there on) by index of the request."""
    pooled: tuple[list[int], torch.Tensor] | None
    """Indices among the step's samples, and their vectors."""


class Runner:
    """Owns a device's state: inputs, model, sampler, memory, drafter, graphs. A call is a step.

    A step runs as a captured graph where one fits, else kernel by kernel. A graph is a complete
    step: inputs, model, sampler, state update. Special requests, those with penalties, biases,
    grammars or logits processors, are sampled again after it, from its logits. Pipeline stages
    receive hidden states before the graph and send them after it.

    If steps verify drafts, a request has several rows of logits, its points (`kernels.drafts`)."""

    pooling: PromptPooling | ClipAlignment | None = None
    """Set if the model pools prompts, or aligns transcripts with clips."""
    num_compiled: Callable[[], int] = staticmethod(lambda: 0)
    """Returns how many kernels were compiled since its last call."""

    def __init__(
        self,
        model: CausalLM,
        backends: Backends,
        caches: Sequence[KVCache],
        row_states: RowStates,
        state: BatchState,
        sampler: StepSampler,
        policy: GraphPolicy,
        *,
        drafter: Drafter | None = None,
        adapters: Adapters | None = None,
        features: FeatureRequests | Clips | None = None,
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """caches: the model's, and that of a drafter, which has the same block numbers; computing:
        returns the context in which the model runs."""
        self.model, self.backends, self.state = model, backends, state
        self.sampler, self.policy, self.drafter = sampler, policy, drafter
        self.adapters, self.features, self.device = adapters, features, state.device
        self.caches, self.row_states, self._computing = caches, row_states, computing
        caches[0].bind(model, backends)
        self._spoils = checks_memory()
        if not model.stage.is_first:
            shape = state.max_tokens, model.hidden_size
            self._received = torch.zeros(shape, dtype=model.dtype, device=self.device)
        self._graphs: dict[StepShape, Graph] = {}
        self._pool: Any = None

    @property
    def why_eager(self) -> str | None:
        """Return why no step replays a CUDA graph or a recording, None if some do."""
        return None if self._graphs else self.sampler.kernels.why_eager or self.model.why_unrecorded

    # ---- steps

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingOutput:
        """Launch a step, after its cache copies."""
        self._prepare(step)
        if not len(step.rows):
            return empty_output(step.step)
        is_last = self.model.stage.is_last
        later = self.state.samples_later(step) if is_last else None
        self.state.send(step, later)
        if not self.model.stage.is_first:
            self.model.stage.receive(self._received[: step.total_tokens])
        has_features = self.features is not None and self.features.send(step)
        graph = self._graph_for(step)
        if has_features and graph is not None and graph.shape.samples_all:
            graph = None  # a chunk of one token: graphs of next tokens read no features
        hidden: torch.Tensor | None = None
        out: torch.Tensor | None
        if graph is not None:
            shape, out = graph.shape, graph.out
            graph.graph.replay()
        else:
            shape = self._exact_shape(step)
            samples = bool(step.samples.any())
            hidden, out = self._run(shape, self._keeps_hidden(step), samples, has_features)
        if not is_last:
            assert out is not None
            self.model.stage.send(out[: step.total_tokens])
            return empty_output(step.step)
        extras = self._extras(step, hidden)

        def sample(masks: Masks | None) -> PendingOutput:
            sampled = self.sampler.collect(step, later, out, masks)
            drafts = None
            if self.drafter is not None:
                with self._computing():
                    drafts = self.drafter.follow(step, shape)
            return self._start_output(step, sampled, drafts, extras)

        if len(step.constrained):
            return UnsampledOutput(sample, self.device)
        return sample(None)

    def _prepare(self, step: SchedulerOutput) -> None:
        """Copy blocks and states, place adapters, and apply the step to the state of rows."""
        for cache in self.caches:
            cache.copy_out(step.swap_out)
        self.row_states.copy_out(step.state_swap_out)
        if self._spoils:
            self._spoil(step)
        for cache in self.caches:
            cache.copy_in(step.swap_in)
        self.row_states.copy_in(step.state_swap_in)
        if self.adapters is not None:
            for load in step.loads:
                if isinstance(load, PlaceAdapter):
                    self.adapters.place(load.slot, load.key)
        self.state.apply(step)
        if self.features is not None:
            self.features.apply(step)
        if self.pooling is not None:
            self.pooling.apply(step)
        if self.drafter is not None:
            for new in step.new_rows:
                self.drafter.place(new)

    def _spoil(self, step: SchedulerOutput) -> None:
        """Fill blocks and rows that requests get in this step with NaN, but for cached blocks."""
        pages = step.new_blocks[:, 2].tolist()
        layout = self.caches[0].layout
        for new in step.new_rows:
            for group, table in zip(layout.groups, new.blocks, strict=True):
                if group.feature:
                    continue
                tokens = layout.block_size * group.blocks_per_page
                own = table[new.num_computed_tokens // tokens :]
                pages += [page for page in own if page != HOLE]
        if any(group.feature for group in layout.groups):
            pages += [
                page for load in step.loads if isinstance(load, Encode) for page in load.pages
            ]
        if pages:
            for cache in self.caches:
                cache.spoil(pages)
        if len(step.state_writes):
            read = step.state_reads[step.num_computed > 0]
            keeps, kept = step.state_keeps.T
            new = keeps[kept > step.num_computed]  # no step before may have written them
            written = np.concatenate((step.state_writes, new))
            spoiled = np.setdiff1d(written[written >= 0], read).tolist()
            self.row_states.spoil(spoiled + [slot for _, slot in step.state_swap_in])

    def _run(
        self,
        shape: StepShape,
        keeps_hidden: bool,
        samples: bool,
        has_features: bool | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run the step that was sent, and sample its tokens.

        has_features: it has tokens before the end of one; None: it may, if it has a prompt.
        Return hidden states [num_tokens, hidden] if they are kept, and logits [num_points, vocab]
        if the step samples, or hidden states for the next stage."""
        inputs = self.state.expand(shape)
        if has_features is None:
            has_features = not shape.samples_all
        if has_features and self.features is not None:
            self.features.place(inputs.batch)
        if not self.model.stage.is_last:
            return None, self._hidden(inputs)
        if not shape.samples_all and not keeps_hidden:
            inputs.batch.wanted = inputs.wanted
        hidden = self._hidden(inputs)
        logits = None
        if samples:
            logits = self.sampler.choose(hidden[inputs.wanted] if keeps_hidden else hidden, inputs)
        else:
            self.sampler.accept(inputs)
        return hidden if keeps_hidden else None, logits

    def _forward(self, shape: StepShape) -> torch.Tensor:
        """Run a step to capture. Return its output."""
        _, out = self._run(shape, keeps_hidden=False, samples=True)
        assert out is not None
        return out

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        active = self.state.active
        if active is None:
            return self._compute(inputs.token_ids, inputs.batch)
        inputs.batch.when_kept = active.keep_wanted
        with active.during(inputs.adapters):
            return self._compute(inputs.token_ids, inputs.batch)

    def _compute(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        hidden = None if self.model.stage.is_first else self._received[: len(token_ids)]
        if hidden is not None and self.state.active is not None:
            # A kernel between the step's inputs and a product, which may read them early (`pdl`).
            hidden = hidden.clone()
        with self._computing():
            computed: torch.Tensor = self.model(token_ids, batch, hidden)
        return computed

    def _keeps_hidden(self, step: SchedulerOutput) -> bool:
        """True if the hidden states of all tokens of the step are needed."""
        return bool(step.prompt_logprobs) or self._pools(step)

    def _pools(self, step: SchedulerOutput) -> bool:
        return self.pooling is not None and self.pooling.is_needed(step)

    def _is_adapted(self, step: SchedulerOutput) -> bool:
        return self.state.active is not None and bool(self.state.adapters[step.rows].any())

    def _exact_shape(self, step: SchedulerOutput) -> StepShape:
        context_lens = step.num_computed + step.num_tokens
        longest, num_drafts = int(step.num_tokens.max()), int(step.num_drafts.sum())
        verifies = bool((step.num_own_tokens == 1).all())
        if verifies and num_drafts:  # kernels are compiled for this number
            longest = 1 + self.policy.most_drafts
        return StepShape(
            step.total_tokens,
            len(step.rows),
            longest,
            int(context_lens.max()),
            self._is_adapted(step),
            num_drafts,
            verifies,
        )

    # ---- results

    def _extras(self, step: SchedulerOutput, hidden: torch.Tensor | None) -> Extras:
        prompt_logprobs, pooled = {}, None
        if step.prompt_logprobs:
            assert hidden is not None, (
                "a step with prompt log-probabilities keeps its hidden states"
            )
            prompt_logprobs = self.sampler.prompt_logprobs(step, hidden)
        if self.pooling is not None and self._pools(step):
            assert hidden is not None, "a step that pools keeps its hidden states"
            pooled = self.pooling.pool(step, hidden)
        return Extras(prompt_logprobs, pooled)

    def _start_output(
        self, step: SchedulerOutput, sampled: Sampled, drafts: torch.Tensor | None, extras: Extras
    ) -> PendingOutput:
        """Start the copies to the host. `result` waits for them."""
        tokens = to_host(sampled.tokens)
        logprobs = None if sampled.logprobs is None else to_host(sampled.logprobs)
        prompts = {
            i: (start, to_host(records)) for i, (start, records) in extras.prompt_logprobs.items()
        }
        samples, vectors = (
            ([], None) if extras.pooled is None else (extras.pooled[0], to_host(extras.pooled[1]))
        )
        counts_there = None if sampled.counts is None else to_host(sampled.counts)
        drafts_there = None if drafts is None else to_host(drafts)
        wait = copy_barrier(self.device)

        def finish() -> ModelOutput:
            wait()
            kept, counts, failures, places = sampled.firsts, None, sampled.failures, samples
            if counts_there is not None:
                counts = counts_there.numpy()[step.samples]
                kept = sampled.kept(counts)
                firsts = counts.cumsum() - counts
                failures = {firsts.item(i): error for i, error in failures.items()}
                places = firsts[samples].tolist() if samples else []
            return ModelOutput(
                step.step,
                tokens.numpy()[kept],
                None if logprobs is None else logprobs.numpy()[kept],
                {
                    i: PromptLogprobs(start, records.numpy())
                    for i, (start, records) in prompts.items()
                },
                {} if vectors is None else dict(zip(places, vectors.numpy(), strict=True)),
                self.num_compiled(),
                failures,
                counts,
                None if drafts_there is None else drafts_there.numpy()[step.samples],
            )

        return PendingOutput(finish)

    # ---- graphs

    @torch.inference_mode()
    def rehearse(self, shapes: Sequence[StepShape]) -> None:
        """Run steps of these shapes without requests."""
        self.state.send(_EMPTY)
        drafted: set[int] = set()
        for shape in shapes:
            self._forward(shape)
            if self.drafter is not None:
                # Drafts depend on the number of requests only.
                self.drafter.rehearse(shape, drafts=shape.num_reqs not in drafted)
                drafted.add(shape.num_reqs)

    @contextmanager
    def with_few_layers(self) -> Iterator[None]:
        """Run as few layers inside as launch all kernels, of the model and of a drafter's."""
        drafter = nullcontext() if self.drafter is None else self.drafter.with_few_layers()
        with self.model.with_few_layers(), drafter:
            yield

    @torch.inference_mode()
    def synchronizes(self) -> bool:
        """Return True if steps wait for the device. They cannot be captured."""
        shapes = StepShape(1, 1, 1, 1), StepShape(2, 1, 2, 2)
        self.rehearse(shapes)  # compiles kernels
        self.state.send(_EMPTY)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for shape in shapes:
                self._forward(shape)
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    @torch.inference_mode()
    def seconds(self, shape: StepShape) -> float:
        """Return how long the graph of a shape takes without requests.

        If it verifies drafts, with the next drafts."""
        self.state.send(_EMPTY)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2):  # the first one fills caches
            begin.record()
            self._graphs[shape].graph.replay()
            if self.drafter is not None and (shape.verifies or not self.drafter.may_wait):
                self.drafter.rehearse(shape, drafts=shape.verifies)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    @torch.inference_mode()
    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Capture a graph per shape, on the current stream."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        for shape in shapes:
            self.state.send(_EMPTY)
            graph, out = capture(functools.partial(self._forward, shape), self._pool)
            self._graphs[shape] = Graph(shape, graph, out)
            if self.drafter is not None:
                self.drafter.capture(shape, self._pool)
        torch.cuda.synchronize()
        empty_cache()  # memory of the steps before the captures

    def capture_encoder(self) -> None:
        """Capture the graphs of an encoder of features, unless they are captured already."""
        if self.features is not None:
            self.features.capture()

    def rehearse_encoder(self) -> None:
        """Compute the largest features, kernel by kernel."""
        if self.features is not None:
            self.features.rehearse()

    @torch.inference_mode()
    def capture_penalties(self) -> None:
        """Capture the graphs that sample again, after all others, whose logits they read."""
        if self.model.stage.is_last and self._graphs:
            out = next(iter(self._graphs.values())).out
            self.sampler.capture(
                out, self.policy.penalized_sizes, self._pool, lambda: self.state.send(_EMPTY)
            )

    def close(self) -> None:
        """Free the graphs, even while this object is referenced. No step follows."""
        for one in self._graphs.values():
            one.graph.reset()
        self._graphs = {}
        self.sampler.close()
        if self.drafter is not None:
            self.drafter.close()

    def _graph_for(self, step: SchedulerOutput) -> Graph | None:
        """Return the graph to replay for a step, or None. Graphs do not keep hidden states."""
        shape = self.policy.shape_for(step, self._is_adapted(step))
        if shape is None or self._keeps_hidden(step):
            return None
        return self._graphs.get(shape)  # None before it is captured


_NO_INTS = np.empty(0, np.int32)
_EMPTY = SchedulerOutput(-1, _NO_INTS, _NO_INTS, _NO_INTS, np.empty(0, np.bool_))
