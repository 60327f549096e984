"""Makes the runner of a decoder, with its KV cache and drafter."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from toolkit.attention import Backends
from toolkit.attention.cpu import kernels_support
from toolkit.cache_group import most_step
from toolkit.hardware.parent import is_own_process
from toolkit.lora.adapters import Adapters
from toolkit.models.config.registry import describe
from toolkit.models.decoder import Decoder
from toolkit.models.memory import MemoryLayout, TokenMemory
from toolkit.models.model import CausalLM, Model
from toolkit.sampling.processor_rows import Loaded
from toolkit.worker.batch_state import BatchState
from toolkit.worker.clips import Clips
from toolkit.worker.drafter import Drafter, ModelDrafter, PromptLookup
from toolkit.worker.features import FeaturePlan, FeatureRequests, FeatureTable
from toolkit.worker.graph_policy import GraphPolicy
from toolkit.worker.kv_cache import KVCache, RowStates, choose_cache_dtype
from toolkit.worker.runner import Runner
from toolkit.worker.startup import drafters
from toolkit.worker.startup.cache_sizing import CacheSize
from toolkit.worker.startup.hearing import describe_hearing, speech_rules
from toolkit.worker.startup.setup import Setup
from toolkit.worker.step_sampler import StepSampler

logger = logging.getLogger(__name__)


def choose_attention(setup: Setup, model: Model) -> tuple[torch.dtype, Backends]:
    """Return the type of the cache, and the backends of a model or a drafter.

    Raises ConfigError if the device does not support those of the settings."""
    cache = setup.config.cache
    dtype = choose_cache_dtype(cache.kv_cache_dtype, setup.dtype, setup.device)
    backends = Backends(
        setup.config.device.attention_backend,
        setup.device,
        model.dtype,
        [one.parts[0].size for one in model.memory if isinstance(one, TokenMemory)],
        cache.block_size,
        fp8_cache=dtype == torch.float8_e4m3fn,
    )
    return dtype, backends


class RunnerFactory:
    """Makes runners of one model, with caches of any size: a small one measures memory."""

    def __init__(
        self,
        setup: Setup,
        model: CausalLM,
        processors: Loaded,
        adapters: Adapters | None = None,
        drafter: drafters.Loaded | None = None,
        features: tuple[FeaturePlan, FeatureTable | None] | None = None,
    ) -> None:
        """features: those of prompts, with the table of their rows on the first pipeline stage."""
        self._setup, self._model, self._processors = setup, model, processors
        self._adapters, self._drafter = adapters, drafter
        self._features = None if features is None else features[0]
        self._table = None if features is None else features[1]
        self._block_size = setup.config.cache.block_size
        self._cache_dtype, self.backends = choose_attention(setup, model)
        logger.info("attention backend %s", self.backends.why)
        drafts = [] if drafter is None else drafter.model.memory
        make_layout = partial(
            MemoryLayout.of,
            block_size=self._block_size,
            itemsize=self._cache_dtype.itemsize,
            row_itemsize=model.dtype.itemsize,
            state_type=setup.config.cache.state_type,
            drafter=drafts,
            most_drafts=setup.config.speculation.most_drafts,
        )
        whole = own = make_layout(model.memory)
        stage = setup.place.stage
        if stage.count > 1:  # all stages have the same groups
            ranks = setup.place.group.size
            whole = make_layout(describe(setup.model_config).memory, num_ranks=ranks)
        self.hearing = self._rules = None
        if isinstance(model, Decoder) and model.encoder is not None:
            self.hearing = describe_hearing(setup.folder, model.encoder)
            self._rules = speech_rules(self.hearing, model.vocab_size, setup.device)
        step = most_step(setup.token_budget, setup.config.speculation.most_drafts, stage.count)
        self.layout = own.with_groups_of(whole.with_groups(setup.max_model_len, step))

    @property
    def spare_bytes(self) -> int:
        """Bytes in addition to blocks and states: for positions of drafts, and pictures."""
        num_rows, spare = self._setup.max_num_seqs + 1, 0
        if self._drafter is not None:
            spare = self._spare_pages(self._drafter, num_rows)
        table = self._features.table_bytes if self._table is not None and self._features else 0
        return table + spare * self.layout.drafts.block_bytes

    def _spare_pages(self, drafter: drafters.Loaded, num_rows: int) -> int:
        """Return the pages of a drafter's cache for positions past the rows' own blocks."""
        blocks = num_rows * drafter.spare_blocks(self._block_size)
        return -(-blocks // self.layout.groups[0].blocks_per_page)

    def make(self, size: CacheSize) -> Runner:
        """Return a runner. The size is that of the model's cache."""
        setup, kernels = self._setup, self._setup.place.kernels
        active = None if self._adapters is None else self._adapters.active
        wanted, is_last = setup.config.speculation.drafter, setup.place.stage.is_last
        policy = GraphPolicy(
            setup.max_num_seqs,
            setup.token_budget,
            size.max_model_len,
            captures=setup.place.triton is not None
            and self.backends.is_capturable
            and not setup.config.device.enforce_eager,
            adapts=active is not None,
            most_drafts=setup.config.speculation.most_drafts,
        )
        if wanted is not None and not policy.most_step_drafts:
            raise drafters.no_room_error(policy)
        state = BatchState(
            setup.max_num_seqs,
            size.max_model_len,
            self._block_size,
            setup.device,
            setup.token_budget,
            kernels,
            self._processors,
            active,
            policy.most_step_drafts if is_last else 0,
            groups=self.layout.groups,
            most_drafts=policy.most_drafts,
            num_state_slots=size.num_state_slots,
            has_axes=self._features is not None and self._features.has_axes,
        )
        features: FeatureRequests | None = None
        if self._features is not None:
            features = FeatureRequests(
                setup.max_num_seqs,
                state.max_tokens,
                setup.device,
                has_axes=self._features.has_axes,
                both_ways=self._features.both_ways,
                table=self._table,
                looks_ahead=self._drafter is not None and self._drafter.network.reads_features,
            )
        caches = [self._cache(self.layout, size, size.num_blocks)]
        drafter: Drafter | None = None
        if self._drafter is not None:
            drafter, cache = self._model_drafter(self._drafter, state, policy, size, features)
            caches.append(cache)
        elif wanted is not None and is_last:
            drafter = PromptLookup(wanted, kernels, state)
        row_states = RowStates(
            self._model,
            self.layout.state_type,
            num_slots=state.num_slots,
            num_host_slots=size.num_host_slots,
            most_drafts=policy.most_drafts,
            tokens=state.state_tokens,
            device=setup.device,
        )
        sampler = StepSampler(self._model, state, kernels, policy, drafter, self._rules)
        return Runner(
            self._model,
            self.backends,
            caches,
            row_states,
            state,
            sampler,
            policy,
            drafter=drafter,
            adapters=self._adapters,
            features=features or self._clips(),
            computing=_computing(self.backends, caches[0]),
        )

    def _clips(self) -> Clips | None:
        """Return what encodes clips; None if the model does not hear."""
        model = self._model
        if not isinstance(model, Decoder) or model.encoder is None:
            return None
        per_page = next(one.blocks_per_page for one in self.layout.groups if one.feature)
        return Clips(model, per_page, self._block_size)

    def _cache(self, layout: MemoryLayout, size: CacheSize, num_pages: int) -> KVCache:
        return KVCache(
            layout,
            num_pages=num_pages,
            num_host_pages=size.num_host_blocks,
            dtype=self._cache_dtype,
            device=self._setup.device,
        )

    def _model_drafter(
        self,
        loaded: drafters.Loaded,
        state: BatchState,
        policy: GraphPolicy,
        size: CacheSize,
        features: FeatureRequests | None,
    ) -> tuple[ModelDrafter, KVCache]:
        """Return a drafter with a model, and its cache, which has a few more pages."""
        spare = loaded.spare_blocks(self._block_size)
        num_pages = size.num_blocks + self._spare_pages(loaded, len(state.tables[0]))
        cache = self._cache(self.layout.drafts, size, num_pages)
        _, backends = choose_attention(self._setup, loaded.model)
        cache.bind(loaded.model, backends)
        first = size.num_blocks * self.layout.groups[0].blocks_per_page
        state.set_spare_blocks(first, spare)
        drafter = ModelDrafter(
            loaded.network,
            state,
            self._setup.place.kernels,
            policy,
            min(loaded.limit, size.max_model_len),
            is_capturable=backends.is_capturable and not loaded.model.may_synchronize,
            features=features,
        )
        return drafter, cache


def _computing(backends: Backends, cache: KVCache) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which the model runs."""
    sizes = {part.size for memory in cache.layout.of_tokens for part in memory.parts}
    kernels_compute = backends.name == "cpu" and all(
        kernels_support(cache.dtype, size) for size in sizes
    )
    return _single_threaded_torch if kernels_compute and is_own_process() else nullcontext


@contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """Run PyTorch's operations on the calling thread: our kernels do nearly all work.

    Its threads would compete with those of our kernels: on two cores, an int8 gpt2 step of 64
    requests takes 5 % longer with them. Threads that first call PyTorch in here keep the setting.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
