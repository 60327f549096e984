"""Load of /v1/audio/transcriptions: files of noise, and their speed in real time."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.speech.invented import FakeModel, spelled
from tests.speech.served import Served, serving
from toolkit.bench.load.dataset import request
from toolkit.bench.load.recorded_datasets import open_dataset
from toolkit.bench.report.document import as_json
from toolkit.bench.report.table import print_table
from toolkit.bench.run import measure
from toolkit.config.load import BenchConfig
from toolkit.errors import ConfigError

SETTINGS = {"endpoint": "transcriptions", "clip_seconds": 1.5, "random_output_len": 9, "seed": 0}


async def test_sound_is_sent_and_its_speed_reported():
    model = FakeModel(lambda heard: (spelled(" Oh, yes"), -0.5))
    served = Served(model)
    with serving(served) as url:
        config = BenchConfig(url=url, num_prompts=6, max_concurrency=2, num_warmups=1, **SETTINGS)
        outcome = await measure(config)
    served.close()
    result = outcome.result
    assert (result.num_succeeded, result.num_failed) == (6, 0)
    assert result.output_tokens == 6 * 9
    assert {one.clip.seconds for one in model.answers} == {1.5}
    assert len({one.clip.digest for one in model.answers}) == 7
    assert {(one.params.max_tokens, one.params.ignore_eos) for one in model.answers} == {(9, True)}
    document = as_json(outcome)
    assert document["rtfx"] == pytest.approx(6 * 1.5 / result.wall, rel=0.01)
    shown = io.StringIO()
    print_table(Console(file=shown, width=120), outcome)
    assert "1.5 s of noise in, 9 tokens out" in shown.getvalue()
    assert "× real time" in shown.getvalue()


def test_files_depend_on_the_seed_and_the_number():
    config = BenchConfig(**SETTINGS, extra_body={"response_format": "verbose_json"})
    dataset = open_dataset(config)
    first, again, other = (request(dataset.prompt(i), config, "m") for i in (0, 0, 1))
    assert first == again != other
    assert b'name="response_format"\r\n\r\nverbose_json\r\n' in first.body
    assert first.content_type.startswith("multipart/form-data; boundary=")


def test_sound_is_generated():
    with pytest.raises(ConfigError, match="sends generated sound"):
        BenchConfig(endpoint="transcriptions", dataset_name="prefix")
