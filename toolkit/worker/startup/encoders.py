"""Start of an encoder."""

from toolkit.models.memory import MemoryLayout
from toolkit.models.model import Encoder
from toolkit.pooling import heads
from toolkit.worker.encoder_runner import EncoderRunner
from toolkit.worker.info import WorkerInfo
from toolkit.worker.startup.cache_sizing import CacheSize
from toolkit.worker.startup.description import describe_worker
from toolkit.worker.startup.model_loader import LoadedModel
from toolkit.worker.startup.setup import Setup
from toolkit.worker.startup.warm_up import WarmUp


def start_encoder(
    setup: Setup, loaded: LoadedModel, model: Encoder
) -> tuple[EncoderRunner, WorkerInfo]:
    """Set up an encoder. It keeps nothing: blocks have no bytes."""
    head, pooling = heads.encoder_head(
        model, setup.model_config, setup.config, setup.folder, setup.device
    )
    runner = EncoderRunner(model, head, setup.device, setup.dtype)
    per_request = -(-setup.max_model_len // setup.config.cache.block_size)
    size = CacheSize(setup.max_num_seqs * per_request, 0, setup.max_model_len)
    layout = MemoryLayout.of((), setup.config.cache.block_size, 0, 0)
    info = describe_worker(setup, loaded, "sdpa", size, layout)
    info.generates, info.chunks_prompts, info.pooling = False, False, pooling
    if setup.device.type == "cuda":
        with setup.explain_lack_for_steps():
            warm_up = WarmUp(runner, info, setup.max_num_seqs)
            if (kernels := setup.place.triton) is not None:
                warm_up.compile(kernels, setup.num_compile_threads)
            warm_up.run_largest_step()
    return runner, info
