"""CTranslate2's folders of Whisper: parser, configuration, tensors by their original names."""
