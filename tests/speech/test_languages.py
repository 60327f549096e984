"""Languages by code and name."""

from __future__ import annotations

import pytest

from tests.speech.invented import TOKENS
from toolkit.errors import InvalidRequestError
from toolkit.speech.languages import LANGUAGES, find_language

KNOWN = TOKENS.languages


def test_languages_are_those_of_transformers():
    whisper = pytest.importorskip("transformers.models.whisper.tokenization_whisper")
    assert whisper.LANGUAGES == LANGUAGES
    assert {name: find_language(name, LANGUAGES) for name in whisper.TO_LANGUAGE_CODE} == (
        whisper.TO_LANGUAGE_CODE
    )


@pytest.mark.parametrize("given", ["de", "DE", "de-AT", "de_CH", "German", " german "])
def test_languages_are_found_by_code_and_name(given):
    assert find_language(given, KNOWN) == "de"


def test_unknown_languages_are_refused():
    with pytest.raises(
        InvalidRequestError, match=r"must be a code .* Did you mean german"
    ) as error:
        find_language("germn", KNOWN)
    assert error.value.param == "language"


def test_english_models_know_english_alone():
    assert find_language("en-US", ["en"]) == "en"
    with pytest.raises(InvalidRequestError, match="knows English alone"):
        find_language("fr", ["en"])
