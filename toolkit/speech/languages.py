"""Names of languages that models know, by ISO 639 code."""

from __future__ import annotations

from collections.abc import Collection

from toolkit.errors import InvalidRequestError, did_you_mean

LANGUAGES = {
    "af": "afrikaans", "am": "amharic", "ar": "arabic", "as": "assamese", "az": "azerbaijani",
    "ba": "bashkir", "be": "belarusian", "bg": "bulgarian", "bn": "bengali", "bo": "tibetan",
    "br": "breton", "bs": "bosnian", "ca": "catalan", "cs": "czech", "cy": "welsh",
    "da": "danish", "de": "german", "el": "greek", "en": "english", "es": "spanish",
    "et": "estonian", "eu": "basque", "fa": "persian", "fi": "finnish", "fo": "faroese",
    "fr": "french", "gl": "galician", "gu": "gujarati", "ha": "hausa", "haw": "hawaiian",
    "he": "hebrew", "hi": "hindi", "hr": "croatian", "ht": "haitian creole", "hu": "hungarian",
    "hy": "armenian", "id": "indonesian", "is": "icelandic", "it": "italian", "ja": "japanese",
    "jw": "javanese", "ka": "georgian", "kk": "kazakh", "km": "khmer", "kn": "kannada",
    "ko": "korean", "la": "latin", "lb": "luxembourgish", "ln": "lingala", "lo": "lao",
    "lt": "lithuanian", "lv": "latvian", "mg": "malagasy", "mi": "maori", "mk": "macedonian",
    "ml": "malayalam", "mn": "mongolian", "mr": "marathi", "ms": "malay", "mt": "maltese",
    "my": "myanmar", "ne": "nepali", "nl": "dutch", "nn": "nynorsk", "no": "norwegian",
    "oc": "occitan", "pa": "punjabi", "pl": "polish", "ps": "pashto", "pt": "portuguese",
    "ro": "romanian", "ru": "russian", "sa": "sanskrit", "sd": "sindhi", "si": "sinhala",
    "sk": "slovak", "sl": "slovenian", "sn": "shona", "so": "somali", "sq": "albanian",
    "sr": "serbian", "su": "sundanese", "sv": "swedish", "sw": "swahili", "ta": "tamil",
    "te": "telugu", "tg": "tajik", "th": "thai", "tk": "turkmen", "tl": "tagalog",
    "tr": "turkish", "tt": "tatar", "uk": "ukrainian", "ur": "urdu", "uz": "uzbek",
    "vi": "vietnamese", "yi": "yiddish", "yo": "yoruba", "yue": "cantonese", "zh": "chinese",
}  # fmt: skip
WITHOUT_SPACES = frozenset({"bo", "ja", "km", "lo", "my", "th", "yue", "zh"})
"""Languages that are written without spaces between words."""
_OTHER_NAMES = {
    "burmese": "my", "castilian": "es", "filipino": "tl", "flemish": "nl", "haitian": "ht",
    "letzeburgesch": "lb", "mandarin": "zh", "moldavian": "ro", "moldovan": "ro", "panjabi": "pa",
    "pushto": "ps", "sinhalese": "si", "valencian": "ca",
}  # fmt: skip
_CODES = {name: code for code, name in LANGUAGES.items()} | _OTHER_NAMES


def find_language(given: str, known: Collection[str]) -> str:
    """Return the code of a language, given by code or name: `de`, `de-AT` or `German`.

    known: codes. Raises InvalidRequestError for another language."""
    word = given.strip().lower()
    code = _CODES.get(word, word)
    code = code if code in known else code.replace("_", "-").partition("-")[0]
    if code in known:
        return code
    if list(known) == ["en"]:
        raise InvalidRequestError(
            f"This model knows English alone, so language must be en, not {given[:32]!r}.",
            param="language",
        )
    hint = did_you_mean(word, [*known, *(LANGUAGES.get(one, one) for one in known)])
    raise InvalidRequestError(
        f"language must be a code of ISO 639-1 that the model knows, such as en; got "
        f"{given[:32]!r}.{hint}",
        param="language",
    )


def language_code(name: str) -> str | None:
    """Return the code of a language's English name; None for an unknown one."""
    return _CODES.get(name.lower())


def language_name(code: str) -> str:
    """Return the English name of a language in lower case, else its code."""
    return LANGUAGES.get(code, code)
