"""One device: loads the model, measures memory, makes the cache, runs steps."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from toolkit import units
from toolkit.attention import choose_backend
from toolkit.config import EngineConfig, Speculation
from toolkit.distributed import SINGLE, SINGLE_STAGE, Group, Stage, connect, parallel, split_stages
from toolkit.distributed.symmetric import choose_algorithms, open_peer_memory
from toolkit.errors import ConfigError
from toolkit.hardware import memory
from toolkit.hardware.cores import find_cores, num_cpus, plan_threads, requested_threads
from toolkit.hardware.figures import CPU_CACHE_SHARE
from toolkit.hardware.graph_capture import empty_cache
from toolkit.kernels import cpu
from toolkit.kernels.table import kernels_for
from toolkit.lora.adapters import Adapters
from toolkit.lora.weight import Active, Adapted
from toolkit.models.build import build_model, choose_dtype, load_config
from toolkit.models.cache_scale import scale_cache
from toolkit.models.decoder import Decoder
from toolkit.models.model import CausalLM, Encoder, Model
from toolkit.models.model_config import ArchitectureConfig
from toolkit.models.registry import describe, has_head, load_plugins
from toolkit.pooling import heads
from toolkit.pooling.settings import has_pooling
from toolkit.sampling.processor_rows import NO_PROCESSORS, Loaded, load_processors
from toolkit.scheduler import SchedulerOutput
from toolkit.speculative.lookup import DeviceLookup
from toolkit.speculative.model_drafter import ModelDrafter
from toolkit.speculative.ngram import NgramDrafter
from toolkit.weights.loader import find_weights
from toolkit.weights.quantization import require
from toolkit.worker import drafters, memory_budget
from toolkit.worker.adapter_reading import AdapterReader, max_lora_rank
from toolkit.worker.batch_state import BatchState
from toolkit.worker.cuda_drafter import CudaDrafter
from toolkit.worker.cuda_runner import CudaRunner
from toolkit.worker.cuda_state import CudaBatchState
from toolkit.worker.encoder_runner import EncoderRunner
from toolkit.worker.graph_policy import GraphPolicy
from toolkit.worker.info import Report, WorkerInfo
from toolkit.worker.kv_cache import KVCache, cache_layout, choose_cache_dtype
from toolkit.worker.loading import Fill, Loading
from toolkit.worker.model_runner import ModelRunner, PendingOutput
from toolkit.worker.operations import Operation
from toolkit.worker.warm_up import WarmUp

logger = logging.getLogger(__name__)


ABORT_TIMEOUT = 20.0  # seconds to wait for another thread that disconnects from the ranks


class Worker:
    """The model and all of its state on one device."""

    info: WorkerInfo
    encoder: EncoderRunner | None = None
    """Runner of a model without a KV cache, in place of `runner`."""
    _processors: Loaded = NO_PROCESSORS
    _stream: torch.cuda.Stream | None = None
    _loading: Loading | None = None
    _adapters: Adapters | None = None
    _reader: AdapterReader | None = None
    _drafter_model: drafters.Loaded | None = None

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        rank: int = 0,
        rendezvous: Path | str | None = None,
        num_local_ranks: int = 0,
    ) -> None:
        """`rendezvous`: meeting point of the ranks of a sharded model (`distributed.connect`).

        `num_local_ranks`: ranks on this machine, itself included. 0: all ranks of all engines."""
        self._num_local_ranks = num_local_ranks
        self.config = config
        self.folder = folder
        self._rank, self._rendezvous = rank, rendezvous
        self._disconnecting = threading.Lock()
        """Held while disconnecting, which may wait for graphs that the main thread must free."""
        self.world = self.group = SINGLE
        """All ranks of the model, and the ranks of this one's stage."""
        self.stage = SINGLE_STAGE

    def start(self, report: Report) -> WorkerInfo:
        """Load the model and make the cache. Raises ToolkitError."""
        device = choose_device(
            self.config.device.device, None if self._rendezvous is None else self._rank
        )
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            with self._on_stream():
                return self._start(device, _Phases(report))
        except BaseException:
            if self._loading is not None:
                self._loading.stop()
            raise

    def _start(self, device: torch.device, phases: _Phases) -> WorkerInfo:
        size, kernels = self.config.parallel.world_size, kernels_for(device)
        if kernels is not None:
            kernels.late_compilations.stop()
        if device.type == "cpu":
            self._start_threads()
        if self._rendezvous is not None:
            with phases("ranks"):
                self.world = connect(self._rank, size, self._rendezvous, device)
                group, self.stage = split_stages(
                    self.world, self.config.parallel.tensor_parallel_size
                )
                self.group = open_peer_memory(group, device)
                self.group = choose_algorithms(self.group, device)
        with phases("config"):
            load_plugins(strict=self.config.plugins.strict_plugins)
            model_config = load_config(self.folder, self.config.model)
            dtype = choose_dtype(self.config.model.dtype, model_config, device)
            max_model_len = self._max_model_len(model_config)
            require(self.config.model.quantization, device, dtype)
            target = drafters.Target(self.folder, model_config, dtype, device, max_model_len)
            speculation = drafters.check(self.config, target)
            loader = drafters.find_loader(self.config, speculation, target, self.group)
        start = time.perf_counter()
        model = self._load(
            model_config, device, dtype, max_model_len, 0 if loader is None else loader.nbytes
        )
        if loader is not None:
            self._drafter_model = loader.load(model)
            self._weight_bytes += self._drafter_model.model.nbytes
        before = time.perf_counter() - start
        if self._loading is None:
            phases.report("weights", before)

        def loaded() -> None:
            if self._loading is not None:
                with phases("weights", before):
                    self._loading.wait()
                self._loading = None

        if isinstance(model, Encoder):
            loaded()
            self._start_encoder(model, model_config, device, dtype, max_model_len)
            self._count_late_compilations(device)
            return self.info
        assert isinstance(model, CausalLM)
        self._processors = load_processors(self.config.plugins, device, model.vocab_size)
        with phases("KV cache"):
            self._make_cache(model, device, dtype, max_model_len, loaded)
        if self._adapters is not None:
            self.runner.adapters = self._adapters
            self.info.max_lora_rank = self._adapters.max_rank
            with phases("adapters"):
                self._reader = AdapterReader(self._adapters, self.config, self.folder)
                self.info.adapters = self._reader.read_modules()
        self._add_pooling(model, model_config, device)
        if speculation is not None:
            self._describe_drafter(speculation)
            if device.type == "cpu":
                warm_up = WarmUp(self.runner, self.info, self.config.scheduler.max_num_seqs)
                self.info.step_seconds = warm_up.step_seconds(self.world.total)
        if isinstance(self.runner, CudaRunner) and self.runner.policy.captures:
            advice = "lower --gpu-memory-utilization or --kv-cache-memory, or use --enforce-eager"
            with (
                phases("CUDA graphs"),
                memory.explain_out_of_memory("CUDA graphs next to the KV cache", device, advice),
            ):
                self.runner.capture(self.runner.policy.shapes)
                self.runner.capture_penalties()
        if device.type == "cuda":
            with phases("warm-up"), self._room_for_steps(device):
                warm_up = WarmUp(self.runner, self.info, self.config.scheduler.max_num_seqs)
                warm_up.run()
                self.info.step_seconds, self.info.verify_seconds = warm_up.graph_seconds()
        self._count_late_compilations(device)
        return self.info

    def _count_late_compilations(self, device: torch.device) -> None:
        """Count the kernels that steps compile from now on. There should be none."""
        kernels = kernels_for(device)
        if kernels is not None:
            (self.encoder or self.runner).num_compiled = kernels.late_compilations().take

    def _start_threads(self) -> None:
        """Start CPU threads as `plan_threads` decides."""
        ranks, given = self.config.parallel.num_devices, requested_threads()
        asked = self.config.device.num_threads or (max(1, given // ranks) if given else None)
        plan = plan_threads(find_cores(), asked, self._rank, ranks)
        torch.set_num_threads(plan.count)
        cpu.set_num_threads(plan.count)
        # Engines do not know each other's cores.
        alone = self.config.parallel.data_parallel_size == 1
        if len(plan.cores) > 1 and alone:
            bound = cpu.bind_threads([core.cpus for core in plan.cores])
            how = "all but the first pinned to cores" if bound else "not pinned: the system refused"
            logger.info("%d threads, %s", plan.count, how)

    def close(self, *, lost: bool = False) -> None:
        """Free the model and the device's memory, and disconnect from other ranks. No step follows.

        `lost`: a step in flight may never end; its memory is kept until the process ends."""
        if self._rendezvous is not None:
            self._release()
        runner: ModelRunner | None = vars(self).pop("runner", None)
        if runner is not None:
            with self._log_gpu_failure("freed"):
                runner.close()  # NCCL does not end before the last graph that calls it
        del runner
        self.encoder = None
        if self._rendezvous is not None:
            gc.collect()
            self._disconnect()
        if self._stream is not None and not lost:
            with self._log_gpu_failure("freed"):
                empty_cache()

    def abandon(self) -> None:
        """End a GPU step that waits for lost ranks. Its result means nothing. From any thread."""
        if self._stream is not None:
            self._release()
            self._disconnect()

    def _release(self) -> None:
        if self.group.peer_memory is not None:
            with self._log_gpu_failure("written"):
                self.group.peer_memory.release()

    @contextmanager
    def _log_gpu_failure(self, what: str) -> Iterator[None]:
        """Log errors of a failed GPU, whose memory cannot be `what`: `written` or `freed`."""
        try:
            yield
        except RuntimeError as error:
            logger.warning("the GPU's memory could not be %s: %s", what, str(error).splitlines()[0])

    def _disconnect(self) -> None:
        if not self._disconnecting.acquire(timeout=ABORT_TIMEOUT):
            logger.warning("NCCL has not ended after %g s; it ends with the process", ABORT_TIMEOUT)
            return
        try:
            world, self.world = self.world, SINGLE
            world.close()
        finally:
            self._disconnecting.release()

    def execute(self, step: SchedulerOutput) -> PendingOutput:
        with self._on_stream():
            return (self.encoder or self.runner).execute(step)

    def _on_stream(self) -> AbstractContextManager[object]:
        """Use the worker's stream: the default one cannot be captured.

        All work is on one stream. Kernels on a second one would slow each kernel of every graph by
        0.4 us on an H200: 8 % of a step of 128 requests."""
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def _start_encoder(
        self,
        model: Encoder,
        model_config: ArchitectureConfig,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
    ) -> None:
        """Set up an encoder. A request has one block, which stands for its place in a step."""
        head, pooling = heads.encoder_head(model, model_config, self.config, self.folder, device)
        self.encoder = EncoderRunner(model, head, device, dtype)
        num_rows, budget = self.config.scheduler.max_num_seqs, self._budget(device)
        self.info = self._info(model, "sdpa", dtype, device, max_model_len, budget, num_rows, 0, 0)
        self.info.block_size = max_model_len
        self.info.generates, self.info.chunks_prompts, self.info.pooling = False, False, pooling
        if device.type == "cuda":
            with self._room_for_steps(device):
                warm_up = WarmUp(self.encoder, self.info, num_rows)
                self._compile_kernels(warm_up, device)
                warm_up.run_largest_step()

    def _add_pooling(
        self, model: CausalLM, model_config: ArchitectureConfig, device: torch.device
    ) -> None:
        found = heads.decoder_pooling(model, model_config, self.config, self.folder, device)
        if found is not None:
            self.runner.pooling, self.info.pooling = found
            self.info.generates = has_head(model_config) and not has_pooling(self.folder)

    def _describe_drafter(self, speculation: Speculation) -> None:
        self.info.most_drafts = speculation.num_speculative_tokens
        self.info.reads_predictions = self._drafter_model is None
        if isinstance(self.runner, CudaRunner):
            self.info.most_step_drafts = self.runner.policy.most_step_drafts
            drafter = self.runner.draft_runner
            if drafter is not None and self.runner.policy.captures and not drafter.is_capturable:
                logger.warning(
                    "the drafter runs without CUDA graphs: its code may wait for the GPU"
                )

    def _add_drafter(
        self,
        runner: ModelRunner,
        speculation: Speculation,
        num_blocks: int,
        num_host_blocks: int,
        max_model_len: int,
    ) -> None:
        """Have steps verify drafts. The numbers of blocks are those of the model's cache."""
        state, loaded = runner.state, self._drafter_model
        if isinstance(runner, CudaRunner) and not runner.state.verifies:
            raise drafters.no_room_error(runner.policy)
        if loaded is None:
            if isinstance(runner, CudaRunner):
                runner.lookup = DeviceLookup(speculation, runner.kernels, runner.state)
            elif self.stage.is_last:
                runner.drafter = NgramDrafter(speculation, state.token_ids.numpy(), state.lengths)
            return
        block_size = state.block_size
        spare = loaded.spare_blocks(block_size)
        cache = KVCache(
            loaded.model,
            num_blocks=num_blocks + spare * len(state.lengths),
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            dtype=runner.cache.dtype,
            device=state.device,
        )
        backend, _ = choose_backend(
            self.config.device.attention_backend,
            state.device,
            loaded.model.dtype,
            loaded.model.attention_layers()[0].shape.head_size,
            block_size,
            fp8_cache=cache.dtype == torch.float8_e4m3fn,
        )
        cache.bind(loaded.model, backend)
        state.set_spare_blocks(num_blocks, spare)
        runner.caches.append(cache)
        limit = min(loaded.limit, max_model_len)
        if isinstance(runner, CudaRunner):
            runner.draft_runner = CudaDrafter(
                loaded.network,
                runner.state,
                runner.kernels,
                runner.policy,
                limit,
                is_capturable=backend.is_capturable and not loaded.model.may_synchronize,
            )
        else:
            runner.drafter = ModelDrafter(loaded.network, state, loaded.most, limit)

    def _budget(self, device: torch.device) -> int:
        """Return the token budget of one step."""
        return self.config.scheduler.max_num_batched_tokens or (
            8192 if device.type == "cuda" else 2048
        )

    def _max_model_len(self, model_config: ArchitectureConfig) -> int:
        made_for = describe(model_config).max_positions
        wanted = self.config.model.max_model_len
        if not made_for and wanted is None:
            raise ConfigError(
                "config.json does not say how long sequences may be. Give --max-model-len.",
                param="max_model_len",
            )
        if wanted is not None and 0 < made_for < wanted:
            raise ConfigError(
                f"--max-model-len is {wanted}, but the model supports at most {made_for} tokens.",
                param="max_model_len",
            )
        return wanted or min(made_for, heads.max_seq_length(self.folder) or made_for)

    def _load(
        self,
        model_config: ArchitectureConfig,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        drafter_bytes: int,
    ) -> Model:
        """Return the model. On a GPU its weights may still be loading.

        `drafter_bytes`: weights of a drafter's model, which is loaded afterwards."""

        target = device

        def build(
            device: torch.device,
            max_model_len: int,
            stage: Stage = self.stage,
            group: Group = self.group,
        ) -> Model:
            splits_experts = not self.config.parallel.enable_expert_parallel
            with parallel(group, stage, splits_experts=splits_experts):
                return build_model(
                    model_config,
                    device=device,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    quantization=self.config.model.quantization,
                    target=target,
                )

        sketch = build(torch.device("meta"), 1)
        if (packings := model_config.packings) is not None:
            names = [slot.rpartition(".")[0] for slot in sketch.slots()]
            layouts = packings.layouts(dict.fromkeys(names))
            logger.info("weights quantized by %s: %s", packings.method, layouts)
        self._num_parameters = self._model_parameters = _num_parameters(sketch)
        if self.world.size > 1:
            self._model_parameters = _num_parameters(
                build(torch.device("meta"), 1, SINGLE_STAGE, SINGLE)
            )
        self._weight_bytes = sketch.nbytes
        together = self._weight_bytes + drafter_bytes
        if device.type == "cpu":  # ranks on one machine share its memory
            together = (
                together * self._num_local_ranks
                if self._num_local_ranks
                else self.world.total(together)
            )
        both = ("The weights of the model and its drafter",) if drafter_bytes else ()
        memory_budget.require_weights_fit(together, device, dtype, *both)
        with self._room_for_weights(device):
            model = build(device, max_model_len)
        everything = (
            sketch if self.stage is SINGLE_STAGE else build(torch.device("meta"), 1, SINGLE_STAGE)
        )
        if self.config.lora.is_enabled:
            self._require_adapters(model, device)
            lora, rank = self.config.lora, max_lora_rank(self.config.lora)
            with self._on_stream(), self._room_for_weights(device):
                self._adapters = Adapters(
                    model, everything, rank, lora.max_loras, dtype, kernels_for(device)
                )
            self._weight_bytes += sum(
                module.nbytes for module in model.modules() if isinstance(module, Adapted)
            )
        given = self.config.model
        fill = find_weights(model, self.folder, given.load_format, given.seed, everything.slots())
        # Not while a drafter's model is built: PyTorch's default dtype is that of all threads.
        if device.type == "cuda" and self.world.size == 1 and not drafter_bytes:
            self._loading = Loading(partial(self._fill, model, device, fill), device)
            return model
        # On a CPU, loading uses the main thread's PyTorch threads. Several ranks compile kernels
        # together, and each would wait for all files.
        self._fill(model, device, fill, threading.Event())
        if device.type == "cpu":
            del fill  # refers to the unpacked weights
            model.pack_weights()
            if isinstance(model, CausalLM) and self.config.device.enforce_eager:
                model.disable_recording()
            memory.trim_heap()
            self._weight_bytes = model.nbytes
        return model

    def operate(self, operation: Operation) -> Future[None]:
        """Do an operation. Between steps; the next ones may run before the result is there."""
        assert self._reader is not None, "no operation without adapters"
        return self._reader.operate(operation)

    def _require_adapters(self, model: Model, device: torch.device) -> None:
        """Raise ConfigError if the model cannot have adapters here."""
        problem = None
        if device.type != "cpu" and kernels_for(device) is None:
            problem = "adapters on a GPU need the package triton"
        elif not isinstance(model, Decoder):
            problem = f"adapters of {model.architecture} are not supported: tk has no code of it"
        if problem is not None:
            raise ConfigError(f"--lora-modules: {problem}.", param="lora_modules")

    def _fill(self, model: Model, device: torch.device, fill: Fill, stop: threading.Event) -> None:
        with self._on_stream(), self._room_for_weights(device):
            fill(stop)
            if self.config.cache.kv_cache_dtype == "fp8" and isinstance(model, Decoder):
                scale_cache(model)

    def _room_for_weights(self, device: torch.device) -> AbstractContextManager[None]:
        advice = (
            "end other programs on the device, or see --quantization and --tensor-parallel-size"
        )
        return memory.explain_out_of_memory("the model's weights", device, advice)

    def _room_for_steps(self, device: torch.device) -> AbstractContextManager[None]:
        num_tokens, num_requests = self._budget(device), self.config.scheduler.max_num_seqs
        what = f"the largest step, {num_tokens} tokens of up to {num_requests} requests"
        return memory.explain_out_of_memory(
            what, device, "lower --max-num-batched-tokens or --max-num-seqs"
        )

    def _make_cache(
        self,
        model: CausalLM,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        loaded: Callable[[], None],
    ) -> None:
        config = self.config
        block_size = config.cache.block_size
        num_heads = model.attention_layers()[0].shape
        cache_dtype = choose_cache_dtype(config.cache.kv_cache_dtype, dtype, device)
        backend, why = choose_backend(
            config.device.attention_backend,
            device,
            dtype,
            num_heads.head_size,
            block_size,
            fp8_cache=cache_dtype == torch.float8_e4m3fn,
        )
        logger.info("attention backend %s (%s)", backend.name, why)
        models = [model, *([self._drafter_model.model] if self._drafter_model else ())]
        per_block = sum(
            cache_layout(one, block_size).block_bytes(cache_dtype.itemsize) for one in models
        )
        budget = self._budget(device)
        num_rows, kernels = config.scheduler.max_num_seqs, kernels_for(device)
        wanted = config.speculation.drafter
        most_drafts = 0 if wanted is None else wanted.num_speculative_tokens

        def runner(num_blocks: int, num_host_blocks: int, max_len: int) -> ModelRunner:
            made = plain_runner(num_blocks, num_host_blocks, max_len)
            if wanted is not None:
                self._add_drafter(made, wanted, num_blocks, num_host_blocks, max_len)
            return made

        def plain_runner(num_blocks: int, num_host_blocks: int, max_len: int) -> ModelRunner:
            cache = KVCache(
                model,
                num_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                block_size=block_size,
                dtype=cache_dtype,
                device=device,
            )
            if kernels is None:
                plain = BatchState(num_rows, max_len, block_size, device, self._processors)
                return ModelRunner(model, backend, cache, plain)
            active = None if self._adapters is None else self._adapters.active
            assert not isinstance(active, Active), "adapters have the device of the runner"
            captures = backend.is_capturable and not config.device.enforce_eager
            policy = GraphPolicy(
                num_rows,
                budget,
                max_len,
                captures=captures,
                adapts=active is not None,
                most_drafts=most_drafts,
            )
            state = CudaBatchState(
                num_rows,
                max_len,
                block_size,
                device,
                budget,
                kernels,
                self._processors,
                active,
                policy.most_step_drafts,
            )
            return CudaRunner(model, backend, cache, state, kernels, policy)

        def info(max_len: int, num_blocks: int, num_host_blocks: int) -> WorkerInfo:
            return self._info(
                model,
                backend.name,
                dtype,
                device,
                max_len,
                budget,
                num_blocks,
                num_host_blocks,
                per_block,
            )

        if device.type == "cuda" and config.cache.num_gpu_blocks_override is None:
            with self._room_for_steps(device):
                # The content of the only cache block does not matter.
                self.runner, self.info = runner(1, 0, max_model_len), info(max_model_len, 1, 0)
                room = self._cache_room(device, loaded)
        else:
            loaded()
            taken = self.world.total(self._weight_bytes) if device.type == "cpu" else 0
            sharing = self._num_local_ranks or self.config.parallel.world_size
            room = int(memory.available(device, taken) * CPU_CACHE_SHARE / sharing)
            if self._drafter_model is not None:
                drafter = cache_layout(self._drafter_model.model, block_size)
                spare = num_rows * self._drafter_model.spare_blocks(block_size)
                room -= spare * drafter.block_bytes(cache_dtype.itemsize)
        num_blocks, num_host_blocks = memory_budget.cache_blocks(
            config.cache,
            room=max(0, room),
            block_bytes=per_block,
            most_useful=num_rows * -(-max_model_len // block_size),
            device=device,
        )
        num_blocks, num_host_blocks = (
            self.world.minimum(num_blocks),
            self.world.minimum(num_host_blocks),
        )
        overridden = (
            config.cache.num_gpu_blocks_override is not None and config.model.max_model_len is None
        )
        if overridden and num_blocks * block_size < max_model_len:
            logger.warning(
                "max_model_len is limited to %d by --num-gpu-blocks-override",
                num_blocks * block_size,
            )
            max_model_len = num_blocks * block_size
        memory_budget.require_one_request_fits(
            num_blocks, block_size, max_model_len, per_block, device
        )
        size, swap = units.size(num_blocks * per_block), units.size(num_host_blocks * per_block)
        advice = "lower --kv-cache-memory, --gpu-memory-utilization or --swap-space"
        with memory.explain_out_of_memory(
            f"a KV cache of {size} and {swap} of swap space", device, advice
        ):
            self.runner = runner(num_blocks, num_host_blocks, max_model_len)
        if self._drop_graphs_that_wait():
            logger.warning("the model's code waits for the GPU: it runs without CUDA graphs")
        self.info = info(max_model_len, num_blocks, num_host_blocks)
        if config.cache.num_gpu_blocks_override is not None:
            with self._room_for_steps(device):
                self._compile_kernels(
                    WarmUp(self.runner, self.info, config.scheduler.max_num_seqs), device
                )

    def _cache_room(self, device: torch.device, loaded: Callable[[], None]) -> int:
        """Measure the bytes of a GPU that are left for the cache, next to steps and graphs.

        Frees the runner used for measuring. Kernels are compiled before the weights are `loaded`.
        Not called with --num-gpu-blocks-override, nor for encoders: then products keep PyTorch's
        choice of algorithm."""
        warm_up = WarmUp(self.runner, self.info, self.config.scheduler.max_num_seqs)
        self._compile_kernels(warm_up, device)
        loaded()
        self._drop_graphs_that_wait()
        if self.runner.backend.is_capturable and kernels_for(device) is not None:
            warm_up.choose_products()
        peak = warm_up.peak_bytes(samples=self.stage.is_last) - self.info.cache_bytes
        peak += warm_up.graph_bytes()
        del warm_up, self.runner
        empty_cache()
        total = torch.cuda.mem_get_info(device)[1]
        return int(total * self.config.cache.gpu_memory_utilization) - peak

    def _drop_graphs_that_wait(self) -> bool:
        """Have the runner capture nothing if the model's code waits for the GPU. Return if so.

        Call it after loading, which waits too: PyTorch watches all threads."""
        runner = self.runner
        if not isinstance(runner, CudaRunner) or not runner.policy.captures:
            return False
        if not runner.model.may_synchronize or not runner.synchronizes():
            return False
        runner.policy = replace(runner.policy, captures=False)
        return True

    def _compile_kernels(self, warm_up: WarmUp, device: torch.device) -> None:
        """Compile all kernels, on this rank's share of the cores."""
        kernels = kernels_for(device)
        if kernels is not None:
            here = self._num_local_ranks or self.config.parallel.num_devices
            warm_up.compile(kernels, max(1, num_cpus() // here))

    def _info(
        self,
        model: Model,
        backend: str,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        budget: int,
        num_blocks: int,
        num_host_blocks: int,
        per_block: int,
    ) -> WorkerInfo:
        wanted = self.config.scheduler.async_scheduling
        return WorkerInfo(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            dtype=str(dtype).removeprefix("torch."),
            attention_backend=backend,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=self.config.cache.block_size,
            num_parameters=self._num_parameters,
            model_parameters=self._model_parameters,
            weight_bytes=self._weight_bytes,
            cache_bytes=num_blocks * per_block,
            world_size=self.world.size,
            async_scheduling=device.type == "cuda" if wanted is None else wanted,
            attention_size=_attention_size(model),
            logits_processors=list(self._processors),
        )


class _Phases:
    """Times phases of start-up: `with phases("weights"): ...`. Nested phases count separately."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._inside = 0.0  # seconds of nested phases

    @contextmanager
    def __call__(self, name: str, before: float = 0.0) -> Iterator[None]:
        """`before`: seconds that the phase has taken so far."""
        start, around, self._inside = time.perf_counter(), self._inside, 0.0
        yield
        seconds = time.perf_counter() - start
        self.report(name, before + seconds - self._inside)
        self._inside = around + seconds


def _num_parameters(model: Model) -> int:
    return sum(part.target.numel() for slot in model.slots().values() for part in slot.parts)


def _attention_size(model: Model) -> int:
    layers = model.attention_layers() if isinstance(model, CausalLM) else []
    return sum(layer.shape.num_heads * layer.shape.head_size for layer in layers)


def choose_device(wanted: str, rank: int | None) -> torch.device:
    """Return the worker's device. `rank`: set if each rank has its own GPU. Raises ConfigError."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: PyTorch sees no NVIDIA GPU here. nvidia-smi shows if the driver does.",
            param="device",
        )
    if rank is not None:
        # Ranks of one machine have consecutive numbers.
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
