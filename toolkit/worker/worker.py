"""One device: starts the model step by step, then runs its steps."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import assert_never

import torch

from toolkit.config import EngineConfig
from toolkit.distributed import SINGLE, SINGLE_STAGE, connect, split_stages
from toolkit.distributed.symmetric import choose_algorithms, open_peer_memory
from toolkit.hardware import memory
from toolkit.hardware.graph_capture import empty_cache
from toolkit.kernels.table import kernels_for
from toolkit.models.config.registry import has_head
from toolkit.models.decoder import Decoder
from toolkit.models.model import CausalLM, Encoder
from toolkit.pooling import heads
from toolkit.pooling.settings import has_pooling
from toolkit.scheduler import SchedulerOutput
from toolkit.worker.adapter_reading import AdapterReader
from toolkit.worker.alignment import ClipAlignment
from toolkit.worker.encoder_runner import EncoderRunner
from toolkit.worker.info import Report, WorkerInfo
from toolkit.worker.operations import LoadAdapter, Operation, UnloadAdapter
from toolkit.worker.pending import PendingOutput
from toolkit.worker.runner import Runner
from toolkit.worker.startup import cache_sizing, expansion
from toolkit.worker.startup.cache_problem import describe_memory
from toolkit.worker.startup.cache_sizing import CacheSize
from toolkit.worker.startup.checks import find_loaders
from toolkit.worker.startup.description import (
    describe_drafter,
    describe_worker,
)
from toolkit.worker.startup.devices import choose_device, start_threads
from toolkit.worker.startup.encoders import start_encoder
from toolkit.worker.startup.loading import Loading
from toolkit.worker.startup.model_loader import LoadedModel
from toolkit.worker.startup.phases import Phases
from toolkit.worker.startup.runners import RunnerFactory
from toolkit.worker.startup.setup import Place, Setup, read_setup, use_stream
from toolkit.worker.startup.warm_up import WarmUp, drop_graphs_that_wait

logger = logging.getLogger(__name__)


ABORT_TIMEOUT = 20.0  # seconds to wait for another thread that disconnects from the ranks


class Worker:
    """The model and all of its state on one device."""

    info: WorkerInfo
    encoder: EncoderRunner | None = None
    """Runner of a model without a KV cache, in place of `runner`."""
    runner: Runner
    _stream: torch.cuda.Stream | None = None
    _loading: Loading | None = None
    _reader: AdapterReader | None = None

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
            with self.on_stream():
                return self._start(device, Phases(report))
        except BaseException:
            if self._loading is not None:
                self._loading.stop()
            raise

    def _start(self, device: torch.device, phases: Phases) -> WorkerInfo:
        place = self._take_place(device, phases)
        with phases("config"):
            setup = read_setup(self.config, self.folder, place)
            loaders = find_loaders(setup)
            loader = loaders.drafter
        start = time.perf_counter()
        loaded = loaders.model.load(0 if loader is None else loader.nbytes)
        self._loading = loaded.loading
        drafter = None
        if loader is not None:
            drafter = loader.load(loaded.model)
            loaded.weight_bytes += drafter.model.nbytes
        before = time.perf_counter() - start
        if self._loading is None:
            phases.report("weights", before)

        def wait_for_weights() -> None:
            if self._loading is not None:
                with phases("weights", before):
                    self._loading.wait()
                self._loading = loaded.loading = None

        model = loaded.model
        if isinstance(model, Encoder):
            wait_for_weights()
            self.encoder, self.info = start_encoder(setup, loaded, model)
            self._count_late_compilations(setup)
            return self.info
        assert isinstance(model, CausalLM)
        with phases("KV cache"):
            features = loaders.model.features(loaded)
            factory = RunnerFactory(
                setup, model, loaders.processors, loaded.adapters, drafter, features
            )
            self._make_runner(setup, loaded, factory, wait_for_weights)
        sight, sound = loaders.model.sight, loaders.model.sound
        self.info.sight = None if sight is None else sight.info
        self.info.sound = None if sound is None else sound.info
        self.info.hearing = factory.hearing
        self.info.logits_processors = list(loaders.processors)
        if loaded.adapters is not None:
            self.info.max_lora_rank = loaded.adapters.max_rank
            self.info.lora_embeddings = loaded.adapters.has_ends
            with phases("adapters"):
                self._reader = AdapterReader(loaded.adapters, self.config, self.folder)
                self.info.adapters = self._reader.read_modules()
        self._add_pooling(setup, model)
        if (wanted := loaders.speculation) is not None:
            describe_drafter(self.info, wanted, self.runner, has_model=drafter is not None)
            if device.type == "cpu":
                warm_up = WarmUp(self.runner, self.info, setup.max_num_seqs)
                self.info.step_times = warm_up.step_times(self.world.total)
        if self.runner.policy.captures:
            advice = "lower --gpu-memory-utilization or --kv-cache-memory, or use --enforce-eager"
            with (
                phases("CUDA graphs"),
                memory.explain_out_of_memory("CUDA graphs next to the KV cache", device, advice),
            ):
                self.runner.capture_encoder()
                self.runner.capture(self.runner.policy.shapes)
                self.runner.capture_penalties()
        if device.type == "cuda":
            with phases("warm-up"), setup.explain_lack_for_steps():
                warm_up = WarmUp(self.runner, self.info, setup.max_num_seqs)
                warm_up.run()
                self.info.step_times = warm_up.graph_times()
        self._count_late_compilations(setup)
        return self.info

    def _take_place(self, device: torch.device, phases: Phases) -> Place:
        """Start threads, and connect to the other ranks."""
        kernels = kernels_for(device)
        kernels.ignore_compilations()
        if device.type == "cpu":
            start_threads(self.config, self._rank)
        if self._rendezvous is not None:
            parallel = self.config.parallel
            with phases("ranks"):
                self.world = connect(self._rank, parallel.world_size, self._rendezvous, device)
                group, self.stage = split_stages(self.world, parallel.tensor_parallel_size)
                self.group = open_peer_memory(group, device)
                self.group = choose_algorithms(self.group, device)
        return Place(
            device,
            kernels,
            self._stream,
            self.world,
            self.group,
            self.stage,
            self._num_local_ranks,
        )

    def _make_runner(
        self,
        setup: Setup,
        loaded: LoadedModel,
        factory: RunnerFactory,
        wait_for_weights: Callable[[], None],
    ) -> None:
        """Make the runner, with a cache of as many blocks as there is room for."""
        backend, layout = factory.backends.name, factory.layout
        room: int | None
        expanded = 0
        if cache_sizing.is_measured(setup):
            with setup.explain_lack_for_steps():
                # The contents of the only cache block and of the only state do not matter.
                size = CacheSize(1, 0, setup.max_model_len, int(layout.row_bytes > 0))
                self.runner = factory.make(size)
                info = describe_worker(setup, loaded, backend, size, layout)
                room = cache_sizing.measure_room(setup, self.runner, info, wait_for_weights)
                del self.runner
                empty_cache()
                expanded = expansion.keep_expanded(setup, loaded.model, layout, room)
                room -= expanded
        else:
            wait_for_weights()
            room = None
        free = cache_sizing.free_on_host(setup, loaded.weight_bytes)
        size = cache_sizing.choose_size(setup, free, layout, factory.spare_bytes, room)
        what, advice = describe_memory(
            self.config.cache,
            cache=size.num_blocks * layout.block_bytes,
            swap=size.num_host_blocks * layout.block_bytes + size.num_host_slots * layout.row_bytes,
            on_gpu=setup.device.type == "cuda",
        )
        with memory.explain_out_of_memory(what, setup.device, advice):
            self.runner = factory.make(size)
        with setup.explain_lack_for_steps():
            waits = drop_graphs_that_wait(self.runner)
        if waits:
            logger.warning("the model's code waits for the GPU: it runs without CUDA graphs")
        self.info = describe_worker(setup, loaded, backend, size, layout)
        self.info.expanded_weight_bytes = expanded
        overridden = self.config.cache.num_gpu_blocks_override is not None
        if overridden and (kernels := setup.place.triton) is not None:
            with setup.explain_lack_for_steps():
                warm_up = WarmUp(self.runner, self.info, setup.max_num_seqs)
                warm_up.compile(kernels, setup.num_compile_threads)

    def _add_pooling(self, setup: Setup, model: CausalLM) -> None:
        if (hearing := self.info.hearing) is not None:  # it has no embeddings of texts
            assert isinstance(model, Decoder)
            self.runner.pooling = ClipAlignment(
                model, hearing.alignment_heads, self.runner.state, setup.max_num_seqs
            )
            return
        found = heads.decoder_pooling(
            model, setup.model_config, self.config, self.folder, setup.device
        )
        if found is not None:
            self.runner.pooling, self.info.pooling = found
            self.info.generates = has_head(setup.model_config) and not has_pooling(self.folder)

    def _count_late_compilations(self, setup: Setup) -> None:
        """Count the kernels that steps compile from now on. There should be none."""
        count = setup.place.kernels.count_compilations()
        (self.encoder or self.runner).num_compiled = count

    def execute(self, step: SchedulerOutput) -> PendingOutput:
        with self.on_stream():
            return (self.encoder or self.runner).execute(step)

    def operate(self, operation: Operation) -> Future[None]:
        """Do an operation. Between steps; the next ones may run before the result is there."""
        match operation:
            case LoadAdapter() | UnloadAdapter():
                assert self._reader is not None, "there are no adapters"
                return self._reader.operate(operation)
            case unknown:
                assert_never(unknown)

    def why_eager(self) -> str | None:
        """Return why no step so far was a CUDA graph or a recorded one, None if one was."""
        return "encoders have none" if self.encoder is not None else self.runner.why_eager

    def on_stream(self) -> AbstractContextManager[object]:
        """Use the worker's stream."""
        return use_stream(self._stream)

    def close(self, *, lost: bool = False) -> None:
        """Free the model and the device's memory, and disconnect from other ranks. No step follows.

        `lost`: a step in flight may never end; its memory is kept until the process ends."""
        if self._rendezvous is not None:
            self._release()
        runner: Runner | None = vars(self).pop("runner", None)
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
