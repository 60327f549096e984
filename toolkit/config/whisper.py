"""Flags of OpenAI's `whisper` and of whisper.cpp that `tk transcribe` spells otherwise, does not
need, or lacks.

The entries are as in `config.vllm`."""

from toolkit.config.vllm import Note, Refusal, Table, Use

_FORMATS = "Formats are text, json, srt, vtt and verbose_json."

TRANSCRIBE: Table = (
    # --- honoured under another name
    (Use("--format {}"), "--output-format="),
    (Use("--format text"), "--output-format=txt --format=txt -f=txt -otxt --output-txt"),
    (Use("--format srt"), "-osrt --output-srt"),
    (Use("--format vtt"), "-ovtt --output-vtt"),
    (Use("--format json"), "-oj --output-json"),
    (Use("--format verbose_json"), "-ojf --output-json-full"),
    (Use("--output {}"), "--output-dir="),
    (Use("--translate"), "--task=translate -tr"),
    (Use("--prompt {}"), "--initial-prompt="),
    # --- accepted, without an effect
    (Note("The sound is not translated without --translate"), "--task=transcribe"),
    (
        Note("'tk serve' has flags for the device and its types"),
        "--device= --fp16= --compute-type=",
    ),
    (Note("'tk serve --num-threads' sets the number of threads"), "--threads= -t="),
    (Note("Each token is the likeliest"), "--beam-size= --best-of= --patience= -bs= -bo="),
    (Note("Subtitles have times, other text has none"), "-nt --no-timestamps"),
    (Note("Progress is on stderr, and the text alone on stdout"), "--verbose= -np --no-prints -pp"),
    (Note("Each 30 seconds are transcribed alone"), "--condition-on-previous-text=False"),
    (Note("Words have no times"), "--word-timestamps=False"),
    # --- refused
    (Refusal(_FORMATS), "--output-format=all --output-format=tsv -ocsv --output-csv -olrc"),
    (
        Refusal("The API has the field timestamp_granularities[]: see docs/speech.md."),
        "--word-timestamps=True",
    ),
    (
        Refusal("The API has the field condition_on_previous_text: see docs/speech.md."),
        "--condition-on-previous-text=True",
    ),
    (Refusal("--output takes the name of a transcript."), "-of= --output-file="),
)
