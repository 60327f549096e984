"""Makes the runner of a decoder, with its KV cache and drafter."""

import logging

import torch

from toolkit.attention import Backends
from toolkit.config import Speculation
from toolkit.lora.adapters import Adapters
from toolkit.lora.weight import Active
from toolkit.models.memory import MemoryLayout, TokenMemory
from toolkit.models.model import CausalLM, Model
from toolkit.sampling.processor_rows import Loaded
from toolkit.speculative.lookup import DeviceLookup
from toolkit.speculative.model_drafter import ModelDrafter
from toolkit.speculative.ngram import NgramDrafter
from toolkit.worker.batch_state import BatchState
from toolkit.worker.gpu.cuda_drafter import CudaDrafter
from toolkit.worker.gpu.cuda_runner import CudaRunner
from toolkit.worker.gpu.cuda_state import CudaBatchState
from toolkit.worker.gpu.graph_policy import GraphPolicy
from toolkit.worker.kv_cache import KVCache, choose_cache_dtype
from toolkit.worker.model_runner import ModelRunner
from toolkit.worker.startup import drafters
from toolkit.worker.startup.cache_sizing import CacheSize
from toolkit.worker.startup.setup import Setup

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
    ) -> None:
        self._setup, self._model, self._processors = setup, model, processors
        self._adapters, self._drafter = adapters, drafter
        self._block_size = setup.config.cache.block_size
        self._cache_dtype, self.backends = choose_attention(setup, model)
        logger.info("attention backend %s", self.backends.why)
        drafts = [] if drafter is None else drafter.model.memory
        self.layout = MemoryLayout.of(
            model.memory,
            self._block_size,
            self._cache_dtype.itemsize,
            model.dtype.itemsize,
            drafter=drafts,
        )

    @property
    def spare_bytes(self) -> int:
        """Bytes in addition to blocks: for positions of drafts, and what rows keep."""
        num_rows, spare = self._setup.max_num_seqs, 0
        if self._drafter is not None:
            spare = num_rows * self._drafter.spare_blocks(self._block_size)
        return spare * self.layout.drafts.block_bytes + self._num_rows * self.layout.row_bytes

    @property
    def _num_rows(self) -> int:
        """Rows of the device's state: on a GPU, one is for padding."""
        return self._setup.max_num_seqs + (self._setup.place.kernels is not None)

    def make(self, size: CacheSize) -> ModelRunner:
        """Return a runner. The size is that of the model's cache."""
        runner = self._make_plain(size)
        wanted = self._setup.config.speculation.drafter
        if wanted is not None:
            self._add_drafter(runner, wanted, size)
        return runner

    def _make_plain(self, size: CacheSize) -> ModelRunner:
        setup, kernels = self._setup, self._setup.place.kernels
        cache = KVCache(
            self.layout,
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            dtype=self._cache_dtype,
            device=setup.device,
        )
        if kernels is None:
            plain = BatchState(
                setup.max_num_seqs,
                size.max_model_len,
                self._block_size,
                setup.device,
                self._processors,
            )
            return ModelRunner(self._model, self.backends, cache, plain)
        active = None if self._adapters is None else self._adapters.active
        assert not isinstance(active, Active), "adapters have the device of the runner"
        wanted = setup.config.speculation.drafter
        policy = GraphPolicy(
            setup.max_num_seqs,
            setup.token_budget,
            size.max_model_len,
            captures=self.backends.is_capturable and not setup.config.device.enforce_eager,
            adapts=active is not None,
            most_drafts=0 if wanted is None else wanted.num_speculative_tokens,
        )
        state = CudaBatchState(
            setup.max_num_seqs,
            size.max_model_len,
            self._block_size,
            setup.device,
            setup.token_budget,
            kernels,
            self._processors,
            active,
            policy.most_step_drafts if setup.place.stage.is_last else 0,
        )
        return CudaRunner(self._model, self.backends, cache, state, kernels, policy)

    def _add_drafter(self, runner: ModelRunner, wanted: Speculation, size: CacheSize) -> None:
        """Have steps verify drafts."""
        state, loaded = runner.state, self._drafter
        if isinstance(runner, CudaRunner) and not runner.policy.most_step_drafts:
            raise drafters.no_room_error(runner.policy)
        if loaded is None:
            if not self._setup.place.stage.is_last:
                return
            if isinstance(runner, CudaRunner):
                runner.lookup = DeviceLookup(wanted, runner.kernels, runner.state)
            else:
                runner.drafter = NgramDrafter(wanted, state.token_ids.numpy(), state.lengths)
            return
        spare = loaded.spare_blocks(self._block_size)
        cache = KVCache(
            self.layout.drafts,
            num_blocks=size.num_blocks + spare * len(state.lengths),
            num_host_blocks=size.num_host_blocks,
            dtype=self._cache_dtype,
            device=state.device,
        )
        _, backends = choose_attention(self._setup, loaded.model)
        cache.bind(loaded.model, backends)
        state.set_spare_blocks(size.num_blocks, spare)
        runner.caches.append(cache)
        limit = min(loaded.limit, size.max_model_len)
        if isinstance(runner, CudaRunner):
            runner.draft_runner = CudaDrafter(
                loaded.network,
                runner.state,
                runner.kernels,
                runner.policy,
                limit,
                is_capturable=backends.is_capturable and not loaded.model.may_synchronize,
            )
        else:
            runner.drafter = ModelDrafter(loaded.network, state, loaded.most, limit)
