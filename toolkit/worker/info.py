"""A worker's description of itself, without torch."""

from collections.abc import Callable

import msgspec

from toolkit.cache_group import ONE_GROUP, CacheGroup
from toolkit.models.audio import rows_of_clip
from toolkit.pictures.settings import ProcessorSettings
from toolkit.pictures.tokens import PictureTokens
from toolkit.plugins import Plugin
from toolkit.pooling.settings import PoolingInfo
from toolkit.scheduler.speculation import UNKNOWN_TIMES, StepTimes
from toolkit.sequence import Adapter
from toolkit.speech.tokens import HearingInfo

Report = Callable[[str, float], None]  # called with the name and the seconds of a start-up phase


class SightInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Pictures that prompts may have."""

    tokens: PictureTokens
    processor: ProcessorSettings
    most_rows: int  # of a picture
    num_pages: int  # of the table of rows
    both_ways: bool = False  # a picture's tokens see each other

    @property
    def token_id(self) -> int:
        """Token that stands for a picture in prompts."""
        return self.tokens.place


class SoundInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Clips that prompts may have as tokens."""

    token_id: int  # stands for a row of a clip
    seconds: float  # of the longest clip
    chunk: int  # frames that convolutions see together
    num_pages: int  # of the table of rows

    def num_rows(self, num_samples: int) -> int:
        """Return the rows of a clip."""
        return rows_of_clip(num_samples, self.chunk)


class WorkerInfo(msgspec.Struct, kw_only=True):
    """Facts found at start-up. Sizes in bytes, lengths in tokens."""

    device: str
    dtype: str  # of activations
    weight_type: str  # of most weights
    attention_backend: str
    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int  # pages of the cache
    num_host_blocks: int
    block_size: int
    groups: tuple[CacheGroup, ...] = ONE_GROUP
    cache_tokens: int  # that fit, in sequences of the full length that decode
    num_parameters: int
    weight_bytes: int
    cache_bytes: int
    expanded_weight_bytes: int = 0  # of weights of integers that are kept in 16 bits, too
    async_scheduling: bool
    world_size: int = 1  # ranks that share the model. Sizes are those of one rank
    model_parameters: int = 0  # parameters of the unsharded model
    attention_size: int = 0  # query heads times head size, summed over layers
    num_state_slots: int = 0
    """Slots for requests' states and snapshots of them; 0: no layer has a `memory.RowMemory`."""
    num_host_slots: int = 0  # slots in host memory for the states of preempted requests
    generates: bool = True  # prompts can be continued
    chunks_prompts: bool = True  # A prompt can be computed in several steps
    pooling: PoolingInfo | None = None  # set if prompts can be pooled
    logits_processors: list[Plugin] = []  # that requests may ask for
    adapters: list[Adapter] = []  # of --lora-modules
    max_lora_rank: int = 0  # 0: requests cannot have adapters
    lora_embeddings: bool = False  # adapters may change embeddings and output head
    most_drafts: int = 0  # drafts that a request may have in a step
    most_step_drafts: int = 0  # that all requests may have in a step; 0: any number
    reads_predictions: bool = False  # the drafter guesses from a request's prediction
    step_times: StepTimes = UNKNOWN_TIMES  # if there are drafts
    sight: SightInfo | None = None  # None: prompts have no pictures
    sound: SoundInfo | None = None  # None: no token stands for a part of a clip
    hearing: HearingInfo | None = None  # set if each prompt has a clip, which all tokens read

    @property
    def hears(self) -> bool:
        """True if prompts may have clips."""
        return self.hearing is not None or self.sound is not None

    @property
    def num_feature_pages(self) -> int:
        """Pages of the table of what towers compute."""
        return sum(one.num_pages for one in (self.sight, self.sound) if one is not None)

    @property
    def token_bytes(self) -> float:
        """Bytes of KV cache per token."""
        return self.cache_bytes / max(1, self.cache_tokens)

    @property
    def tasks(self) -> list[str]:
        """Tasks of the model: `generate`, `embed`, `score`, `classify`."""
        return ["generate"] * self.generates + (
            [self.pooling.task] if self.pooling is not None else []
        )
