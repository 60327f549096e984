"""Pictures of prompts: their tokens, and their pixels once a core asks for them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from toolkit.config.engine import PictureConfig
from toolkit.engine.front.features import FeatureSource
from toolkit.engine.front.pixels import PixelSource, then
from toolkit.errors import ConfigError, InvalidParamError, InvalidRequestError
from toolkit.pictures.families import Grid, find_family
from toolkit.pictures.pool import PicturePool
from toolkit.pictures.settings import PictureLimits
from toolkit.pictures.sources import Encoded, from_image, load
from toolkit.sequence import Feature
from toolkit.worker.info import SightInfo

MAX_SIZES = 2**14  # pictures whose sizes are kept


@dataclass(frozen=True, slots=True)
class PictureUrl:
    """URL of a picture, and the parameter of the request that has it."""

    url: str
    param: str


@dataclass(frozen=True, slots=True)
class PictureImage:
    """An image of Pillow, and the parameter that has it."""

    image: Any
    param: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a prompt."""

    encoded: Encoded
    grid: Grid  # rows and columns of its tokens
    num_rows: int  # of its features
    digest: bytes  # of its bytes, and of what prepares them
    source: FeatureSource


def pictures_in(prompt: object) -> list[Any]:
    """Return the images of a prompt's multi_modal_data. Raises InvalidRequestError."""
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if data is None:
        return []
    if not isinstance(data, Mapping) or data.keys() - {"image", "audio"}:
        raise InvalidParamError(
            "multi_modal_data",
            'must be {"image": an image or a list of them} or {"audio": (samples, rate)}.',
        )
    images = data.get("image")
    return list(images) if isinstance(images, list | tuple) else [] if images is None else [images]


def require_sight(pictures: Pictures | None, model: str, param: str = "prompt") -> Pictures:
    """Raise InvalidRequestError if prompts are text. `model`: its name."""
    if pictures is None:
        raise InvalidRequestError(
            f"{model} reads text alone: the prompt has a picture.",
            param=param,
            code="model_not_supported",
        )
    return pictures


def check_sources(config: PictureConfig) -> None:
    """Raise ConfigError for a domain or a folder of pictures that is not valid."""
    if config.allowed_media_domains:
        from toolkit.pictures.fetch import parse_domain  # imports httpx

        for domain in config.allowed_media_domains:
            parse_domain(domain)
    folder = config.allowed_local_media_path
    if folder and not os.path.isdir(folder):
        raise ConfigError(
            f"--allowed-local-media-path is {folder!r}, which is not a folder.",
            param="allowed_local_media_path",
        )


def make_pictures(
    sight: SightInfo | None, config: PictureConfig, *, keeper_path: str = "", **limits: Any
) -> Pictures | None:
    """Start the processes that prepare pictures; None if prompts are text.

    `keeper_path`: socket of a process that has or starts them, see `PicturePool`. `limits`: fields
    of PictureLimits."""
    if sight is None:
        return None
    own = PictureLimits(
        allowed_domains=config.allowed_media_domains,
        local_folder=config.allowed_local_media_path or "",
        **limits,
    )
    pool = PicturePool(sight.processor, own, keeper_path)
    pool.start()
    return Pictures(sight, config, pool, own)


class Pictures:
    """Prepares the pictures of a front end's prompts, in a pool of processes."""

    def __init__(
        self, sight: SightInfo, config: PictureConfig, pool: PicturePool, limits: PictureLimits
    ) -> None:
        self.sight, self.config, self.pool, self.limits = sight, config, pool, limits
        self._tokens, self._family = sight.tokens, find_family(sight.processor.family)
        self._salt = msgspec.msgpack.encode(sight.processor, order="deterministic")
        self._sizes: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._pixels = PixelSource(pool)

    def close(self) -> None:
        self.pool.close()

    async def resolve(self, urls: Sequence[PictureUrl], *, is_checked: bool) -> list[Picture]:
        """Load and measure pictures. `is_checked`: also process those that are new.

        Such a picture can be decoded, so that no answer fails because of it. Raises the error of
        the first picture that fails, after the others are cancelled."""

        async def take(one: PictureUrl) -> Picture:
            encoded = await load(one.url, self.limits, one.param)
            picture = await asyncio.wrap_future(self.measure(encoded, one.param))
            if is_checked:
                await asyncio.wrap_future(self.check(picture, one.param))
            return picture

        tasks = [asyncio.ensure_future(take(one)) for one in urls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take(self, image: Any, param: str) -> Future[Picture]:
        """Take a picture that is one already, or an image of Pillow."""
        if isinstance(image, Picture):
            done: Future[Picture] = Future()
            done.set_result(image)
            return done
        if not hasattr(image, "convert"):
            raise InvalidParamError(
                param, f"has a {type(image).__name__}, where images of Pillow must be."
            )
        return self.measure(from_image(image), param)

    def measure(self, encoded: Encoded, param: str) -> Future[Picture]:
        """Find the size of a picture. Fails with InvalidRequestError if it is none."""
        size = self._known_size(encoded)
        measured: Future[tuple[int, int]] = Future()
        if size is not None:
            measured.set_result(size)
        else:
            measured = self.pool.measure(encoded, param)
        return then(measured, partial(self._picture_of, encoded, param))

    def check(self, picture: Picture, param: str) -> Future[None]:
        """Process a picture unless it is known that it can be. Fails with InvalidRequestError."""
        return self._pixels.check(picture.encoded, picture.digest, param)

    def _known_size(self, encoded: Encoded) -> tuple[int, int] | None:
        if encoded.raw_size is not None:
            return encoded.raw_size
        with self._lock:
            return self._sizes.get(encoded.digest)

    def _picture_of(self, encoded: Encoded, param: str, size: tuple[int, int]) -> Picture:
        """Return a picture of this size. Raises InvalidRequestError for a size that is refused."""
        with self._lock:
            self._sizes[encoded.digest] = size
            if len(self._sizes) > MAX_SIZES:
                self._sizes.popitem(last=False)
        if problem := self._family.refusal(self.sight.processor, *size):
            raise InvalidParamError(param, f"{problem}.")
        grid = self._family.token_grid(self.sight.processor, *size)
        if (num_rows := self._tokens.num_rows(grid)) > self.sight.most_rows:
            raise InvalidParamError(
                param,
                f"is a picture of {size[0]} x {size[1]} pixels, which takes {num_rows} tokens; "
                f"this server's pictures have at most {self.sight.most_rows}.",
            )
        digest = hashlib.blake2b(encoded.digest + self._salt, digest_size=16).digest()
        source = partial(self._pixels.load, encoded, digest, param)
        return Picture(encoded, grid, num_rows, digest, source)

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], tuple[Feature, ...]]:
        """Return the prompt with a placeholder for each row of a picture, and its features.

        A prompt has one placeholder for each picture, or all tokens of pictures already; if they
        have a frame, perhaps its start alone. Raises InvalidRequestError."""
        placeholder = self._tokens.placeholder
        places = [at for at, token in enumerate(token_ids) if token == placeholder]
        ids = [self._tokens.ids(picture.grid) for picture in pictures]
        if self._is_expanded(token_ids, places, pictures, ids):
            return list(token_ids), self._features_of(token_ids, pictures, ids)
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        if not places and (frame := self._tokens.frame) is not None:
            places = [at for at, token in enumerate(token_ids) if token == frame.start]
            before, after = frame.before, frame.after
        if len(places) != len(pictures):
            raise InvalidRequestError(
                f"The prompt has {len(places)} places for pictures, and there are "
                f"{len(pictures)} pictures.",
                param="prompt",
            )
        expanded: list[int] = []
        features, last = [], 0
        for place, picture, own in zip(places, pictures, ids, strict=True):
            expanded += [*token_ids[last:place], *before]
            features.append(self._feature(picture, len(expanded)))
            expanded += [*own, *after]
            last = place + 1
        return [*expanded, *token_ids[last:]], tuple(features)

    def _is_expanded(
        self,
        token_ids: Sequence[int],
        places: Sequence[int],
        pictures: Sequence[Picture],
        ids: Sequence[list[int]],
    ) -> bool:
        """Return True for a prompt with all placeholders. ids: the tokens of each picture."""
        num_rows = sum(picture.num_rows for picture in pictures)
        if not pictures or len(places) != num_rows:
            return False
        if num_rows != len(pictures):
            return True
        # Each picture has one placeholder, and perhaps other tokens around it.
        firsts = (
            at - own.index(self._tokens.placeholder) for at, own in zip(places, ids, strict=True)
        )
        return all(
            first >= 0 and list(token_ids[first : first + len(own)]) == own
            for first, own in zip(firsts, ids, strict=True)
        )

    def _features_of(
        self, token_ids: Sequence[int], pictures: Sequence[Picture], ids: Sequence[list[int]]
    ) -> tuple[Feature, ...]:
        """Return the features of a prompt with all tokens of pictures."""
        features, end = [], 0
        for picture, own in zip(pictures, ids, strict=True):
            placeholder = self._tokens.placeholder
            at = token_ids.index(placeholder, end) - own.index(placeholder)
            end, after = at + len(own), end
            if at < after or list(token_ids[at:end]) != own:
                raise InvalidRequestError(
                    f"A picture takes {len(own)} tokens in {picture.grid[0]} rows, and the "
                    f"prompt has others there.",
                    param="prompt",
                )
            features.append(self._feature(picture, at))
        return tuple(features)

    def _feature(self, picture: Picture, start: int) -> Feature:
        runs = self._tokens.runs(picture.grid, start)
        return Feature(picture.digest, runs, picture.grid, self.sight.both_ways)

    def require_number(self, number: int, param: str) -> None:
        """Raise InvalidRequestError for more pictures than a prompt may have."""
        most = self.config.most_pictures
        if number > most:
            raise InvalidRequestError(
                f"The prompt has {number} pictures, and at most {most} are allowed "
                f"(--limit-mm-per-prompt).",
                param=param,
            )
